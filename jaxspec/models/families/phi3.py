"""Phi-3 and Phi-4: Llama's decoder, whose checkpoints have q, k and v as one tensor, and gate and up as another."""

from __future__ import annotations

from typing import Any

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder
from jaxspec.models.weights import by_outputs, linear, run_length

__all__ = ["read", "tensors"]

# What transformers' Phi3Config has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    norm, attention = reading.norm(hf), reading.attention(hf, rotated=1.0)
    window = None if hf.get("sliding_window") is None else positive(hf, "sliding_window")
    windows = [window] * positive(hf, "num_hidden_layers")
    return reading.decoder(hf, reading.layers(attention, reading.mlps({**hf, "mlp_bias": False}), norm, windows), norm)


def tensors(decoder: Decoder) -> dict[str, Any]:
    tree, a, d = decoder_tensors(decoder), decoder.attention, decoder.width
    heads = (a.heads, a.head_dim), (a.kv_heads, a.head_dim), (a.kv_heads, a.head_dim)
    for i, (layer, arrays) in enumerate(zip(decoder.layers, tree["layers"], strict=True)):
        prefix, width = f"model.layers.{i}.", layer.feed.width
        qkv = {f"{prefix}self_attn.qkv_proj.weight": sum(count * size for count, size in heads)}
        gate_up = {f"{prefix}mlp.gate_up_proj.weight": 2 * width}
        arrays["qkv"] = linear(d, qkv, split=by_outputs(heads))
        arrays["gate_up"] = linear(d, gate_up, run_length(width), split=by_outputs(((width, 1), (width, 1))))
    return tree
