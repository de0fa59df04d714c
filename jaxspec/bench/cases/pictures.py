"""A vision tower's attention, and all of the tower, with Qwen3.5-35B-A3B's sizes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import Case
from jaxspec.pallas.attention.picture_attention import picture_attention, reference


def attention(side: int, patch: int, heads: int, h: int, layers: int, dtype: str) -> Case:
    """One picture of `side` x `side` pixels."""
    p = (side // patch) ** 2
    begin, end = np.zeros(p, np.int32), np.full(p, p, np.int32)

    def build(key):
        return (), jax.random.normal(key, (layers, 3, p, heads, h), dtype)

    def attend(layer, shared, own, plain=False):
        return (reference if plain else picture_attention)(*own[layer], begin, end)

    return Case(
        name=f"picture attention {side} x {side}",
        group="picture attention",
        layers=layers,
        build=build,
        op=attend,
        plain=partial(attend, plain=True),
        size=jnp.dtype(dtype).itemsize * 4 * p * heads * h,
        flops=4 * p * p * heads * h,
    )
