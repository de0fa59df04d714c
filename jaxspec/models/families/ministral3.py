"""Ministral 3 and Devstral Small 2: Mistral's decoder, whose queries are scaled by their position in long texts."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.rope import position_scale

__all__ = ["read", "tensors"]

ROPE = {  # but for the length of the original context and its factor
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# What transformers' Ministral3Config has where a config.json is silent.
DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        **ROPE,
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
    },
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    norm, attention = reading.norm(hf), reading.attention(hf, position_scale=position_scale(hf))
    window = None if hf.get("sliding_window") is None else positive(hf, "sliding_window")
    mlps = reading.mlps({**hf, "mlp_bias": False})
    return reading.decoder(hf, reading.layers(attention, mlps, norm, [window] * len(mlps)), norm)
