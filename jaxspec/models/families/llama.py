"""The Llama family: pre-norm layers, grouped-query attention with rotary positions, a SiLU-gated MLP."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer

__all__ = ["read", "tensors"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm = reading.norm(hf)
    bias = bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, bias=bias, out_bias=bias)
    return reading.decoder(hf, [Layer(attention, mlp, norm) for mlp in reading.mlps(hf)], norm)
