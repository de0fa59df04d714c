"""Granite with experts and a shared one, which has no gate."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.description import Decoder
from jaxspec.models.families import granite, granitemoe
from jaxspec.models.families.granitemoe import tensors

__all__ = ["read", "tensors"]

# What transformers' GraniteMoeSharedConfig has where a config.json is silent.
DEFAULTS = {**granitemoe.DEFAULTS, "shared_intermediate_size": 0}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    shared = reading.layer_number(hf, "shared_intermediate_size")
    return granite.read(hf, [granitemoe.mixture(hf, shared)] * positive(hf, "num_hidden_layers"))
