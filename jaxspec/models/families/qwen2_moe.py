"""Qwen1.5 and Qwen2 with experts: Qwen2's attention, and mixtures with a gated shared expert for most MLPs."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder

__all__ = ["read", "tensors"]

# What transformers' Qwen2MoeConfig has where a config.json is silent.
DEFAULTS = {
    "qkv_bias": True,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "max_position_embeddings": 32768,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    norm, attention = reading.norm(hf), reading.attention(hf, bias=bool(hf["qkv_bias"]))
    window = positive(hf, "sliding_window") if hf.get("use_sliding_window") else None
    last = reading.layer_number(hf, "max_window_layers")
    windows = reading.windows(hf, window, lambda i: i % 2 == 0 and i < last)
    feeds = reading.mixtures({**hf, "mlp_bias": False}, renormalised=False)
    return reading.decoder(hf, reading.layers(attention, feeds, norm, windows), norm)
