"""MTP modules under each publisher's names: texts stay the model's own, FP8 weights are the numbers they stand for.

What the modules compute is held to PyTorch in tests/models/test_hybrid_models.py.
"""

from __future__ import annotations

import functools
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec import LLM, ConfigError, EngineConfig, load_drafter
from jaxspec.checkpoint import load_target, outlined
from jaxspec.compiling.abstract_model import alike, drafter_of
from jaxspec.drafters import mtp
from jaxspec.models.weights import Fp8
from tests.checkpoint.test_checkpoint import edit_json
from tests.models.test_families import GREEDY, OPTIONS, PROMPTS, VOCAB
from tests.support.engines import check_greedy
from tests.support.quantised import write
from tests.support.sample import rare
from tests.support.tiny import rewrite, tiny_checkpoint

BEHIND = ("model.layers.1.", *(f"model.layers.1.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")))
QWENS = "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
ERNIES = "model.mtp_block.0.", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None
# Names of layer, norms, projection and last norm; the config of a model whose one layer is the module's, too.
FAMILIES = {
    "hy_v3": (BEHIND, {}),
    "bailing_moe": (BEHIND, {}),
    "exaone_moe": (QWENS, {"layer_types": ["full_attention"], "first_k_dense_replace": 1}),
    "ernie4_5_moe": (ERNIES, {"moe_layer_start_index": 1, "tie_word_embeddings": True}),
}


@functools.cache
def checkpoint(family: str, vocab: int = VOCAB):
    """A model of one layer, and a module with a copy of it, which takes the token alone.

    It computes what the model does, but without the text's first token: most drafts are right.
    """
    if family == "qwen4_exp":
        return of_streams(vocab)
    (layer, *norms, fc, last), more = FAMILIES[family]
    source = tiny_checkpoint(family, vocab, 2, num_hidden_layers=1, num_nextn_predict_layers=1, **more)
    folder = shutil.copytree(source, source.with_name(source.name + "-mtp"))
    tensors = load_file(folder / "model.safetensors")
    d = len(tensors["model.norm.weight"])
    module = {k.replace("model.layers.0.", layer): v for k, v in tensors.items() if k.startswith("model.layers.0.")}
    module |= {f"{name}.weight": np.ones(d, np.float32) for name in norms}
    module |= {f"{fc}.weight": np.eye(d, 2 * d, dtype=np.float32)}
    module |= {f"{last}.weight": tensors["model.norm.weight"]} if last else {}
    rewrite(folder, module)
    return folder


def of_streams(vocab: int):
    """A model of a linear layer, whose part is small, and one of indexed attention, which is the module's, too."""
    source = tiny_checkpoint("qwen4_exp", vocab, 2, mtp_num_hidden_layers=1)
    folder = shutil.copytree(source, source.with_name(source.name + "-mtp"))
    tensors = load_file(folder / "model.safetensors")
    d, small = tensors["model.embed_tokens.weight"].shape[1], ("linear_attn.out_proj", "down_proj", "value_proj")
    count = len(tensors["model.hyper_connection_mixer.hc_norm.weight"]) // d
    changed = {k: 0.3 * v for k, v in tensors.items() if "layers.0." in k and any(name in k for name in small)}
    module = {k.replace("model.layers.1.", "mtp.layers.0."): v for k, v in tensors.items() if "layers.1." in k}
    module |= {k.replace("model.", "mtp."): v for k, v in tensors.items() if "model.hyper_connection_mixer" in k}
    module |= {"mtp.fc_embedding.weight": np.eye(d, dtype=np.float32)}
    module |= {"mtp.fc_hidden.weight": np.zeros((d, d), np.float32)}
    module |= {
        f"mtp.pre_fc_norm_{k}.weight": np.zeros(n, np.float32) for k, n in (("embedding", d), ("hidden", count * d))
    }
    rewrite(folder, changed | module)
    return folder


@pytest.mark.parametrize("family,drafts", [
    ("ernie4_5_moe", 3), *(rare(family, 3) for family in ("qwen4_exp", "hy_v3", "bailing_moe", "exaone_moe")),
    *(rare(family, 1) for family in (*FAMILIES, "qwen4_exp")),
])  # fmt: skip
def test_greedy_texts_are_the_models_own_cached_or_cold(family, drafts):
    llm = LLM(str(checkpoint(family)), "mtp", **OPTIONS | {"num_draft_tokens": drafts})
    cached = check_greedy(llm, PROMPTS, GREEDY)
    assert cached[-1].metrics.cached_tokens >= len(PROMPTS[-1]) - 1 - OPTIONS["page_size"]
    stats = llm.engine.stats()
    drafted, accepted = sum(stats["drafted_per_position"]), sum(stats["accepted_per_position"])
    assert drafted / 4 < accepted < drafted, (accepted, drafted)


@pytest.mark.parametrize("family", ["bailing_moe", *map(rare, ("hy_v3", "exaone_moe", "ernie4_5_moe", "qwen4_exp"))])
def test_fp8_modules_are_the_numbers_that_they_stand_for(family, tmp_path):
    fp8, whole = write(checkpoint(family), tmp_path)
    options = EngineConfig(draft="mtp", fp8_activations="off")
    props = []
    for folder in (fp8, whole):
        model = jaxspec.load_model(str(folder), "float32", progress=False, fp8_activations=False)
        loaded = load_drafter("mtp", model, options)
        props.append(jaxspec.propose(model, loaded, PROMPTS[2], 2))
        assert isinstance(loaded.params["layer"]["qkv"].format, Fp8) == (folder is fp8)
    assert props[0].tokens.tolist() == props[1].tokens.tolist()
    np.testing.assert_allclose(props[0].logits, props[1].logits, atol=2e-3)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen4_exp"])
def test_memory_is_planned_for_the_modules_weights(family):
    options = EngineConfig(model=str(checkpoint(family)), draft="mtp")
    shapes = outlined(options)
    planned, loaded = drafter_of(options, shapes), load_drafter("mtp", load_target(options), options)
    assert alike(planned.params, loaded.params) and planned.drafter == loaded.drafter
    lent = "norm" not in mtp.parameters(loaded.drafter.config)
    assert family == "qwen4_exp" or (planned.params["norm"] is shapes.params["norm"]) == lent, "it counts once"


def test_a_module_that_the_config_does_not_count_is_refused_by_the_key(tmp_path):
    folder = shutil.copytree(checkpoint("exaone_moe"), tmp_path / "uncounted")
    edit_json(folder / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"mtp\.\S+.*config\.json.*num_nextn_predict_layers"):
        LLM(str(folder), "mtp", **OPTIONS)
    assert load_drafter("auto", jaxspec.load_model(str(folder), progress=False)).name == "ngram"


def test_tensors_of_an_unknown_layout_are_refused_by_name(tmp_path):
    """MiniMax-M2's unpublished modules have such names. The model is read without them."""
    folder = shutil.copytree(tiny_checkpoint("minimax_m2", VOCAB), tmp_path / "unknown")
    rewrite(folder, {"model.mtp_layers.0.e_norm.weight": np.ones(32, np.float32)})
    with pytest.raises(
        ConfigError, match=r"minimax_m2\) has tensors of no layout.*model\.mtp_layers\.0\.e_norm\.weight"
    ):
        load_drafter("mtp", jaxspec.load_model(str(folder), progress=False))
