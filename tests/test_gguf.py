"""Models in a single GGUF file: they equal the safetensors that they were made from, or an error says what differs."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint import CheckpointError, resolve
from jaxspec.config import ModelConfig
from jaxspec.decoder.functions import rope_frequencies
from jaxspec.decoder.spec import Norm
from tests.test_checkpoint import assert_same, load
from tests.tiny import random_tensors, tiny_checkpoint, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_gguf(path: Path, hf: dict, tensors: dict[str, np.ndarray], quant=None, rope_freqs=None, **metadata) -> None:
    """As llama.cpp's converter does: its names, and for llama the rows of q and k interleaved."""
    family, heads = hf["model_type"], {"q": hf["num_attention_heads"], "k": hf["num_key_value_heads"]}
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_eos_token_id(5)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 6)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", ".").replace("ARCH", family), value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, tensor in tensors.items():
        stem, kind = name.rsplit(".", 1)
        layer, part = stem.split(".", 3)[2:] if stem.startswith("model.layers.") else (None, stem)
        if family == "llama" and (which := part[-6:-5]) in heads and part.endswith("_proj") and "attn" in part:
            tensor = tensor.reshape(heads[which], 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        prefix = f"blk.{layer}." if layer else ""
        raw = quant if quant is not None and tensor.ndim > 1 else None
        data = tensor if raw is None else gguf.quantize(tensor, raw)
        writer.add_tensor(prefix + names.get(part, part) + "." + kind, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_gguf_equals_safetensors(tmp_path, family, options):
    source = tiny_checkpoint(family, **options)
    hf = json.loads((source / "config.json").read_text())
    write_gguf(tmp_path / "m.gguf", hf, load_file(source / "model.safetensors"))
    model, expected = load(tmp_path / "m.gguf"), load(source)
    assert_same(model.params, expected.params)
    decoder, norm = model.config.decoder, model.config.decoder.norm
    assert norm.eps == pytest.approx(1e-6)  # stored as float32
    assert repr(decoder).replace(repr(norm), repr(Norm(1e-6))) == repr(expected.config.decoder)
    differ = {"eos_token_ids": (5, 6), "decoder": decoder}
    assert {**vars(expected.config), **differ} == vars(model.config)
    assert_same(load(tmp_path).params, expected.params)  # a folder with this one file
    assert model.tokenizer is None


@pytest.mark.parametrize("quant, tolerance", [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_1", 0.4)])
def test_gguf_weights_are_dequantised(tmp_path, quant, tolerance):
    source = tiny_checkpoint("llama")
    hf = json.loads((source / "config.json").read_text())
    write_gguf(tmp_path / "m.gguf", hf, load_file(source / "model.safetensors"), gguf.GGMLQuantizationType[quant])
    assert_same(load(tmp_path / "m.gguf").params, load(source).params, tolerance)


def rope_divisors(theta: float, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.2: one divisor for each rotary frequency, by its wavelength."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        divisors.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(divisors, np.float32)


def test_gguf_rope_factors_become_llama3_scaling(tmp_path):
    hf = tiny_config("llama", rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=64)
    tensors, divisors = random_tensors(hf, 0), rope_divisors(5e5, 64)
    write_gguf(tmp_path / "m.gguf", hf, tensors, rope_freqs=divisors)
    expected, found = ModelConfig.from_hf(hf), resolve(str(tmp_path / "m.gguf")).config
    assert found.decoder.attention.rope == expected.decoder.attention.rope
    np.testing.assert_allclose(*(rope_frequencies(each.decoder.attention) for each in (found, expected)))
    write_gguf(tmp_path / "odd.gguf", hf, tensors, rope_freqs=divisors[::-1].copy())
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs.weight scales .* isn't Llama 3's"):
        load(tmp_path / "odd.gguf")


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"split__count": 3}, "one of 3 parts"),
        ({"ARCH__expert_count": 8}, "mixture of 8 experts"),
        ({"ARCH__rope__scaling__type": "yarn"}, "llama.rope.scaling.type 'yarn'"),
        ({"ARCH__rope__dimension_count": 8}, "rope.dimension_count must be the head width 16, got 8"),
    ],
)
def test_gguf_variants_that_are_not_supported(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", tiny_config("llama"), {}, **metadata)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")


def test_damaged_gguf_files(tmp_path):
    file = tmp_path / "m.gguf"
    hf = tiny_config("llama")
    write_gguf(file, hf, random_tensors(hf, 0))
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


def test_several_gguf_files_need_a_choice(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        load(tmp_path)
