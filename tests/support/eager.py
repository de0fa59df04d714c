"""Makes operations outside of programs cheap, those that have one exact result: NumPy does them.

jax compiles a program for each such operation and each shape: 15 ms and more, of arrays that a test makes or compares,
which were a third of many files' time. Its own functions, such as `jnp.where`, are programs too: NumPy does those that
round each number once at most, which is what XLA makes of them. What is replaced here are private functions of the jax
that the lock names.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
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
E4M3 = np.dtype(jnp.float8_e4m3fn)
INTEGERS = {np.dtype(kind) for kind in (bool, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)}

OF_JAX = str(Path(jax.__file__).parent)
MOST_BYTES = 2**22  # of what is made: more takes longer than a program

_counted: weakref.WeakSet[core.Jaxpr] = weakref.WeakSet()


def install() -> None:
    for primitive in MOVES:
        primitive.def_impl(functools.partial(_move, primitive, primitive.impl))
    pjit._pjit_call_impl_python = functools.partial(_program, pjit._pjit_call_impl_python)
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


def _move(primitive: core.Primitive, otherwise: Callable, *args: Any, **params: Any) -> Any:
    """Return what NumPy makes of these arrays; where that isn't one exact result, do what jax does."""
    weak = "weak_type" in params  # which says what the result is
    if all(_plain(x, weak) for x in args) and _nothing_else_is_asked():
        made = _made(primitive, [np.asarray(x) for x in args], params)
        if made is not None and made[0].dtype != jax.dtypes.float0 and made[0].nbytes <= MOST_BYTES:
            return _put(*made)
    return otherwise(*args, **params)


def _program(otherwise: Callable, *args: Any, jaxpr: core.Jaxpr, **params: Any) -> Any:
    """Return what NumPy makes of one of jax's own functions, in the form of `_pjit_call_impl_python`."""
    of_jax = (jaxpr.debug_info.func_filename or "").startswith(OF_JAX)
    made = _results(jaxpr, args) if of_jax and _nothing_else_is_asked() else None
    if made is None:
        return otherwise(*args, jaxpr=jaxpr, **params)
    if jaxpr not in _counted:  # as compiled, which tests of a server under load ask for
        _counted.add(jaxpr)
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 0.0)
    return [_put(each) for each in made], None, None, []


def _nothing_else_is_asked() -> bool:
    return get_abstract_mesh().empty and not jax.config.jax_debug_nans


def _results(jaxpr: core.Jaxpr, args: Sequence[Any]) -> list[np.ndarray] | None:
    """Results of a program outside of others, or None. What it is given is small, and so are they."""
    if jaxpr.effects or not all(type(x) in (bool, int, float) or _plain(x, False) for x in args):
        return None
    avals = [var.aval for var in jaxpr.outvars]
    sizes = [aval.size * aval.dtype.itemsize for aval in (*avals, *(var.aval for var in jaxpr.invars))]
    if max(sizes, default=0) > MOST_BYTES or any(aval.weak_type for aval in avals):
        return None
    arrays = [np.asarray(x, var.aval.dtype) for x, var in zip(args, jaxpr.invars, strict=True)]
    made = _evaluated(jaxpr, arrays, collections.Counter())
    if made is None or any(
        x.dtype == jax.dtypes.float0 or x.dtype != aval.dtype for x, aval in zip(made, avals, strict=True)
    ):
        return None
    return made


def _evaluated(jaxpr: core.Jaxpr, arrays: Sequence[np.ndarray], rounded: collections.Counter) -> list | None:
    """Operation by operation. None where one has no exact result, or where a second one rounds an array: a program may
    leave out a rounding between two."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(np.asarray, jaxpr.consts), *arrays], strict=True))
    read = lambda var: np.asarray(var.val, var.aval.dtype) if isinstance(var, core.Literal) else known[var]  # noqa: E731
    for equation in jaxpr.eqns:
        given = [read(var) for var in equation.invars]
        if equation.primitive is pjit.jit_p:
            made = _evaluated(equation.params["jaxpr"], given, rounded)
        else:
            made = _made(equation.primitive, given, equation.params)
            rounded["times"] += made is not None and _rounds(equation.primitive, given, made[0])
        if made is None or rounded["times"] > 1:
            return None
        known.update(zip(equation.outvars, made, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _made(primitive: core.Primitive, arrays: list[np.ndarray], params: dict[str, Any]) -> list[np.ndarray] | None:
    if primitive not in OPERATIONS or params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None
    with np.errstate(all="ignore"):
        made = OPERATIONS[primitive](*arrays, **params)
    if made is None:
        return None
    return [np.asarray(x) for x in (made if primitive.multiple_results else [made])]


def _rounds(primitive: core.Primitive, given: list[np.ndarray], made: np.ndarray) -> bool:
    if primitive is lax.convert_element_type_p:
        return (
            made.ndim > 0 and made.dtype not in INTEGERS and not np.array_equal(made.astype(given[0].dtype), given[0])
        )
    return primitive in ROUNDING and made.dtype in FLOATS


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
        return (weak or not x.weak_type) and not x._committed and not x.is_deleted()
    if isinstance(x, TypedNdArray):
        return weak or not x.weak_type
    return isinstance(x, np.ndarray | np.generic)


def _broadcast(x: np.ndarray, shape: tuple, broadcast_dimensions: tuple, **_: Any) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _convert(x: np.ndarray, new_dtype: Any, weak_type: bool, **_: Any) -> np.ndarray | None:
    to = np.dtype(new_dtype)
    known = (x.dtype in INTEGERS and to in FLOATS | INTEGERS) or (x.dtype in FLOATS | {E4M3} and to in FLOATS)
    known |= (x.dtype, to) == (np.float32, E4M3)  # of bfloat16 XLA rounds twice
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


def _padded(x: np.ndarray, value: np.ndarray, padding_config: Sequence[tuple[int, int, int]]) -> np.ndarray | None:
    if any(low < 0 or high < 0 or inner for low, high, inner in padding_config):
        return None
    return np.pad(x, [(low, high) for low, high, _ in padding_config], constant_values=value)


def _round(x: np.ndarray, rounding_method: lax.RoundingMethod) -> np.ndarray | None:
    return np.rint(x) if rounding_method == lax.RoundingMethod.TO_NEAREST_EVEN and x.dtype in FLOATS else None


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else None


def _of_numbers(function: Callable) -> Callable:
    """The function of floats and integers that NumPy computes as XLA does, and of nothing else."""

    def run(*arrays: np.ndarray, **_: Any) -> np.ndarray | None:
        known = all(x.dtype in FLOATS | INTEGERS for x in arrays)
        return np.asarray(function(*arrays)).astype(arrays[0].dtype, copy=False) if known else None

    return run


def _of_floats(function: Callable) -> Callable:
    run = _of_numbers(function)
    return lambda *arrays, **_: run(*arrays) if all(x.dtype in FLOATS for x in arrays) else None


def _compared(function: Callable) -> Callable:
    return lambda x, y, **_: function(x, y) if {x.dtype, y.dtype} <= FLOATS | INTEGERS else None


def _unstacked(x: np.ndarray, axis: int) -> list[np.ndarray]:
    return list(np.moveaxis(x, axis, 0))


def _split(x: np.ndarray, sizes: Sequence[int], axis: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    return np.fmod(x, y) if x.dtype in INTEGERS and (y != 0).all() else None


def _sum(x: np.ndarray, axes: Sequence[int], **_: Any) -> np.ndarray | None:
    return x.sum(tuple(axes), dtype=x.dtype) if x.dtype in INTEGERS else None


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    if x.dtype not in INTEGERS:
        return np.divide(x, y) if x.dtype in FLOATS else None
    return (x // y + ((x % y != 0) & ((x < 0) != (y < 0)))).astype(x.dtype) if (y != 0).all() else None


def _reduced(function: Callable) -> Callable:
    return lambda x, axes, **_: function(x, axis=tuple(axes)) if x.dtype in FLOATS | INTEGERS and x.size else None


# Of these no program is made, and none counts.
MOVES: dict[core.Primitive, Callable[..., Any]] = {
    core.stage_p: lambda x: x,
    lax.broadcast_in_dim_p: _broadcast,
    lax.concatenate_p: lambda *each, dimension: np.concatenate(each, dimension),
    lax.convert_element_type_p: _convert,
    lax.iota_p: _iota,
    lax.reshape_p: lambda x, new_sizes, dimensions, **_: None if dimensions is not None else x.reshape(new_sizes),
    lax.rev_p: lambda x, dimensions: np.flip(x, dimensions),
    lax.squeeze_p: lambda x, dimensions: np.squeeze(x, dimensions),
    lax.transpose_p: lambda x, permutation: np.transpose(x, permutation),
    slicing.dynamic_slice_p: _dynamic_slice,
    slicing.slice_p: _slice,
}
OPERATIONS: dict[core.Primitive, Callable[..., Any]] = MOVES | {
    lax.div_p: _divided,
    lax.pad_p: _padded,
    lax.rem_p: _remainder,
    lax.round_p: _round,
    lax.select_n_p: _select,
    lax.split_p: _split,
    lax.stack_p: lambda *each, axis: np.stack(each, axis),
    lax.unstack_p: _unstacked,
    lax.reduce_max_p: _reduced(np.max),
    lax.reduce_min_p: _reduced(np.min),
    lax.reduce_and_p: lambda x, axes, **_: np.bitwise_and.reduce(x, axis=tuple(axes)),
    lax.reduce_or_p: lambda x, axes, **_: np.bitwise_or.reduce(x, axis=tuple(axes)),
    lax.reduce_sum_p: _sum,
    **{primitive: _of_numbers(function) for primitive, function in (
        (lax.abs_p, np.abs), (lax.add_p, np.add), (lax.max_p, np.maximum), (lax.min_p, np.minimum),
        (lax.mul_p, np.multiply), (lax.neg_p, np.negative), (lax.sign_p, np.sign), (lax.sub_p, np.subtract),
    )},
    **{primitive: _of_floats(function) for primitive, function in (
        (lax.ceil_p, np.ceil), (lax.floor_p, np.floor), (lax.sqrt_p, np.sqrt),
    )},
    **{primitive: _compared(function) for primitive, function in (
        (lax.eq_p, np.equal), (lax.ge_p, np.greater_equal), (lax.gt_p, np.greater), (lax.le_p, np.less_equal),
        (lax.lt_p, np.less), (lax.ne_p, np.not_equal),
    )},
    **{primitive: lambda *arrays, _function=function, **_: _function(*arrays) for primitive, function in (
        (lax.and_p, np.bitwise_and), (lax.not_p, np.invert), (lax.or_p, np.bitwise_or), (lax.xor_p, np.bitwise_xor),
    )},
}  # fmt: skip
ROUNDING = {lax.add_p, lax.div_p, lax.mul_p, lax.sqrt_p, lax.sub_p}
