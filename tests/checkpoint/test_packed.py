"""Packed weights that are dequantised on load: AutoAWQ's, AutoGPTQ's and compressed-tensors' own, and checkpoints."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.checkpoint import CheckpointError, load_model, packed, quantization
from jaxspec.checkpoint.packed import AWQ, COMPRESSED, GPTQ, INT8, Packed
from jaxspec.checkpoint.quantization import NVFP4
from tests.support.quantised import save
from tests.support.tiny import tiny_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "packed"
TOOLS = {
    "awq-32": Packed(AWQ, 4, 32),
    "awq-128": Packed(AWQ, 4, 128),
    "gptq": Packed(GPTQ, 4, 32, less=1),
    "gptq-order": Packed(GPTQ, 4, 32, less=1),
    "gptq-8": Packed(GPTQ, 8, 64, less=1),
    "compressed": Packed(COMPRESSED, 4, 32),
    "compressed-zeros": Packed(COMPRESSED, 4, 32),
    "compressed-channel-8": Packed(COMPRESSED, 8, None),
    "compressed-channel": Packed(COMPRESSED, 4, None),
    "int8": Packed(INT8, 8, None),
    "int8-zeros": Packed(INT8, 8, 32),
}
CONFIGS = {
    AWQ: {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    GPTQ: {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "dynamic": {"-:head": {}}},
    COMPRESSED: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
            },
        },
    },
}
CONFIGS[INT8] = CONFIGS[COMPRESSED] | {"format": INT8}


@pytest.mark.parametrize("name", TOOLS)
def test_weights_are_those_that_the_tool_makes_of_them(name):
    """With scales in float32 a number times its scale is exact in float32, so nothing may differ."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    expected = tensors.pop("expected")
    ((part, weight),) = TOOLS[name].made("m", _parts(tensors), whole=True).items()
    assert part == "weight" and weight.dtype == np.float32
    np.testing.assert_array_equal(weight, expected)


def _parts(tensors):
    return {name.removeprefix("m."): tensor for name, tensor in tensors.items()}


def words(numbers: np.ndarray) -> np.ndarray:
    """Numbers of four bits [r, n] in words [r, n / 8], the first lowest."""
    each = numbers.reshape(len(numbers), -1, 8).astype(np.uint32)
    return np.bitwise_or.reduce(each << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).view(np.int32)


def pack(kind: str, matrix: np.ndarray, group: int = 16) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A matrix's parts, and what they stand for."""
    rows, columns = matrix.shape
    each = matrix.reshape(rows, -1, group)
    scales = ((each.max(-1) - each.min(-1)) / 14).astype(np.float16)
    zeros = np.clip(np.round(-each.min(-1) / scales.astype(np.float32)), 1, 15)
    numbers = np.clip(np.round(each / scales[..., None].astype(np.float32) + zeros[..., None]), 0, 15)
    meant = ((numbers - zeros[..., None]) * scales[..., None].astype(np.float32)).reshape(rows, columns)
    numbers = numbers.reshape(rows, columns)
    if kind == AWQ:
        order = np.arange(rows).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        return {"qweight": words(numbers.T[:, order]), "qzeros": words(zeros.T[:, order]), "scales": scales.T}, meant
    if kind == GPTQ:
        parts = {"qweight": words(numbers).T, "qzeros": words(zeros.T - 1), "scales": scales.T}
        return parts | {
            "g_idx": (np.arange(columns) // group).astype(np.int32),
            "bias": np.zeros(rows, np.float16),
        }, meant
    if kind == INT8:
        parts = {"weight": numbers.astype(np.int8), "weight_zero_point": zeros.astype(np.int8), "weight_scale": scales}
        return parts | {"input_scale": np.ones(1, np.float32), "input_zero_point": np.ones(1, np.int8)}, meant
    shape = np.array(matrix.shape)
    parts = {"weight_packed": words(numbers), "weight_scale": scales, "weight_shape": shape}
    return parts | {"weight_zero_point": words(zeros.T).T}, meant


def packed_and_plain(kind: str, path, pack=pack, config=None, family="qwen3_moe", packed="_proj.weight", **sizes):
    """Two folders: a checkpoint whose projections are packed, and one of what these stand for."""
    source = tiny_checkpoint(family, **dict(moe_intermediate_size=32, num_hidden_layers=1) | sizes)
    folders = path / "packed", path / "plain"
    for folder in folders:
        shutil.copytree(source, folder)
    stored, meant = {}, load_file(source / "model.safetensors")
    for name, tensor in meant.items():
        if not name.endswith(packed):
            stored[name] = tensor
            continue
        parts, meant[name] = pack(kind, tensor)
        stored |= {f"{name.removesuffix('weight')}{part}": np.asarray(value) for part, value in parts.items()}
    save(stored, folders[0] / "model.safetensors")
    save_file(meant, folders[1] / "model.safetensors")
    edit(folders[0], quantization_config=config or CONFIGS[kind])
    return folders


def edit(folder, **keys) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_is_read_as_its_dequantised_weights(kind, tmp_path, caplog):
    """Experts one by one, and GPTQ's biases of zeros, which the model doesn't have. Scales of activations are left."""
    caplog.set_level(logging.INFO)
    both = packed_and_plain(kind, tmp_path)
    ours, plain = (load_model(str(folder), progress=False) for folder in both)
    jax.tree.map(np.testing.assert_array_equal, ours.params, plain.params)
    assert ours.quantization is None and f" bits ({kind}) are dequantised to float32" in caplog.text
    ours, plain = (load_model(str(folder), quantization="fp8", progress=False) for folder in both)
    jax.tree.map(np.testing.assert_array_equal, ours.params, plain.params)
    assert jaxspec.logits(ours, [[5, 6, 7]]).shape == (1, 3, 64) and "made fp8 as they are read" in caplog.text


@pytest.mark.parametrize("kind,name", [(GPTQ, "quantize_config.json"), (AWQ, "quant_config.json")])
def test_older_checkpoints_say_in_another_file_how_they_are_packed(kind, name, tmp_path):
    packed, plain = packed_and_plain(kind, tmp_path, family="llama")
    older = {"w_bit": 4, "q_group_size": 16, "version": "GEMM", "zero_point": True}
    older = {"bits": 4, "group_size": 16, "desc_act": False, "sym": False} if kind == GPTQ else older
    edit(packed, quantization_config=None)
    (packed / name).write_text(json.dumps(older))
    ours, expected = (load_model(str(folder), progress=False).params for folder in (packed, plain))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def test_a_weight_may_lie_in_two_files(tmp_path):
    folder, plain = packed_and_plain(GPTQ, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        files["ab"[name.endswith(("scales", "g_idx"))] + ".safetensors"][name] = tensor
    for file, part in files.items():
        save_file(part, folder / file)
    where = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    ours, other = (load_model(str(each), progress=False) for each in (folder, plain))
    jax.tree.map(np.testing.assert_array_equal, ours.params, other.params)


def without(tensors, ending):
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


def changed(tensors, ending, change):
    return {name: change(tensor) if name.endswith(ending) else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("damage,says", [
    (lambda t: without(t, "q_proj.scales"), r"q_proj has qweight and no scales; download"),
    (lambda t: changed(t, "q_proj.scales", lambda s: s[:1]), r"q_proj: scales \[64, 1\] and zero points \[64, 2\]"),
    (lambda t: changed(t, "q_proj.scales", lambda s: s * np.inf), r"q_proj has scales that aren't finite"),
    (lambda t: changed(t, "q_proj.g_idx", lambda g: g + 1), r"q_proj: its inputs' groups \(g_idx\) don't fit"),
    (lambda t: changed(t, "q_proj.qweight", lambda w: w[:2]), r"misshapen model.*q_proj.weight: found \[64, 16\]"),
    (lambda t: changed(t, "q_proj.qzeros", lambda z: z[0]), r"q_proj.qzeros is I32 \[8\]; packed numbers are a matrix"),
    (lambda t: without(t, "q_proj.g_idx"), r"q_proj has qweight and no g_idx; download"),
    (lambda t: changed(t, "q_proj.qzeros", lambda z: z[:0]), r"q_proj.qzeros is I32 \[0, 8\]; packed numbers are a"),
    (lambda t: changed(t, "q_proj.scales", np.uint8), r"q_proj.scales is stored as U8; supported: F32, F16, BF16, I"),
    (lambda t: changed(t, "q_proj.scales", np.int32), r"q_proj.scales is I32 \[2, 64\]; scales are F32, F16, BF16"),
    (lambda t: changed(t, "q_proj.qweight", np.float32), r"q_proj.qweight is F32 \[4, 64\]; packed numbers are"),
    (lambda t: changed(t, "q_proj.scales", lambda s: s[0]), r"q_proj: scales \[64\] and zero points \[64, 2\]"),
    (lambda t: changed(t, "o_proj.bias", lambda b: b + 1), r"unexpected model.*o_proj.bias \[32\]"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(damage, says, tmp_path):
    folder, _ = packed_and_plain(GPTQ, tmp_path)
    save_file(damage(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        load_model(str(folder), progress=False)


def groups(*sizes, bits=4, activations=None):
    """compressed-tensors' groups of settings, of weights in groups of so many inputs."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group"}
    rows = activations and {"num_bits": activations}
    made = [{"weights": weights | {"group_size": size}, "input_activations": rows} for size in sizes or (16,)]
    return {"config_groups": dict(zip("ab", made, strict=False))}


def rotated(location):
    return {"transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": [{"location": location}]}}}}


FP8 = {"c": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}


@pytest.mark.parametrize("kind,keys,says", [
    (AWQ, {"version": "gemv"}, "awq in 4 bits, version 'gemv', not in 4 bits of version gemm"),
    (AWQ, {"version": None, "checkpoint_format": "gemv_fast"}, "version 'gemv_fast', not in 4 bits of version gemm"),
    (AWQ, {"group_size": 0}, "awq with group_size 0, not a number of inputs or -1"),
    (GPTQ, {"bits": 3}, "gptq in 3 bits, checkpoint_format 'gptq', not in 4 or 8 bits of gptq or gptq_v2"),
    (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin', not in"),
    (GPTQ, {"dynamic": {"+:.*down.*": {"bits": 8}}}, "settings of its own for .*down.* \\(dynamic\\)"),
    (COMPRESSED, groups(bits=3), "compressed-tensors pack-quantized, 3-bit int with strategy 'group' of 16 inputs"),
    (COMPRESSED, groups(16, 32), "4-bit int with strategy 'group' of 16 inputs beside 4-bit .* of 32 inputs"),
    (COMPRESSED, {"config_groups": groups(bits=8)["config_groups"] | FP8}, "8-bit int .* inputs beside 8-bit float"),
    (COMPRESSED, groups(activations=8) | {"format": "marlin-24"}, "marlin-24, 4-bit int .* and 8-bit activations"),
    (COMPRESSED, groups() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity 'sparse-24-bitmask'"),
    (COMPRESSED, rotated("input"), "compressed-tensors with transforms at input"),
    (COMPRESSED, {"transform_config": {"config_groups": ["R"]}}, "compressed-tensors with transforms at None"),
    (GPTQ, AUTO_ROUND | {"packing_format": "auto_round:exl2"}, "auto-round of 'int' packed as 'auto_round:exl2', "),
    (GPTQ, AUTO_ROUND | {"data_type": "mx_fp"}, "auto-round of 'mx_fp' packed as"),
    (GPTQ, AUTO_ROUND | {"extra_config": {"q_proj": {"bits": 8}}}, "settings of its own for 'q_proj' .extra_config"),
    (GPTQ, AUTO_ROUND | {"act_bits": 8}, "auto-round of 'int' packed as .*, act_bits 8, not"),
    (GPTQ, AUTO_ROUND | {"rotation_config": {"type": "hadamard"}}, "auto-round with rotation_config .*, which asks"),
    (GPTQ, {"rotation": "hadamard"}, "gptq with rotation 'hadamard', which asks for rotated rows"),
])  # fmt: skip
def test_other_layouts_are_refused_by_name(kind, keys, says, tmp_path):
    folder, _ = packed_and_plain(kind, tmp_path)
    edit(folder, quantization_config=CONFIGS[kind] | keys)
    with pytest.raises(CheckpointError, match=f"{says}.* not supported; use the model's FP8 or unquantised"):
        load_model(str(folder), progress=False)


@pytest.mark.parametrize("config,means", [
    (CONFIGS[AWQ] | {"zero_point": False}, Packed(AWQ, 4, 16)),  # they are stored all the same
    (AUTO_ROUND | {"bits": 4, "group_size": 32}, Packed(GPTQ, 4, 32, less=1)),
    (AUTO_ROUND | {"bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"}, Packed(AWQ, 4, 32)),
    (AUTO_ROUND | {"bits": 4, "group_size": 32, "packing_format": "auto_round:gptqmodel"}, Packed(GPTQ, 4, 32)),
    (AUTO_ROUND | {"bits": 4, "group_size": 32, "packing_format": "auto_round"}, Packed(GPTQ, 4, 32)),
    ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 32}, Packed(GPTQ, 4, 32, less=1)),
    (AUTO_ROUND | {"bits": 4, "group_size": 16, "data_type": "nv_fp", "act_bits": 4,
                   "packing_format": "auto_round:llm_compressor"}, Packed(NVFP4, 4, 16)),
    (CONFIGS[GPTQ] | {"dynamic": {"lm_head": {"bits": 4, "desc_act": True}}}, Packed(GPTQ, 4, 16, less=1)),
    (CONFIGS[GPTQ] | {"checkpoint_format": None, "format": "gptq_v2"}, Packed(GPTQ, 4, 16)),
    (CONFIGS[COMPRESSED] | rotated("weight_input"), Packed(COMPRESSED, 4, 16)),  # a rotation of weights is in them
    (CONFIGS[COMPRESSED] | {"config_groups": {"keys": {"targets": ["LlamaAttention"], "weights": None}}}, None),
    (CONFIGS[COMPRESSED] | groups(activations=8), Packed(COMPRESSED, 4, 16)),
    (CONFIGS[INT8] | groups(128, bits=4, activations=8), Packed(INT8, 8, 128)),
    (CONFIGS[COMPRESSED] | {"config_groups": {}}, None),  # an unquantised model with scales of keys and values
    ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, None),
])  # fmt: skip
def test_configs_of_other_tools_are_read(config, means, tmp_path):
    """Layouts are those that AutoRound, GPTQModel, llm-compressor and ModelOpt write."""
    hf = {"quantization_config": config}
    assert packed.read(hf, tmp_path) == means
    assert means is not None or quantization.read(hf, tmp_path) is None


def test_older_configs_call_it_compression_config(tmp_path):
    hf = {"compression_config": CONFIGS[COMPRESSED]}
    assert packed.read(hf, tmp_path) == packed.read({"text_config": hf}, tmp_path) == Packed(COMPRESSED, 4, 16)


def test_auto_round_names_modules_that_it_kept(tmp_path):
    config = AUTO_ROUND | {"bits": 4, "group_size": 32, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}
    assert packed.read({"quantization_config": config}, tmp_path).kept == ("lm_head",)


def test_scales_of_keys_and_values_alone_are_read(tmp_path):
    """A checkpoint of llm-compressor's whose weights aren't quantised."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama", num_hidden_layers=1), folder)
    tensors = load_file(folder / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{x}_scale": np.full(1, size, np.float32) for x, size in (("k", 2), ("v", 3))}
    save_file(tensors | scales, folder / "model.safetensors")
    edit(folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    model = load_model(str(folder), progress=False)
    assert model.quantization is None and model.kv_scales.tolist() == [[[2, 2], [3, 3]]]


def test_zero_points_of_newer_gptq_are_stored_as_they_are(tmp_path):
    config = CONFIGS[GPTQ] | {"checkpoint_format": "gptq_v2", "group_size": -1}
    assert packed.read({"quantization_config": config}, tmp_path) == Packed(GPTQ, 4, None)
    older = dataclasses.replace(TOOLS["gptq"], less=0)
    tensors = load_file(GOLDEN / "gptq.safetensors")
    expected, scales = tensors.pop("expected"), np.float32(tensors["m.scales"])
    weight = older.made("m", _parts(tensors), whole=True)["weight"]
    np.testing.assert_allclose(weight - expected, np.repeat(scales.T, 32, axis=1), rtol=1e-5)


@pytest.mark.parametrize("name,ones", [("gptq", 0x11111111), ("gptq-8", 0x01010101)])
def test_zero_points_of_0_borrow_from_their_neighbours_in_older_gptq(name, ones):
    """GPTQModel subtracts one from each zero point of a word at once."""
    tensors = _parts(load_file(GOLDEN / f"{name}.safetensors"))
    newer = np.random.default_rng(0).integers(0, 2**32, tensors["qzeros"].shape, np.uint32) & ~np.uint32(0xFF00FF)
    made = [
        dataclasses.replace(TOOLS[name], less=less).made("m", tensors | {"qzeros": words.view(np.int32)}, whole=True)
        for less, words in ((0, newer), (1, newer - np.uint32(ones)))
    ]
    np.testing.assert_array_equal(made[0]["weight"], made[1]["weight"])
