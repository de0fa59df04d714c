"""Arcee (AFM-4.5B): Llama's decoder, whose MLPs have no gate, and square ReLU."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer, Mlp

__all__ = ["read", "tensors"]

# What transformers' ArceeConfig has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "max_position_embeddings": 4096}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    reading.only(hf, {"hidden_act": "relu2"})
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, bias=bias, out_bias=bias)
    mlp = Mlp(positive(hf, "intermediate_size"), bool(hf.get("mlp_bias", False)), "relu2", gated=False)
    return reading.decoder(hf, [Layer(attention, mlp, norm)] * positive(hf, "num_hidden_layers"), norm)
