"""Normal numbers of any shape. jax compiles a program for each shape that it draws, in 60 ms of processor time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

MANY = 2**21  # which jax draws sooner than numpy, compiling included


def normal(key: jax.Array, shape: tuple[int, ...], dtype: str | type = "float32") -> jax.Array:
    """In place of `jax.random.normal`, with other numbers. Where they are traced, jax draws them."""
    if isinstance(key, jax.core.Tracer) or math.prod(shape) > MANY:
        return jax.random.normal(key, shape, dtype)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))
