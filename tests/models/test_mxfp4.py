"""MXFP4, as gpt-oss has it: numbers against a table, checkpoints against dequantised ones, and faults by name."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.bench.floors import ModelCost
from jaxspec.checkpoint import CheckpointError, load_model
from jaxspec.checkpoint.params import quantised
from jaxspec.decoder.forward import PATHS, choose
from jaxspec.decoder.path import Call
from jaxspec.engine import weights
from jaxspec.models import mxfp4
from jaxspec.models.weights import Fp8, Int4, Mxfp4, Nvfp4, Unquantised, formats
from tests.checkpoint.test_checkpoint import edit_json
from tests.checkpoint.test_quantisation import spoil
from tests.support.engines import CROWDED, check_greedy
from tests.support.quantised import BF16, E2M1, MXFP4, write_mxfp4
from tests.support.quantised import mxfp4 as packed_by_numpy
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40)).tolist()
STEM = "model.layers.0.mlp.experts.gate_up_proj"
_root = tempfile.TemporaryDirectory(prefix="jaxspec-mxfp4-")


def load(folder, **options):
    return load_model(str(folder), progress=False, **options)


@functools.cache
def source(**more) -> Path:
    sizes = dict(hidden_size=64, intermediate_size=32, num_local_experts=4) | more
    return tiny_checkpoint("gpt_oss", **sizes)


@pytest.fixture
def folder(tmp_path):
    return write_mxfp4(source(), tmp_path)[0]


def test_every_byte_stands_for_two_numbers():
    packed = np.arange(256, dtype=np.uint8).reshape(1, 4, 64)
    scales = np.array([[[127, 2], [127, 250], [120, 130], [128, 129]]], np.uint8).repeat(2, axis=2)
    expected = np.empty((1, 4, 128), np.float32)
    for j in range(128):
        byte = packed[0, :, j // 2]
        expected[0, :, j] = E2M1[byte >> 4 if j % 2 else byte & 15] * 2.0 ** (scales[0, :, j // 32].astype(int) - 127)
    arranged = mxfp4.arrange(jnp.asarray(packed), jnp.asarray(scales))
    np.testing.assert_array_equal(mxfp4.dequantise(*arranged), expected)


def test_a_shift_and_a_mask_make_bfloat16_of_each_number():
    """Each pair of inputs 8i + 2c and the next is in the word c of its block, where a kernel looks for it."""
    rng = np.random.default_rng(2)
    packed, scales = rng.integers(0, 256, (9, 48), np.uint8), rng.integers(66, 191, (9, 3), np.uint8)
    values, by_block = mxfp4.arrange(jnp.asarray(packed), jnp.asarray(scales))
    words = np.asarray(values).view(np.uint32).reshape(9, 3, 4)
    each = [part & 0x81C081C0 for part in (words, words << 10 | words >> 22, words >> 4 ^ words << 4, words << 6)]
    numbers = np.stack(each, axis=2).astype(np.uint32).view(BF16).reshape(9, 3, 32).astype(np.float64)
    expected = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(9, 3, 32)]
    np.testing.assert_array_equal(numbers * 2.0**126, expected)
    np.testing.assert_array_equal(np.asarray(by_block).T, scales)


def test_numbers_are_rounded_as_by_a_table():
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((6, 96), np.float32) * np.float32(2.0) ** rng.integers(-20, 20, (6, 1))
    matrix[0, :32], matrix[1, :14] = 0, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.25, -2.5, -5, 4, 6, -6]
    packed, scales, whole = packed_by_numpy(matrix)
    ours = mxfp4.quantise(jnp.asarray(matrix))
    np.testing.assert_array_equal(ours[1].T[1:], scales[1:])
    np.testing.assert_array_equal(mxfp4.dequantise(*ours), whole)
    theirs = mxfp4.arrange(jnp.asarray(packed.reshape(6, -1)), jnp.asarray(scales))
    np.testing.assert_array_equal(mxfp4.dequantise(*theirs), whole)


def test_logits_are_those_of_the_dequantised_model(tmp_path):
    packed, whole = write_mxfp4(source(), tmp_path)
    model, expected = load(packed), jaxspec.logits(load(whole), TOKENS)
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), expected, rtol=0, atol=1e-4)
    layer = model.params["layers"][0]
    assert layer["experts_gate_up"].dtype == layer["experts_gate_up"].scales.dtype == "uint8"
    held = sum(layer[name].values.nbytes + layer[name].scales.nbytes for name in ("experts_gate_up", "experts_down"))
    assert held * 8 == 4.25 * (3 * 64 * 32 * 4)
    assert set(formats(model.params)) == {Mxfp4(), Unquantised()}
    assert layer["experts_gate_up"].inputs == 64 and layer["experts_gate_up"].outputs == 64


@pytest.mark.parametrize("name,format", [("fp8", Fp8(128)), ("nvfp4", Nvfp4()), rare("int4", Int4(64))])
def test_a_dequantised_checkpoint_is_quantised_on_load_or_when_it_is_updated(name, format):
    model, whole = load(source(), quantization=name), load(source())
    stack, was = (each.params["layers"][0]["experts_gate_up"] for each in (model, whole))
    assert stack.format == format and isinstance(model.params["layers"][0]["router"].format, Unquantised)
    error = stack.dequantised("float32") - was.unquantised
    assert float(error.std()) < 0.11 * float(was.values.std())
    declared = dataclasses.replace(weights.declared(whole)["layers"][0]["experts_gate_up"], format=format)
    jax.tree.map(np.testing.assert_array_equal, quantised(declared, was.values), stack)


def test_dummy_weights_are_packed(folder):
    (folder / "model.safetensors").unlink()
    model, plain = load(folder, load_format="dummy"), load(source(), load_format="dummy")
    layer, was = (each.params["layers"][0] for each in (model, plain))
    assert layer["experts_gate_up"].format == layer["experts_down"].format == Mxfp4()
    assert all(isinstance(layer[name].format, Unquantised) for name in ("qkv", "out", "router"))
    error = layer["experts_down"].dequantised("float32") - was["experts_down"].unquantised
    assert float(error.std()) < 0.15 * float(was["experts_down"].values.std())
    assert np.isfinite(np.asarray(jaxspec.logits(model, TOKENS))).all()
    kept = MXFP4 | {"modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    edit_json(folder / "config.json", quantization_config=kept)
    assert formats(load(folder, load_format="dummy").params) == (Unquantised(),)


def test_the_floor_counts_the_bytes_that_are_read(folder):
    model, plain = load(folder, dtype="bfloat16"), load(source(), dtype="bfloat16")
    now, was = (ModelCost.of(each, "bfloat16") for each in (model, plain))
    assert now.layer_flops == was.layer_flops
    assert now.expert_bytes / was.expert_bytes == 4.25 / 16
    assert was.weight_bytes - now.weight_bytes == was.expert_bytes - now.expert_bytes


def test_faster_paths_say_what_they_lack(folder):
    model = load(folder, dtype="bfloat16")
    for size in (1, 16, 200):
        path, refused = choose(model.config.decoder, model.params["layers"], Call(size, 1, "bfloat16", 132))
        assert path.name == "plain" and all(refused[each.name] for each in PATHS[:-1])
    assert "heads of width 16" in refused["few_rows"] and "Attention.bias" in refused["fused_norms"]
    experts = [layer["experts_down"] for layer in model.params["layers"]]
    with pytest.raises(TypeError, match=r"Mxfp4.* was given to a kernel that takes unquantised ones"):
        experts[0].unquantised  # noqa: B018


@pytest.mark.parametrize("name,change,message", [
    ("scales", lambda s: None, rf"missing {STEM}_scales \[4, 64, 2\]"),
    ("scales", lambda s: s[:, :60], rf"misshapen {STEM}_scales: found \[4, 60, 2\], expected \[4, 64, 2\]"),
    ("scales", lambda s: np.full_like(s, 255), f"{STEM}_scales has scales that aren't numbers"),
    ("scales", lambda s: np.full_like(s, 200), rf"{STEM}_scales has scales up to 2\^73; supported: up to 2\^63"),
    ("blocks", lambda b: None, rf"missing {STEM}_blocks \[4, 64, 2, 16\]"),
    ("blocks", lambda b: b[:3], rf"misshapen {STEM}_blocks: found \[3, 64, 2, 16\]"),
    ("blocks", lambda b: b.astype(BF16), f"{STEM}_blocks is stored as BF16; blocks and scales of experts are U8"),
])  # fmt: skip
def test_a_bad_tensor_is_named(folder, name, change, message):
    spoil(folder, f"{STEM}_{name}", change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_what_does_not_fit_the_format_is_named(folder, tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight"
    content = (folder / "model.safetensors").read_bytes()
    spoil(folder, name, lambda values: np.zeros(values.shape, np.uint8))
    with pytest.raises(CheckpointError, match=f"{name} is stored as U8"):
        load(folder)
    (folder / "model.safetensors").write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match=r"model.safetensors \([\d,]+ bytes\) is truncated"):
        load(folder)
    (folder / "model.safetensors").write_bytes(content)
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"is stored as U8, and config\.json has no quantization_config"):
        load(folder)
    edit_json(folder / "config.json", quantization_config=MXFP4, intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has 40 inputs .* a multiple of 32"):
        load(folder)


OPTIONS = CROWDED | {"context_length": 128, "max_total_tokens": 512, "disable_structured_output": True}


@pytest.mark.exhaustive  # packed logits are above; texts with windows are test_families.py's
def test_greedy_texts_are_the_models_own_cached_or_cold(folder):
    """Packed experts, sinks and windows in the engine, with a drafter of the same kind."""
    prompts = [TOKENS[0][:33], TOKENS[1][:7] * 4, [3]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm = LLM(str(folder), draft=f"standalone:{source()}", num_draft_tokens=3, **OPTIONS)
    check_greedy(llm, prompts, params)
    assert sum(llm.engine.stats()["accepted_per_position"]) > 0
