"""Workspaces in the devices' memory that all devices of a mesh can read, for sums (`pallas.collectives.peer_sum`).

An engine opens them once: each device gets one, all devices learn the addresses, and each reads a word from every other
device. If any of that fails, sums are XLA's (`psum`), and `open_peers` says why. Programs take the addresses as an
operand, because they differ in each process. While a program is traced, a context variable holds them.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import itertools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.pallas import hopper
from jaxspec.pallas.collectives import peer_sum
from jaxspec.pallas.dense.few_rows import Scaled
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.parallel.collectives import AXIS, summing, total

log = logging.getLogger("jaxspec")

MARK = 1000  # what a device writes at the end of its workspace, more than its rank
ALREADY_ENABLED = 704  # a CUDA error


class Peers(NamedTuple):
    """Operands of a program, on a device."""

    table: Int[Array, "n 2"]  # each rank's workspace: the address's low and high word
    rank: Int[Array, "1"]  # this device's


class Workspaces(NamedTuple):
    """An engine's: `memory` must live as long as programs that were given `peers` may run."""

    memory: Int[Array, " words"]
    peers: Peers  # int32[n, 2] on all devices, int32[n] divided among them


_known: contextvars.ContextVar[Peers | None] = contextvars.ContextVar("peers", default=None)


@contextlib.contextmanager
def known(peers: Peers | None) -> Iterator[None]:
    """While this trace goes on, sums go through these; None: through XLA."""
    tokens = _known.set(peers), summing.set(None if peers is None else _total)
    try:
        yield
    finally:
        _known.reset(tokens[0])
        summing.reset(tokens[1])


def _total(x: Float[Array, "*b d"]) -> Float[Array, "*b d"] | None:
    """The sum of all devices' x, or None if it can't go through peers' memory."""
    rows = x.reshape(-1, x.shape[-1])
    if not PEER_SUM.takes(rows):
        return None
    return peer_sum.peer_sum(rows, *_known.get()).reshape(x.shape)


def opened(mesh: Mesh) -> tuple[Workspaces | None, str]:
    """Open peers' memory as `open_peers` does; also say, and log, how sums are made."""
    workspaces, reason = open_peers(mesh)
    sums = "through peers' memory" if reason is None else f"by XLA's psum: {reason}"
    log.info("sums over the %d devices are made %s", mesh.size, sums)
    return workspaces, sums


def open_peers(mesh: Mesh) -> tuple[Workspaces | None, str | None]:
    """The workspaces of the mesh's devices; or None, and why sums can't go through peers' memory."""
    if reason := hopper.kernels_here():
        return None, reason
    if jax.process_count() > 1:
        return None, "devices of several hosts"
    if reason := _no_access([device.local_hardware_id for device in mesh.devices]):
        return None, reason
    (axis,) = mesh.axis_names
    spread, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(axis), PartitionSpec()))
    words = peer_sum.workspace_bytes(mesh.size) // 4

    def make(rank):
        return jnp.full((words,), peer_sum.EMPTY, jnp.int32).at[-1].set(MARK + rank[0])

    try:
        rank = jax.device_put(np.arange(mesh.size, dtype=np.int32), spread)
        memory = jax.block_until_ready(_over(mesh, make, spread.spec)(rank))
        table = jax.device_put(table_of(memory), everywhere)
        read = _over(mesh, lambda table: peer_sum.words_at(table, 4 * (words - 1)), everywhere.spec)(table)
        read = np.asarray(read).reshape(mesh.size, mesh.size)
    except jax.errors.JaxRuntimeError as error:
        return None, f"a peer's memory can't be read: {error}"
    if (read != MARK + np.arange(mesh.size)).any():
        return None, f"other words than theirs were read from peers' memory: {read.tolist()}"
    return Workspaces(memory, Peers(table, rank)), None


def _over(mesh, run, given):
    (axis,) = mesh.axis_names
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=PartitionSpec(axis), check_vma=False))


def table_of(memory: Int[Array, " words"]) -> np.ndarray:
    """int32[n, 2]: the address of each device's part of an array, low and high word."""
    shards = sorted(memory.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.array([shard.data.unsafe_buffer_pointer() for shard in shards], np.uint64).view(np.int32).reshape(-1, 2)


def _no_access(ordinals: list[int]) -> str | None:
    """Why these GPUs can't address each other's memory, or None if they can. Asks the driver and enables it, for this
    process: reading what isn't mapped would fail everything that follows."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"CUDA's driver can't be asked about peers: {error}"
    contexts = {}
    for ordinal in ordinals:
        contexts[ordinal] = ctypes.c_void_p()
        if error := cuda.cuDevicePrimaryCtxRetain(ctypes.byref(contexts[ordinal]), ordinal):
            return f"GPU {ordinal} has no context: CUDA error {error}"
    for one, other in itertools.permutations(ordinals, 2):
        can = ctypes.c_int()
        error = cuda.cuDeviceCanAccessPeer(ctypes.byref(can), one, other)
        if error or not can.value:
            return f"GPU {one} can't address the memory of GPU {other}"
        cuda.cuCtxPushCurrent_v2(contexts[one])
        error = cuda.cuCtxEnablePeerAccess(contexts[other], 0)
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if error not in (0, ALREADY_ENABLED):
            return f"GPU {one} may not address the memory of GPU {other}: CUDA error {error}"
    return None


def summed(
    part: Float[Array, "r d"] | Float[Array, "s r d"],
    x: Float[Array, "r d"] | None = None,
    scale: Float[Array, " d"] | None = None,
    prefetch: Float[Array, "k n"] | None = None,
    *,
    centred: bool = False,
) -> Float[Array, "r d"] | tuple[Float[Array, "r d"], Scaled]:
    """x plus the sum of all devices' `part`, the same bits on each: through peers' memory if it can go there.

    A `part` in float32 comes in parts, which are added up and rounded to bfloat16 first. With a `scale`, as `Scaled`
    rows as well, as of `few_rows.add_product`. `prefetch`: weights that the next kernel reads.
    """
    call = part, x, scale, prefetch, centred
    return choose("a sum over devices", SUM, *call).run(*call)


def summed_in_order(part: Float[Array, "r d"], x: Float[Array, "r d"]) -> Float[Array, "r d"]:
    """x plus the sum of all devices' `part`, in float32 in the order of ranks and rounded once, for any number of
    rows."""
    call = part, x, None, None, False
    return choose("a sum in the order of ranks", SUM_IN_ORDER, *call).run(*call)


def _peers_refused(part: Array, *_: Any) -> str | None:
    if _known.get() is None:
        return "devices that don't read each other's memory"
    return peer_sum.supported(*part.shape[-2:], _rounded(part))


def _by_peers(part, x, scale, prefetch, centred) -> Array | tuple[Array, Scaled]:
    return peer_sum.peer_sum(part, *_known.get(), x, scale, prefetch, centred=centred)


def _by_xla(part, x, scale, prefetch, centred) -> Array | tuple[Array, Scaled]:
    if part.ndim == 3:
        part = part.sum(0).astype(_rounded(part))
    if x is not None and scale is None:
        return x + total(part)
    return peer_sum.reference(x, total(part)[None], scale, centred)


def _gathered(part, x, scale, prefetch, centred) -> Array | tuple[Array, Scaled]:
    return peer_sum.reference(x, jax.lax.all_gather(part, AXIS), scale, centred)


def _rounded(part: Array) -> Any:
    """The dtype in which a part is sent."""
    return jnp.bfloat16 if part.ndim == 3 else part.dtype


PEER_SUM = Implementation("peer_sum", HOPPER, _peers_refused, _by_peers)
SUM = (PEER_SUM, Implementation("psum", ANY, nothing, _by_xla))
SUM_IN_ORDER = (PEER_SUM, Implementation("gathered", ANY, nothing, _gathered))
