"""Tensor parallelism: one model divided among the devices of a host (`--tp-size`).

This file alone knows how. A program is one `jax.shard_map` over a mesh of one axis. In it a device runs the code that
one device runs, on the arrays of a smaller model (`local`): some of the heads, of an MLP's columns, of the vocabulary's
rows. What isn't divided is computed by all devices alike. The parameters' declarations say how each is divided
(`weights.Split`), and every exchange between devices is a function here, which on one device does nothing.

Invariant: the residual stream, and each decision about a request, are the same bits on all devices. A layer's partial
results are summed before anything else reads them (`total`). One device decides for a request, and the others get the
decision (`logits_of_my_requests`, `my_requests`, `all_gather_requests`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config.options import ConfigError
from jaxspec.models.weights import Layout, Param, Parts, Weight, run_length
from jaxspec.parallel.collectives import AXIS, all_gather, devices, total

# How arguments and results of programs are divided: the same on all devices; requests by who decides for them;
# logits [b, q, v] by parts of the vocabulary.
EVERYWHERE, BY_REQUEST, LOGITS = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, None, AXIS)


def mesh_of(size: int) -> Mesh | None:
    """The first `size` devices of this host, or of several the first of each; None for one, which needs no mesh.

    **Raises:** `ConfigError` if there are fewer, or for a number that isn't positive.
    """
    if type(size) is not int or size < 1:
        raise ConfigError(f"--tp-size must be an integer of at least 1, got {size!r}")
    if size == 1:
        return None
    here, hosts = jax.local_devices(), jax.process_count()
    if hosts > 1:  # as many of each host's, in order
        of = lambda host: [device for device in jax.devices() if device.process_index == host]  # noqa: E731
        each = [of(host)[: size // hosts] for host in range(hosts)]
        if any(len(devices) < size // hosts for devices in each):
            found = ", ".join(str(len(devices)) for devices in each)
            raise ConfigError(f"--tp-size {size} on {hosts} hosts takes {size // hosts} of each; they have {found}")
        return Mesh(np.concatenate(each), (AXIS,))
    if len(here) < size:
        more = "; JAX_NUM_CPU_DEVICES in the environment makes virtual ones" if here[0].platform == "cpu" else ""
        count = f"{len(here)} device{'' if len(here) == 1 else 's'}"
        raise ConfigError(f"--tp-size {size} is more than this host has, {count} ({here[0].device_kind}){more}")
    return Mesh(np.array(here[:size]), (AXIS,))


# --- parameters: from a checkpoint's tensors to the devices ---


def check_params(declared: Any, size: int) -> None:
    """**Raises:** `ConfigError` for a parameter that nobody has decided about, for one that so many devices can't
    divide, and for one of which a block that shares a scale would have to be cut."""
    for param in jax.tree.leaves(declared):
        if param.split is None:
            raise ConfigError(
                f"--tp-size {size}: how to divide {param.sources[0]} isn't decided; --tp-size 1 serves it"
            )
        block, among = param.format.per_scale(param.split.along) or 1, size // param.split.groups
        if param.split.along == "inputs":
            block = max(block, param.format.inputs_together)
        instead = "an unquantised checkpoint"
        if not param.scales:
            instead = "another --quantization (of a drafter, --draft-quantization) or none"
        more = ", or --ep-size to divide experts whole" if param.stacked else ""
        for i in range(len(param.split.parts)):
            for units, width in _parts(param, i):
                if units % among and among % units and not param.split.padded:
                    raise ConfigError(
                        f"--tp-size {size}: {param.sources[i]} has {units} x {width} {param.split.along}, and {among} "
                        f"devices can't divide {units}. Use a --tp-size that divides it, or --tp-size 1"
                    )
            for start, stop, _ in _spans(_parts(param, i), 0, among, param.split.padded):
                whole = sum(units * width for units, width in _parts(param, i))  # whose last block may be a part
                if start % block or (stop % block and stop != whole):
                    raise ConfigError(
                        f"--tp-size {size}: {param.sources[i]} would be cut into {stop - start} {param.split.along}, "
                        f"and blocks of {block} share a scale, which can't be cut. Use fewer devices, {instead}{more}"
                    )


def local_param(param: Param, size: int, rank: int = 0) -> Param:
    """The declaration of one device's part. Of experts that come one by one, its sources are the device's own."""
    split, shape = param.split, list(param.shape)
    among = size // split.groups
    if split.groups > 1:
        shape[0] //= split.groups
        own = own_sources(param, rank, size)
        of = lambda names: tuple(names[i] for i in own) if names else ()  # noqa: E731
        param = dataclasses.replace(param, sources=of(param.sources), scales=of(param.scales))
    if split.along in ("whole", "once"):
        return dataclasses.replace(param, shape=tuple(shape))
    widths = [sum(_held(units, among, split.padded) * width for units, width in parts) for parts in split.parts]
    if split.along == "inputs":
        shape[_axis(param)] = widths[0]
        return dataclasses.replace(param, shape=tuple(shape))
    count = len(param.layout.splits)
    splits = tuple(itertools.islice(itertools.cycle(widths), count))
    shape[_axis(param)] = max(sum(splits), param.least)
    interleave = run_length(sum(splits) // 2) if param.layout.interleave else 0
    return dataclasses.replace(param, shape=tuple(shape), layout=Layout(splits, interleave, param.layout.grouped))


def own_sources(param: Param, rank: int, size: int) -> range:
    """Which of a parameter's sources a device has a part of: those of its experts, where each has some of its own."""
    count = len(param.sources)
    if count == 1:
        return range(1)
    each = count // param.split.groups
    group = rank // (size // param.split.groups)
    return range(group * each, (group + 1) * each)


def _axis(param: Param) -> int:
    """The divided axis of `Param.shape`."""
    outputs = param.split.along == "outputs"
    if param.stacked:
        return 1 if outputs else 2
    return len(param.shape) - 1 if outputs else 0


def _held(units: int, size: int, padded: bool) -> int:
    """How many of so many units a device has."""
    return -(-units // size) if padded else max(units // size, 1)


def of_rows(param: Param) -> bool:
    """Whether a device's part of each source is rows of it, so that it lies in one piece of a file, or in few."""
    return param.split.along == "outputs" and _source_axis(param) == 0


def cut(param: Param, i: int, tensor: Any, rank: int, size: int, scale: bool = False) -> Any:
    """A device's part of a parameter's i-th source, or of the tensor of its scales, padded with zeros.

    It may share the tensor's memory. An array of jax's is cut on its device, and rows of a tensor that isn't read yet
    (`of_rows`) aren't read here unless they are in several pieces.
    """
    split, of = param.split, jnp if isinstance(tensor, jax.Array) else np
    tensor, among = own_experts(param, tensor, rank, size), size // split.groups
    rank, size = rank % among, among
    if split.along == "whole" or (split.along == "once" and rank == 0):
        return tensor
    if split.along == "once":
        return of.zeros_like(tensor)
    axis, grain = _source_axis(param), _grain(param, scale)
    if scale:
        values = list(param.stored_values().values())[i]
        if grain is None or tensor.ndim <= axis or tensor.shape[axis] * grain < values[axis]:
            return tensor  # scales of whole outputs, or of a whole matrix
    pieces = []
    for start, stop, lack in _spans(_parts(param, i), rank, size, split.padded):
        piece = tensor[(slice(None),) * axis + (slice(start // grain, -(-stop // grain)),)]
        pieces.append(of.pad(piece, [(0, lack if j == axis else 0) for j in range(piece.ndim)]) if lack else piece)
    return pieces[0] if len(pieces) == 1 else of.concatenate(pieces, axis=axis)


def own_experts(param: Param, tensor: Any, rank: int, size: int) -> Any:
    """Experts of a device's group that a tensor has: all, unless it has all groups'."""
    if len(param.sources) > 1 or (groups := param.split.groups) == 1:
        return tensor
    held, group = len(tensor) // groups, rank // (size // groups)
    return tensor[group * held : (group + 1) * held]


def _parts(param: Param, i: int) -> Parts:
    parts = param.split.parts
    if param.split.along == "inputs":
        return parts[0]
    if param.stacked and param.sources == (param.whole,):  # all sources of an expert are in one tensor
        return sum(parts, ())
    return parts[i % len(parts)]


def _spans(parts: Parts, rank: int, size: int, padded: bool) -> Iterator[tuple[int, int, int]]:
    """(start, stop, lacking) of a device's part of each part."""
    start = 0
    for units, width in parts:
        held, end = _held(units, size, padded), start + units * width
        first = rank * held if padded or units >= size else rank * units // size
        low = min(start + first * width, end)
        high = min(low + held * width, end)
        yield low, high, held * width - (high - low)
        start = end


def _source_axis(param: Param) -> int:
    """The divided axis of a source as the checkpoint has it."""
    outputs, whole = param.split.along == "outputs", param.sources == (param.whole,)
    if param.stacked and whole:
        return 1 if outputs != param.transpose else 2
    if param.stacked:
        return 0 if outputs else 1
    if param.depthwise:
        return 0
    return len(param.shape) - 1 - _axis(param) if param.transpose else param.unit_axes[0] + _axis(param)


def _grain(param: Param, scale: bool) -> int | None:
    """How many numbers along the divided axis an entry of a source stands for, or of its scales; None: all of them."""
    if scale:
        return param.format.per_scale(param.split.along)
    return param.format.inputs_per_entry if param.split.along == "inputs" and param.scales else 1


def joined(param: Param, parts: Sequence[Any], mesh: Mesh) -> Any:
    """One array or `Weight` of what each device has, `parts` in order of rank. On several hosts: of those here."""
    axis = {"whole": None, "once": 0}.get(param.split.along, _axis(param))
    if param.of_matmul and param.format.quantised and not param.stacked and axis is not None:
        axis = 1 - axis  # values are [outputs, inputs]
    if param.split.groups > 1:
        axis = 0  # one device's experts after the other's, whatever it has of them
    if not isinstance(parts[0], Weight):
        return _global(axis, parts, mesh)
    first, along = parts[0], param.split.along
    of = {"values": axis, "scales": axis, "factors": axis, "order": None}
    if axis is not None and axis >= first.values.ndim - 2:
        if param.format.scales_by_input:
            of["scales"] = 2 * first.values.ndim - 3 - axis
        of["factors"] = first.values.ndim - 2 if along == "outputs" else None
        if param.format.per_scale(along) is None:
            of["scales"] = None  # the same for all
    each = {name: [getattr(weight, name) for weight in parts] for name in of if getattr(first, name) is not None}
    return first.replace(**{name: _global(of[name], arrays, mesh) for name, arrays in each.items()})


def _global(axis: int | None, parts: Sequence[Array], mesh: Mesh) -> Array:
    shape = list(parts[0].shape)
    spec = [None] * len(shape)
    if axis is not None:
        shape[axis] *= mesh.size
        spec[axis] = AXIS
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """The pytree with each array that isn't on the mesh copied to all of its devices."""
    there = NamedSharding(mesh, EVERYWHERE)

    def copy(x: Array) -> Array:
        if isinstance(x.sharding, NamedSharding):
            return x
        if jax.process_count() == 1:
            return jax.device_put(x, there)
        return jax.make_array_from_callback(x.shape, there, np.asarray(x).__getitem__)  # each host has it

    return jax.tree.map(copy, tree)


def take(x: Array, ids: Int[np.ndarray, " n"], axis: int) -> Array:
    """These of an array's entries along an axis. If that is divided, so are they, and the last is repeated for
    padding."""
    mesh = None if isinstance(x, jax.core.Tracer) else getattr(x.sharding, "mesh", None)
    if mesh is None:
        return jnp.take(x, ids, axis=axis)
    there = NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))
    ids = np.pad(ids, (0, -len(ids) % mesh.size), mode="edge")
    return jax.jit(partial(jnp.take, axis=axis), out_shardings=there)(x, ids)


def specs_of(tree: Any) -> Any:
    """How the arrays of a pytree are divided."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def on_one(tree: Any) -> Any:
    """The shapes of a pytree's arrays as one device has them. Shapes stay as they are."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape if sharding is None else sharding.shard_shape(x.shape), x.dtype)

    return jax.tree.map(shape, tree)


# --- programs ---


@dataclasses.dataclass(frozen=True)
class Division:
    """The mesh of an engine's programs, and how their params and state are divided.

    `workspaces`: `peers.Workspaces`, whose addresses programs take beside the drafter's params; None if sums are XLA's.
    """

    mesh: Mesh
    params: Any
    draft_params: Any
    state: Any
    workspaces: Any = None

    def without_devices(self) -> Division:
        """Enough of it for another process to trace the programs."""
        mesh = self.mesh.abstract_mesh
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))  # noqa: E731
        workspaces = self.workspaces and self.workspaces._replace(memory=None, peers=jax.tree.map(shape, self.peers))
        return dataclasses.replace(self, mesh=mesh, workspaces=workspaces)

    @property
    def peers(self) -> Any:
        return self.workspaces and self.workspaces.peers


def spread(run: Callable, mesh: Mesh, given: Any, gives: Any) -> Callable:
    """The program that has each device run `run` on its own part of everything. `given`, `gives`: how its arguments and
    results are divided.

    Arguments without elements (no drafts, say) are made on each device: XLA's partitioner for GPUs crashes on them
    (jaxlib 0.11.2).
    """

    def program(*args):
        leaves, tree = jax.tree.flatten(args)
        if all(map(np.size, leaves)):
            return _spread(run, mesh, given, gives)(*args)
        specs = jax.tree.leaves(jax.tree.broadcast(given, args))
        parts = [NamedSharding(mesh, spec).shard_shape(x.shape) for x, spec in zip(leaves, specs, strict=True)]

        def run_with_empty(*held):
            held = iter(held)
            own = [next(held) if x.size else jnp.zeros(part, x.dtype) for x, part in zip(leaves, parts, strict=True)]
            return run(*jax.tree.unflatten(tree, own))

        held, specs = zip(*[(x, spec) for x, spec in zip(leaves, specs, strict=True) if x.size], strict=True)
        return _spread(run_with_empty, mesh, specs, gives)(*held)

    program.__name__ = getattr(run, "__name__", "program")
    return program


def _spread(run, mesh, given, gives):
    return jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)


def on_each(f: Callable[[Array], Array], x: Array) -> Array:
    """`f` of each device's part of an array; divided as that is."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x.sharding, NamedSharding):
        return f(x)
    return jax.jit(spread(f, x.sharding.mesh, (x.sharding.spec,), x.sharding.spec))(x)


def divided(whole: Any, one: Any) -> Any:
    """How a state is divided, from its shapes on a device that has the whole model, and on one of several: what a
    smaller model has less of is divided. All else is the same on all devices."""

    def spec(whole, one):
        axes = [AXIS if a != b else None for a, b in zip(whole.shape, one.shape, strict=True)]
        return PartitionSpec(*axes) if any(axes) else EVERYWHERE

    return jax.tree.map(spec, whole, one)


# --- exchanges between devices, within a program ---


def embed(table: Float[Array, "v d"], tokens: Int[Array, "*b"]) -> Float[Array, "*b d"]:
    """The tokens' embeddings. `table` has this device's part of the vocabulary; one device has each token's."""
    if devices() == 1:
        return table[tokens]
    rows, here = own_rows(table, tokens)
    return total(jnp.where(here[..., None], table[rows], 0))


def own_rows(table: Float[Array, "v d"], tokens: Int[Array, "*b"]) -> tuple[Int[Array, "*b"], Bool[Array, "*b"]]:
    """The tokens' rows in this device's part of a table, and whether they are there; others name any row."""
    if devices() == 1:
        return tokens, jnp.ones(tokens.shape, bool)
    row = tokens - jax.lax.axis_index(AXIS) * len(table)
    return jnp.clip(row, 0, len(table) - 1), (row >= 0) & (row < len(table))


def neighbours_total(x: Float[Array, "*b"], count: int) -> Float[Array, "*b"]:
    """The sum of float32 numbers over each `count` neighbouring devices, in the order of ranks."""
    if count == 1:
        return x
    every = all_gather(jax.lax.bitcast_convert_type(x, jnp.int32))
    own = jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(AXIS) // count * count, count)
    return jax.lax.bitcast_convert_type(own, jnp.float32).sum(0)


def top_tokens(logits: Float[Array, "*b v"], vocab: int | None = None) -> tuple[Int[Array, "*b"], Float[Array, "*b"]]:
    """The argmax, the lowest of equals, and its logit: NaN if there is one. `vocab`: logits are this device's part of
    so many, and devices exchange the best of each; None: they are whole."""
    if devices() == 1 or vocab is None:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return best, jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    logits, first = _unpadded(logits, vocab)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    values, ids = _all_gather_pairs(logits.max(-1), best + first)
    of = jnp.argmax(values, axis=0)[None]
    return tuple(jnp.take_along_axis(each, of, axis=0)[0] for each in (ids, values))


def top_logprobs(
    logits: Float[Array, "*b v"], k: int, vocab: int | None = None, find: Callable = jax.lax.top_k
) -> tuple[Float[Array, "*b k"], Int[Array, "*b k"], Float[Array, "*b 1"]]:
    """The k highest logits, the lowest token of equals first; their tokens; and what to subtract for log-probabilities.

    `vocab`: as of `top_tokens`; each device's k best are exchanged. `find` is `top_k`, or another that finds the same.
    """
    if devices() == 1 or vocab is None:
        return *find(logits, k), jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logits, first = _unpadded(logits, vocab)
    values, ids = find(logits, min(k, logits.shape[-1]))
    own = jax.nn.logsumexp(logits, axis=-1, keepdims=True)  # goes along as one more candidate
    values, ids = jnp.concatenate([values, own], axis=-1), jnp.concatenate([ids + first, ids[..., :1]], axis=-1)
    values, ids = (jnp.moveaxis(each, 0, -2) for each in _all_gather_pairs(values, ids))
    normaliser = jax.nn.logsumexp(values[..., -1], axis=-1, keepdims=True)
    values, ids = (each[..., :-1].reshape(*logits.shape[:-1], -1) for each in (values, ids))
    values, at = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, at, axis=-1), normaliser


def _unpadded(logits: Float[Array, "*b v"], vocab: int) -> tuple[Float[Array, "*b v"], Int[Array, ""]]:
    """This device's logits with -inf where the vocabulary is padded, and its first token."""
    first, width = jax.lax.axis_index(AXIS) * logits.shape[-1], logits.shape[-1]
    return jnp.where(first + jnp.arange(width) < vocab, logits, -jnp.inf), first


def _all_gather_pairs(values: Float[Array, "*b"], ids: Int[Array, "*b"]) -> tuple[Array, Array]:
    """Each device's values, as float32, and ids: [n, *b] both."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    both = all_gather(jnp.stack([bits, ids]))
    return jax.lax.bitcast_convert_type(both[:, 0], jnp.float32), both[:, 1]


def _each(b: int) -> int:
    """How many of b requests a device decides for."""
    return -(-b // devices())


def logits_of_my_requests(logits: Float[Array, "b *q v"], vocab: int | None = None) -> Float[Array, "r *q w"]:
    """The whole logits of the requests that this device decides for. `vocab`: as of `top_tokens`.

    Each of n devices has ceil(b / n) of the requests, in order. If there are fewer, some decide for padding.
    """
    if devices() == 1:
        return logits
    if vocab is None:
        return my_requests(logits)
    padding = _each(len(logits)) * devices() - len(logits)
    logits = jnp.pad(logits, [(0, padding), *[(0, 0)] * (logits.ndim - 1)])
    return jax.lax.all_to_all(logits, AXIS, 0, logits.ndim - 1, tiled=True)[..., :vocab]


def largest(param: Param, magnitudes: Float[Array, "*e n"]) -> Float[Array, "*e m"]:
    """The largest magnitudes of a parameter's outputs, of those in this device's part. Where outputs are divided, of
    all of them."""
    if param.split.along == "outputs":
        magnitudes = magnitudes.max(-1, keepdims=True)
    every, among = jax.lax.all_gather(magnitudes, AXIS), devices() // param.split.groups
    return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(AXIS) // among * among, among).max(0)


def largest_of_blocks(magnitudes: Float[Array, "a b"], per_block: int) -> Float[Array, "a b"]:
    """The largest magnitude of each one's block, which has so many neighbours, also other devices'."""
    every = jax.lax.all_gather(magnitudes, AXIS, tiled=True) if devices() > 1 else magnitudes
    blocks = jnp.pad(every, ((0, -len(every) % per_block), (0, 0))).reshape(-1, per_block, every.shape[1]).max(1)
    first = jax.lax.axis_index(AXIS) * len(magnitudes) if devices() > 1 else 0
    return jax.lax.dynamic_slice_in_dim(jnp.repeat(blocks, per_block, axis=0), first, len(magnitudes))


def my_requests(tree: Any) -> Any:
    """Rows of the requests that this device decides for, from arrays [b, ...] that all devices have."""
    if devices() == 1:
        return tree

    def rows(x: Array) -> Array:
        each = _each(len(x))
        x = jnp.pad(x, [(0, each * devices() - len(x)), *[(0, 0)] * (x.ndim - 1)], mode="edge")
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * each, each)

    return jax.tree.map(rows, tree)


def all_gather_requests(tree: Any, b: int) -> Any:
    """Gather each device's decisions, [b / n, ...], on all of them: [b, ...]."""
    if devices() == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True)[:b], tree)


def bytes_of(tree: Any, beside: Any = None) -> int:
    """Bytes of a tree's arrays on a device, without those that are in `beside` too: a drafter may borrow the
    target's."""
    counted = {id(x) for x in jax.tree.leaves(beside)}
    own = on_one([x for x in jax.tree.leaves(tree) if id(x) not in counted])
    return sum(x.size * x.dtype.itemsize for x in own)
