"""Granite 3 and 4 dense: Llama's decoder with four multipliers, of embeddings, scores, residuals and logits."""

from __future__ import annotations

import dataclasses

from jaxspec.config.json_values import positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer, Mixture, Mlp

__all__ = ["read", "tensors"]


def read(hf: reading.Config, feeds: list[Mlp | Mixture] | None = None) -> Decoder:
    """`feeds`: what layers have for an MLP. **Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    scale = positive_float(hf, "attention_multiplier", 1.0)
    attention = reading.attention(hf, bias=bias, out_bias=bias, scale=scale)
    residual = positive_float(hf, "residual_multiplier", 1.0)
    layers = [Layer(attention, feed, norm, residual_scale=residual) for feed in feeds or reading.mlps(hf)]
    embed, logits = positive_float(hf, "embedding_multiplier", 1.0), positive_float(hf, "logits_scaling", 1.0)
    return dataclasses.replace(reading.decoder(hf, layers, norm), embed_scale=embed, logit_scale=1 / logits)
