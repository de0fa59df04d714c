"""DFlash 2 against the `dflash` package, and its checkpoints. Expected tensors come from make_dflash2.py."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ConfigError, EngineConfig, load_drafter
from jaxspec.checkpoint import CheckpointError
from jaxspec.drafters.blocks import candidates
from jaxspec.drafters.blocks.candidates import largest
from jaxspec.drafters.blocks.convolutions import convolve
from jaxspec.drafters.blocks.dflash2 import DFlash2
from tests.support import drawn
from tests.support.blocks import GOLDEN, copies, golden, proposals
from tests.support.sample import rare
from tests.support.tiny import rewrite

VARIANTS = ("sliding", "causal")
FOLDER = GOLDEN / "dflash2"


@pytest.mark.parametrize("variant", [rare("sliding"), "causal"])  # DFlash's layers slide in test_dflash.py
def test_drafts_equal_the_packages(variant, monkeypatch):
    for proposed, expected in proposals("dflash2", variant, monkeypatch):
        ids, scores = expected["candidates"], expected["scores"]
        np.testing.assert_allclose(np.take_along_axis(proposed.logits, ids, axis=1), scores, atol=5e-4)
        np.testing.assert_array_equal(proposed.tokens, expected["tokens"])
        assert np.isfinite(proposed.logits).sum() == ids.size and proposed.count == len(ids)


def test_configs_are_read_as_the_package_reads_them():
    sliding, causal = (golden("dflash2", variant)[1].drafter for variant in VARIANTS)
    assert (sliding.taps, sliding.group, sliding.rank, sliding.top) == (2, 8, 6, 5)
    assert (causal.taps, causal.group, causal.rank, causal.top) == (3, 16, 4, 8)
    assert (sliding.multiplier, sliding.softcap, sliding.config.decoder.embed_scale) == (0.7, 4.0, 1.7)
    assert (causal.multiplier, causal.softcap, causal.config.decoder.embed_scale) == (1.0, None, 1.0)
    assert sliding.causal == (False, False) and causal.causal == (False, True)
    assert [layer.mixing.window for layer in sliding.config.decoder.layers] == [9, 9]
    assert [layer.mixing.window for layer in causal.config.decoder.layers] == [None, 4]


def test_a_convolution_is_causal_and_each_row_has_its_kernel():
    rng = np.random.default_rng(0)
    x, kernels = rng.standard_normal((2, 5, 6)), rng.standard_normal((2, 5, 3, 6))
    expected = np.zeros_like(x)
    for row in range(5):
        for tap in range(min(3, row + 1)):
            expected[:, row] += kernels[:, row, tap] * x[:, row - tap]
    np.testing.assert_allclose(convolve(jnp.float32(x), jnp.float32(kernels)), expected, atol=1e-5)


@pytest.mark.parametrize("size", [40, rare(3000), 9999])
def test_the_largest_are_those_of_a_sort(size, monkeypatch):
    monkeypatch.setattr(candidates, "CHUNK", 32)
    x = drawn.normal(jax.random.key(size), (2, 3, size))
    for mine, sorted_ in zip(largest(x, 16), jax.lax.top_k(x, 16), strict=True):
        np.testing.assert_array_equal(mine, sorted_)
    crowded = jnp.zeros((1, 1, size)).at[..., 17:29].set(1.0)  # the largest share a chunk
    assert largest(crowded, 12)[1].tolist() == [[list(range(17, 29))]]


@pytest.fixture
def pair(tmp_path):
    """The golden target, and what copies the golden drafter with other keys in its config."""
    return golden("dflash2", "causal")[0], partial(copies("dflash2", tmp_path), "causal")


def test_the_method_is_found_by_config(pair):
    model, _ = pair
    for prefix in ("dflash2:", "dflash:", ""):
        assert type(load_drafter(f"{prefix}{FOLDER / 'causal'}", model).drafter) is DFlash2


def test_the_layout_of_speculators_means_the_same(pair):
    model, copy = pair
    folder = copy()
    hf = json.loads((folder / "config.json").read_text())
    own = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "mask_token_id")
    nested = {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "aux_hidden_state_layer_ids": [i + 1 for i in hf["target_layer_ids"]],
        "draft_vocab_size": hf["vocab_size"],
        "sliding_window_non_causal": False,
        "transformer_layer_config": {key: value for key, value in hf.items() if key not in own},
        **{key: hf[key] for key in own},
    }
    (folder / "config.json").write_text(json.dumps(nested))
    flat, speculators = (load_drafter(f"dflash2:{where}", model) for where in (FOLDER / "causal", folder))
    assert speculators.drafter == flat.drafter
    del nested["sliding_window_non_causal"]
    (folder / "config.json").write_text(json.dumps(nested))
    assert load_drafter(f"dflash2:{folder}", model).drafter.causal == (False, False)


def test_random_weights_from_the_config_alone(pair):
    model, copy = pair
    folder = copy()
    (folder / "model.safetensors").unlink()
    made = load_drafter(f"dflash2:{folder}", model, EngineConfig(draft="ngram", load_format="dummy"))
    real = load_drafter(f"dflash2:{FOLDER / 'causal'}", model)
    assert jax.tree.map(jnp.shape, made.params) == jax.tree.map(jnp.shape, real.params)


@pytest.mark.parametrize("keys,words", [
    ({"conv_group_size": 5}, "conv_group_size is 5; it must divide hidden_size, 32"),
    ({"conv_kernel_size": None}, "conv_kernel_size must be an integer of at least 1, got None"),
    ({"selector_top_k": 41}, "selector_top_k must be an integer from 1 to 40, got 41"),
    ({"sample_from_anchor": True}, "sample_from_anchor is true; DFlash 2 drafts from its masks alone"),
    ({"markov_rank": 8}, "markov_rank is 8; variants of DFlash that have it are not supported"),
])  # fmt: skip
def test_configs_that_are_refused(pair, keys, words):
    model, copy = pair
    with pytest.raises(ConfigError, match=words):
        load_drafter(f"dflash2:{copy(**keys)}", model)


def test_tensors_that_dont_fit_are_named(pair):
    model, copy = pair
    folder = copy()
    rewrite(folder, drop=["layers.1.mlp_conv.base_kernel"])
    with pytest.raises(CheckpointError, match=r"missing layers.1.mlp_conv.base_kernel \[2, 3, 32\]"):
        load_drafter(f"dflash2:{folder}", model)
