"""DFlash checkpoints: what is read from a config, what is borrowed from the target, and everything that is refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import ConfigError, EngineConfig, load_drafter, load_model
from jaxspec.checkpoint import CheckpointError
from jaxspec.drafters import dflash_checkpoint
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.registry import KNOWN, Known
from tests.drafters.test_dflash import drafter_folder
from tests.support.tiny import rewrite, tiny_checkpoint


@pytest.fixture
def pair(tmp_path):
    """A target and a folder with a drafter for it, the test's own; and what rewrites the folder's config."""
    target = load_model(str(tiny_checkpoint()), progress=False)
    folder = shutil.copytree(drafter_folder(tiny_checkpoint()), tmp_path / "drafter")

    def change(**keys):
        hf = json.loads((folder / "config.json").read_text())
        if isinstance(settings := keys.get("dflash_config"), dict):
            keys["dflash_config"] = hf["dflash_config"] | settings
        (folder / "config.json").write_text(json.dumps({**hf, **keys}))

    return target, folder, change


@pytest.mark.parametrize("method", ["dflash:", ""])
def test_by_method_or_by_path_alone(pair, method):
    target, folder, _ = pair
    loaded = load_drafter(f"{method}{folder}", target)
    assert isinstance(loaded.drafter, DFlash)
    assert dataclasses.replace(loaded.drafter, config=None) == DFlash(
        config=None, mask_token=63, block_size=5, causal=(False, True), num_draft_tokens=4,
        feature_layers=(1, 0),
    )  # fmt: skip
    assert [layer.mixing.window for layer in loaded.drafter.config.decoder.layers] == [None, 21]
    assert loaded.params["embed"] is target.params["embed"] and loaded.params["head"] is target.params["head"]
    assert load_drafter(str(folder), target, EngineConfig(draft="ngram", num_draft_tokens=2)).drafter.block_size == 5


def test_borrowed_weights_arent_counted_twice(pair):
    target, folder, _ = pair
    loaded = load_drafter(str(folder), target)
    llm = jaxspec.LLM(str(tiny_checkpoint()), str(folder), context_length=64, skip_warmup=True)
    own = sum(
        x.nbytes for name in loaded.params.keys() - {"embed", "head"} for x in jax.tree.leaves(loaded.params[name])
    )
    assert llm.engine.runner.plan.draft_weight_bytes == own
    kv = loaded.drafter.config.num_layers * 2 * loaded.drafter.config.num_kv_heads * loaded.drafter.config.head_dim
    assert loaded.drafter.kv_bytes_per_token("bfloat16") == 2 * kv


def test_names_with_a_prefix(pair):
    target, folder, _ = pair
    plain = load_drafter(str(folder), target).params
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_drafter(str(folder), target).params, plain)


def test_random_weights_from_the_config_alone(pair):
    target, folder, _ = pair
    (folder / "model.safetensors").unlink()
    loaded = load_drafter(f"dflash:{folder}", target, EngineConfig(draft="ngram", load_format="dummy"))
    assert loaded.params["fc"].values.shape == (64, 32) and float(loaded.params["fc"].values.std()) > 0.1


def test_a_method_alone_takes_the_known_drafter(pair, monkeypatch):
    target, folder, _ = pair
    monkeypatch.setitem(KNOWN["dflash"], "acme/big", Known(str(folder)))
    assert isinstance(load_drafter("dflash", dataclasses.replace(target, name="Acme/Big")).drafter, DFlash)
    with pytest.raises(ConfigError, match=r"dflash:PATH_OR_ID.*qwen/qwen3-8b"):
        load_drafter("dflash", target)


@pytest.mark.parametrize("layers,target,expected", [
    (1, 36, (18,)), (5, 36, (1, 9, 17, 25, 33)), (8, 48, (1, 7, 14, 20, 26, 32, 39, 45)), (5, 40, (1, 10, 19, 28, 37)),
])  # fmt: skip
def test_default_layers(layers, target, expected):
    assert dflash_checkpoint.feature_layers(None, layers, target) == expected


@pytest.mark.parametrize("keys,causal,windows", [
    ({}, (False, False, False), (None,) * 3),
    ({"sliding_window": 7}, (False, False, False), (None,) * 3),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_sliding_window": True,
      "sliding_window": 7}, (False, True, False), (None, 7, None)),
    ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 7}, (True, True, True), (None,) * 3),
    ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (False, True, True), (None, 7, 7)),
    ({"is_causal": True}, (True, True, True), (None,) * 3),
    ({"layer_types": ["sliding_attention"] * 3, "is_causal": False, "use_sliding_window": True, "sliding_window": 7},
     (False,) * 3, (7,) * 3),
])  # fmt: skip
def test_what_rows_see(keys, causal, windows):
    assert dflash_checkpoint.sight(keys, keys.get("is_causal"), 3) == (causal, windows)


@pytest.mark.parametrize("keys,words", [
    ({"hidden_size": 48}, ["made for a model with hidden_size 48, and this one has 32"]),
    ({"vocab_size": 80}, ["made for a model with vocab_size 80, and this one has 64"]),
    ({"num_target_layers": 36}, ["made for a model with num_target_layers 36, and this one has 2"]),
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, ["target_layer_ids must be an integer from -1 to 1, got 2"]),
    ({"dflash_config": {"target_layer_ids": []}}, ["target_layer_ids must be a list of layers, got []"]),
    ({"dflash_config": {"mask_token_id": 64}}, ["mask_token_id must be an integer from 0 to 63, got 64"]),
    ({"dflash_config": {"mask_token_id": None}}, ["it is no DFlash drafter", "has a mask_token_id"]),
    ({"dflash_config": [1, 0]}, ["dflash_config must be a mapping, got [1, 0]"]),
    ({"block_size": 1}, ["block_size must be an integer of at least 2, got 1"]),
    ({"layer_types": ["full_attention"]}, ["layer_types must name", "each of 2 layers"]),
    ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types must name", "linear_attention"]),
    ({"sliding_window": None}, ["sliding_window must be an integer of at least 1, got None"]),
    ({"dflash_config": {"conv_kernel_size": 2}}, ["conv_kernel_size is 2", "not supported"]),
    ({"dflash_config": {"use_swa": True}}, ["use_swa is True", "not supported"]),
    ({"dflash_config": {"projector_type": "spiral"}}, ["projector_type is 'spiral'", "not supported"]),
    ({"dflash_config": {"final_logit_softcapping": -1}}, ["final_logit_softcapping must be a positive number, got -1"]),
])  # fmt: skip
def test_configs_that_are_refused(pair, keys, words):
    target, folder, change = pair
    change(**keys)
    with pytest.raises(ConfigError) as error:
        load_drafter(f"dflash:{folder}", target)
    for word in [str(folder), target.name, *words]:
        assert word in str(error.value)


def test_drafts_beyond_the_block_are_refused(pair):
    target, folder, _ = pair
    with pytest.raises(ConfigError, match=r"--num-draft-tokens 5: .* blocks of 5 tokens.* drafts 1 to 4"):
        load_drafter(f"dflash:{folder}", target, EngineConfig(draft="ngram", num_draft_tokens=5))
    with pytest.raises(ConfigError, match="--num-draft-tokens 9"):
        jaxspec.propose(target, load_drafter(str(folder), target), [1, 2, 3], 9)


def test_tensors_that_dont_fit_are_named(pair):
    target, folder, change = pair
    rewrite(folder, {"fc.bias": np.zeros(32, np.float32)}, drop=["layers.1.self_attn.k_norm.weight"])
    with pytest.raises(CheckpointError) as error:
        load_drafter(f"dflash:{folder}", target)
    assert "missing layers.1.self_attn.k_norm.weight [16]" in str(error.value)
    assert "unexpected fc.bias [32]" in str(error.value)
    change(dflash_config={"target_layer_ids": [0]})
    with pytest.raises(CheckpointError, match=r"misshapen fc.weight: found \[32, 64\], expected \[32, 32\]"):
        load_drafter(f"dflash:{folder}", target)


def test_a_pickled_mask_embedding_is_never_opened(pair):
    target, folder, _ = pair
    (folder / "mask_embedding.pt").write_bytes(b"not a pickle: opening it would fail otherwise")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is never opened.*remove the file"):
        load_drafter(f"dflash:{folder}", target)


def test_a_folder_of_another_kind_is_refused(pair, tmp_path):
    target, other = pair[0], shutil.copytree(tiny_checkpoint(), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"it is no DFlash drafter: .* a mask_token_id"):
        load_drafter(f"dflash:{other}", target)
    (other / "config.json").write_text(json.dumps({"architectures": ["Other"], "model_type": "other"}))
    with pytest.raises(ConfigError, match=r"architectures Other and model_type 'other'; drafters are DFlashDraftModel"):
        load_drafter(str(other), target)
    (other / "config.json").unlink()
    (other / "model.gguf").touch()
    with pytest.raises((ConfigError, CheckpointError), match=r"model\.gguf"):
        load_drafter(f"dflash:{other / 'model.gguf'}", target)
