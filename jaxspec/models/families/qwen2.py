"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values. Some layers may see a window alone."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder

__all__ = ["read", "tensors"]

# What transformers' Qwen2Config has where a config.json is silent.
DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    norm, attention = reading.norm(hf), reading.attention(hf, bias=True)
    window = positive(hf, "sliding_window") if hf.get("use_sliding_window") else None
    first = reading.layer_number(hf, "max_window_layers")
    windows = reading.windows(hf, window, lambda i: i >= first)
    return reading.decoder(hf, reading.layers(attention, reading.mlps(hf), norm, windows), norm)
