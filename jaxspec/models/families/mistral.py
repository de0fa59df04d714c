"""Mistral: Llama's decoder, whose layers see a window of the text if `sliding_window` isn't null."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder

__all__ = ["read", "tensors"]

# What transformers' MistralConfig has where a config.json is silent.
DEFAULTS = {"sliding_window": 4096}


def read(hf: reading.Config) -> Decoder:
    """Layers that `layer_types` calls full see all. **Raises:** `ConfigError` naming the key."""
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, bias=bias, out_bias=bias)
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    windows = reading.windows(hf, window, lambda i: True)
    return reading.decoder(hf, reading.layers(attention, reading.mlps(hf), norm, windows), norm)
