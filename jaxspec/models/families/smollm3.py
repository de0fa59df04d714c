"""SmolLM3: Llama's decoder, some of whose layers, by default every fourth, don't rotate queries and keys."""

from __future__ import annotations

import dataclasses

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer

__all__ = ["read", "tensors"]

# What transformers' SmolLM3Config has where a config.json is silent.
DEFAULTS = {
    "rope_theta": 2000000.0,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, bias=bias, out_bias=bias)
    still = dataclasses.replace(attention, rope=reading.unrotated(attention.rope))
    # The list has a 1 for layers that do rotate.
    rotates = reading.each_layer(hf, "no_rope_layers", lambda i: (i + 1) % positive(hf, "no_rope_layer_interval") > 0)
    layers = [
        Layer(attention if each else still, mlp, norm) for each, mlp in zip(rotates, reading.mlps(hf), strict=True)
    ]
    return reading.decoder(hf, layers, norm)
