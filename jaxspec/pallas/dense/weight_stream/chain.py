"""The matmuls between two attentions as one persistent kernel, so that weights stream from memory without a pause.

At a few rows a decoder layer is bound by reading its weights, and every kernel of its own costs some microseconds in
which nothing is read: launch, filling the pipeline, draining it. Here one thread block per multiprocessor runs a chain
of stages. Its weight producer knows all addresses in advance and prefetches tiles into a ring, across stages. The
consumers multiply, and hand their results to the next stage through memory (they stay in L2) and a counter that all
blocks watch. As long as the ring has room, it hides the time that a stage waits for others.

Stages, over `rows` (the left operand of the next matmul) and the residual stream `x`:

- `matmul`: partial[s] = rows[:, K_s] @ weight[K_s], the input width cut into splits so that all blocks have work;
- `gated`: rows = silu(gate) * up of rows @ weight, whose columns alternate `HALF` of gate and `HALF` of up;
- `norm`: x += sum of the partials, if there are any; rows = rms_norm(x) * scale.

Between stages rows travel as `[width / step, row, step]`, a tile of one step's inputs contiguous, and partials, in
float32, as `[split, row, width / step, step]`.

This file has all but the products: the division among blocks, the rings, the counters and the norm. How weights of a
format are loaded and multiplied is a `Geometry` of its own, in `unquantised` and `fp8_sums`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.hopper import MULTIPROCESSORS, SHARED_BYTES, WGMMA_ROWS

STAGES = ("matmul", "norm", "gated", "matmul", "norm", "matmul")
GROUP = WGMMA_ROWS  # outputs of one product: the unit in which they are shared out
MAX_GROUPS = 3  # of a tile
MAX_ROWS = 128
BLOCKS = MULTIPROCESSORS  # all must be resident, since they wait for one another
ROOM = SHARED_BYTES - 1024  # for tiles and rings; the rest is for barriers
_i32 = jnp.int32


@dataclass(frozen=True)
class Share:
    """How one matmul is shared out: `columns` outputs a tile, inputs in `splits` parts, a tile's part one item.

    A step takes `step` inputs. The last tile may have fewer columns.
    """

    inputs: int
    outputs: int
    columns: int
    splits: int
    step: int

    @property
    def tiles(self) -> int:
        return -(-self.outputs // self.columns)

    @property
    def items(self) -> int:
        return self.tiles * self.splits

    @property
    def groups(self) -> int:
        return self.columns // GROUP

    @property
    def steps(self) -> int:
        return self.inputs // self.step

    def bounds(self, item: Any) -> tuple[Any, Any, Any, Any]:
        """An item's tile of columns, its split, and the input steps from and to."""
        tile, split = lax.rem(item, _i32(self.tiles)), lax.div(item, _i32(self.tiles))
        low, high = (lax.div((split + end) * self.steps, _i32(self.splits)) for end in (0, 1))
        return tile, split, low, high


def share_out(inputs: int, outputs: int, rows: int, gated: bool, step: int, item: int) -> Share:
    """Choose the share whose busiest block has least to do; ties go to fewer splits and wider tiles.

    A tile of the left operand is read again for every tile of columns, and split matmuls write and read partials: both
    from L2, counted at a fraction of the weights' bytes. `item`: bytes of a weight's number. A gated matmul needs whole
    sums, so it has no splits. If a number has more than a byte, tiles of columns are even.
    """
    steps = inputs // step

    def cost(columns: int, splits: int) -> float:
        tiles = -(-outputs // columns)
        busiest = -(-tiles * splits // BLOCKS) * -(-steps // splits) * columns
        partials = 4 * rows * splits / inputs
        return busiest * (1 + 0.4 / item * rows / columns) * (1 + 0.5 / item * partials)

    _, splits, columns = min(
        (cost(columns, splits), splits, -columns)
        for columns in range(GROUP, (MAX_GROUPS + 1) * GROUP, GROUP)
        for splits in ((1,) if gated else (1, 2, 3, 4, 6, 8))
        if (outputs % columns == 0 or item == 1) and (splits == 1 or steps >= 4 * splits)
    )
    return Share(inputs, outputs, -columns, splits, step)


@dataclass(frozen=True)
class Geometry:
    """The kernel's static sizes, and the operations that depend on the weights' format, which subclasses define.

    `rows` of `padded` are valid. `widest`: groups of outputs of the widest tile. `width`: of the residual stream.

    - `step`: inputs of one step; its rows come in `row_pieces`.
    - `warpgroups`: how many multiply; `registers` of each of their threads, `other_registers` of those that copy. A
      block has 65,536 divided by its threads for each, in multiples of eight, and waits for ever for more.
    - `weight_slots`, `row_slots`: of each ring.
    - `norming`: warpgroups that norm a row together; `sums_bytes`: of shared memory, for sums over a warpgroup's warps.
    """

    rows: int
    padded: int
    widest: int
    width: int
    name: ClassVar[str]
    step: ClassVar[int]
    row_pieces: ClassVar[int] = 1
    warpgroups: ClassVar[int]
    registers: ClassVar[int]
    other_registers: ClassVar[int] = 40
    weight_slots: ClassVar[int]
    row_slots: ClassVar[int]
    norming: ClassVar[int] = 1
    sums_bytes: ClassVar[int] = 2048

    @classmethod
    def share(cls, operands: tuple, padded: int, gated: bool) -> Share:
        """How a matmul by these weights is shared out. A gated one needs whole sums, so it has no splits."""
        raise NotImplementedError

    def scratch(self, dtype: Any, interpret: Any) -> dict[str, Any]:
        """Shared memory for the weights' ring `weight_s` and the rows' ring `rows_s`, and for results."""
        raise NotImplementedError

    def fetch_weights(self, block: Block, i: int, k: Any, tile: Any, slot: Any) -> None:
        """Begin to copy stage i's weights of step k to a slot, with `widest` arrivals."""
        raise NotImplementedError

    def fetch_rows(self, block: Block, i: int, piece: Any, slot: Any) -> None:
        """Begin to copy a piece of stage i's rows to a slot."""
        raise NotImplementedError

    def norm(self, block: Block, i: int, warpgroup: Any, norm: tuple[float, bool]) -> None:
        """A warpgroup's part of this block's rows in stage i. `norm`: eps, and whether it is centred."""
        _, _, (scale,), reads, writes = block.work[i]
        block.wait_for(i - 1)

        def row(j, none):
            _norm(block.index + j * BLOCKS, scale, norm, reads, writes, block.scratch["norm_s"])
            return none

        lax.fori_loop(_i32(0), block.mine(block.items(i)), row, _i32(0))

    def multiply(self, block: Block, i: int, warpgroup: Any, item: Any, step: Any) -> Any:
        """Accumulate one item as its tiles arrive and write it; `step`: how many this block has used so far."""
        raise NotImplementedError


def run(
    kind: type[Geometry],
    x: jax.Array,
    rows: jax.Array,
    weights: list[tuple],
    scales: list[jax.Array],
    eps: float,
    interpret: Any,
    chain: tuple[str, ...] = STAGES,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run the stages of `chain` on attention's output `rows` and the residual stream `x`.

    Returns that stream, and the partials. In interpret mode, which has no counters between blocks, each stage is a
    kernel of its own.
    """
    b, padded = len(x), -(-len(x) // 8) * 8
    pad = lambda a: jnp.pad(a, ((0, padded - b), (0, 0)))  # noqa: E731
    out, partials = run_stages(kind, chain, b, pad(x), pad(rows), weights, scales, eps, interpret, centred)
    return out[:b], partials[:, :b]


def run_stages(
    kind: type[Geometry],
    stages: tuple[str, ...],
    valid: int,
    x: jax.Array,
    rows: jax.Array | None,
    weights: list[tuple],
    scales: list[jax.Array],
    eps: float,
    interpret: Any,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run some stages that end in a matmul, over a multiple of eight rows, the first `valid` of them valid; results
    have all rows.

    `rows` is the left operand of the first stage; None if that is a norm, which then adds nothing to `x`. `centred`:
    whether norms are, see `models.description.Norm`.
    """
    padded, d = x.shape
    held = {"x": x.reshape(padded, d // kind.step, kind.step)} | ({} if rows is None else {"rows": rows})
    weights, scales = list(weights), [(s.reshape(-1, kind.step),) for s in scales]
    for together in [(stage,) for stage in stages] if interpret else [stages]:
        taken = [(scales if stage == "norm" else weights).pop(0) for stage in together]
        held = _launch(kind, together, valid, held, taken, (eps, centred), interpret)
    return held["x"].reshape(padded, d), held["partial"].reshape(len(held["partial"]), padded, -1)


def _launch(kind, stages, b, held, taken, norm, interpret):
    """Launch one kernel for `stages`. `held` has x, and rows or partial, from the kernel before; so has the result."""
    x = held["x"]
    padded, groups, step = x.shape
    shares = [
        None if stage == "norm" else kind.share(operands, padded, stage == "gated")
        for stage, operands in zip(stages, taken, strict=True)
    ]
    # Whatever passes between stages is an output of the kernel, stage by stage.
    shape = jax.ShapeDtypeStruct
    outs: list[dict[str, Any]] = []
    for stage, share in zip(stages, shares, strict=True):
        if stage == "norm":
            added = {"x": shape(x.shape, x.dtype)} if "partial" in held or outs else {}
            outs.append({"rows": shape((groups, padded, step), x.dtype)} | added)
        elif stage == "gated":
            outs.append({"rows": shape((share.outputs // 2 // step, padded, step), x.dtype)})
        else:
            outs.append({"partial": shape((share.splits, padded, share.outputs // step, step), jnp.float32)})

    geometry = kind(b, padded, max((s.groups for s in shares if s), default=1), groups * step)
    warpgroups = geometry.warpgroups
    names, counts = [tuple(out) for out in outs], [len(operands) for operands in taken]
    results = plgpu.kernel(
        partial(_kernel, stages, shares, geometry, tuple(held), counts, names, norm),
        kernel_name=kind.name,
        out_type=tuple(s for out in outs for s in out.values()),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=warpgroups + 2,
        thread_name="warpgroup",
        scratch_types=geometry.scratch(x.dtype, interpret)
        | dict(
            norm_s=plgpu.SMEM((groups, step), x.dtype),
            weight_full=plgpu.Barrier(num_arrivals=geometry.widest, num_barriers=geometry.weight_slots),
            weight_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=geometry.weight_slots),
            rows_full=plgpu.Barrier(num_barriers=geometry.row_slots),
            rows_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=geometry.row_slots),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=geometry.sums_bytes
        ),
        interpret=interpret,
    )(*held.values(), *[array for operands in taken for array in operands])
    results, left = iter(results), {"x": x}
    for out in outs:
        left = {"x": left["x"]} | {name: next(results) for name in out}
    return left


class Stage(NamedTuple):
    """A stage's name, its share if it is a matmul, its weights or scales, and the arrays that it reads and writes."""

    name: str
    share: Share | None
    operands: list[Any]
    reads: dict[str, Any]
    writes: dict[str, Any]


class Block(NamedTuple):
    """One thread block's part of the chain."""

    geometry: Geometry
    work: list[Stage]
    done: list[Any]  # counters of all but the last stage
    index: Any
    scratch: dict[str, Any]

    def items(self, i: int) -> int:
        """Items of stage i in all blocks: those of its share, or rows if it is a norm."""
        share = self.work[i].share
        return share.items if share else self.geometry.rows

    def mine(self, count: int) -> Any:
        """How many of `count` items are this block's: it takes index, index + BLOCKS, ..."""
        return lax.div(_i32(count + BLOCKS - 1) - self.index, _i32(BLOCKS))

    def wait_for(self, i: int) -> None:
        """Wait until all blocks that have work in stage i have done it."""
        if i >= 0:
            each = self.geometry.warpgroups if self.work[i].share else self.geometry.norming
            signals = min(self.items(i), BLOCKS) * each
            plgpu.semaphore_wait(self.done[i], signals, decrement=False, memory_scope="gpu")


def _kernel(stages, shares, geometry, held, counts, outs, norm, *refs, **scratch):
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    warpgroups = geometry.warpgroups
    refs = iter(refs)
    given = {name: next(refs) for name in held}
    taken = [[next(refs) for _ in range(count)] for count in counts]
    work = []
    for stage, share, operands, names in zip(stages, shares, taken, outs, strict=True):
        out = {name: next(refs) for name in names}
        work.append(Stage(stage, share, operands, dict(given), out))
        given |= out
    done = [pl.get_global(plgpu.SemaphoreType.REGULAR) for _ in stages[:-1]]
    block = Block(geometry, work, done, index, scratch)
    pl.when(warpgroup == warpgroups)(partial(_bring_weights, block))
    pl.when(warpgroup == warpgroups + 1)(partial(_bring_rows, block))
    pl.when(warpgroup < warpgroups)(partial(_consume, block, warpgroup, norm))


def _bring_weights(block: Block) -> None:
    """Prefetch weights into their ring, across stages: one warpgroup does only this."""
    geometry = block.geometry
    plgpu.set_max_registers(geometry.other_registers, action="decrease")
    fetch = partial(geometry.fetch_weights, block)
    _produce(block, fetch, block.scratch["weight_empty"], geometry.weight_slots)


def _bring_rows(block: Block) -> None:
    """Load rows into their ring, as stages hand them over: one warpgroup does only this."""
    geometry = block.geometry
    plgpu.set_max_registers(geometry.other_registers, action="decrease")

    def fetch(i, piece, tile, slot):
        geometry.fetch_rows(block, i, piece, slot)

    empty, pieces = block.scratch["rows_empty"], geometry.row_pieces
    _produce(block, fetch, empty, geometry.row_slots, pieces, before=lambda i: block.wait_for(i - 1))


def _produce(block, fetch, empty, slots, pieces=1, before=lambda i: None):
    """Run `fetch(stage index, piece of the inputs, column tile, slot)` over this block's items, as slots come free.

    `pieces`: how many a step has.
    """
    step = _i32(0)
    for i, (_, share, *_) in enumerate(block.work):
        if share is None:
            continue

        def item(j, step, i=i, share=share):
            tile, _, low, high = share.bounds(block.index + j * BLOCKS)

            def one(k, step):
                slot = lax.rem(step, _i32(slots))
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                fetch(i, k, tile, slot)
                return step + 1

            return lax.fori_loop(low * pieces, high * pieces, one, step)

        before(i)
        step = lax.fori_loop(_i32(0), block.mine(share.items), item, step)

    def observe(step, _):  # a barrier must not be left with an arrival that wasn't waited for
        plgpu.barrier_wait(empty.at[lax.rem(step, _i32(slots))])
        return _

    lax.fori_loop(jnp.maximum(step - slots, 0), step, observe, _i32(0))


def _consume(block: Block, warpgroup: Any, norm: tuple[float, bool]) -> None:
    """Multiply and norm, and signal each stage's end: the other warpgroups do this."""
    geometry = block.geometry
    plgpu.set_max_registers(geometry.registers, action="increase")
    step = _i32(0)
    for i, (_, share, *_) in enumerate(block.work):
        if share is None:
            signals = (lax.div(warpgroup, _i32(geometry.norming)) == 0) & (block.index < block.items(i))
            pl.when(signals)(partial(geometry.norm, block, i, warpgroup, norm))
        else:
            multiply = partial(geometry.multiply, block, i, warpgroup)
            step = lax.fori_loop(
                _i32(0), block.mine(share.items), lambda j, step, m=multiply: m(block.index + j * BLOCKS, step), step
            )
            signals = block.index < block.items(i)
        plgpu.wait_smem_to_gmem(0)
        if i + 1 < len(block.work):
            pl.when(signals)(lambda i=i: plgpu.semaphore_signal(block.done[i], memory_scope="gpu"))


def _norm(row, scale, norm, reads, writes, norm_s):
    """Norm one row: add the partials to the residual stream, normalise, scale. Rounds where the plain layers do."""
    x = reads["x"][row]
    if "partial" in reads:
        partials = reads["partial"]
        total = partials[0, row]
        for split in range(1, partials.shape[0]):
            total = total + partials[split, row]
        x = (x.astype(jnp.float32) + total.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)
    normed = norm_of(x, scale, *norm)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    norm_s[...] = normed.astype(x.dtype)
    if "x" in writes:
        writes["x"][row] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(norm_s, writes["rows"].at[:, row])


def norm_of(x, scale, eps, centred=False):
    """A row's norm, of a warpgroup, in float32; `scale` is in memory."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / math.prod(x.shape) + eps)
    if centred:
        return normed * (1 + scale[...].astype(jnp.float32))
    return normed.astype(x.dtype).astype(jnp.float32) * scale[...].astype(jnp.float32)
