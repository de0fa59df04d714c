"""Weights of four bits that stay packed: each tool's layout, checkpoints of each, and what can't stay so."""

import json
import logging
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.bench.floors import ModelCost
from jaxspec.checkpoint import CheckpointError, load_model
from jaxspec.checkpoint.check import TensorInfo
from jaxspec.checkpoint.packed import AWQ, COMPRESSED, GPTQ, Packed
from jaxspec.checkpoint.params import assemble
from jaxspec.checkpoint.quantization import MODELOPT, NVFP4, as_stored
from jaxspec.models import int4, nvfp4
from jaxspec.models.weights import Fp8, Int4, Nvfp4, Unquantised, formats, linear
from tests.checkpoint.test_packed import CONFIGS, GOLDEN, TOOLS, edit, pack, packed_and_plain
from tests.support.engines import CROWDED, check_greedy
from tests.support.quantised import E2M1, quantised, read, save
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 20)).tolist()
E4M3 = ml_dtypes.float8_e4m3fn
PACKED = {name: tool for name, tool in TOOLS.items() if tool.bits == 4}
PACKED |= {"nvfp4": Packed(NVFP4, 4, 16), "nvfp4-modelopt": Packed(MODELOPT, 4, 16)}
CONFIG = CONFIGS | {
    NVFP4: {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                "input_activations": {"num_bits": 4, "type": "float"},
            },
        },
    },
    MODELOPT: {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
FORMAT = {
    "awq": Int4(32, zeros=True),
    "gptq": Int4(32, zeros=True),
    "gptq-order": Int4(32, zeros=True, ordered=True),
    "compressed-tensors": Int4(32, zeros=True),
    "nvfp4": Nvfp4(),
    "modelopt": Nvfp4(),
}


def golden(name):
    """A tool's tensors and what it makes of them."""
    tensors = load_file(GOLDEN / f"{name.removesuffix('-modelopt')}.safetensors")
    expected = tensors.pop("expected")
    if name.startswith("nvfp4"):
        tensors["m.weight_scale"] = tensors["m.weight_scale"].view(E4M3)
    if name == "nvfp4-modelopt":
        tensors = {"m.weight": tensors.pop("m.weight_packed"), **tensors}
        tensors["m.weight_scale_2"] = 1 / tensors.pop("m.weight_global_scale")
    return tensors, expected


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_stand_for_those_that_the_tool_makes_of_them(name):
    tool, (tensors, expected) = PACKED[name], golden(name)
    parts = {key.removeprefix("m."): value for key, value in tensors.items()}
    made = {f"m.{part}": value for part, value in tool.made("m", parts).items()}
    infos = {key: _info(value) for key, value in made.items()}
    param = as_stored(linear(128, {"m.weight": 32}), infos, tool.quantization, False, "file")
    weight = assemble(param, made, "float32")
    np.testing.assert_allclose(weight.dequantised("float32").T, expected, rtol=1e-6, atol=0)
    assert weight.values.shape == (32, 64) and weight.values.dtype == jnp.uint8
    assert weight.format == Nvfp4() if tool.floats else weight.format.group == tool.group
    assert (weight.order is not None) == (name == "gptq-order")


def _info(array):
    return TensorInfo(array.shape, array.nbytes, "U8" if array.dtype == np.uint8 else "F32")


def pack_as(layout):
    """A packing function for `packed_and_plain`, and its kind."""

    def nvfp4_parts(_, matrix):
        each = matrix.reshape(len(matrix), -1, 16)
        factor = np.float32(np.abs(matrix).max() / (6 * 448))
        scales = np.maximum(np.abs(each).max(-1) / 6 / factor, 2.0**-9).astype(E4M3)
        by = scales.astype(np.float32)[..., None] * factor
        numbers = np.abs(each[..., None] / by[..., None] - E2M1).argmin(-1)
        meant = (E2M1[numbers] * by).reshape(matrix.shape).astype(np.float32)
        numbers = numbers.reshape(matrix.shape).astype(np.uint8)
        packed = numbers[:, ::2] | numbers[:, 1::2] << 4
        if layout == MODELOPT:
            return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": factor}, meant
        given = {"weight_global_scale": 1 / factor.reshape(1), "input_global_scale": factor.reshape(1)}
        return {"weight_packed": packed, "weight_scale": scales, **given}, meant

    def ordered(_, matrix):
        """`desc_act`: all weights with as many inputs have them in one order."""
        order = np.random.default_rng(matrix.shape[1]).permutation(matrix.shape[1])
        parts, meant = pack(GPTQ, matrix[:, order], 32)
        back = np.argsort(order)
        words = np.ascontiguousarray(parts["qweight"].T).view(np.uint8)
        numbers = np.stack([words & 15, words >> 4], -1).reshape(matrix.shape)[:, back]
        words = np.ascontiguousarray(numbers[:, ::2] | numbers[:, 1::2] << 4).view(np.int32)
        return parts | {"qweight": words.T, "g_idx": (back // 32).astype(np.int32)}, np.take(meant, back, 1)

    if layout in (NVFP4, MODELOPT):
        return nvfp4_parts
    return ordered if layout == "gptq-order" else lambda kind, matrix: pack(kind, matrix, 32)


def four_bits(layout, path, **sizes):
    """Folders of a packed checkpoint and of what it stands for."""
    kind = layout.removesuffix("-order")
    config = json.loads(json.dumps(CONFIG[kind]).replace('"group_size": 16', '"group_size": 32'))
    if kind in (NVFP4, MODELOPT):
        config = CONFIG[kind]
    return packed_and_plain(kind, path, pack_as(layout), config, **sizes)


def load(folder, **options):
    return load_model(str(folder), progress=False, **options)


@pytest.mark.parametrize("layout", [AWQ, "gptq-order", NVFP4, *map(rare, (GPTQ, COMPRESSED, MODELOPT))])
def test_logits_are_those_of_the_dequantised_checkpoint(layout, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    family = {"family": "llama"} if layout == "gptq-order" else {}
    packed, plain = four_bits(layout, tmp_path, **family)
    model, whole = load(packed), load(plain)
    assert "stay packed" in caplog.text and "dequantised" not in caplog.text
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(whole, TOKENS), rtol=0, atol=1e-4)
    made = set(formats(model.params))
    assert {FORMAT[layout], Unquantised()} <= made <= {FORMAT[layout], Unquantised(), Int4(32, zeros=True)}
    was = whole.params["layers"][0]["qkv"]
    assert model.params["layers"][0]["qkv"].numbers == was.numbers
    made_up = load(packed, load_format="dummy")
    kind = FORMAT[layout] if layout != "gptq-order" else FORMAT["gptq"]
    assert kind.__class__ in {type(each) for each in formats(made_up.params)}
    assert np.isfinite(np.asarray(jaxspec.logits(made_up, TOKENS))).all()


def test_experts_in_another_order_are_dequantised_and_named(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    packed, plain = four_bits("gptq-order", tmp_path, moe_intermediate_size=64)
    model, whole = load(packed), load(plain)
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(whole, TOKENS), rtol=0, atol=1e-4)
    assert isinstance(model.params["layers"][0]["experts_down"].format, Unquantised)
    assert model.params["layers"][0]["out"].format == FORMAT["gptq-order"]
    assert "weights can't stay packed and are dequantised: model.layers.0.mlp.experts.0" in caplog.text


@pytest.mark.parametrize("layout", [AWQ, NVFP4])
def test_fp8_may_be_made_of_packed_weights(layout, tmp_path):
    packed, plain = four_bits(layout, tmp_path)
    model, whole = (load(folder, quantization="fp8") for folder in (packed, plain))
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(lambda a, b: close(a.astype("float32"), b.astype("float32")), model.params, whole.params)
    assert Fp8(128, activations=True) in formats(model.params) and model.quantization is None


def test_modelopts_own_file_says_how_weights_are_packed(tmp_path):
    packed, plain = four_bits(MODELOPT, tmp_path)
    edit(packed, quantization_config=None)
    told = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (packed / "hf_quant_config.json").write_text(json.dumps(told))
    model, whole = load(packed), load(plain)
    assert Nvfp4() in formats(model.params) and model.quantization.kept == ("lm_head",)
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(whole, TOKENS), rtol=0, atol=1e-4)
    (packed / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="quantization must be a mapping, got None"):
        load(packed)


@pytest.mark.parametrize("layout,kind,alone", [
    (COMPRESSED, "channel", False), (MODELOPT, "tensor", True), rare(MODELOPT, "tensor", False),
    rare(NVFP4, "block", False), rare(NVFP4, "tensor", False),
])  # fmt: skip
def test_layers_may_be_in_fp8_beside_four_bits(layout, kind, alone, tmp_path):
    """Attention is FP8; or all is, `alone`, as ModelOpt says it for each layer. Rows keep their dtype."""
    packed, plain = four_bits(layout, tmp_path, family="llama")
    tensors, whole = read(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    layers = {}
    for name in [name for name in whole if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        layers[module] = {"quant_algo": "NVFP4"}
        if alone or "self_attn" in name:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
            tensors[name], scales, whole[name] = quantised(whole[name], kind)
            tensors |= {f"{name}_scale": scales.squeeze() if kind == "tensor" else scales}
            layers[module] = {"quant_algo": "FP8"}
    save(tensors, packed / "model.safetensors")
    save_file(whole, plain / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if layout != MODELOPT:
        config = json.loads((packed / "config.json").read_text())["quantization_config"]
        fp8 = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": kind}}
        four = config["config_groups"]["group_0"] | {"format": config["format"]}
        config |= {"format": "mixed-precision", "config_groups": {"group_0": four, "group_1": fp8}}
    edit(packed, quantization_config=config)
    model = load(packed, fp8_activations=False)
    both = {Fp8(128 if kind == "block" else None), *([] if alone else [FORMAT[layout]])}
    assert set(formats(model.params)) == both | {Unquantised()}
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(load(plain), TOKENS), rtol=0, atol=1e-4)


def test_experts_that_a_family_stacks_may_be_packed_one_by_one(tmp_path):
    """Qwen3-VL's, as llm-compressor writes them."""
    source, pack = tiny_checkpoint("qwen3_vl_moe", moe_intermediate_size=32, num_hidden_layers=1), pack_as(NVFP4)
    stored, whole = {}, load_file(source / "model.safetensors")
    for name, tensor in list(whole.items()):
        prefix, _, part = name.rpartition(".experts.")
        if not prefix:
            stored[name] = tensor
            continue
        meant, parts = [], ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, matrix in enumerate(tensor):
            made = [pack(NVFP4, each) for each in np.split(matrix.T, len(parts))]
            meant.append(np.concatenate([each for _, each in made]).T)
            for each, (values, _) in zip(parts, made, strict=True):
                stored |= {f"{prefix}.experts.{expert}.{each}.{key}": value for key, value in values.items()}
        whole[name] = np.stack(meant)
    for folder, tensors in ((tmp_path / "packed", stored), (tmp_path / "plain", whole)):
        shutil.copytree(source, folder)
        save(tensors, folder / "model.safetensors")
    edit(tmp_path / "packed", quantization_config=CONFIG[NVFP4])
    model, plain = load(tmp_path / "packed"), load(tmp_path / "plain")
    assert model.params["layers"][0]["experts_gate_up"].format == Nvfp4()
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(plain, TOKENS), rtol=0, atol=1e-4)


def test_a_head_stays_packed(tmp_path):
    """Where a checkpoint has it packed. Its logits are float32, of the dequantised head."""
    packed, plain = four_bits(GPTQ, tmp_path, packed=("_proj.weight", "lm_head.weight"), tie_word_embeddings=False)
    model, whole = load(packed), load(plain)
    assert model.params["head"].format == Int4(32, zeros=True)
    np.testing.assert_allclose(jaxspec.logits(model, TOKENS), jaxspec.logits(whole, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name,kind,scales", [("int4", Int4(32), 2 / 32), ("nvfp4", Nvfp4(), 1 / 16 + 4 / 32)])
def test_weights_are_made_so_on_load(name, kind, scales, tmp_path):
    """Scales take so many bytes an input: experts have 32 inputs, and NVFP4 a factor for each output."""
    _, plain = four_bits(AWQ, tmp_path)
    model, whole = load(plain, quantization=name), load(plain)
    layer, was = model.params["layers"][0], whole.params["layers"][0]
    assert layer["qkv"].format == layer["experts_down"].format == kind
    for weight in ("qkv", "experts_down", "experts_gate_up", "out"):
        error = layer[weight].dequantised("float32") - was[weight].unquantised
        assert float(error.std()) < 0.11 * float(was[weight].values.std())
    assert isinstance(layer["router"].format, Unquantised)
    cost, of = (ModelCost.of(each, "bfloat16") for each in (model, whole))
    assert cost.layer_flops == of.layer_flops
    assert cost.expert_bytes / of.expert_bytes == (0.5 + scales) / 4


def test_integers_round_to_the_nearest_and_use_their_range():
    groups = jnp.asarray(np.random.default_rng(1).standard_normal((4, 256), np.float32))
    values, scales = int4.quantise(groups, 128)
    assert values.shape == (4, 128) and scales.shape == (2, 4) and scales.dtype == jnp.bfloat16
    numbers = np.asarray(int4.numbers(values)).reshape(4, 2, 128)
    by = np.asarray(scales, np.float32).T[..., None]
    wanted = np.clip(np.round(np.asarray(groups).reshape(4, 2, 128) / by) + 8, 0, 15)
    np.testing.assert_array_equal(numbers, wanted)
    np.testing.assert_allclose(by[..., 0], np.abs(np.asarray(groups)).reshape(4, 2, 128).max(-1) / 7.5, rtol=2**-8)
    assert int4.group_of(5120) == 128 and int4.group_of(576) == 64 and int4.group_of(48) is None
    zeros = jnp.zeros((2, 32))
    np.testing.assert_array_equal(int4.dequantise(*int4.quantise(zeros, 32)), zeros)
    np.testing.assert_array_equal(nvfp4.dequantise(*nvfp4.quantise(zeros)), zeros)


@pytest.mark.parametrize("layout,part,change,says", [
    (NVFP4, "q_proj.weight_scale", lambda s: s[:1], r"q_proj: scales \[1, 2\] and factors \[1\] don't fit"),
    (NVFP4, "q_proj.weight_global_scale", lambda s: s * 0, r"q_proj has scales that aren't finite"),
    (NVFP4, "q_proj.weight_scale", lambda s: s.view(np.uint8), r"weight_scale is U8 .*; scales are F32, .*, F8_E4M3"),
    (NVFP4, "q_proj.weight_scale", lambda s: -s, r"q_proj has scales that aren't finite numbers, or negative"),
    (COMPRESSED, "q_proj.weight_shape", lambda s: s[:1], r"weight_shape is I64 \[1\]; a weight has two axes"),
    (COMPRESSED, "q_proj.weight_zero_point", None, r"q_proj has weight_packed and no weight_zero_point; download"),
    (NVFP4, "q_proj.weight_global_scale", None, r"q_proj has weight_packed and no weight_global_scale"),
    (MODELOPT, "q_proj.weight", lambda w: w.astype(np.float32), r"q_proj.weight is F32 .*are a matrix of U8"),
    (AWQ, "q_proj.scales", lambda s: s * np.inf, r"q_proj has scales that aren't finite"),
])  # fmt: skip
def test_damaged_tensors_are_named(layout, part, change, says, tmp_path):
    folder, _ = four_bits(layout, tmp_path)
    tensors = read(folder / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith(part))
    tensors = {k: change(v) if k == name else v for k, v in tensors.items() if change or k != name}
    save(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        load(folder)


OPTIONS = CROWDED | {"context_length": 64, "disable_structured_output": True}


@pytest.mark.parametrize("layout", [AWQ, pytest.param(NVFP4, marks=pytest.mark.exhaustive)])
def test_greedy_texts_are_the_models_own_cached_or_cold(layout, tmp_path):
    """Drafts come from the same checkpoint in int4, so most are right and some are not."""
    packed, plain = four_bits(layout, tmp_path, family="llama")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    more = {"draft": f"standalone:{plain}", "draft_quantization": "int4", "num_draft_tokens": 3}
    llm = LLM(str(packed), **more, **OPTIONS)
    assert Int4(32) in formats(llm.engine.runner.draft.params)
    check_greedy(llm, [TOKENS[0], TOKENS[1][:7] * 3, [3]], params)
    assert sum(llm.engine.stats()["accepted_per_position"]) > 0
