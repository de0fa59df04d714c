"""Seed-OSS: Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer

__all__ = ["read", "tensors"]

# What transformers' SeedOssConfig has where a config.json is silent.
DEFAULTS = {"attention_bias": True, "attention_out_bias": False, "head_dim": 128, "num_key_value_heads": 8}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm, biases = reading.norm(hf), {"bias": "attention_bias", "out_bias": "attention_out_bias"}
    attention = reading.attention(hf, **{field: bool(hf[key]) for field, key in biases.items()})
    return reading.decoder(hf, [Layer(attention, mlp, norm) for mlp in reading.mlps(hf)], norm)
