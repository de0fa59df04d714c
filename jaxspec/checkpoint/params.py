"""Params pytrees: assembled from a checkpoint's tensors, several parameters at once, or made up from a seed.

Whatever the source, the result has exactly the structure, shapes and names that the family's `tensors` declares.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.reserve import Reserved, reserved
from jaxspec.checkpoint.stored import Computed, Readers
from jaxspec.models import fp8, mxfp4
from jaxspec.models.weights import Format, FourBits, Fp8, Layout, Mxfp4, Param, Unquantised
from jaxspec.parallel import sharding

_EMBEDDING_STD = 0.02
THREADS = 8  # that read weights, as other servers have
BUDGET = 2**32  # bytes of tensors that the host holds while they are read and sent
SENT_AT_ONCE = 2  # parameters for which a device needs memory beside their own


def assemble(
    declared: Any,
    tensors: Mapping[str, Any],
    dtype: str,
    mesh: Mesh | None = None,
    *,
    threads: int = THREADS,
    budget: int | None = None,
    done: Callable[[list[str]], None] = lambda names: None,
) -> Any:
    """Fill a pytree of `Param` with arrays and weights of `dtype`, made of tensors by their checkpoint names: `Stored`,
    `Computed` or arrays.

    With a `mesh`, each is divided among its devices as declared, and a device is given nothing but its part. So many
    `threads` read, and as many make parameters of it. Of tensors that are being read or sent, the host holds at most
    `budget` bytes (None: `BUDGET`), or one parameter's. `done` is told the tensors of each parameter that is there.

    Tensors have Hugging Face's shapes, already checked; names that no parameter is made of are passed over.

    **Raises:** `CheckpointError` if a parameter lacks a tensor, or for scales that aren't finite numbers. `ConfigError`
    for a parameter that can't be divided, before any is read.
    """
    if mesh is not None:
        sharding.check_params(declared, mesh.size)
    leaves, structure = jax.tree.flatten(declared)
    names = [[*param.sources, *_beside(param)] for param in leaves]
    if lacking := [each for each in names if not all(name in tensors for name in each)]:
        missing = next(name for name in lacking[0] if name not in tensors)
        raise CheckpointError(f"{len(lacking)} parameters lack tensors of the checkpoint: {missing}, ...")
    order = {name: i for i, name in enumerate(tensors)}  # so that files are read forwards
    places, at_once = _places(declared, dtype, mesh), threading.Semaphore(SENT_AT_ONCE)
    budget = BUDGET if budget is None else budget
    filled: list[Any] = [None] * len(leaves)
    running: dict[Future, tuple[int, int]] = {}

    def load(i: int) -> Any:
        param = leaves[i]
        beside = readers.read(tensors[name] for name in _beside(param))
        beside = [each.squeeze((1, 3)) if each.ndim == 4 else each for each in beside]  # ModelOpt's of blocks
        scales = dict(zip(_beside(param), beside, strict=True))
        given = param, [tensors[name] for name in param.sources], scales, dtype, readers, places, at_once
        return _whole_on_one(*given) if mesh is None else _divided(*given, mesh)

    def finish(some: Iterable[Future]) -> None:
        for future in some:
            i, _ = running.pop(future)
            filled[i] = future.result()
            done(names[i])

    with Readers(threads) as readers, ThreadPoolExecutor(threads, "jaxspec-weights") as pool:
        try:
            for i in sorted(range(len(leaves)), key=lambda i: order[leaves[i].sources[0]]):
                size = sum(tensors[name].nbytes for name in names[i])
                while running and size + sum(held for _, held in running.values()) > budget:
                    finish(wait(running, return_when=FIRST_COMPLETED).done)
                running[pool.submit(load, i)] = i, size
            while running:
                finish(wait(running, return_when=FIRST_COMPLETED).done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return jax.tree.unflatten(structure, filled)


def _beside(param: Param) -> list[str]:
    """Tensors that come beside a parameter's sources."""
    return [name for name, _ in param.scales] + [param.order] * bool(param.order)


def _places(declared: Any, dtype: str, mesh: Mesh | None) -> list[Reserved]:
    """Memory for the weights, or in order of rank for the parts that devices of this host have of them."""
    if mesh is None:
        return [reserved(declared, dtype)]
    places = []
    for rank, device in enumerate(mesh.devices):
        here = device.process_index == jax.process_index()
        own = jax.tree.map(lambda param, rank=rank: sharding.local_param(param, mesh.size, rank), declared)
        with jax.default_device(device if here else None):
            places.append(reserved(own if here else (), dtype))
    return places


def _whole_on_one(
    param: Param,
    host: list[Any],
    scales: dict[str, np.ndarray],
    dtype: str,
    readers: Readers,
    places: list[Reserved],
    at_once: threading.Semaphore,
) -> Any:
    """The parameter on the default device."""
    host = _on_host(param, host, readers)
    with at_once:
        return jax.block_until_ready(places[0].moved(_placed(param, host, scales, dtype)))


def _divided(
    param: Param,
    host: list[Any],
    scales: dict[str, np.ndarray],
    dtype: str,
    readers: Readers,
    places: list[Reserved],
    at_once: threading.Semaphore,
    mesh: Mesh,
) -> Any:
    """The parameter on the devices of a mesh, made there of each one's part of its sources. Parts that are rows of a
    file are read apart; others, and packed tensors, are read once for all devices of this host."""
    size, made = mesh.size, []
    names = [name for name, _ in param.scales]
    here = [(i, each) for i, each in enumerate(mesh.devices) if each.process_index == jax.process_index()]
    own_of = {rank: sharding.own_sources(param, rank, size) for rank, _ in here}
    needed = sorted({i for own in own_of.values() for i in own})
    sources, whole = {i: host[i] for i in needed}, _needs_whole(param)
    if whole or not sharding.of_rows(param) or any(isinstance(each, Computed) for each in sources.values()):
        sources = dict(zip(needed, readers.read(sources.values()), strict=True))
    by_input = 1 if param.stacked and param.transpose else -1  # the axis of a source's inputs
    magnitudes = {i: _magnitudes(source, by_input) for i, source in sources.items()} if whole else {}
    for rank, device in here:
        one = sharding.local_param(param, size, rank)
        own = [sharding.cut(param, i, sources[i], rank, size) for i in own_of[rank]]
        scaled = own_of[rank] if names else ()
        own_scales = {names[i]: sharding.cut(param, i, scales[names[i]], rank, size, scale=True) for i in scaled}
        if param.order:
            own_scales[param.order] = scales[param.order]
        largest = [sharding.own_experts(param, magnitudes[i], rank, size) for i in own_of[rank]] if whole else []
        own = _on_host(one, own, readers)
        with at_once, jax.default_device(device):
            own = [part if isinstance(part, np.ndarray) else jax.device_put(part, device) for part in own]
            largest = _of_outputs(largest, param.layout, param.stacked) if whole else None
            made.append(jax.block_until_ready(places[rank].moved(_placed(one, own, own_scales, dtype, largest))))
    return sharding.joined(param, made, mesh)


def _needs_whole(param: Param) -> bool:
    """Whether devices quantise parts of a weight, and need more of it than their own."""
    divided = param.split.along in ("outputs", "inputs")
    return divided and param.format.quantised and not param.scales and param.format.needs_whole(param.split.along)


def _magnitudes(source: Any, axis: int) -> Any:
    """The largest magnitudes along an axis."""
    if isinstance(source, jax.Array):
        return jnp.max(jnp.abs(source), axis)
    # By their bits, which integers order by magnitude for each sign: abs of numpy's bfloat16 takes 20 times as long.
    found = [source.view(f"{kind}{source.itemsize}").max(axis).view(source.dtype) for kind in "iu"]
    return np.maximum(*np.abs(np.float32(found)))


@partial(jax.jit, static_argnames=("layout", "stacked"))
def _of_outputs(magnitudes: list[jax.Array], layout: Layout, stacked: bool) -> jax.Array:
    """Magnitudes of sources in order of the whole weight's outputs, f32[*e, n]."""
    whole = [each.astype(jnp.float32) for each in magnitudes]
    if stacked:
        whole = jnp.concatenate(whole).reshape(-1, sum(layout.splits))
        whole = jnp.split(whole, list(itertools.accumulate(layout.splits))[:-1], axis=-1)
    return layout.pack(whole)


def _on_host(param: Param, parts: list[Any], readers: Readers) -> list[Any]:
    """Sources as arrays. Experts' matrices are in one, [experts, _, _]: a program of hundreds of operands would be
    slow."""
    if not param.stacked:
        return readers.read(parts)
    if param.sources != (param.whole,):
        return [readers.concatenated(parts).reshape(*param.shape[:2], -1)]
    (stack,) = readers.read(parts)
    return [stack.reshape(*stack.shape[:2], -1)]  # the bytes of MXFP4 have an axis of blocks


def _placed(
    param: Param, host: list[Any], scales: dict[str, np.ndarray], dtype: str, largest: jax.Array | None = None
) -> Any:
    """The parameter on the default device, of what `_on_host` gives. `largest`: as of `Format.quantise`."""
    # A copy, because on a CPU an array may share the host's memory.
    return _made(param, [jax.device_put(each, may_alias=False) for each in host], scales, dtype, largest)


def _made(
    param: Param, sources: list[jax.Array], scales: dict[str, np.ndarray], dtype: str, largest: jax.Array | None
) -> Any:
    if param.depthwise:
        sources = [source[:, 0] for source in sources]
    if any(param.unit_axes):
        sources = [source.reshape(-1) for source in sources]
    if param.stacked and param.transpose:
        sources = [jnp.swapaxes(source, 1, 2) for source in sources]
    if isinstance(param.format, Mxfp4):
        return param.made(*_arranged(sources[0], _exponents(param, scales), param.layout))
    if isinstance(param.format, FourBits) and param.scales:
        order = jnp.array(scales.pop(param.order)) if param.order else None
        packed = sources[0] if param.stacked else tuple(sources)
        return param.made(*_four_bits(packed, _group_scales(param, scales), param.layout, param.format), order)
    if isinstance(param.format, Unquantised):
        if param.stacked:
            return param.made(_fused_rows(sources, param.layout, param.dtype or dtype))
        # Layers alike share what compiles.
        values = _fused(sources, param.transpose, param.layout, param.dtype or dtype)
        lacking = param.shape[-1] - values.shape[-1] if param.least else 0
        return param.made(jnp.pad(values, ((0, 0), (0, lacking))) if lacking else values)
    if not param.scales:
        return param.made(*_quantised(sources, param.layout, param.format, largest))
    in_order = param.stacked and not param.layout.grouped  # a copy of a stack would take its memory once more
    values = sources[0] if in_order else _fused_rows(sources, param.layout)
    return param.made(values, _scales(param, scales))


@partial(jax.jit, static_argnames=("transpose", "layout", "dtype"))
def _fused(sources: list[jax.Array], transpose: bool, layout: Layout, dtype: str) -> jax.Array:
    return layout.pack([(source.T if transpose else source).astype(dtype) for source in sources])


@partial(jax.jit, static_argnames=("layout", "dtype"))
def _fused_rows(sources: list[jax.Array], layout: Layout, dtype: Any = None) -> jax.Array:
    """Fuse sources, or stacks, whose outputs are rows and stay so. Without a `dtype` the sources keep theirs."""
    columns = layout.pack([jnp.swapaxes(source, -1, -2).astype(dtype or source.dtype) for source in sources])
    return jnp.swapaxes(columns, -1, -2)


@partial(jax.jit, static_argnames="layout")
def _arranged(packed: jax.Array, scales: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """A stack in MXFP4 as devices have it, expert by expert: so the device needs little beside what comes and goes."""
    rows = lambda expert: tuple(_fused_rows([part], layout) for part in expert)  # noqa: E731
    return jax.lax.map(lambda expert: mxfp4.arrange(*rows(expert)), (packed, scales))


@partial(jax.jit, static_argnames=("layout", "format"))
def _four_bits(
    packed: jax.Array | tuple[jax.Array, ...], scales: list[jax.Array], layout: Layout, format: FourBits
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Values, scales and factors as devices have them, of sources or of a stack, expert by expert."""
    if isinstance(packed, tuple):
        *_, groups, each = scales[0].shape
        rows = _fused_rows([part.reshape(len(part), -1) for part in scales], layout)
        made = format.placed(_fused_rows(list(packed), layout), rows.reshape(len(rows), groups, each))
    else:
        made = jax.lax.map(lambda expert: format.placed(*expert), (packed, scales[0]))
    return (*made, None) if len(made) == 2 else made


def _group_scales(param: Param, found: dict[str, np.ndarray]) -> list[jax.Array]:
    """Scales of weights in four bits, [outputs, groups, n] of each source, or one array of a stack's."""
    each = [found.pop(name) for name, _ in param.scales]
    if param.stacked:
        each = [np.concatenate(each).reshape(param.shape[0], -1, *each[0].shape[1:])]
    return [jnp.array(scales) for scales in each]


def _exponents(param: Param, found: dict[str, np.ndarray]) -> jax.Array:
    """The scales of MXFP4."""
    ((name, _),) = param.scales
    scales = found.pop(name)
    if (scales == mxfp4.NAN).any():
        raise CheckpointError(f"{name} has scales that aren't numbers; download the file again")
    if (scales > mxfp4.MOST).any():
        raise CheckpointError(
            f"{name} has scales up to 2^{int(scales.max()) - 127}; supported: up to 2^{mxfp4.MOST - 127}. Models have "
            "scales around 2^-7, so the file may be damaged"
        )
    return jnp.array(scales)


def _scales(param: Param, found: dict[str, np.ndarray]) -> jax.Array:
    """Scales as `Weight` has them, [outputs / g, groups] or a stack of such.

    A block's scale is repeated for each g of its outputs, g being the most that fusing and interleaving keep together;
    that of a whole matrix for all outputs.
    """
    blocks, layout = param.format.per_scale("outputs") != 1, param.layout
    size, each = layout.unit if blocks else 1, []
    outputs = param.stored_values().values()
    by_input = param.stacked and param.transpose  # values and scales
    for (name, _), shape in zip(param.scales, outputs, strict=True):
        scales, rows = np.asarray(found[name], np.float32), shape[-1 if by_input else -2]
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise CheckpointError(f"{name} has scales that aren't finite numbers, or negative; download the file again")
        if blocks:
            scales = np.swapaxes(scales, 1, 2) if by_input else scales
            scales = np.repeat(scales, fp8.BLOCK // size, axis=-2)[..., : rows // size, :]
        elif param.sources == (param.whole,):
            scales = np.broadcast_to(scales.reshape(param.shape[0], -1, 1), (*param.shape[:2], 1))
        else:
            scales = np.broadcast_to(scales.reshape(-1, 1), (rows, 1))
        each.append(scales)
    if param.stacked:
        each = [np.concatenate(each).reshape(param.shape[0], -1, each[0].shape[-1])]
    return _fused_rows([jnp.asarray(scales) for scales in each], layout.per(size))


@partial(jax.jit, static_argnames=("layout", "format"))
def _quantised(
    sources: list[jax.Array], layout: Layout, format: Format, largest: jax.Array | None = None
) -> tuple[jax.Array | None, ...]:
    """Values, scales and factors of unquantised sources, each [outputs, inputs], or of a stack of experts' fused ones.

    In blocks each source is quantised by itself, so the result is that of a checkpoint quantised beforehand. `largest`:
    as of `Format.quantise`, of each expert.
    """
    if sources[0].ndim == 2:
        return _matrix(sources, layout, format, largest)
    ends = list(itertools.accumulate(layout.splits))[:-1]
    expert = lambda of: _matrix(jnp.split(of[0], ends), layout, format, of[1])  # noqa: E731
    # One after the other: float32 numbers of a whole stack would take four times its memory.
    return jax.lax.map(expert, (sources[0], largest))


def _matrix(
    sources: list[jax.Array], layout: Layout, format: Format, largest: jax.Array | None
) -> tuple[jax.Array | None, ...]:
    if not isinstance(format, Fp8) or format.block is None:
        return format.quantise(_fused_rows(sources, layout), *([] if largest is None else [largest]))
    size = layout.unit
    made = [format.quantise(source) for source in sources]
    scales = [fp8.finer(scales, len(values), size) for values, scales in made]
    return _fused_rows([values for values, _ in made], layout), _fused_rows(scales, layout.per(size))


def quantised(param: Param, values: jax.Array, like: Any = None) -> Any:
    """The weight in the format of its declaration, of values as an unquantised one has them. `like`: a weight that is
    divided among devices as the values are."""
    if like is None or not isinstance(values.sharding, NamedSharding):
        return _of_values(param, values)
    mesh, spec = values.sharding.mesh, values.sharding.spec
    own = sharding.local_param(param, mesh.size)

    def make(part):
        largest = (
            sharding.largest(param, _magnitudes(part, -1 if param.stacked else 0)) if _needs_whole(param) else None
        )
        return _of_values(own, part, largest)

    return jax.jit(sharding.spread(make, mesh, (spec,), sharding.specs_of(like)))(values)


def _of_values(param: Param, values: jax.Array, largest: jax.Array | None = None) -> Any:
    if param.stacked:
        sources = [_whole(values, param.layout, False)]
    else:
        sources = [part.T for part in param.layout.unpack(values)]
    return param.made(*_quantised(sources, param.layout, param.format, largest))


def dummy(declared: Any, dtype: str, seed: int, mesh: Mesh | None = None) -> Any:
    """Random params on the device, each a function of `seed` and its own name alone.

    With a `mesh`, each is made on one device, and its parts go from there to the others.

    Matmul weights have standard deviation `inputs ** -0.5`, so every layer adds about unit variance to the residual
    stream and activations stay finite at any depth; embeddings have 0.02. Weights declared as quantised are made
    so one by one, as soon as they are there.
    """
    root, nobody = jax.random.key(seed), Readers(1)  # there is nothing to read
    if mesh is not None:
        sharding.check_params(declared, mesh.size)
    traced = isinstance(root, jax.core.Tracer)
    drawn = {} if traced else _compiled(declared, dtype)
    ready = (lambda made: made) if traced else jax.block_until_ready  # which looks for where each tracer is from
    # Over several devices weights are made whole on one, which needs the room.
    places = _places(declared if mesh is None and drawn else (), dtype, mesh)
    key_of = lambda path: jax.random.fold_in(root, zlib.crc32(jax.tree_util.keystr(path).encode()))  # noqa: E731

    def values(path, param: Param) -> jax.Array:
        if param.init != "normal":
            return jnp.full(param.shape, {"ones": 1, "zeros": 0}[param.init], param.dtype or dtype)
        key = key_of(path)
        draw, *fixed = _drawing(param, dtype)
        return drawn[draw, *fixed](key) if drawn else draw(key, *fixed)

    def make(path, param: Param) -> Any:
        if mesh is not None:
            given = *_sources(param, values(path, param)), {}, dtype, nobody, places, threading.Semaphore()
            return _divided(*given, mesh)
        if isinstance(param.format, Mxfp4):
            made = _packed_stack(key_of(path), param.shape, param.shape[-1] ** -0.5, dtype)
            return ready(param.made(*made))
        array = values(path, param)
        if isinstance(param.format, Unquantised):
            return places[0].moved(param.made(array))
        return ready(places[0].moved(quantised(param, array)))

    # The largest first: what one is quantised from then leaves room that the next one fits into.
    named, tree = jax.tree_util.tree_flatten_with_path(declared)
    order = sorted(range(len(named)), key=lambda i: -math.prod(named[i][1].shape))
    made = {i: make(*named[i]) for i in order}
    return jax.tree.unflatten(tree, [made[i] for i in range(len(named))])


def _drawing(param: Param, dtype: str) -> tuple[Callable, tuple[int, ...], float, str]:
    """Function that draws a parameter's values, and its static arguments."""
    if param.stacked:
        return _normal_stack, param.shape, param.shape[-1] ** -0.5, dtype
    std = param.shape[0] ** -0.5 if param.transpose else _EMBEDDING_STD
    return _normal, param.shape, std, param.dtype or dtype


def _compiled(declared: Any, dtype: str) -> dict[tuple, Callable[[jax.Array], jax.Array]]:
    """Programs that draw values, by `_drawing`. They are compiled beside one another: one after the other took a GPU
    longer than to run them all."""
    drawn = [param for param in jax.tree.leaves(declared) if param.init == "normal"]
    drawn = [param for param in drawn if param.stacked or not isinstance(param.format, Mxfp4)]
    wanted = list(dict.fromkeys(_drawing(param, dtype) for param in drawn))
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    lowered = [draw.lower(key, shape, std, dtype) for draw, shape, std, dtype in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(lambda each: each.compile(), lowered), strict=True))


def _sources(param: Param, array: jax.Array) -> tuple[Param, list[jax.Array]]:
    """A parameter's array as tensors of a checkpoint would have it, and the declaration with these sources."""
    if isinstance(param.format, Mxfp4):
        raise CheckpointError("dummy weights in MXFP4 can't be divided among devices; use --tp-size 1")
    if param.stacked:
        whole = _whole(array, param.layout, param.transpose)
        return dataclasses.replace(param, sources=("dummy",), whole="dummy"), [whole]
    parts = param.layout.unpack(array)
    parts = [part.T if param.transpose else part for part in parts]
    if any(param.unit_axes):
        parts = [part.reshape(shape) for part, shape in zip(parts, param.stored_values().values(), strict=True)]
    return param, [part[:, None] if param.depthwise else part for part in parts]


@partial(jax.jit, static_argnames=("layout", "transpose"))
def _whole(stack: jax.Array, layout: Layout, transpose: bool) -> jax.Array:
    """Experts' matrices as one tensor of a checkpoint has them. Expert by expert: a stack takes gigabytes, and the
    device that draws it holds its part of all others."""

    def expert(matrix):
        rows = jnp.concatenate([part.T for part in layout.unpack(matrix.T)])
        return rows.T if transpose else rows

    return jax.lax.map(expert, stack)


@partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype: str) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


@partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _normal_stack(key: jax.Array, shape: tuple[int, ...], std: float, dtype: str) -> jax.Array:
    """Matrix by matrix: random bits and float32 numbers of a whole stack would take four times its memory."""
    return jax.lax.map(lambda k: _normal(k, shape[1:], std, dtype), jax.random.split(key, shape[0]))


@partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _packed_stack(key: jax.Array, shape: tuple[int, ...], std: float, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Draw a stack in MXFP4: packed numbers and their scales."""
    return jax.lax.map(lambda k: mxfp4.quantise(_normal(k, shape[1:], std, dtype)), jax.random.split(key, shape[0]))
