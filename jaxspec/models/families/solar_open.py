"""Solar Open: Llama's attention, and GLM-4.5's mixtures in every layer."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer
from jaxspec.models.families import glm4_moe

__all__ = ["read", "tensors"]

# What transformers' SolarOpenConfig has where a config.json is silent.
DEFAULTS = {**glm4_moe.DEFAULTS, "rope_theta": 1e6, "head_dim": 128, "max_position_embeddings": 131072}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm = reading.norm(hf)
    attention = reading.attention(hf, rotated=1.0, bias=bool(hf.get("attention_bias", False)))
    layer = Layer(attention, glm4_moe.mixture(hf), norm)
    return reading.decoder(hf, [layer] * positive(hf, "num_hidden_layers"), norm)
