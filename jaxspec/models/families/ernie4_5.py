"""ERNIE 4.5 dense: Llama's decoder, whose neighbouring columns rotate in pairs."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer

__all__ = ["read", "tensors"]

# What transformers' Ernie4_5Config has where a config.json is silent.
DEFAULTS = {
    "rope_theta": 500000.0,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm, bias = reading.norm(hf), bool(hf["use_bias"])
    attention = reading.attention(hf, interleaved=True, bias=bias, out_bias=bias)
    mlps = reading.mlps({**hf, "mlp_bias": bias})
    return reading.decoder(hf, [Layer(attention, mlp, norm) for mlp in mlps], norm)
