"""Models in a single GGUF file: they equal the safetensors that they were made from, or an error says what differs."""

import dataclasses
import json
import re
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint import CheckpointError, outlined, resolve
from jaxspec.checkpoint.gguf import packing
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.decoder.functions import rope_frequencies
from jaxspec.engine import functional
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope_scaling import LinearScaling, Rope
from jaxspec.models.weights import Int4
from tests.checkpoint.test_checkpoint import assert_same, load
from tests.support.sample import rare
from tests.support.tiny import GEMMA4_ALL, random_tensors, tiny_checkpoint, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
# What a Gemma 3 in GGUF has, whether its metadata says so or not.
GEMMA3 = {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "rope_local_base_freq": 1e4}


def write_gguf(path: Path, hf: dict, tensors: dict[str, np.ndarray], quant=None, rope_freqs=None, **metadata) -> None:
    """Write a file as llama.cpp's converter does: names by the gguf package's table; for Llama and Mistral, which it
    calls "llama", the rows of q and k interleaved; 1 added to Gemma's norms."""
    renamed = {"mistral": "llama", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2"}
    renamed |= {"gpt_oss": "gpt-oss", "mixtral": "llama"}
    family = renamed.get(hf["model_type"], hf["model_type"])
    heads = {"q": hf["num_attention_heads"], "k": hf["num_key_value_heads"]}
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, hf["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(hf["vocab_size"])
    modules = hf.get("num_nextn_predict_layers", 0)
    writer.add_block_count(hf["num_hidden_layers"] + modules)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    if family == "gemma3" and "sliding_window" in hf:
        writer.add_sliding_window(hf["sliding_window"])
    if family in ("glm4", "glm4moe", "minimax-m2"):
        writer.add_rope_dimension_count(hf["head_dim"] // 2)
    if family == "gpt-oss":
        writer.add_sliding_window(hf["sliding_window"])
        tensors = parted(tensors)
    if family in ("gpt-oss", "qwen3moe", "glm4moe", "minimax-m2") or hf["model_type"] == "mixtral":
        counts = [hf.get(key) for key in ("n_routed_experts", "num_local_experts", "num_experts")]
        writer.add_expert_count(next(filter(None, counts)))
        writer.add_expert_used_count(hf["num_experts_per_tok"])
        if family != "llama":
            writer.add_expert_feed_forward_length(hf.get("moe_intermediate_size", hf["intermediate_size"]))
    if family == "glm4moe":
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_weights_scale(hf["routed_scaling_factor"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_nextn_predict_layers(modules)
        for name in ("nextn.eh_proj.weight", "ffn_gate_exps.weight") if modules else ():
            writer.add_tensor(f"blk.{hf['num_hidden_layers']}.{name}", np.zeros((2, 4, 8), np.float32))
    tensors = stacked(tensors)
    if scaling := hf.get("rope_scaling"):
        if scaling["rope_type"] != "llama3":
            writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
            writer.add_rope_scaling_factor(scaling["factor"])
        if scaling["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        adds = {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }
        for key in adds.keys() & scaling.keys():
            adds[key](scaling[key])
    writer.add_eos_token_id(5)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 6)
    for key, value in metadata.items():
        adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        adds[type(value)](key.replace("__", ".").replace("ARCH", family), value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, tensor in tensors.items():
        if family == "llama" and (match := re.search(r"self_attn\.([qk])_proj", name)):
            tensor = tensor.reshape(heads[match[1]], 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if family == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        raw = quant if quant is not None and tensor.ndim > 1 else None
        data = tensor if raw is None else gguf.quantize(tensor, raw)
        if name.endswith("e_score_correction_bias"):
            named = names.get_name(name.removesuffix("_bias")) + ".bias"
        else:
            named = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(named, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA4_NAMES = {  # that the gguf package doesn't map
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def write_gemma4(path: Path, hf: dict, tensors: dict[str, np.ndarray], **changes) -> None:
    """Write a file as llama.cpp's converter does: what differs by layer in lists, divisors of 1e30 for pairs that don't
    rotate, and experts' gate and up in one tensor."""
    layers, kinds = hf["num_hidden_layers"], hf["layer_types"]
    wide, kv = hf["global_head_dim"], {"sliding_attention": hf["num_key_value_heads"]}
    kv["full_attention"] = hf["num_global_key_value_heads"] if hf["attention_k_eq_v"] else hf["num_key_value_heads"]
    doubled = layers - hf.get("num_kv_shared_layers", 0) if hf.get("use_double_wide_mlp") else layers
    writer = gguf.GGUFWriter(path, "gemma4")
    metadata = {
        "block_count": layers,
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": [hf["intermediate_size"] * (1 + (i >= doubled)) for i in range(layers)],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": [kv[kind] for kind in kinds],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.sliding_window": hf["sliding_window"],
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": hf["head_dim"],
        "rope.dimension_count": wide,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "final_logit_softcapping": hf["final_logit_softcapping"],
        "attention.shared_kv_layers": hf.get("num_kv_shared_layers", 0),
        "embedding_length_per_layer_input": hf["hidden_size_per_layer_input"],
        **({"expert_count": hf["num_experts"], "expert_used_count": hf["top_k_experts"],
            "expert_feed_forward_length": hf["moe_intermediate_size"]} if hf.get("enable_moe_block") else {}),
        **changes,
    }  # fmt: skip
    adds = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    for key, value in metadata.items():
        adds[type(value)](f"gemma4.{key}", value)
    writer.add_tensor("rope_freqs.weight", np.where(np.arange(wide // 2) < wide // 8, 1, 1e30).astype(np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    tensors = stacked(tensors)
    for name in [name for name in tensors if name.endswith("experts.gate_proj.weight")]:
        up = tensors.pop(name.replace("gate_proj", "up_proj"))
        tensors[name.replace("gate_proj.weight", "gate_up_proj")] = np.concatenate([tensors.pop(name), up], axis=1)
    for name, tensor in tensors.items():
        leaf = name.rpartition("layers.")[2]
        own = next((own for theirs, own in GEMMA4_NAMES.items() if name.endswith(theirs)), None)
        named = f"blk.{leaf.split('.')[0]}.{own}" if own else names.get_name(name.removesuffix(".weight")) + ".weight"
        writer.add_tensor(named, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("options", [
    {"layer_types": KINDS, "tie_word_embeddings": True},  # as the 31B
    GEMMA4_ALL | {"tie_word_embeddings": True, "vocab_size_per_layer_input": 64},
])  # fmt: skip
def test_gemma_4_in_gguf_equals_safetensors(tmp_path, options):
    source = tiny_checkpoint("gemma4", **options)
    hf, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    write_gemma4(tmp_path / "m.gguf", hf, tensors)
    model, expected = load(tmp_path / "m.gguf"), load(source)
    assert_same(model.params, expected.params, 0)
    eps = [repr(each.norm.eps) for each in (model.config.decoder, expected.config.decoder)]
    assert repr(model.config.decoder).replace(*eps) == repr(expected.config.decoder)


@pytest.mark.parametrize("changes, words", [
    ({"attention.head_count_kv": [2, 1, 1, 1]}, "layers differ in a way that Gemma 4's don't"),
    ({"attention.head_count_kv": [2, 1]}, "head_count_kv must have a value for each of 4 layers"),
    ({"feed_forward_length": [64, 128, 64, 64]}, "feed_forward_length .*64, 128"),
    ({"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}, "must have 32 numbers"),
])  # fmt: skip
def test_gemma_4_in_gguf_that_is_refused(tmp_path, changes, words):
    hf = tiny_config("gemma4", **GEMMA4_ALL)
    write_gemma4(tmp_path / "m.gguf", hf, {}, **changes)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "m.gguf")


def parted(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss' tensors with experts' gate and up apart, and outputs before inputs."""
    out = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".experts.")
        if not stem:
            out[name + ".weight" if name.endswith("sinks") else name] = tensor
            continue
        kind, tensor = (".bias" if leaf.endswith("bias") else ".weight"), np.moveaxis(tensor, -1, 1)
        halves = {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]}
        parts = halves if leaf.startswith("gate_up") else {"down_proj": tensor}
        out |= {f"{stem}.experts.{part}{kind}": np.ascontiguousarray(each) for part, each in parts.items()}
    return out


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with those of all experts in one."""
    out: dict = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.\d+(\..+)", name):
            out.setdefault(match[1] + match[2], []).append(tensor)
        else:
            out[name] = tensor
    return {name: np.stack(each) if isinstance(each, list) else each for name, each in out.items()}


@pytest.mark.parametrize("family, options", [
    ("qwen3_moe", {}),
    ("glm4_moe", {"num_hidden_layers": 3, "attention_bias": True, "num_nextn_predict_layers": 1}),
    ("glm4_moe", {"use_qk_norm": True, "tie_word_embeddings": True}),
    ("minimax_m2", {}),
    ("mixtral", {}),
    ("gpt_oss", {"rope_scaling": YARN}),
    ("gpt_oss", {"rope_parameters": {}, "attention_bias": False, "tie_word_embeddings": True}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 24.0, "beta_slow": 2.0}}),
    ("mistral", {"rope_scaling": LINEAR, "sliding_window": None}),
    ("mistral", {"tie_word_embeddings": True, "sliding_window": None}),
    ("qwen2", {"rope_scaling": YARN}),
    ("qwen2", {"tie_word_embeddings": True, "rope_scaling": LINEAR}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "rope_scaling": LINEAR}),
    ("qwen3", {"rope_scaling": YARN | {"beta_fast": 24.0}}),
    ("gemma3", {"tie_word_embeddings": True, "num_hidden_layers": 7}),
    ("gemma3", {"tie_word_embeddings": False, "num_hidden_layers": 6, "rope_scaling": LINEAR}),
    ("glm4", {}),
    ("glm4", {"attention_bias": False, "tie_word_embeddings": True, "rope_scaling": YARN}),
])  # fmt: skip
def test_gguf_equals_safetensors(tmp_path, family, options):
    source = tiny_checkpoint(family, **(GEMMA3 if family == "gemma3" else {}) | options)
    hf = json.loads((source / "config.json").read_text())
    write_gguf(tmp_path / "m.gguf", hf, load_file(source / "model.safetensors"))
    model, expected = load(tmp_path / "m.gguf"), load(source)
    rounding = 2e-7 if family == "gemma3" else 0  # of 1 added to norms and taken away
    assert_same(model.params, expected.params, rounding)
    decoder, norm = model.config.decoder, model.config.decoder.norm
    assert norm.eps == pytest.approx(1e-6)  # stored as float32
    assert repr(decoder).replace(repr(norm), repr(dataclasses.replace(norm, eps=1e-6))) == repr(expected.config.decoder)
    differ = {"eos_token_ids": (5, 6), "decoder": decoder, "mtp_layers": 0}  # modules aren't read
    if family == "mistral":  # whose name isn't in the file
        differ["model_type"] = "llama"
    assert {**vars(expected.config), **differ} == vars(model.config)
    assert_same(load(tmp_path).params, expected.params, rounding)  # a folder with this one file
    assert model.tokenizer is None


@pytest.mark.parametrize("family, quant, tolerance", [
    ("llama", "F16", 2e-3), ("llama", "BF16", 2e-2), ("llama", "Q8_0", 2e-2), ("llama", "Q4_1", 0.4),
    ("qwen3_moe", "Q8_0", 2e-2),  # of whose tensors an expert has a part
])  # fmt: skip
def test_gguf_weights_are_dequantised(tmp_path, family, quant, tolerance):
    source = tiny_checkpoint(family, **({"moe_intermediate_size": 32} if family != "llama" else {}))
    hf = json.loads((source / "config.json").read_text())
    write_gguf(tmp_path / "m.gguf", hf, load_file(source / "model.safetensors"), gguf.GGMLQuantizationType[quant])
    assert_same(load(tmp_path / "m.gguf").params, load(source).params, tolerance)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize("quant, error", [rare("Q4_0", 0), ("Q4_1", 2**-20)])
def test_weights_of_four_bits_stay_packed_on_a_gpu(tmp_path, monkeypatch, caplog, quant, error):
    """Compare with what the gguf package makes. Weights of other widths, or quantised on load, are dequantised."""
    hf, tensors = tiny(**WIDE, num_attention_heads=4, num_key_value_heads=2)
    write_gguf(tmp_path / "m.gguf", hf, tensors, gguf.GGMLQuantizationType[quant])
    expected = load(tmp_path / "m.gguf").params
    monkeypatch.setattr(packing, "kernels_here", lambda: True)
    with caplog.at_level("INFO"):
        model = load(tmp_path / "m.gguf")
    assert "weights of 4 bits (gguf) stay packed" in caplog.text
    (layer,), (whole,) = model.params["layers"], expected["layers"]
    for name in ("qkv", "out", "gate_up", "down"):
        assert layer[name].format == Int4(32, zeros=quant == "Q4_1")
        got, numbers = (np.asarray(each[name].dequantised("float32")) for each in (layer, whole))
        np.testing.assert_allclose(got, numbers, rtol=0, atol=error * np.abs(numbers).max())
    assert_same(model.params["head"], expected["head"])
    assert load(tmp_path / "m.gguf", quantization="int4").params["layers"][0]["qkv"].format == Int4(128)
    assert not load(tmp_path / "m.gguf", deterministic=True).params["layers"][0]["qkv"].quantised
    shapes = outlined(EngineConfig(model=str(tmp_path / "m.gguf"), load_format="dummy"))
    assert shapes.params["layers"][0]["down"].format == Int4(32)
    write_gguf(tmp_path / "m.gguf", *tiny(hidden_size=128), gguf.GGMLQuantizationType[quant])
    with caplog.at_level("INFO"):
        assert not load(tmp_path / "m.gguf").params["layers"][0]["down"].quantised
    assert "not multiples of 256 and 64" in caplog.text


@pytest.mark.parametrize("quant", ["Q4_1", "Q4_K"])
def test_packed_groups_stand_for_the_same_weights(quant):
    """Groups have any scale, or none: one may be constant, or next to it."""
    kind, rng = gguf.GGMLQuantizationType[quant], np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (64, size), np.uint8)
    raw[:, :4] = np.exp(rng.uniform(-9, -2, (64, 2))).astype(np.float16).view(np.uint8)
    raw[:3, :2] = np.array([[0], [1e-7], [6e-5]], np.float16).view(np.uint8)
    raw[3, :4] = 0
    made, expected = packing.unpacked(raw.reshape(8, -1), kind), gguf.dequantize(raw.reshape(8, -1), kind)
    values, scales = Int4(32, zeros=True).placed(*(jnp.asarray(made[part]) for part in ("weight", "weight_scale")))
    got, groups = np.asarray(Int4(32, zeros=True).dequantise(values, scales)), expected.reshape(-1, 32)
    assert (np.abs(got.reshape(-1, 32) - groups) <= 2**-11 * np.abs(groups).max(1, keepdims=True)).all()


@pytest.mark.exhaustive  # its weights are compared above
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1"])
def test_logits_of_packed_weights(tmp_path, monkeypatch, quant):
    hf, tensors = tiny(**WIDE, num_attention_heads=4, num_key_value_heads=2)
    write_gguf(tmp_path / "m.gguf", hf, tensors, gguf.GGMLQuantizationType[quant])
    expected = functional.logits(load(tmp_path / "m.gguf"), [list(range(1, 40))])
    monkeypatch.setattr(packing, "kernels_here", lambda: True)
    got = functional.logits(load(tmp_path / "m.gguf"), [list(range(1, 40))])
    np.testing.assert_allclose(got, expected, atol=1e-3)


def tiny(**options) -> tuple[dict, dict[str, np.ndarray]]:
    """Config and tensors of a Llama."""
    hf = tiny_config("llama", **options)
    return hf, random_tensors(hf, 0)


def rope_divisors(theta: float, head_dim: int) -> np.ndarray:
    """Divisors that llama.cpp's converter writes for Llama 3.2: one for each rotary frequency, by its wavelength."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        divisors.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(divisors, np.float32)


def test_gguf_rope_factors_become_llama3_scaling(tmp_path):
    hf, tensors = tiny(rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=64)
    divisors = rope_divisors(5e5, 64)
    write_gguf(tmp_path / "m.gguf", hf, tensors, rope_freqs=divisors)
    expected, found = ModelConfig.from_hf(hf), resolve(str(tmp_path / "m.gguf")).config
    assert found.decoder.attention.rope == expected.decoder.attention.rope
    np.testing.assert_allclose(*(rope_frequencies(each.decoder.attention) for each in (found, expected)))
    write_gguf(tmp_path / "odd.gguf", hf, tensors, rope_freqs=divisors[::-1].copy())
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs.weight scales .* isn't Llama 3's"):
        load(tmp_path / "odd.gguf")


@pytest.mark.parametrize("metadata, layers, window", [
    ({}, "sssssfs", 20),
    ({"ARCH__attention__sliding_window_pattern": 3}, "ssfssfs", 20),
    ({"ARCH__attention__sliding_window_pattern": [True, True, False, True, False, False, True]}, "ssfsffs", 20),
    ({}, "fffffff", None),
])  # fmt: skip
def test_gguf_says_which_layers_of_gemma_3_have_a_window(tmp_path, metadata, layers, window):
    hf = tiny_config("gemma3", **GEMMA3, num_hidden_layers=7)
    hf.pop("sliding_window") if window is None else None
    write_gguf(tmp_path / "m.gguf", hf, {}, ARCH__rope__freq_base_swa=500.0, **metadata)
    found = [layer.mixing for layer in resolve(str(tmp_path / "m.gguf")).config.decoder.layers]
    assert "".join("fs"[mixing.window is not None] for mixing in found) == layers
    assert {(mixing.window, mixing.rope.theta) for mixing in found} <= {(window, 500.0), (None, 1e4)}


@pytest.mark.parametrize("layers, scale", [(48, None), (62, 8**-0.5)])
def test_gguf_of_gemma_3_27b_scales_queries_by_its_width(tmp_path, layers, scale):
    """Which no metadata says: llama.cpp knows the 27B by its 62 layers."""
    write_gguf(tmp_path / "m.gguf", tiny_config("gemma3", **GEMMA3, num_hidden_layers=layers), {})
    decoder = resolve(str(tmp_path / "m.gguf")).config.decoder
    assert {layer.mixing.scale for layer in decoder.layers} == {scale}


@pytest.mark.parametrize("family, metadata, message", [
    ("gemma3", {"ARCH__final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    ("glm4", {"ARCH__rope__dimension_sections": [4, 4, 0, 0]}, "rotary positions in sections"),
    ("qwen3", {"ARCH__expert_count": 8}, "qwen3 with 8 experts is not supported; .* are: gemma4, gpt-oss, qwen3moe"),
    ("glm4", {"ARCH__nextn_predict_layers": 1}, "1 layers that predict further tokens"),
])  # fmt: skip
def test_gguf_variants_of_newer_families_that_are_not_supported(tmp_path, family, metadata, message):
    write_gguf(tmp_path / "m.gguf", tiny_config(family), {}, **metadata)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("metadata, message", [
    ({"split__count": 3}, "one of 3 parts"),
    ({"ARCH__expert_count": 8}, "the metadata lacks llama.expert_used_count"),  # which makes it a Mixtral
    ({"ARCH__rope__scaling__yarn_log_multiplier": 0.1}, r"scaling.yarn_log_multiplier 0.1\d* is not supported"),
    ({"ARCH__rope__scaling__yarn_ext_factor": 0.5}, "scaling.yarn_ext_factor 0.5 is not supported; supported: 1"),
    ({"ARCH__rope__scaling__attn_factor": 2.0}, "scaling.attn_factor 2.0 is not supported"),
    ({"ARCH__rope__dimension_count": 8}, "rope.dimension_count must be the head width 16, got 8"),
])  # fmt: skip
def test_gguf_variants_that_are_not_supported(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", tiny_config("llama"), {}, **metadata)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("keys, rope", [
    ({"scale_linear": 4.0}, Rope(1e4, LinearScaling(4.0))),  # as old files have it
    ({"scaling__factor": 4.0}, Rope(1e4, LinearScaling(4.0))),  # llama.cpp's default is linear
    ({"scaling__type": "none", "scaling__factor": 4.0}, Rope(1e4)),
    ({"scaling__factor": 0.0}, Rope(1e4)),  # nothing, says llama.cpp
])  # fmt: skip
def test_gguf_rope_scaling_is_read_as_llama_cpp_reads_it(tmp_path, keys, rope):
    write_gguf(tmp_path / "m.gguf", *tiny(), **{f"ARCH__rope__{key}": value for key, value in keys.items()})
    assert resolve(str(tmp_path / "m.gguf")).config.decoder.attention.rope == rope


def test_gguf_rope_scaling_that_is_not_supported(tmp_path):
    write_gguf(tmp_path / "m.gguf", *tiny(), ARCH__rope__scaling__type="longrope")
    with pytest.raises(ConfigError, match="rope_scaling of type longrope lacks short_factor, long_factor"):
        load(tmp_path / "m.gguf")
    twice = tiny(rope_scaling=LINEAR)
    write_gguf(tmp_path / "m.gguf", *twice, rope_freqs=rope_divisors(1e4, 16))
    with pytest.raises(
        CheckpointError, match=r"scales rotary positions twice: by llama\.rope\.scaling and by the tens"
    ):
        load(tmp_path / "m.gguf")


def test_damaged_gguf_files(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file, *tiny())
    whole = file.read_bytes()
    for size in (*range(24, 1500, 97), len(whole) - 200):  # in the header and in the last tensor
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is truncated"):
            load(file)
    for content, message in ((b"", "it has 0 bytes"), (b"<html>" * 9, "not a GGUF file: it begins with b'<htm'")):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            load(file)
    file.write_bytes(whole.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba"))
    with pytest.raises(
        CheckpointError, match="architecture 'mamba' is not supported in GGUF files; supported: llama, "
    ):
        load(file)


def test_an_end_token_beyond_the_vocabulary_is_told(tmp_path, caplog):
    write_gguf(tmp_path / "m.gguf", *tiny(), tokenizer__ggml__eom_token_id=200_000)
    assert load(tmp_path / "m.gguf").eos_ids == (5, 6)
    assert "m.gguf: its end token 200000 is beyond the vocabulary of 64 tokens, and is left out" in caplog.text


def test_several_gguf_files_need_a_choice(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        load(tmp_path)
