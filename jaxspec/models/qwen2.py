"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from jaxspec.decoder.spec import Decoder, Layer
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors

__all__ = ["read", "tensors"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm, attention = reading.norm(hf), reading.attention(hf, bias=True)
    return reading.decoder(hf, [Layer(attention, mlp, norm) for mlp in reading.mlps(hf)], norm)
