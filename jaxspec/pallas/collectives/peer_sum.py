"""The sum of several GPUs' results in one process, added to the residual stream, in one kernel, on Hopper.

A layer whose weights are divided ends in it twice. XLA's `psum` is a kernel of NCCL's, which no graph of kernels takes
in, and the residual sum and the next norm's scale are kernels of their own. Here they are one, and a device waits once,
for the time that a store needs to reach a peer.

Peers' memory is addressed by pointers that are data: operand int32[n, 2], gathered once (`parallel.peers`). jax's own
`remote_ref` would have each call meet all other devices' on the host.

Each thread stores eight columns of its device's part, 16 bytes, into the workspace of every rank, its own too, and
polls its own until those of each rank are there. It sums them in float32, in the order of ranks: so all devices have
the same bits. Data are their own flag: a slot that waits has `EMPTY` in each word, two negative zeros, which a sender
replaces by positive ones. So nothing is fenced, nothing but data crosses the link, and no thread waits for another of
its device. A thread empties each slot once it has read it. Two slots alternate, by a thread's number of calls: a peer
that stores call i + 2 has read this device's call i + 1, whose kernel began after that of call i had emptied the slot.

With four ranks and more, many rows take less time in two exchanges (`two_shots`): each rank sums its share of the
numbers, rounds them, and sends the result to all. A thread has eight columns of each rank's share then.

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
from jaxspec.pallas.hopper.thread_ints import const, i32, mul

VECTOR = 8  # numbers of a thread: 16 bytes
CHUNK = THREADS * VECTOR  # numbers of a block in an exchange
BLOCKS = 1024  # the most of a call, for which a workspace has room
PACKET = 16  # bytes that a thread sends a rank
SLOT = THREADS * PACKET  # bytes that one rank sends a block in an exchange
COUNTS = 4 * THREADS  # bytes of a block's counters of calls, one a thread
EMPTY = 0x80008000 - 2**32  # a word of a slot that waits, as int32: two negative zeros
SECOND = 700_000  # bytes that NVLink carries while a second exchange begins: 2 us
PREFETCH_BLOCKS, PIECE = 96, 1024  # blocks that prefetch, and bytes of each of their threads: 12 MiB, 3 us of memory
REGIONS = 4  # of the weights: each is prefetched from its beginning, as a product's inputs may be divided among blocks
POLLS = 1024  # of a packet, before the clock is looked at
LIMIT = 10_000_000_000  # nanoseconds that a thread waits for a peer before it ends the program with an error
_i32, _f32 = jnp.int32, jnp.float32


def workspace_bytes(ranks: int) -> int:
    """Bytes of a device's workspace. Each word is `EMPTY` before the first call; the last 16 are for the start's
    check."""
    return BLOCKS * (COUNTS + 2 * ranks * SLOT) + PACKET


def two_shots(ranks: int, numbers: int) -> bool:
    """Whether so many numbers are summed in two exchanges: that saves more bytes than a second one costs time."""
    saved = 2 * numbers * (ranks - 1) * (ranks - 2) // ranks
    return saved > SECOND and numbers % (ranks * CHUNK) == 0


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
        grid=(_blocks(len(table), rows * width) + (PREFETCH_BLOCKS if fetched else 0), here),
        grid_names=("block", "rank"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(part, table, first, *given)
    made = made if several else [each[0] for each in made]
    return made[0] if scale is None else (made[0], Scaled(*made[1:]))


def _blocks(ranks, numbers):
    return numbers // CHUNK // (ranks if two_shots(ranks, numbers) else 1)


def _sum(ranks, shape, added, scaled, centred, limit, fetched, *refs):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs), return_type=None)
    def run(ctx, *refs):
        addresses = [_address(ref) for ref in refs]
        prefetch = addresses.pop(3 + added + scaled) if fetched else None
        here = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x))  # the last axis of a grid is x
        block = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.y))
        thread = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
        summing = partial(_emit, ranks, shape, added, scaled, centred, limit, here, block, thread, *addresses)
        if not fetched:
            summing()
            return
        blocks = const(_blocks(ranks, shape[-2] * shape[-1]))
        either = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, block, blocks), has_else=True)
        with ir.InsertionPoint(either.then_block):
            summing()
            scf.yield_([])
        with ir.InsertionPoint(either.else_block):
            _prefetch(prefetch, fetched, _add(mul(arith.subi(block, blocks), THREADS), thread))
            scf.yield_([])

    run(*refs)


def _prefetch(weights, size, thread):
    """Begin to prefetch one thread's piece of the weights into the L2 cache."""
    pieces = min(PREFETCH_BLOCKS * THREADS, size // PIECE // REGIONS * REGIONS)
    region = size // REGIONS // 16 * 16
    at = _add(mul(arith.remui(thread, const(REGIONS)), region), mul(arith.divui(thread, const(REGIONS)), PIECE))
    within = arith.cmpi(arith.CmpIPredicate.ult, thread, const(pieces))
    utils.inline_ptx(f"cp.async.bulk.prefetch.L2.global [$0], {PIECE};", _offset(weights, at), predicate=within)


def _emit(ranks, shape, added, scaled, centred, limit, here, block, thread, *addresses):
    """Emit one thread's sum, as MLIR."""
    (part, table, first, *given), outs = addresses[: 3 + added + scaled], addresses[3 + added + scaled :]
    *splits, rows, width = shape
    me, before, two = arith.addi(here, _load(first)), mul(here, rows * width), two_shots(ranks, rows * width)
    workspaces = [_wide(_load(table, 8 * rank), _load(table, 8 * rank + 4)) for rank in range(ranks)]
    exchange = partial(_exchange, workspaces, me, thread, limit)
    in_bytes = lambda address, i: _offset(address, mul(i, 2))  # noqa: E731
    # This thread's first number in its rank's rows; with two exchanges, that of a rank's share.
    number = lambda share: _add(mul(_add(mul(block, ranks), share) if two else block, CHUNK), mul(thread, VECTOR))  # noqa: E731

    def load_part(number):
        if splits:
            return _sendable(_added_up(part, *splits, here, rows * width, number))
        return _sendable(_load_four(in_bytes(part, _add(before, number))))

    # These loads are issued before any wait.
    numbers = [number(const(rank)) for rank in range(ranks)] if two else [number(None)]
    parts, mine = [load_part(each) for each in numbers], number(me)
    residual = _load_four(in_bytes(given[0], _add(before, mine))) if added else None
    scales = [_load_four(in_bytes(given[-1], arith.remui(each, const(width)))) for each in numbers] if scaled else ()
    total = None
    for got in exchange(mul(block, 2) if two else block, parts if two else parts * ranks):
        got = _all_floats(got)
        total = got if total is None else [arith.addf(a, b) for a, b in zip(total, got, strict=True)]
    if added:
        total = [arith.addf(a, b) for a, b in zip(total, _all_floats(residual), strict=True)]
    sums = [[_rounded(a, b) for a, b in zip(total[::2], total[1::2], strict=True)]]
    if two:
        sums = exchange(_add(mul(block, 2), const(1)), [_sendable(sums[0])] * ranks)
    for i, (each, words) in enumerate(zip(numbers, sums, strict=True)):
        at = _add(before, each)
        _store_four(in_bytes(outs[0], at), words)
        if not scaled:
            continue
        scale = _all_floats(scales[i])
        if centred:
            one = arith.constant(ir.F32Type.get(), 1.0)
            scale = [arith.addf(one, each) for each in scale]
        total = _all_floats(words)
        times = [arith.mulf(a, b) for a, b in zip(total, scale, strict=True)]
        _store_four(in_bytes(outs[1], at), [_rounded(a, b) for a, b in zip(times[::2], times[1::2], strict=True)])
        _squares(total, each, here, block, thread, rows, width, outs[2])


def _exchange(workspaces, me, thread, limit, block, parts):
    """Send each rank its words of `parts` through a block's slots, this one too; return the words from each."""
    ranks, workspace = len(workspaces), workspaces[-1]
    for rank, each in enumerate(workspaces[:-1]):
        workspace = arith.select(_equal(me, const(rank)), each, workspace)
    counter = _offset(workspace, _add(mul(block, COUNTS), mul(thread, 4)))
    count = _load(counter)
    turn = mul(_add(mul(block, 2), arith.andi(count, const(1))), ranks)
    slot = lambda rank: _add(const(BLOCKS * COUNTS), _add(mul(_add(turn, rank), SLOT), mul(thread, PACKET)))  # noqa: E731
    for each, words in zip(workspaces, parts, strict=True):
        _send(_offset(each, slot(me)), words)
    got = _receive([_offset(workspace, slot(const(rank))) for rank in range(ranks)], limit)
    _store(counter, _add(count, const(1)))
    return got


def _added_up(parts, splits, here, size, number):
    """Add up a thread's numbers of a part that comes in `splits` parts of `size` float32 numbers: words of bfloat16."""
    f32, total = ir.F32Type.get(), None
    for split in range(splits):
        at = _add(mul(_add(mul(here, splits), const(split)), size), number)
        words = [word for half in (0, 16) for word in _load_four(_offset(parts, _add(mul(at, 4), const(half))))]
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
    column = arith.remui(number, const(width))
    tile, row = arith.divui(column, const(TILE)), arith.divui(number, const(width))
    base = mul(here, all_tiles * rows)
    at = _add(base, _add(mul(tile, rows), row))
    bits = arith.bitcast(i32(), square)
    _store(_offset(out, mul(at, 4)), bits, _equal(arith.remui(thread, const(lanes)), const(0)))
    for start in range(0, (all_tiles - tiles) * rows, THREADS):
        more = _add(thread, const(start))
        below = arith.cmpi(arith.CmpIPredicate.ult, more, const((all_tiles - tiles) * rows))
        at = _add(base, _add(const(tiles * rows), more))
        _store(_offset(out, mul(at, 4)), const(0), arith.andi(below, _equal(block, const(0))))


def words_at(table: Int[Array, "n 2"], at: int) -> Int[Array, " n"]:
    """The word at this offset of each rank's workspace, read through its pointer."""

    def read(table_g, out_g):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=None)
        def run(ctx, table_ref, out_ref):
            table, out = _address(table_ref), _address(out_ref)
            for rank in range(out_g.shape[0]):
                workspace = _wide(_load(table, 8 * rank), _load(table, 8 * rank + 4))
                _store(_offset(out, const(4 * rank)), _load(workspace, at))  # every thread writes the same

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


def _add(a, b):
    return arith.addi(a, b)


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
    program = f"ld.volatile.global.b32 $0, [$1+{at}];"
    return utils.inline_ptx(program, address, result_types=i32(), has_side_effects=True)


def _load_four(address):
    four = [i32()] * 4
    return utils.inline_ptx(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", address, result_types=four, has_side_effects=True
    )


def _store(address, word, predicate=None):
    utils.inline_ptx("st.volatile.global.b32 [$0], $1;", address, word, predicate=predicate, has_side_effects=True)


def _store_four(address, words):
    utils.inline_ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", address, *words, has_side_effects=True)


def _sendable(words):
    """The words without `EMPTY` ones: of these the zeros become positive."""
    return [arith.select(_equal(word, const(EMPTY)), const(0), word) for word in words]


def _send(address, words):
    """Store words. Each is there by itself, so no order among them matters."""
    store = "st.volatile.global.v4.b32 [$0], {$1, $2, $3, $4};"
    utils.inline_ptx(store, address, *words, has_side_effects=True)


def _receive(slots, limit):
    """Wait for the words of all slots, empty them and return their words: they are polled; past the limit, it traps.

    All are loaded before any is looked at, as each load takes as long as words do on their way; so does the clock,
    which is read only after some polls.
    """
    count = 4 * len(slots)
    words = [f"w{i}" for i in range(count)]
    four = [", ".join(words[i : i + 4]) for i in range(0, count, 4)]
    loads = "\n".join(f"ld.volatile.global.v4.b32 {{{each}}}, [${count + i}];" for i, each in enumerate(four))
    there = "\n".join(f"setp.ne.and.b32 here, {word}, empty, here;" for word in words[1:])
    clear = "\n".join(
        f"st.volatile.global.v4.b32 [${count + i}], {{empty, empty, empty, empty}};" for i in range(len(slots))
    )
    results = "\n".join(f"mov.b32 ${i}, {word};" for i, word in enumerate(words))
    poll = f"""{{
        .reg .pred here, wait, late;
        .reg .b32 {", ".join(words)}, empty, polls;
        .reg .u64 begin, now;
        mov.b32 empty, {EMPTY};
        mov.b32 polls, 0;
        mov.u64 begin, 0;
    again:
        {loads}
        setp.ne.b32 here, w0, empty;
        {there}
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
        {clear}
        {results}
    }}"""
    types = [i32()] * count
    made = utils.inline_ptx(poll, *slots, result_types=types, has_side_effects=True)
    return [made[i : i + 4] for i in range(0, count, 4)]


def _all_floats(words):
    """The numbers of words."""
    return [each for word in words for each in _floats(word)]


def _floats(word):
    """The two bfloat16 numbers of a word as float32, the lower one first."""
    f32 = ir.F32Type.get()
    low = arith.shli(word, const(16))
    high = arith.andi(word, const(-65536))
    return arith.bitcast(f32, low), arith.bitcast(f32, high)


def _rounded(low, high):
    """Two float32 numbers as a word of bfloat16."""
    return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=i32())
