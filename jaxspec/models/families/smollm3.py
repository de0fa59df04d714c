"""SmolLM3: Llama's decoder, some of whose layers, by default every fourth, don't rotate queries and keys."""

from __future__ import annotations

import dataclasses

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
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
    layers = [
        Layer(attention if rotates else still, mlp, norm)
        for rotates, mlp in zip(_rotating(hf), reading.mlps(hf), strict=True)
    ]
    return reading.decoder(hf, layers, norm)


def _rotating(hf: reading.Config) -> list[bool]:
    """Whether each layer rotates; `no_rope_layers` has a 1 for those that do."""
    count, named = positive(hf, "num_hidden_layers"), hf.get("no_rope_layers")
    if named is None:
        every = positive(hf, "no_rope_layer_interval")
        return [bool((i + 1) % every) for i in range(count)]
    if not isinstance(named, list | tuple) or len(named) != count or any(each not in (0, 1) for each in named):
        raise ConfigError(f"config.json: no_rope_layers must have {count} numbers, each 0 or 1; got {shown(named)}")
    return [bool(each) for each in named]
