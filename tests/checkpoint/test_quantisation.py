"""FP8 checkpoints of each published layout, against the dequantised model and against numpy."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.bench.floors import ModelCost
from jaxspec.checkpoint import CheckpointError, load_model
from jaxspec.checkpoint.kv_scales import by_group
from jaxspec.checkpoint.quantization import Quantization
from jaxspec.decoder import matmul as decoder_matmul
from jaxspec.decoder.forward import choose
from jaxspec.decoder.path import Call
from jaxspec.models import fp8
from jaxspec.models.weights import Fp8, Layout, Unquantised, Weight, formats, matmul
from tests.checkpoint.test_checkpoint import edit_json
from tests.support import eager, hybrids
from tests.support.engines import CROWDED
from tests.support.quantised import BF16, BLOCKS, E4M3, E8M0, KEPT, compressed, quantised, read, save, write
from tests.support.sample import rare
from tests.support.tiny import ARCHITECTURES, tiny_checkpoint

# Widths of which none is a multiple of 128, and some are more than one block.
SIZES = {"hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 1, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 160}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12)).tolist()


def load(folder, fp8_activations=False, **options):
    return load_model(str(folder), progress=False, fp8_activations=fp8_activations, **options)


@functools.cache
def source(family: str = "llama", **more) -> Path:
    sizes = SIZES | (EXPERTS if "moe" in family or family in ("qwen3_next", "qwen4_exp") else {}) | more
    if family in ("kimi_linear", "mimo_v2_flash", "qwen3_5", "qwen3_next", "qwen3_5_moe", "qwen4_exp"):
        sizes["num_hidden_layers"] = 2
    return tiny_checkpoint(family, **sizes)


LAYOUTS = {
    "fp8": {},
    "weight_scale": {"suffix": "_scale"},
    "bfloat16 scales": {"scale_dtype": BF16},
    "powers of two": {"scale_dtype": E8M0, "config": BLOCKS | {"scale_fmt": "ue8m0"}},
    "fbgemm": {"kind": "channel", "suffix": "_scale", "config": {"quant_method": "fbgemm_fp8"}},
    "compressed blocks": {"suffix": "_scale", "config": compressed("block", block_structure=[128, 128])},
    "compressed channels": {"kind": "channel", "suffix": "_scale", "config": compressed("channel")},
    "compressed tensors": {"kind": "tensor", "suffix": "_scale", "config": compressed("tensor")},
    "only the MLP": {"kept": re.compile(KEPT.pattern + r"|.*self_attn.*")},
}


# A dense model, a mixture, one with biases: other families have these ones' layers, or linear attention's.
KINDS = "gpt_oss", "qwen3_moe"


@pytest.mark.parametrize("family,layout", [
    *(("llama", layout) for layout in LAYOUTS),
    *((family, "fp8") for family in KINDS), ("gpt_oss", "compressed channels"),
    *(rare(family, "fp8") for family in sorted(ARCHITECTURES.keys() - {"llama", *KINDS})),
    rare("qwen3_moe", "compressed channels"), rare("qwen3_moe", "compressed tensors"),
    rare("gpt_oss", "compressed tensors"), rare("qwen3_vl_moe", "compressed channels"),
    rare("llama4", "compressed channels"), rare("llama4", "compressed tensors"),
])  # fmt: skip
def test_logits_are_those_of_the_dequantised_model(tmp_path, family, layout):
    quant, whole = write(source(family), tmp_path, **LAYOUTS[layout])
    model = load(quant, dtype="float32")
    assert any(isinstance(each, Fp8) for each in formats(model.params))
    expected = jaxspec.logits(load(whole, dtype="float32"), TOKENS)
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), expected, rtol=0, atol=1e-3)


MIXED = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
    "attention": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "mlp": {"quant_algo": "fp8_pb_wo", "group_size": 128},
}}  # fmt: skip


@pytest.mark.parametrize("config", [
    {"quant_method": "modelopt", "quantization": MIXED},
    rare(compressed("channel") | {"config_groups": {
        kind: {"weights": {"num_bits": 8, "type": "float", "strategy": kind}} for kind in ("channel", "block")
    }}),
])  # fmt: skip
def test_layers_may_have_scales_of_several_kinds(tmp_path, config):
    """By output in attention, and in blocks elsewhere, which ModelOpt writes with two more axes."""
    of_outputs, blocks = (write(source(), tmp_path / kind, kind, suffix="_scale") for kind in ("channel", "block"))
    for folder, other in zip(blocks, of_outputs, strict=True):
        file, others = folder / "model.safetensors", read(other / "model.safetensors")
        tensors = {name: others[name] if "self_attn" in name else tensor for name, tensor in read(file).items()}
        wide = {n: t[:, None, :, None] for n, t in tensors.items() if "mlp" in n and n.endswith("_scale")}
        save(tensors | wide, file)
    edit_json(blocks[0] / "config.json", quantization_config=config)
    model, whole = (load(folder, dtype="float32") for folder in blocks)
    assert {Fp8(None), Fp8(128)} <= set(formats(model.params))
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(whole, TOKENS), rtol=0, atol=1e-3)
    spoil(blocks[0], "model.layers.0.self_attn.k_proj.weight_scale", lambda s: np.ones((1, 2), np.float32))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has scales in blocks and .* hasn't"):
        load(blocks[0])


def test_what_the_file_leaves_as_it_is_stays_so(tmp_path):
    model = load(write(source("qwen3_moe"), tmp_path)[0], dtype="bfloat16")
    layer = model.params["layers"][0]
    assert isinstance(model.params["head"].format, Unquantised) and isinstance(layer["router"].format, Unquantised)
    assert layer["qkv"].format == layer["experts_down"].format == Fp8(128)
    assert layer["qkv"].dtype == E4M3 and layer["qkv"].scales.dtype == "float32" and model.dtype == "bfloat16"
    assert layer["attn_norm"].dtype == "bfloat16"


@pytest.mark.parametrize("n,k", [(128, 128), (130, 1), (1, 257), (192, 192), (300, 200)])
def test_blocks_are_quantised_as_by_numpy(n, k):
    weight = np.random.default_rng(n).standard_normal((n, k), np.float32)
    weight[: n // 2] *= 1e-6
    weight[:, : k // 3] = 0
    values, scales, whole = quantised(weight, "block")
    ours, our_scales = fp8.quantise_blocks(jnp.asarray(weight))
    np.testing.assert_allclose(fp8.finer(our_scales, n, 1), np.repeat(scales, 128, 0)[:n], rtol=1e-6)
    assert (np.asarray(our_scales) > 0).all()
    # Division may round another way just between two numbers.
    assert np.mean(np.asarray(ours).view(np.uint8) != values.view(np.uint8)) < 0.01
    wide = fp8.dequantise(ours, our_scales, 128)
    np.testing.assert_allclose(wide, whole, atol=np.abs(weight).max() * 2**-4)


def test_nothing_overflows():
    values, scales = fp8.quantise_rows(jnp.array([[448.0, -449.0, 1e30, 0.0]]))
    assert np.isfinite(np.asarray(values, np.float32)).all() and float(values[0, 2]) == 448
    values, scales = fp8.quantise_rows(jnp.zeros((2, 4)))
    assert (scales == 1).all() and not np.asarray(values, np.float32).any()


def emulated(x: np.ndarray, values: np.ndarray, scales: np.ndarray, block: int | None) -> np.ndarray:
    """Rows times a weight [n, k], both in e4m3: each group of inputs by itself, its sum times both scales."""
    out = np.zeros((len(x), len(values)))
    for j in range(0, x.shape[1], 128):
        part = x[:, j : j + 128].astype(np.float32)
        each = np.abs(part).max(axis=1, keepdims=True) / np.float32(448)
        rows = (part / np.where(each, each, 1)).astype(E4M3).astype(np.float64)
        sums = rows @ values[:, j : j + 128].astype(np.float64).T
        column = scales[:, j // 128] if block else scales[:, 0]
        out += sums * each * np.repeat(column, -(-len(values) // len(column)))[: len(values)]
    return out


@pytest.mark.parametrize("kind,block", [("block", 128), ("channel", None)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_rows_give_what_numpy_does(kind, block, dtype):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((5, 300), np.float32), rng.standard_normal((256, 300), np.float32)
    x[2] = 0
    x = np.asarray(jnp.asarray(x, dtype), np.float32)
    values, scales, whole = quantised(weight, kind)
    made = Weight(jnp.asarray(values), Fp8(block, True), Layout((256,)), jnp.asarray(scales))
    got = np.asarray(matmul(jnp.asarray(x, dtype), made, jnp.float32))
    expected = emulated(x, values, scales, block)
    np.testing.assert_allclose(got, expected, atol=1e-3)
    exact = np.asarray(matmul(jnp.asarray(x), made.replace(format=Fp8(block)), jnp.float32))
    np.testing.assert_allclose(exact, x @ whole.T, atol=1e-3)
    assert 0 < np.abs(got - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["block", "channel"])
def test_a_models_quantised_rows_give_what_numpy_does(tmp_path, kind):
    layout = LAYOUTS["fp8" if kind == "block" else "compressed channels"]
    folder, _ = write(source("llama"), tmp_path, **layout)
    tensors, prefix = read(folder / "model.safetensors"), "model.layers.0."
    block = 128 if kind == "block" else None

    def product(name, x, factor=1):
        suffix = "_scale" if kind == "channel" else "_scale_inv"
        weight = tensors[f"{prefix}{name}.weight"]
        scales = tensors[f"{prefix}{name}.weight{suffix}"].astype(np.float32)
        scales = np.repeat(scales, 128, axis=0)[: len(weight)] if block else scales
        return emulated(x, weight, scales, block) * factor

    def norm(x, name):
        """Rows times the norm's weight, which are quantised, and the factor of their products."""
        return x * tensors[name], 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)

    tokens, (n, m, h) = TOKENS[0], (4, 2, 32)
    angles = np.arange(len(tokens))[:, None] / 10000 ** (np.arange(h // 2) / (h // 2))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = tensors["model.embed_tokens.weight"][tokens].astype(np.float64)
    rows = norm(x, prefix + "input_layernorm.weight")
    q, k, v = (product(f"self_attn.{each}_proj", *rows).reshape(len(tokens), -1, h) for each in "qkv")
    q, k, v = turned(q), np.repeat(turned(k), n // m, 1), np.repeat(v, n // m, 1)
    scores = np.einsum("tnh,snh->nts", q, k) * h**-0.5
    scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
    x = x + product("self_attn.o_proj", mixed)
    rows = norm(x, prefix + "post_attention_layernorm.weight")
    gate, up = product("mlp.gate_proj", *rows), product("mlp.up_proj", *rows)
    x = x + product("mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    expected = np.multiply(*norm(x, "model.norm.weight")) @ tensors["lm_head.weight"].T.astype(np.float64)
    got = np.asarray(jaxspec.logits(load(folder, dtype="float32", fp8_activations=True), TOKENS[:1]))[0]
    # A row that rounds another way just between two numbers moves a logit by more than float32 does.
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-2)
    best = np.sort(expected, -1)
    sure = best[:, -1] - best[:, -2] > 6e-2
    assert sure.sum() > 6 and (got.argmax(-1) == expected.argmax(-1))[sure].all()


def rounded(x: np.ndarray) -> np.ndarray:
    """Rows whose groups of 128 are e4m3 numbers times a scale."""
    groups = [x[..., j : j + 128] for j in range(0, x.shape[-1], 128)]
    scales = [np.abs(group).max(-1, keepdims=True) / np.float32(448) for group in groups]
    scales = [np.where(scale, scale, 1) for scale in scales]
    numbers = [(g / s).astype(E4M3).astype(np.float32) * s for g, s in zip(groups, scales, strict=True)]
    return np.concatenate(numbers, axis=-1)


class RoundedRows(Unquantised):
    """Weights whose rows `quantise_by_numpy` rounds."""


# Names of weights whose rows stay as they are: of experts and routers, of gates and decays of linear attention, of
# streams, n-grams and indexers. No row is multiplied by `keys_values`.
WHOLE_ROWS = re.compile(
    "(experts|shared)_.*|router|ba|gates|steps|output_gates|keys_values|.*gates_(in|out)|.*_inject|ngram_.*|index"
)


def quantise_by_numpy(monkeypatch, params: dict) -> dict:
    """The params of a dequantised model, marked; and products with them round their rows."""

    def multiply(x, weight, valid, residual=None, gated=False):
        if isinstance(weight.format, RoundedRows):
            x = jax.pure_callback(rounded, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return decoder_matmul.reference(x, weight, residual, gated)

    def marked(name, weight):
        known = isinstance(weight, Weight) and not WHOLE_ROWS.fullmatch(name)
        return weight.replace(format=RoundedRows()) if known else weight

    monkeypatch.setattr(decoder_matmul, "multiply", multiply)
    layers = [{name: marked(name, weight) for name, weight in layer.items()} for layer in params["layers"]]
    return params | {"layers": layers}


FAMILIES = "deepseek_v3", "glm4_moe", "mimo_v2_flash", "minimax_m2", "nemotron_h", "qwen3_next", "qwen4_exp"
FAMILIES += "bailing_moe", "granitemoeshared", "hy_v3", "mixtral", "qwen2_moe"


@pytest.mark.parametrize("family", ["kimi_linear", *(rare(family) for family in FAMILIES)])
def test_families_quantise_the_rows_that_they_should(tmp_path, monkeypatch, family):
    """Numpy's rounding of the dequantised model's rows gives the same logits."""
    quant, whole = (load(each, True, dtype="float32") for each in write(source(family), tmp_path))
    assert Fp8(128, activations=True) in formats(quant.params)
    expected = jaxspec.logits(whole, TOKENS[:1], params=quantise_by_numpy(monkeypatch, whole.params))
    np.testing.assert_allclose(jaxspec.logits(quant, TOKENS[:1]), expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
def test_quantising_on_load_gives_the_checkpoint_that_was_quantised_before(tmp_path, family):
    folder, _ = write(source(family), tmp_path)
    stored, online = load(folder), load(source(family), quantization="fp8")
    assert jax.tree.structure(stored.params) == jax.tree.structure(online.params)
    for ours, theirs in zip(jax.tree.leaves(online.params), jax.tree.leaves(stored.params), strict=True):
        wide = [np.asarray(each, np.float32) for each in (ours, theirs)]
        if ours.dtype == E4M3:  # a division may round another way just between two numbers
            assert np.mean(wide[0] != wide[1]) < 0.01
        else:
            np.testing.assert_allclose(*wide, rtol=1e-6)
    assert jax.tree.structure(load(folder, quantization="fp8").params) == jax.tree.structure(stored.params)


@pytest.mark.parametrize("kind", ["stored", "online"])
def test_the_host_holds_less_than_two_tensors(monkeypatch, tmp_path, kind):
    """Beside what the device keeps. A fused parameter's sources count as one tensor."""
    folder = tiny_checkpoint("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=4, head_dim=64)
    options = {"quantization": "fp8"} if kind == "online" else {}
    folder = write(folder, tmp_path)[0] if kind == "stored" else folder
    monkeypatch.setattr(eager, "MOST_BYTES", 2**16)  # NumPy's memory is counted here
    load(folder, **options)  # compiles, which allocates too
    largest = 2 * 256 * 1024 * (4 if kind == "online" else 1)  # gate and up, as the file has them
    assert 3 * largest < (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr("jaxspec.checkpoint.params.BUDGET", largest)
    tracemalloc.start()
    load(folder, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * largest, f"{peak:,} bytes at peak, gate and up are {largest:,}"


def test_loading_says_how_long_it_took(tmp_path, caplog):
    with caplog.at_level("INFO", "jaxspec"):
        load(write(source(), tmp_path)[0])
    assert re.search(r"loading .*: \d+\.\d\d GB in \d+\.\d s, \d+\.\d\d GB/s", caplog.text)


def test_dummy_weights_are_in_the_format_that_was_asked_for(tmp_path):
    folder, _ = write(source("qwen3_moe"), tmp_path, config=BLOCKS | {"modules_to_not_convert": ["self_attn.o_proj"]})
    (folder / "model.safetensors").unlink()
    config = load(folder, load_format="dummy")
    layer = config.params["layers"][0]
    assert layer["qkv"].format == layer["experts_gate_up"].format == Fp8(128)
    assert isinstance(layer["out"].format, Unquantised) and isinstance(layer["router"].format, Unquantised)
    online = load(source("qwen3_moe"), load_format="dummy", quantization="fp8", fp8_activations=True)
    assert online.params["layers"][0]["out"].format == Fp8(128, activations=True)
    assert np.isfinite(np.asarray(jaxspec.logits(online, TOKENS))).all()
    plain = load(source("qwen3_moe"), load_format="dummy")
    edit = json.loads((folder / "config.json").read_text()) | {"quantization_config": compressed("channel")}
    (folder / "config.json").write_text(json.dumps(edit))
    by_output = load(folder, load_format="dummy")
    qkv = by_output.params["layers"][0]["qkv"]
    assert qkv.format == Fp8(None) and qkv.scales.shape == (qkv.outputs, 1)
    for name in ("experts_down", "qkv"):
        was = plain.params["layers"][0][name].dequantised("float32")
        for made in (online, by_output):
            dense = made.params["layers"][0][name].dequantised("float32")
            np.testing.assert_allclose(dense, was, atol=2**-4 * float(jnp.abs(was).max()))


def test_the_floor_counts_the_bytes_that_are_read(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    plain, small = (
        load(source("llama", **sizes), load_format="dummy", dtype="bfloat16", quantization=how) for how in (None, "fp8")
    )
    was, now = (ModelCost.of(model, "bfloat16") for model in (plain, small))
    assert now.layer_flops == was.layer_flops and now.head_flops == was.head_flops
    matrices = sum(w.values.size for w in plain.params["layers"][0].values() if isinstance(w, Weight))
    scales = sum(w.scales.nbytes for w in small.params["layers"][0].values() if isinstance(w, Weight))
    assert was.weight_bytes - now.weight_bytes == matrices - scales and scales < matrices / 500


def test_no_kernel_for_unquantised_weights_takes_fp8():
    model = load(source("qwen3", hidden_size=2048), load_format="dummy", dtype="bfloat16", quantization="fp8")
    path, refused = choose(model.config.decoder, model.params["layers"], Call(1, 1, "bfloat16", 132))
    assert path.name == "plain"
    assert refused["weight_stream"] == "weights in Fp8" and "not a multiple" in refused["few_rows"]


def spoil(folder: Path, name: str, change) -> None:
    tensors = read(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize("change,message", [
    (lambda s: None, rf"missing {SCALE} \[3, 2\]"),
    (lambda s: s[:2], rf"misshapen {SCALE}: found \[2, 2\], expected \[3, 2\]"),
    (lambda s: s.T, rf"misshapen {SCALE}: found \[2, 3\], expected \[3, 2\]"),
    (lambda s: s * np.float32(np.nan), f"{SCALE} has scales that aren't finite"),
    (lambda s: -s, f"{SCALE} has scales that aren't finite numbers, or negative"),
])  # fmt: skip
def test_a_bad_scale_is_named(tmp_path, change, message):
    folder, _ = write(source("llama"), tmp_path)
    spoil(folder, SCALE, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_truncated_scales_and_mixed_projections_are_named(tmp_path):
    folder, _ = write(source("llama"), tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=r"model.safetensors \([\d,]+ bytes\) is truncated"):
        load(folder)
    file.write_bytes(content)
    name = "model.layers.0.self_attn.k_proj.weight"
    spoil(folder, name, lambda values: values.astype(np.float32))
    with pytest.raises(CheckpointError, match=rf"q_proj.weight is quantised and {name} isn't"):
        load(folder)
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"is stored as F8_E4M3, and config\.json has no quantization_config"):
        load(folder)


def test_scales_that_are_not_needed_are_left(tmp_path, caplog):
    """Leave scales of activations, which are quantised by their own magnitude."""
    folder, whole = write(source("llama"), tmp_path, "tensor", compressed("tensor"), "_scale")
    names = [f"model.layers.0.{name}" for name in ("mlp.up_proj.input_scale", "self_attn.q_scale")]
    names += [f"model.layers.0.mlp.down_proj.{name}" for name in ("activation_scale", "input_scale_ub")]
    tensors = read(folder / "model.safetensors") | {name: np.ones(1, np.float32) for name in names}
    save(tensors, folder / "model.safetensors")
    with caplog.at_level("INFO", "jaxspec"):
        model = load(folder)
    assert f"4 scales like {names[2]} are not used" in caplog.text
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(load(whole), TOKENS), atol=1e-3)


def with_kv_scales(folder: Path, scales: dict[str, np.ndarray]) -> None:
    more = {f"model.layers.{name}": np.asarray(value, np.float32) for name, value in scales.items()}
    save(read(folder / "model.safetensors") | more, folder / "model.safetensors")


def test_scales_of_keys_and_values_are_read_under_each_tools_names(tmp_path, caplog):
    made = write(source("llama", num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2), tmp_path)
    with_kv_scales(made[0], {
        "0.self_attn.k_scale": [0.5], "0.self_attn.v_scale": [0.25, 0.75],
        "1.self_attn.k_proj.k_scale": 2.0, "1.self_attn.v_proj.v_scale": [[[3.0]], [[4.0]]],
        "2.self_attn.k_proj.output_scale": [5.0], "2.self_attn.attn.v_scale": 6.0,
        "3.self_attn.kv_scale": 7.0,
    })  # fmt: skip
    with caplog.at_level("INFO", "jaxspec"):
        scales = load(made[0]).kv_scales
    assert "are not used" not in caplog.text
    assert scales.tolist() == [[[0.5, 0.5], [0.25, 0.75]], [[2, 2], [3, 4]], [[5, 5], [6, 6]], [[7, 7], [7, 7]],
                               [[1, 1], [1, 1]]]  # fmt: skip
    assert load(made[1]).kv_scales is None
    for bad, message in ((np.ones(3), r"shape \[3\]; .* or one for each of 2 KV heads"), (0.0, "must be positive")):
        with_kv_scales(made[0], {"4.self_attn.k_scale": bad})
        with pytest.raises(CheckpointError, match=rf"4\.self_attn\.k_scale .*{message}"):
            load(made[0])


def test_layers_whose_heads_differ_have_scales_by_group(tmp_path):
    """Gemma 4's do. Its last layers have keys and values of others, and so no scales."""
    kinds = ("sliding_attention", "full_attention") * 2
    made = write(source("gemma4", num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2), tmp_path)[0]
    with_kv_scales(made, {"0.self_attn.k_scale": [0.5, 0.25], "1.self_attn.v_scale": 3.0})
    model = load(made)
    near, far = by_group(model.kv_scales, model.config.decoder)
    assert near.tolist() == [[[0.5, 0.25], [1, 1]]] and far.tolist() == [[[1], [3]]]


@pytest.mark.parametrize("config,named", [
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in 4 bits, version 'gemv'"),
    ({"quant_method": "gptq", "bits": 3}, "gptq in 3 bits"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, not awq, gptq, auto-round, .* or mxfp4"),
    ({"quant_method": "mxfp8", "quantization": {}}, "mxfp8, not awq"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ, not NVFP4, W4A16_NVFP4, FP8, "),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "modelopt NVFP4 in groups of 32"),
    ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "group_size": 64}, "modelopt FP8_PB_WO in groups of 64"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_AWQ"}}}, "modelopt FP8 beside W4A16_AWQ"),
    ({"quant_method": ["?"]}, r"\['\?'\]"),
    ({}, None),
    (BLOCKS | {"weight_block_size": [64, 64]}, r"fp8 with weight_block_size \[64, 64\], not \[128, 128\]"),
    (compressed("group", num_bits=4, type="int"), "compressed-tensors float-quantized, 4-bit int"),
    (compressed("channel", type="int"), "compressed-tensors float-quantized, 8-bit int"),
    (compressed("tensor_group", num_bits=4), "4-bit float with strategy 'tensor_group'.*, not integers of 4 or 8 bits"),
    (compressed("block", block_structure=[64, 64]), r"in blocks \[64, 64\]"),
    (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'sparse-24-bitmask'"),
])  # fmt: skip
def test_other_formats_are_refused_by_name(tmp_path, config, named):
    folder, _ = write(source("llama"), tmp_path, config=config)
    if named is None:
        named, instead = "", "has no quantization_config"
    else:
        named, instead = f"weights quantised by .*{named}", "are not supported; use the model's FP8 or unquantised"
    with pytest.raises(CheckpointError, match=f"{named}.*{instead}") as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pattern,kept", [
    ("lm_head", {"lm_head"}),
    ("o_proj", {"model.layers.1.self_attn.o_proj"}),
    ("model.layers.1", {"model.layers.1.self_attn.o_proj", "model.layers.1.mlp.gate"}),
    ("model.language_model.layers.1.mlp", {"model.layers.1.mlp.gate"}),
    (r"re:.*mlp\.gate$", {"model.layers.1.mlp.gate"}),
    ("model.layers.1.mlp.gat", set()),
])  # fmt: skip
def test_modules_that_are_kept_are_found_by_name_part_or_pattern(pattern, kept):
    names = {"lm_head", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.gate", "model.layers.10.mlp.gate_proj"}
    assert {name for name in names if Quantization("block", (pattern,)).keeps(name)} == kept


OPTIONS = CROWDED | {"context_length": 128, "max_total_tokens": 512, "disable_structured_output": True}


def test_an_fp8_cache_with_scales_serves_drafts_losslessly_and_from_the_cache(tmp_path):
    """The scales are so small that keys and values saturate."""
    folder, _ = write(tiny_checkpoint("llama", 272, hidden_size=160, num_hidden_layers=1, tokenizer=True), tmp_path)
    with_kv_scales(folder, {"0.self_attn.k_scale": 1e-4, "0.self_attn.v_scale": 1e-4})
    prompts, params = [[5, 6, 7, 8] * 9, [9, 3] * 6], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm, texts = LLM(str(folder), draft=f"standalone:{folder}", kv_cache_dtype="fp8", **OPTIONS), []
    for speculative in (False, True):
        asked = dataclasses.replace(params, speculative=speculative)
        for cached in (False, True):
            outs = llm.generate(prompts, asked)
            texts.append([out.token_ids for out in outs])
            assert bool(outs[0].metrics.cached_tokens) is cached
        assert llm.engine.flush_cache()
    assert texts[0] == texts[1] == texts[2] == texts[3] and llm.engine.stats()["accepted_per_position"][0]
    cache = llm.engine.runner.state.cache
    assert jnp.allclose(cache.scales[0], 1e-4) and jnp.abs(cache.kv[0][:, 1:].astype(jnp.float32)).max() == 448


@pytest.mark.exhaustive  # test_drafter_weights.py has drafts of a quantised module
def test_an_mtp_module_is_quantised_with_its_target(tmp_path):
    folder, _ = write(hybrids.checkpoint("qwen3_5"), tmp_path)
    drafter = jaxspec.load_drafter("mtp", load(folder), EngineConfig(str(folder), "mtp", fp8_activations="on"))
    assert drafter.params["layer"]["qkv"].format == Fp8(128, activations=True)


@pytest.mark.exhaustive  # test_drafter_weights.py has drafts of a quantised module
def test_greedy_text_of_a_quantised_mtp_module_is_its_targets(tmp_path):
    folder, _ = write(hybrids.checkpoint("qwen3_5"), tmp_path)
    options, target = OPTIONS | {"max_running_requests": 1}, load(folder)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (out,) = LLM(str(folder), draft="mtp", **options).generate([[5, 6, 7] * 5], params)
    logits = np.asarray(jaxspec.logits(target, [out.prompt_token_ids + out.token_ids])[0, 14:-1], np.float32)
    assert (logits[np.arange(16), out.token_ids] >= logits.max(-1) - 1e-4).all()


def test_a_format_is_part_of_what_a_program_is_traced_for():
    """Two weights of the same arrays that are multiplied differently aren't one program's."""
    values, scales = jnp.zeros((4, 4), fp8.E4M3), jnp.ones((4, 1))
    off, on = (Weight(values, Fp8(None, on), scales=scales) for on in (False, True))
    assert str(jax.tree.structure(off)) != str(jax.tree.structure(on))
    assert dataclasses.replace(off, format=Fp8(None, True)).format == on.format
