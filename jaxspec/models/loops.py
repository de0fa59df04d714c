"""Starts of loops that a layer runs, made when the layer runs.

Zeros are constants, so XLA would make those of all layers' loops at once, when a program begins, and hold them to the
end: a prompt's program would need the sums of all layers, where it needs those of one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def zeros_after(x: Float[Array, "..."], shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    """Zeros that can't be made before x is there, since they are computed from its first number, whatever that is."""
    first = x[(0,) * x.ndim]
    never = jnp.isnan(first) & (first > 0)  # XLA can't tell
    return jnp.full(shape, never, dtype)
