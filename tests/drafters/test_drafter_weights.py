"""A drafter's dtype and quantisation are its own, whatever the target's are."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, load_drafter, load_model
from jaxspec.decoder import forward
from jaxspec.drafters.loading import check_drafter
from jaxspec.drafters.own_weights import with_head_copy
from jaxspec.models import fp8
from jaxspec.models.weights import Fp8, Unquantised, Weight, formats
from tests.support import drawn, hybrids
from tests.support.blocks import GOLDEN
from tests.support.engines import check_greedy
from tests.support.quantised import write
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

PROMPT = [5, 6, 7, 8] * 4
EAGLES = GOLDEN / "eagle"
DRAFTERS = {
    "eagle": (EAGLES / "target", f"eagle:{EAGLES / 'safeailab-eagle'}"),
    "eagle3": (EAGLES / "target", f"eagle3:{EAGLES / 'specforge-eagle3'}"),
    "dflash": (GOLDEN / "dflash" / "target", f"dflash:{GOLDEN / 'dflash' / 'full'}"),
    "dflash2": (GOLDEN / "dflash" / "target", f"dflash2:{GOLDEN / 'dflash2' / 'sliding'}"),
    "dspark": (GOLDEN / "dflash" / "target", f"dspark:{GOLDEN / 'dspark' / 'deepspec'}"),
}  # fmt: skip


@functools.cache
def drafting(kind: str):
    """A target and what to draft for it with."""
    if kind == "mtp":
        folder, draft = hybrids.checkpoint("qwen3_5"), "mtp"
    elif kind == "standalone":
        folder, other = tiny_checkpoint("llama", num_hidden_layers=1), tiny_checkpoint(seed=3, num_hidden_layers=1)
        draft = f"standalone:{other}"
    else:
        folder, draft = DRAFTERS[kind]
    return load_model(str(folder), "float32", progress=False), draft


def load(kind: str, **options):
    target, draft = drafting(kind)
    return target, load_drafter(draft, target, EngineConfig(draft=draft, **options))


def is_weight(leaf) -> bool:
    return isinstance(leaf, Weight)


def weights(params) -> list[Weight]:
    return list(filter(is_weight, jax.tree.leaves(params, is_leaf=is_weight)))


def dequantised(drafter):
    """The drafter with the matrices that its FP8 weights stand for."""
    dtype = drafter.params["embed"].dtype

    def whole(leaf):
        if not is_weight(leaf) or isinstance(leaf.format, Unquantised):
            return leaf
        return Weight(leaf.dequantised(dtype), layout=leaf.layout)

    return dataclasses.replace(drafter, params=jax.tree.map(whole, drafter.params, is_leaf=is_weight))


KINDS = (*DRAFTERS, "mtp", "standalone")
OWN = {"draft_dtype": "bfloat16", "draft_quantization": "fp8", "fp8_activations": "off"}


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_and_format_are_the_drafters_alone(kind):
    target, drafter = load(kind, **OWN)
    layer = drafter.params["layer"] if "layer" in drafter.params else drafter.params["layers"][0]
    assert layer["qkv"].format == layer["down"].format == Fp8(128)
    assert formats(target.params) == (Unquantised(),) and target.params["embed"].dtype == "float32"
    found = {str(leaf.dtype) for leaf in jax.tree.leaves(drafter.params)} - {"int32"}
    assert found == {"bfloat16", "float8_e4m3fn", "float32"}
    scales = [each.scales for each in weights(drafter.params) if each.scales is not None]
    assert sum(leaf.dtype == "float32" for leaf in jax.tree.leaves(drafter.params)) == len(scales)


@pytest.mark.parametrize("kind", [*map(rare, KINDS[:-1]), "standalone"])  # an MTP module's: test_mtp_layouts.py
def test_drafts_are_those_of_the_dequantised_drafter(kind):
    target, drafter = load(kind, **OWN)
    found, expected = (jaxspec.propose(target, each, PROMPT, 2) for each in (drafter, dequantised(drafter)))
    assert found.count == expected.count == 2 and found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-3)


@pytest.mark.parametrize("kind", ["standalone", *map(rare, ("dflash", "dspark", "eagle3", "mtp"))])
def test_few_rows_are_drafted_with_a_copy_of_the_head(kind):
    """The head itself, which the target may use, stays as it is, and drafts of many rows are made with it."""
    target, drafter = load(kind, draft_quantization="fp8")
    inner = drafter.params["head"] if isinstance(drafter.params.get("head"), dict) else drafter.params
    copy, tied = inner["head_copy"], "head" not in inner
    whole = inner["embed"].T if tied else inner["head"].unquantised
    assert copy.format == Fp8(128) and (copy.inputs, copy.outputs) == whole.shape
    values, scales = fp8.quantise_blocks(whole.T)
    np.testing.assert_allclose(copy.dequantised("float32"), fp8.dequantise(values, scales, 128).T, rtol=1e-6)
    if kind == "mtp":
        assert inner["head"] is target.params["head"]

    def by(head):
        """The logits of a drafter with this head and no copy."""
        changed = {name: value for name, value in inner.items() if name != "head_copy"} | {"head": Weight(head)}
        params = changed if inner is drafter.params else drafter.params | {"head": changed}
        return jaxspec.propose(target, dataclasses.replace(drafter, params=params), PROMPT, 1).logits

    drafted, plain = jaxspec.propose(target, drafter, PROMPT, 1).logits, by(whole)
    np.testing.assert_allclose(drafted, by(copy.dequantised("float32")), atol=1e-4)
    assert np.abs(np.asarray(drafted) - plain).max() > 1e-3
    rows = drawn.normal(jax.random.key(0), (forward.COPY_ROWS + 1, len(whole)))
    np.testing.assert_allclose(forward.head_logits(inner, rows), rows @ whole, atol=1e-4)


@pytest.mark.exhaustive
def test_a_map_of_tokens_has_a_copy_of_its_own_head(tmp_path):
    ids = list(range(0, 64, 3))
    (tmp_path / "map.json").write_text(str(ids))
    target, drafter = load("mtp", draft_quantization="fp8", draft_token_map=str(tmp_path / "map.json"))
    assert drafter.params["head"]["head_copy"].outputs == len(ids)
    assert jaxspec.propose(target, drafter, PROMPT, 2).count == 2


def test_a_head_that_is_fp8_already_is_not_copied():
    values, scales = fp8.quantise_blocks(drawn.normal(jax.random.key(0), (256, 128)))
    params = {"embed": values, "head": Weight(values, Fp8(128), scales=scales)}
    assert with_head_copy(params) is params


@pytest.mark.parametrize("inputs,copied", [(64, False), (128, True)])
def test_on_a_gpu_a_head_that_no_kernel_takes_is_not_copied(inputs, copied, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    params = with_head_copy({"embed": drawn.normal(jax.random.key(0), (256, inputs))})
    assert ("head_copy" in params) is copied and bool(caplog.records) is not copied


def test_without_options_a_drafter_has_its_targets_dtype_and_its_own_format():
    folder, draft = DRAFTERS["eagle"]
    target = load_model(str(folder), "bfloat16", quantization="fp8", progress=False)
    drafter = load_drafter(draft, target)
    assert Fp8(128, activations=True) in formats(target.params) and formats(drafter.params) == (Unquantised(),)
    assert drafter.params["fc"].dtype == "bfloat16" and drafter.params["embed"] is target.params["embed"]


def test_a_quantised_drafter_is_read_as_it_is(tmp_path):
    target, _ = drafting("eagle")
    quant, whole = write(EAGLES / "safeailab-eagle", tmp_path)
    off = EngineConfig(fp8_activations="off")
    stored, expected = (load_drafter(f"eagle:{folder}", target, off) for folder in (quant, whole))
    assert stored.params["layer"]["qkv"].format == stored.params["fc"].format == Fp8(128)
    found = weights(dequantised(stored).params)
    for ours, theirs in zip(found, weights(expected.params), strict=True):
        np.testing.assert_allclose(ours.unquantised, theirs.unquantised, rtol=1e-6)
    draft = f"eagle:{quant}"
    dummy = load_drafter(draft, target, EngineConfig(draft=draft, load_format="dummy"))
    assert dummy.params["layer"]["qkv"].format == Fp8(128, activations=True)


def test_dummies_of_an_mtp_module_have_the_format_of_its_checkpoint(tmp_path):
    folder, _ = write(hybrids.checkpoint("qwen3_5"), tmp_path)
    target = load_model(str(folder), load_format="dummy")
    drafter = load_drafter("mtp", target, EngineConfig(draft="mtp", load_format="dummy"))
    assert (
        drafter.params["layer"]["qkv"].format == Fp8(128, activations=True)
        and drafter.params["fc"].format == Unquantised()
    )


@functools.cache
def quantised_engine():
    folder, draft = DRAFTERS["eagle3"]
    options = {
        "dtype": "float32", "page_size": 8, "chunked_prefill_size": 64, "context_length": 128, "max_total_tokens": 512,
        "max_running_requests": 2, "skip_warmup": True, "few_programs": True, "disable_structured_output": True,
    }  # fmt: skip
    return LLM(str(folder), draft=draft, **OWN, **options)


def test_the_memory_plan_counts_a_quantised_drafter_as_it_is():
    runner = quantised_engine().engine.runner
    assert runner.plan.draft_weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(runner.draft.params))
    assert any(leaf.dtype == fp8.E4M3 for leaf in jax.tree.leaves(runner.draft.params))


@pytest.mark.exhaustive  # of FP8 draft models, in tests/decoder/test_fp8_exact.py
def test_an_engine_with_a_quantised_drafter_gives_the_text_of_plain_decoding():
    """Draft for two requests in one batch."""
    prompts, params = [PROMPT, [9, 3] * 6], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    check_greedy(quantised_engine(), prompts, params)


def test_a_drafter_without_weights_takes_neither(caplog):
    target, _ = drafting("eagle")
    for options, flag in ((OWN, "--draft-dtype bfloat16"), ({"draft_quantization": "fp8"}, "--draft-quantization fp8")):
        with pytest.raises(ConfigError, match=f"{flag}: --draft suffix has no weights"):
            check_drafter(EngineConfig(draft="suffix", **options))
        with pytest.raises(ConfigError, match=f"{flag} needs a drafter; --draft is none"):
            EngineConfig(**options)
    with caplog.at_level("WARNING", "jaxspec"):
        assert load_drafter("auto", target, EngineConfig(draft="auto", **OWN)).name == "ngram"
    assert "--draft-quantization fp8 has no effect" in caplog.text
