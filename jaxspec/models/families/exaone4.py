"""EXAONE 4: a sub-layer's output is normed and its input isn't.

Where some layers see a window, the others don't rotate. Queries and keys are normed by head, before they are rotated.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder, Layer
from jaxspec.models.families.olmo2 import NORMS

__all__ = ["read", "tensors"]

# What transformers' Exaone4Config has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    every = _period(hf) if window else 1
    windows = reading.windows(hf, window, lambda i: bool((i + 1) % every))
    norm = reading.norm(hf)
    attention = reading.attention(hf, qk_norm=norm)
    still = reading.unrotated(attention.rope) if window else attention.rope
    kinds = {
        None: dataclasses.replace(attention, rope=still),
        window: dataclasses.replace(attention, window=window),
    }
    layers = [
        Layer(kinds[each], mlp, norm, pre_norm=False, post_norm=True)
        for each, mlp in zip(windows, reading.mlps({**hf, "mlp_bias": False}), strict=True)
    ]
    return reading.decoder(hf, layers, norm)


def _period(hf: reading.Config) -> int:
    """Every how many layers one sees all of the text: a number, or letters ("LLLG": three local ones, a global one)."""
    pattern = hf["sliding_window_pattern"]
    return len(pattern) if isinstance(pattern, str) and pattern else positive(hf, "sliding_window_pattern")


tensors = partial(decoder_tensors, norms=NORMS)
