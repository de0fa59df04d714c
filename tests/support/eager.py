"""Makes operations outside of programs cheap, those that only move numbers or change their type: NumPy does them.

jax compiles a program for each such operation and each shape: 10 ms and more, of arrays that a test makes or compares,
which were a seventh of many files' time. What is replaced here are private functions of the jax that the lock names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.array import ArrayImpl
from jax._src.lax import lax, slicing
from jax._src.literals import TypedNdArray
from jax._src.mesh import get_abstract_mesh

from jaxspec.checkpoint import params as loading

# Between these numpy rounds as XLA does. Floats to integers aren't among them: what doesn't fit is another number then.
FLOATS = {np.dtype(kind) for kind in (jnp.bfloat16, np.float16, np.float32)}
INTEGERS = {np.dtype(kind) for kind in (bool, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)}

MOST_BYTES = 2**16  # of what is made: it is memory of NumPy's, which tests of a load's memory count


def install() -> None:
    moves = {
        core.stage_p: lambda x: x,
        lax.broadcast_in_dim_p: _broadcast,
        lax.concatenate_p: lambda *each, dimension: np.concatenate(each, dimension),
        lax.convert_element_type_p: _convert,
        lax.iota_p: _iota,
        lax.reshape_p: lambda x, new_sizes, dimensions, **_: None if dimensions is not None else x.reshape(new_sizes),
        lax.rev_p: np.flip,
        lax.squeeze_p: np.squeeze,
        lax.transpose_p: np.transpose,
        slicing.dynamic_slice_p: _dynamic_slice,
        slicing.slice_p: _slice,
    }
    names = {lax.rev_p: {"dimensions": "axis"}, lax.squeeze_p: {"dimensions": "axis"}}
    names |= {lax.transpose_p: {"permutation": "axes"}}
    for primitive, move in moves.items():
        renamed = names.get(primitive, {})
        primitive.def_impl(functools.partial(_moved, primitive.impl, move, renamed))
    # What fuses a checkpoint's tensors moves them alone: a program for each shape that a model has.
    loading._fused = _uncompiled(loading._fused)
    loading._fused_rows = _uncompiled(loading._fused_rows)


def _uncompiled(program: Callable) -> Callable:
    """The program's operations one by one, where these move little and so compile nothing."""

    @functools.wraps(program)
    def run(sources: list[jax.Array], *args: Any, **named: Any) -> jax.Array:
        little = all(_plain(x, False) for x in sources) and sum(x.nbytes for x in sources) <= MOST_BYTES
        return (program.__wrapped__ if little else program)(sources, *args, **named)

    return run


def _moved(otherwise: Callable, move: Callable, renamed: dict[str, str], *args: Any, **params: Any) -> Any:
    """Return `move` of these arrays; where it gives None, or they aren't plain ones, do what jax does."""
    weak = "weak_type" in params  # which says what the result is
    plain = all(_plain(x, weak) for x in args)
    if plain and params.get("sharding") is None and get_abstract_mesh().empty:
        arrays = [np.asarray(x) for x in args]
        made = move(*arrays, **{renamed.get(name, name): value for name, value in params.items()})
        if made is not None and made.dtype != jax.dtypes.float0 and made.nbytes <= MOST_BYTES:
            return _put(made)
    return otherwise(*args, **params)


def _put(made: np.ndarray) -> jax.Array:
    """A copy that is the device's own, as what jax makes. It would take NumPy's memory at a multiple of 64 bytes as it
    is, and a program that is given such an array can't write its result there."""
    memory = np.empty(made.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + made.itemsize
    own = memory[first : first + made.nbytes].view(made.dtype).reshape(made.shape)
    own[...] = made
    return jax.device_put(own)


def _plain(x: Any, weak: bool) -> bool:
    """Whether an array is there, on no device that somebody chose, and unless `weak` of no Python number's type."""
    if isinstance(x, ArrayImpl):
        return (weak or not x.weak_type) and not x._committed and not x.is_deleted() and x.is_ready()
    if isinstance(x, TypedNdArray):
        return weak or not x.weak_type
    return isinstance(x, np.ndarray | np.generic)


def _broadcast(x: np.ndarray, shape: tuple, broadcast_dimensions: tuple, **_: Any) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _convert(x: np.ndarray, new_dtype: Any, weak_type: bool, **_: Any) -> np.ndarray | None:
    to = np.dtype(new_dtype)
    known = (x.dtype in INTEGERS and to in FLOATS | INTEGERS) or (x.dtype in FLOATS and to in FLOATS)
    return x.astype(to) if known and not weak_type else None


def _iota(dtype: Any, shape: tuple, dimension: int, **_: Any) -> np.ndarray | None:
    if np.dtype(dtype) not in INTEGERS | {np.dtype(np.float32)}:
        return None
    sizes = [size if axis == dimension else 1 for axis, size in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _slice(x: np.ndarray, start_indices: tuple, limit_indices: tuple, strides: tuple | None) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: tuple) -> np.ndarray:
    first = [min(max(int(start), 0), all - size) for start, all, size in zip(starts, x.shape, slice_sizes, strict=True)]
    return x[tuple(slice(start, start + size) for start, size in zip(first, slice_sizes, strict=True))]
