"""Makes operations outside of jitted functions cheap: numpy does those that move numbers or change their format.

jax compiles a program for each operation and each shape, which takes 12 ms, or 60 for normal numbers. Tests' operands
take a fifth of the suite's time so. What numpy does here has one right result, bit for bit; sums and products stay
jax's. The primitives' `impl` replaced here is private to the jax that the lock names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.lax import lax, slicing

DRAWS = (2**8, 2**13, 2**18)  # how many normal numbers a program draws; to draw the more takes less than another one


def install() -> None:
    moves = {
        lax.broadcast_in_dim_p: _broadcast,
        lax.convert_element_type_p: _convert,
        lax.iota_p: _iota,
        lax.reshape_p: _reshape,
        lax.stage_p: lambda x: x,
        lax.squeeze_p: lambda x, *, dimensions: np.squeeze(x, dimensions),
        lax.transpose_p: lambda x, *, permutation: np.transpose(x, permutation),
        lax.concatenate_p: lambda *xs, dimension: np.concatenate(xs, dimension),
        slicing.slice_p: _slice,
        slicing.dynamic_slice_p: _dynamic_slice,
    }
    for primitive, move in moves.items():
        primitive.def_impl(_instead(primitive.impl, move))
    jax.random.normal = _normal(jax.random.normal)


def _instead(compiled: Callable, move: Callable) -> Callable:
    """`move` where it may be used and doesn't decline, else `compiled`."""

    def run(*args: Any, **params: Any) -> Any:
        if params.get("sharding") is None and all(map(_is_plain, args)):
            made = move(*map(np.asarray, args), **{k: v for k, v in params.items() if k != "sharding"})
            if made is not NotImplemented:
                return jax.device_put(np.array(made, order="C"))
        return compiled(*args, **params)

    return run


def _is_plain(x: Any) -> bool:
    """An array of a dtype that jax keeps, on the device where it happens to be. Not a key."""
    if isinstance(x, ArrayImpl):
        return not (x.weak_type or x.committed)
    return isinstance(x, np.ndarray | np.generic) and jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype


def _broadcast(x: np.ndarray, *, shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...]) -> np.ndarray:
    kept = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([kept.get(i, 1) for i in range(len(shape))]), shape)


def _convert(x: np.ndarray, *, new_dtype: Any, weak_type: bool) -> Any:
    """Between integers, and to float32 or bfloat16. What else floats become isn't numpy's to say."""
    exact = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (x.dtype, new_dtype))
    floats = x.dtype in (np.float32, jnp.bfloat16) or jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    if weak_type or not (exact or (floats and new_dtype in (np.float32, jnp.bfloat16))):
        return NotImplemented
    return x.astype(new_dtype)


def _iota(*, dtype: Any, shape: tuple[int, ...], dimension: int) -> Any:
    if not jnp.issubdtype(dtype, jnp.integer) and dtype != np.float32:
        return NotImplemented
    line = np.arange(shape[dimension], dtype=dtype)
    return np.broadcast_to(line.reshape([-1 if i == dimension else 1 for i in range(len(shape))]), shape)


def _reshape(x: np.ndarray, *, new_sizes: tuple[int, ...], dimensions: Any) -> Any:
    return NotImplemented if dimensions is not None else x.reshape(new_sizes)


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: tuple[int, ...]) -> np.ndarray:
    kept = [min(max(int(start), 0), n - size) for start, n, size in zip(starts, x.shape, slice_sizes, strict=True)]
    return x[tuple(slice(start, start + size) for start, size in zip(kept, slice_sizes, strict=True))]


def _normal(drawn: Callable) -> Callable:
    """`jax.random.normal`, whose numbers are those of a longer draw: one program for many shapes."""

    def normal(key: Any, shape: Any = (), dtype: Any = None, **more: Any) -> jax.Array:
        sizes = [shape] if isinstance(shape, int) else list(shape)
        plain = not isinstance(key, jax.core.Tracer) and key.ndim == 0 and not more and all(sizes)
        longer = next((n for n in DRAWS if plain and math.prod(sizes) <= n), None)
        if longer is None or (dtype is not None and np.dtype(dtype) != np.float32):
            return drawn(key, shape, **({} if dtype is None else {"dtype": dtype}), **more)
        return jax.device_put(np.asarray(drawn(key, (longer,)))[: math.prod(sizes)].reshape(sizes))

    return normal
