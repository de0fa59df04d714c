"""Gemma 4 12B's text model: a dense Gemma 4 with larger windows."""

from jaxspec.models.families import gemma4
from jaxspec.models.families.gemma4 import read, tensors

__all__ = ["DEFAULTS", "read", "tensors"]

# What transformers' Gemma4UnifiedTextConfig has where a config.json is silent.
DEFAULTS = gemma4.DEFAULTS | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
