"""The sum of several GPUs' results in one process, added to the residual stream, in one kernel, on Hopper.

A layer whose weights are divided ends in it twice. XLA's `psum` is a kernel of NCCL's, which no graph of kernels takes
in, and the residual sum and the next norm's scale are kernels of their own. Here they are one, and a device waits once,
for the time that a store needs to reach a peer.

Peers' memory is addressed by pointers that are data: operand int32[n, 2], gathered once (`parallel.peers`). jax's own
`remote_ref` would have each call meet all other devices' on the host.

Each thread has eight columns of a row. It stores its device's part into the workspace of every peer, in packets of 16
bytes: data, a flag, data, a flag. It polls its own workspace until the flags of each rank's packets are those
of this call, and sums in float32, in the order of ranks: so all devices have the same bits. A flag arrives with its
data, so nothing is fenced, and no thread waits for another of its device. The flag is a thread's number of calls: it
only grows, and one that is too old differs from the expected one, when it has wrapped, too. Two buffers alternate: a
peer that writes call i + 2 has read this device's call i + 1, which began after call i had been read.

Meanwhile memory is idle. Further blocks prefetch some of the next kernel's weights into the L2 cache (`prefetch`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf
from jaxtyping import Array, Float, Int

from jaxspec.pallas.dense.few_rows.layer import Scaled
from jaxspec.pallas.dense.few_rows.share import TILE, tiles_of_squares
from jaxspec.pallas.hopper import THREADS
from jaxspec.pallas.hopper.export import lower_once

VECTOR = 8  # numbers of a thread: 16 bytes
CHUNK = THREADS * VECTOR  # numbers of a block
BLOCKS = 512  # the most of a call, for which a workspace has room
PACKET = 16  # bytes, half of them data
COUNTS = 4 * THREADS  # bytes of a block's counters of calls, one a thread
PREFETCH_BLOCKS, PIECE = 96, 1024  # blocks that prefetch, and bytes of each of their threads: 12 MiB, 3 us of memory
REGIONS = 4  # of the weights: each is prefetched from its beginning, as a product's inputs may be divided among blocks
POLLS = 1024  # of a packet, before the clock is looked at
LIMIT = 10_000_000_000  # nanoseconds that a thread waits for a peer before it ends the program with an error
_i32, _f32 = jnp.int32, jnp.float32


def workspace_bytes(ranks: int) -> int:
    """Bytes of a device's workspace. They must be zero before the first call; the last 16 are for the start's check."""
    return BLOCKS * (COUNTS + 2 * ranks * _slot()) + PACKET


def _slot() -> int:
    """Bytes that one rank sends a block in a call."""
    return THREADS * (VECTOR * 2 // 8) * PACKET


def supported(rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernel can't sum so many rows of this width, or None if it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if width % TILE or rows * width % CHUNK:
        return f"{rows} rows of {width}; supported: multiples of {TILE} columns and {CHUNK} numbers"
    if rows * width > BLOCKS * CHUNK:
        return f"{rows} rows of {width}; supported: {BLOCKS * CHUNK} numbers"
    return None


def reference(
    x: Float[Array, "r d"] | None, parts: Float[Array, "n r d"], scale: Float[Array, " d"] | None = None,
    centred: bool = False,
) -> Float[Array, "r d"] | tuple[Float[Array, "r d"], Scaled]:  # fmt: skip
    """Reference of `peer_sum` in plain jnp, given all ranks' parts: summed in float32 in the order of ranks, rounded
    once."""
    total = parts[0].astype(_f32)
    for part in parts[1:]:
        total = total + part.astype(_f32)
    out = (total if x is None else total + x.astype(_f32)).astype(parts.dtype)
    if scale is None:
        return out
    wide = out.astype(_f32)
    squares = jnp.sum(jnp.square(wide).reshape(len(out), -1, TILE), axis=2).T
    squares = jnp.pad(squares, ((0, tiles_of_squares(out.shape[1]) - len(squares)), (0, 0)))
    return out, Scaled((wide * (scale.astype(_f32) + centred)).astype(out.dtype), squares)


@lower_once("peer_sum", "centred", "limit")
def peer_sum(
    part: Float[Array, "*l r d"] | Float[Array, "*l s r d"],
    table: Int[Array, "n 2"],
    first: Int[Array, "1"],
    x: Float[Array, "*l r d"] | None = None,
    scale: Float[Array, " d"] | None = None,
    prefetch: Float[Array, "k n"] | None = None,
    *,
    centred: bool = False,
    limit: int = LIMIT,
    interpret: Any = False,
) -> Float[Array, "*l r d"] | tuple[Float[Array, "*l r d"], Scaled]:
    """x plus the sum of all ranks' `part`, in bfloat16, summed in float32 in the order of ranks and rounded once.

    A `part` in float32 comes in parts itself, as `weight_stream` leaves it: they are added up and rounded to bfloat16
    before they are sent. `table`: the address of each rank's workspace, low and high word. `first`: this device's rank.
    With the `scale` of the norm that comes next, the sums come as `Scaled` rows as well, as in `few_rows.add_product`.
    `prefetch`: weights that the next kernel reads. A leading axis of `part` and `x` has an entry for each of several
    ranks on this device, from `first` on; for tests on one GPU. All ranks must call it in the same order with the same
    shapes. One that waits longer than `limit` nanoseconds for another traps: the program fails, and so does all that
    the process does on this GPU afterwards.

    **Raises:** `NotImplementedError` for interpret mode, which has no peers.
    """
    if interpret:
        raise NotImplementedError("peer_sum writes to other devices' memory, which interpret mode doesn't have")
    splits = part.dtype == _f32
    several = part.ndim == 3 + splits
    part = part if several else part[None]
    x = x if x is None or several else x[None]
    here, *splits, rows, width = part.shape
    out = jax.ShapeDtypeStruct((here, rows, width), jnp.bfloat16)
    squares = jax.ShapeDtypeStruct((here, tiles_of_squares(width), rows), _f32)
    given = [each for each in (x, scale, prefetch) if each is not None]
    fetched = 0 if prefetch is None else prefetch.size * prefetch.dtype.itemsize
    made = plgpu.kernel(
        partial(_sum, len(table), (*splits, rows, width), x is not None, scale is not None, centred, limit, fetched),
        kernel_name="peer_sum",
        out_type=[out] if scale is None else [out, out, squares],
        grid=(rows * width // CHUNK + (PREFETCH_BLOCKS if fetched else 0), here),
        grid_names=("block", "rank"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(part, table, first, *given)
    made = made if several else [each[0] for each in made]
    return made[0] if scale is None else (made[0], Scaled(*made[1:]))


def _sum(ranks, shape, added, scaled, centred, limit, fetched, *refs):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs), return_type=None)
    def run(ctx, *refs):
        addresses, i32 = [_address(ref) for ref in refs], ir.IntegerType.get_signless(32)
        prefetch = addresses.pop(3 + added + scaled) if fetched else None
        here = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))  # the last axis of a grid is x
        block = arith.index_cast(i32, gpu.block_id(gpu.Dimension.y))
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        summing = partial(_emit, ranks, shape, added, scaled, centred, limit, here, block, thread, *addresses)
        if not fetched:
            summing()
            return
        blocks = _c(shape[-2] * shape[-1] // CHUNK)
        either = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, block, blocks), has_else=True)
        with ir.InsertionPoint(either.then_block):
            summing()
            scf.yield_([])
        with ir.InsertionPoint(either.else_block):
            _prefetch(prefetch, fetched, _add(_mul(arith.subi(block, blocks), THREADS), thread))
            scf.yield_([])

    run(*refs)


def _prefetch(weights, size, thread):
    """Begin to prefetch one thread's piece of the weights into the L2 cache."""
    pieces = min(PREFETCH_BLOCKS * THREADS, size // PIECE // REGIONS * REGIONS)
    region = size // REGIONS // 16 * 16
    at = _add(_mul(arith.remui(thread, _c(REGIONS)), region), _mul(arith.divui(thread, _c(REGIONS)), PIECE))
    within = arith.cmpi(arith.CmpIPredicate.ult, thread, _c(pieces))
    utils.inline_ptx(f"cp.async.bulk.prefetch.L2.global [$0], {PIECE};", _offset(weights, at), predicate=within)


def _emit(ranks, shape, added, scaled, centred, limit, here, block, thread, *addresses):
    """Emit one thread's sum, as MLIR."""
    (part, table, first, *given), outs = addresses[: 3 + added + scaled], addresses[3 + added + scaled :]
    *splits, rows, width = shape
    me = arith.addi(here, _load(first))
    workspaces = [_wide(_load(table, 8 * rank), _load(table, 8 * rank + 4)) for rank in range(ranks)]
    own = workspaces[-1]
    for rank, workspace in enumerate(workspaces[:-1]):
        own = arith.select(_equal(me, _c(rank)), workspace, own)

    number = _add(_mul(block, CHUNK), _mul(thread, VECTOR))  # of this thread's first, in its rank's rows
    at = _add(_mul(here, rows * width), number)
    in_bytes = lambda address, i: _offset(address, _mul(i, 2))  # noqa: E731
    words = _added_up(part, *splits, here, rows * width, number) if splits else _load_four(in_bytes(part, at))
    # These loads are issued before any wait.
    residual = _load_four(in_bytes(given[0], at)) if added else None
    scale = _load_four(in_bytes(given[-1], arith.remui(number, _c(width)))) if scaled else None
    counter = _offset(own, _add(_mul(block, COUNTS), _mul(thread, 4)))
    flag = _add(_load(counter), _c(1))
    turn = _add(_mul(block, 2), arith.andi(flag, _c(1)))
    packets = lambda rank, half: _add(  # noqa: E731
        _c(BLOCKS * COUNTS + half * THREADS * PACKET),
        _add(_mul(_add(_mul(turn, ranks), rank), _slot()), _mul(thread, PACKET)),
    )
    halves = words[:2], words[2:]
    for rank, workspace in enumerate(workspaces):
        peer = arith.cmpi(arith.CmpIPredicate.ne, me, _c(rank))
        for half, pair in enumerate(halves):
            _send(_offset(workspace, packets(me, half)), *pair, flag, peer)
    total = None
    for rank in range(ranks):
        mine = arith.extui(ir.IntegerType.get_signless(32), _equal(me, _c(rank)))
        receive = partial(_receive, flag=flag, mine=mine, limit=limit)
        got = [receive(_offset(own, packets(_c(rank), half)), pair) for half, pair in enumerate(halves)]
        got = [each for word in (word for half in got for word in half) for each in _floats(word)]
        total = got if total is None else [arith.addf(a, b) for a, b in zip(total, got, strict=True)]
    _store(counter, flag)
    if added:
        residual = [each for word in residual for each in _floats(word)]
        total = [arith.addf(a, b) for a, b in zip(total, residual, strict=True)]
    total = [_rounded(a, b) for a, b in zip(total[::2], total[1::2], strict=True)]
    _store_four(in_bytes(outs[0], at), total)
    if scaled:
        scale = [each for word in scale for each in _floats(word)]
        if centred:
            one = arith.constant(ir.F32Type.get(), 1.0)
            scale = [arith.addf(one, each) for each in scale]
        total = [each for word in total for each in _floats(word)]
        times = [arith.mulf(a, b) for a, b in zip(total, scale, strict=True)]
        _store_four(in_bytes(outs[1], at), [_rounded(a, b) for a, b in zip(times[::2], times[1::2], strict=True)])
        _squares(total, number, here, block, thread, rows, width, outs[2])


def _added_up(parts, splits, here, size, number):
    """Add up a thread's numbers of a part that comes in `splits` parts of `size` float32 numbers: words of bfloat16."""
    f32, total = ir.F32Type.get(), None
    for split in range(splits):
        at = _add(_mul(_add(_mul(here, splits), _c(split)), size), number)
        words = [word for half in (0, 16) for word in _load_four(_offset(parts, _add(_mul(at, 4), _c(half))))]
        each = [arith.bitcast(f32, word) for word in words]
        total = each if total is None else [arith.addf(a, b) for a, b in zip(total, each, strict=True)]
    return [_rounded(a, b) for a, b in zip(total[::2], total[1::2], strict=True)]


def _squares(total, number, here, block, thread, rows, width, out):
    """Write the sum of a tile's squares, which eight neighbouring threads have, and zeros after all tiles'."""
    lanes, tiles, all_tiles = TILE // VECTOR, width // TILE, tiles_of_squares(width)
    square = arith.mulf(total[0], total[0])
    for each in total[1:]:
        square = arith.addf(square, arith.mulf(each, each))
    for distance in (1, 2, 4):
        square = arith.addf(square, utils.shfl_bfly(square, distance))
    column = arith.remui(number, _c(width))
    tile, row = arith.divui(column, _c(TILE)), arith.divui(number, _c(width))
    base = _mul(here, all_tiles * rows)
    at = _add(base, _add(_mul(tile, rows), row))
    bits = arith.bitcast(ir.IntegerType.get_signless(32), square)
    _store(_offset(out, _mul(at, 4)), bits, _equal(arith.remui(thread, _c(lanes)), _c(0)))
    for start in range(0, (all_tiles - tiles) * rows, THREADS):
        more = _add(thread, _c(start))
        below = arith.cmpi(arith.CmpIPredicate.ult, more, _c((all_tiles - tiles) * rows))
        at = _add(base, _add(_c(tiles * rows), more))
        _store(_offset(out, _mul(at, 4)), _c(0), arith.andi(below, _equal(block, _c(0))))


def words_at(table: Int[Array, "n 2"], at: int) -> Int[Array, " n"]:
    """The word at this offset of each rank's workspace, read through its pointer."""

    def read(table_g, out_g):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=None)
        def run(ctx, table_ref, out_ref):
            table, out = _address(table_ref), _address(out_ref)
            for rank in range(out_g.shape[0]):
                workspace = _wide(_load(table, 8 * rank), _load(table, 8 * rank + 4))
                _store(_offset(out, _c(4 * rank)), _load(workspace, at))  # every thread writes the same

        run(table_g, out_g)

    return plgpu.kernel(
        read,
        kernel_name="peer_word",
        out_type=jax.ShapeDtypeStruct((len(table),), _i32),
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(table)


# --- numbers and memory of one thread, as MLIR ---


def _c(value):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _add(a, b):
    return arith.addi(a, b)


def _mul(a, by):
    return arith.muli(a, _c(by))


def _equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _wide(low, high):
    i64 = ir.IntegerType.get_signless(64)
    return arith.ori(arith.extui(i64, low), arith.shli(arith.extui(i64, high), arith.constant(i64, 32)))


def _address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def _offset(address, offset):
    """The address plus `offset` bytes, an unsigned 32-bit number."""
    return arith.addi(address, arith.extui(ir.IntegerType.get_signless(64), offset))


def _load(address, at=0):
    i32 = ir.IntegerType.get_signless(32)
    return utils.inline_ptx(f"ld.volatile.global.b32 $0, [$1+{at}];", address, result_types=i32, has_side_effects=True)


def _load_four(address):
    four = [ir.IntegerType.get_signless(32)] * 4
    return utils.inline_ptx(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", address, result_types=four, has_side_effects=True
    )


def _store(address, word, predicate=None):
    utils.inline_ptx("st.volatile.global.b32 [$0], $1;", address, word, predicate=predicate, has_side_effects=True)


def _store_four(address, words):
    utils.inline_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", address, *words, has_side_effects=True)


def _send(address, first, second, flag, peer):
    """Store a packet, if it is for a `peer`. Eight bytes arrive together, so data always come with their flag."""
    packet = address, first, flag, second
    store = "st.volatile.global.v4.b32 [$0], {$1, $2, $3, $2};"
    utils.inline_ptx(store, *packet, predicate=peer, has_side_effects=True)


def _receive(address, own, flag, mine, limit):
    """Wait for a packet with these flags, and return its data: the address is polled; past the limit, it traps.

    If the packet is `mine`, the data are this rank's `own`, which wasn't sent. The clock is read only after some polls,
    as that takes as long as a packet does.
    """
    two = [ir.IntegerType.get_signless(32)] * 2
    poll = f"""{{
        .reg .pred here, wait, late;
        .reg .b32 a, b, first, second, polls;
        .reg .u64 begin, now;
        mov.b32 a, $4;
        mov.b32 b, $5;
        setp.ne.b32 here, $6, 0;
        @here bra done;
        mov.b32 polls, 0;
        mov.u64 begin, 0;
    again:
        ld.volatile.global.v4.b32 {{a, first, b, second}}, [$2];
        setp.eq.b32 here, first, $3;
        setp.eq.and.b32 here, second, $3, here;
        @here bra done;
        add.u32 polls, polls, 1;
        setp.lt.u32 wait, polls, {POLLS};
        @wait bra again;
        mov.b32 polls, 0;
        mov.u64 now, %globaltimer;
        setp.eq.u64 wait, begin, 0;
        @wait mov.u64 begin, now;
        sub.u64 now, now, begin;
        setp.gt.u64 late, now, {limit};
        @late trap;
        bra again;
    done:
        mov.b32 $0, a;
        mov.b32 $1, b;
    }}"""
    return utils.inline_ptx(poll, address, flag, *own, mine, result_types=two, has_side_effects=True)


def _floats(word):
    """The two bfloat16 numbers of a word as float32, the lower one first."""
    f32 = ir.F32Type.get()
    low = arith.shli(word, _c(16))
    high = arith.andi(word, _c(-65536))
    return arith.bitcast(f32, low), arith.bitcast(f32, high)


def _rounded(low, high):
    """Two float32 numbers as a word of bfloat16."""
    i32 = ir.IntegerType.get_signless(32)
    return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=i32)
