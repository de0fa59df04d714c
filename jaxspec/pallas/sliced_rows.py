"""Rows a few at a time, for sums whose order must not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SLICE = 16  # rows that XLA multiplies at a time


def sliced(f: Callable[..., Any], size: int, *rows: Any) -> Any:
    """`f` of `size` rows after the other, one program for all of them; the last are padded with zeros.

    XLA chooses how to compute by shape and by what is beside it: here there is one shape, and nothing beside it.
    """
    count = len(rows[0])
    pad = lambda x: jnp.pad(x, ((0, -count % size), *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
    cut = jax.tree.map(lambda x: pad(x).reshape(-1, size, *x.shape[1:]), rows)

    def alone(rows):
        return jax.lax.optimization_barrier(f(*jax.lax.optimization_barrier(rows)))

    out = jax.lax.map(alone, cut)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)
