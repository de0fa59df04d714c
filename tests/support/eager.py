"""Makes operations outside of programs cheap, those that NumPy does to the same bits.

They move numbers, change their type, compare or choose them, or round once. jax compiles a program for each such
operation and each shape: 10 ms and more, of arrays that a test makes or compares, which were a seventh of many files'
time. What is replaced here are private functions of the jax that the lock names.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, pjit
from jax._src.array import ArrayImpl
from jax._src.lax import lax, slicing
from jax._src.literals import TypedNdArray
from jax._src.mesh import get_abstract_mesh

from jaxspec.checkpoint import params as loading

# Between these numpy rounds as XLA does. Floats to integers aren't among them: what doesn't fit is another number then.
FLOATS = {np.dtype(kind) for kind in (jnp.bfloat16, np.float16, np.float32)}
INTEGERS = {np.dtype(kind) for kind in (bool, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)}

MOST_BYTES = 2**16  # of what is made: it is memory of NumPy's, which tests of a load's memory count
FEW = 50  # calls of one of jax.numpy's functions that NumPy does; a compiled one takes a hundredth of a call's time


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
        STEPS[primitive] = functools.partial(_named, move, renamed)
    pjit._pjit_call_impl_python = functools.partial(_called, pjit._pjit_call_impl_python)
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
        made = _named(move, renamed, *arrays, **params)
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


def _named(move: Callable, renamed: dict[str, str], *arrays: np.ndarray, **params: Any) -> np.ndarray | None:
    return move(*arrays, **{renamed.get(name, name): value for name, value in params.items()})


def _plainly(operation: Callable) -> Callable:
    """`operation` without the parameters of jax's primitive."""
    return lambda *arrays, **_: operation(*arrays)


def _div(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    return np.divide(x, y) if x.dtype in FLOATS else None


def _rem(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    return np.fmod(x, y) if x.dtype in INTEGERS and y.all() else None


def _shift(operation: Callable) -> Callable:
    """XLA's shift by all bits and more is another than NumPy's."""
    return lambda x, y: operation(x, y) if (y < 8 * x.dtype.itemsize).all() else None


def _bitcast(x: np.ndarray, new_dtype: Any) -> np.ndarray | None:
    to = np.dtype(new_dtype)
    return x.view(to) if x.shape and x.dtype.itemsize == to.itemsize and bool not in (x.dtype, to) else None


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool and which.shape == cases[0].shape else None


ROUNDING = {lax.add_p, lax.sub_p, lax.mul_p, lax.div_p, lax.square_p}  # and conversions to fewer bits
EXACT = {
    lax.add_p: np.add,
    lax.sub_p: np.subtract,
    lax.mul_p: np.multiply,
    lax.div_p: _div,
    lax.rem_p: _rem,
    lax.max_p: np.maximum,
    lax.min_p: np.minimum,
    lax.neg_p: np.negative,
    lax.abs_p: np.abs,
    lax.eq_p: np.equal,
    lax.ne_p: np.not_equal,
    lax.lt_p: np.less,
    lax.le_p: np.less_equal,
    lax.gt_p: np.greater,
    lax.ge_p: np.greater_equal,
    lax.and_p: np.bitwise_and,
    lax.or_p: np.bitwise_or,
    lax.xor_p: np.bitwise_xor,
    lax.not_p: np.invert,
    lax.floor_p: np.floor,
    lax.square_p: np.square,
    lax.shift_left_p: _shift(np.left_shift),
    lax.shift_right_logical_p: _shift(lambda x, y: np.right_shift(x, y) if x.dtype.kind == "u" else None),
    lax.select_n_p: _select,
}
STEPS: dict[core.Primitive, Callable] = {primitive: _plainly(operation) for primitive, operation in EXACT.items()}
STEPS |= {
    lax.bitcast_convert_type_p: _bitcast,
    lax.reduce_max_p: lambda x, axes, **_: x.max(axes) if x.size else None,
    lax.reduce_min_p: lambda x, axes, **_: x.min(axes) if x.size else None,
    lax.reduce_and_p: lambda x, axes, **_: x.all(axes) if x.dtype == bool else None,
    lax.reduce_or_p: lambda x, axes, **_: x.any(axes) if x.dtype == bool else None,
}
NAMES = "_where", "clip", "remainder", "floor_divide"  # of jax.numpy's functions, those that aren't inlined early


def _called(otherwise: Callable, *args: Any, jaxpr: core.Jaxpr, inline: Any, **params: Any) -> Any:
    """Run a function of jax.numpy's in NumPy, if its steps are known and its arrays small. What jax does otherwise."""
    ours = inline is not jax.Inline.JAX_EARLY and params["name"] not in NAMES
    known = not ours and get_abstract_mesh().empty and _known(jaxpr)
    if known and all(isinstance(x, bool | int | float) or _plain(x, True) for x in args):
        with np.errstate(all="ignore"):
            made = _run(jaxpr, [np.asarray(x, var.aval.dtype) for x, var in zip(args, jaxpr.invars, strict=True)])
        if made is not None and sum(x.nbytes for x in made) <= 16 * MOST_BYTES:
            return [_put(x) for x in made], None, None, []
    return otherwise(*args, jaxpr=jaxpr, inline=inline, **params)


_left: weakref.WeakKeyDictionary[core.Jaxpr, int] = weakref.WeakKeyDictionary()  # calls that NumPy does yet


def _known(jaxpr: core.Jaxpr) -> bool:
    """Whether NumPy has all of a function's steps. XLA may round once where two of them would twice."""
    if jaxpr not in _left:
        steps = list(_steps(jaxpr))
        dtypes = {var.aval.dtype for step in steps for var in (*step.invars, *step.outvars)}
        known = not jaxpr.consts and all(step.primitive in STEPS for step in steps) and dtypes <= FLOATS | INTEGERS
        known = known and sum(map(_rounds, steps)) <= 1 and not any(var.aval.weak_type for var in jaxpr.outvars)
        _left[jaxpr] = FEW * known
    _left[jaxpr] = max(_left[jaxpr] - 1, -1)
    return _left[jaxpr] >= 0


def _steps(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for step in jaxpr.eqns:
        if step.primitive is pjit.jit_p:
            yield from _steps(step.params["jaxpr"])
        else:
            yield step


def _rounds(step: core.JaxprEqn) -> bool:
    to = step.outvars[0].aval.dtype
    if step.primitive is lax.convert_element_type_p:
        return to in FLOATS and step.invars[0].aval.dtype.itemsize >= to.itemsize
    return step.primitive in ROUNDING and to in FLOATS


def _run(jaxpr: core.Jaxpr, arrays: list[np.ndarray]) -> list[np.ndarray] | None:
    values = dict(zip(jaxpr.invars, arrays, strict=True))
    read = lambda var: np.asarray(var.val, var.aval.dtype) if isinstance(var, core.Literal) else values[var]  # noqa: E731
    for step in jaxpr.eqns:
        given = [read(var) for var in step.invars]
        if step.primitive is pjit.jit_p:
            made = _run(step.params["jaxpr"], given)
        else:
            made = [STEPS[step.primitive](*given, **step.params)]
        if made is None or made[0] is None:
            return None
        values.update(zip(step.outvars, made, strict=True))
    return [read(var) for var in jaxpr.outvars]
