"""Memory for large weights, taken on a GPU before any of them is made.

XLA's allocator gives an array a free piece of memory whole, unless the piece is twice as large as the array or 128 MB
larger. What is made and freed while weights load leaves pieces of all sizes, so weights in FP8 held a tenth to a sixth
more than their bytes. Arrays that are allocated first come out of one piece, and hold what they need. Each weight is
copied into such an array once it is made.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models import fp8
from jaxspec.models.weights import FourBits, Fp8, Param, Unquantised

LEAST = 2**20  # bytes of an array that is worth it: an array holds less than twice its bytes


class Reserved:
    """Arrays, each of which becomes the memory of one weight's values."""

    def __init__(self, shapes: Iterable[jax.ShapeDtypeStruct]):
        self._guard = threading.Lock()
        self._places: dict[tuple, list[jax.Array]] = defaultdict(list)
        for shape in shapes:
            self._places[shape.shape, shape.dtype].append(jnp.zeros(shape.shape, shape.dtype))
        jax.block_until_ready(self._places)

    def moved(self, made: Any) -> Any:
        """A parameter whose arrays have moved into places of their shape and dtype, where there are any left."""

        def one(array: jax.Array) -> jax.Array:
            with self._guard:
                places = self._places[array.shape, array.dtype]
                place = places.pop() if places else None
            return array if place is None else _into(place, array)

        return jax.tree.map(one, made)


def reserved(declared: Any, dtype: str) -> Reserved:
    """Places for a pytree of `Param`; none on a CPU, where memory isn't given out so."""
    return Reserved(() if jax.default_backend() == "cpu" else values_of(declared, dtype))


def values_of(declared: Any, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """The values of all large parameters, without MXFP4's, which were of the right size without."""
    counted = [param for param in jax.tree.leaves(declared) if isinstance(param.format, Unquantised | Fp8 | FourBits)]
    shapes = [_values(param, dtype) for param in counted]
    return [shape for shape in shapes if math.prod(shape.shape) * shape.dtype.itemsize >= LEAST]


def _values(param: Param, dtype: str) -> jax.ShapeDtypeStruct:
    if isinstance(param.format, Unquantised):
        return jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype))
    *shape, inputs = param.shape if param.stacked else param.shape[::-1]
    stored = fp8.E4M3 if isinstance(param.format, Fp8) else jnp.uint8
    return jax.ShapeDtypeStruct((*shape, inputs // param.format.inputs_per_value), jnp.dtype(stored))


@partial(jax.jit, donate_argnums=0)
def _into(place: jax.Array, array: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(place, array, (0,) * array.ndim)
