"""Qwen3 dense: Llama's decoder with an RMS norm over each query and key head, before the rotary embedding."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer, Mixture, Mlp

__all__ = ["read", "tensors"]


def read(hf: reading.Config, feeds: list[Mlp | Mixture] | None = None) -> Decoder:
    """`feeds`: what layers have for an MLP. **Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm = reading.norm(hf)
    bias = bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, qk_norm=norm, bias=bias, out_bias=bias)
    return reading.decoder(hf, [Layer(attention, feed, norm) for feed in feeds or reading.mlps(hf)], norm)
