"""OLMo 3: OLMo 2's decoder, whose layers but every fourth see a window. A rope's scaling is of those that see all."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.description import Decoder
from jaxspec.models.families import olmo2
from jaxspec.models.families.olmo2 import tensors

__all__ = ["read", "tensors"]

# What transformers' Olmo3Config has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    thetas = dict.fromkeys(("full_attention", "sliding_attention"), ("rope_theta", DEFAULTS["rope_theta"]))
    return olmo2.read(hf, reading.windows(hf, window, lambda i: bool((i + 1) % 4)), thetas)
