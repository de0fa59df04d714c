"""The matmuls between two attentions as one persistent kernel, so that weights stream from memory without a pause.

At a few rows a decoder layer is bound by reading its weights, and every kernel of its own costs some microseconds in
which nothing is read: launch, filling the pipeline, draining it. Here one thread block per multiprocessor runs a chain
of stages. Its weight producer knows all addresses in advance and keeps a ring of tiles full, across stages. The
consumers multiply, and hand their results to the next stage through memory (they stay in L2) and a counter that all
blocks watch. As long as the ring has room, it hides the time that a stage waits for others.

Stages, over `rows` (the left operand of the next matmul) and the residual stream `x`:

- `matmul`: partial[s] = rows[:, K_s] @ weight[K_s], the input width cut into splits so that all blocks have work;
- `gated`: rows = silu(gate) * up of rows @ weight, whose columns alternate `HALF` of gate and `HALF` of up;
- `norm`: x += sum of the partials; rows = rms_norm(x) * scale.

Between stages rows travel as `[width / 64, row, 64]`, a tile of the left operand contiguous, and partials, in float32,
as `[split, row, width / 64, 64]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.pallas.hopper import MULTIPROCESSORS, SHARED_BYTES, SWIZZLED
from jaxspec.pallas.once import lower_once
from jaxspec.weights import HALF

STAGES = ("matmul", "norm", "gated", "matmul", "norm", "matmul")
TILE = SWIZZLED  # inputs of one step, and the unit of outputs: 128 bytes of bf16, the widest swizzle
MIN_ROWS, MAX_ROWS = 9, 128  # up to 8 handing over costs more than XLA's launches do; 9 to 15 are padded to 16
BLOCKS = MULTIPROCESSORS  # all must be resident, since they wait for one another
ROOM = SHARED_BYTES - 1024  # for tiles and rings; the rest is for barriers
_i32 = jnp.int32


@dataclass(frozen=True)
class Share:
    """How one matmul is shared out: `columns` outputs a tile, inputs in `splits` parts, a tile's part one item."""

    inputs: int
    outputs: int
    columns: int
    splits: int

    @property
    def tiles(self) -> int:
        return self.outputs // self.columns

    @property
    def items(self) -> int:
        return self.tiles * self.splits

    @property
    def groups(self) -> int:
        return self.columns // TILE


def share_out(inputs: int, outputs: int, rows: int, gated: bool = False) -> Share:
    """The share-out whose busiest block has least to do; ties go to fewer splits and wider tiles.

    A tile of the left operand is read again for every tile of columns, and split matmuls write and read partials: both
    from L2, counted at a fraction of the weights' bytes. A gated matmul needs whole sums, so it has no splits.
    """
    steps = inputs // TILE

    def cost(columns: int, splits: int) -> float:
        busiest = -(-outputs // columns * splits // BLOCKS) * -(-steps // splits) * columns
        partials = 4 * rows * splits / inputs
        return busiest * (1 + 0.2 * rows / columns) * (1 + 0.25 * partials)

    _, splits, columns = min(
        (cost(columns, splits), splits, -columns)
        for columns in (64, 128, 192)
        for splits in ((1,) if gated else (1, 2, 3, 4, 6, 8))
        if outputs % columns == 0 and (splits == 1 or steps >= 4 * splits)
    )
    return Share(inputs, outputs, -columns, splits)


def supported(rows: int, dtype: Any, *widths: int) -> str | None:
    """Why a chain over these widths can't run, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return f"{rows} rows, not {MIN_ROWS} to {MAX_ROWS}"
    if bad := [w for w in widths if w % (2 * TILE) or w < 4 * TILE]:
        return f"width {bad[0]} is not a multiple of {2 * TILE}, from {4 * TILE} on"
    return None


@lower_once("weight_stream", "eps", "fused")
def stream(
    x: Float[Array, "b d"],
    rows: Float[Array, "b k"],
    weights: list[Float[Array, "_ _"]],
    scales: list[Float[Array, " d"]],
    *,
    eps: float,
    fused: bool = True,
    interpret: Any = False,
) -> tuple[Float[Array, "b d"], Float[Array, "s b n"]]:
    """Run `STAGES`: from attention's output `rows` and the residual stream `x` to the next layer's projections.

    `weights` are those of the output projection, gate and up, down, and the next layer's q, k, v; `scales` those of the
    two norms; all bfloat16. Returns the residual stream, and the projections as partials, float32, to be summed over
    axis 0. `fused=False` makes each stage a kernel of its own: what interpret mode, which has no counters between
    blocks, can run.
    """
    b, d = x.shape
    padded = -(-b // 8) * 8
    pad = lambda a: jnp.pad(a, ((0, padded - b), (0, 0)))  # noqa: E731
    held = {"x": pad(x).reshape(padded, d // TILE, TILE), "rows": pad(rows)}
    weights, scales = list(weights), [s.reshape(-1, TILE) for s in scales]
    for stages in [STAGES] if fused else [(stage,) for stage in STAGES]:
        taken = [(scales if stage == "norm" else weights).pop(0) for stage in stages]
        held = _launch(stages, b, held, taken, eps, interpret)
    return held["x"].reshape(padded, d)[:b], held["partial"].reshape(len(held["partial"]), padded, -1)[:, :b]


@dataclass(frozen=True)
class Geometry:
    """The kernel's static sizes: `rows` real of `padded`; consumer `warpgroups` of 64 rows; slots of each ring.

    Tiles in shared memory have 64 rows (what the tensor cores take), of which `padded` count: slots lie `stride` rows
    apart, and where they overlap it is with rows that are nobody's.
    """

    rows: int
    padded: int
    widest: int  # column groups of the widest tile
    groups: int  # column groups of the residual stream

    @property
    def warpgroups(self) -> int:
        return 1 if self.padded <= 64 else 2

    @property
    def stride(self) -> int:
        return self.padded if self.warpgroups == 1 else 64 * self.warpgroups

    @property
    def row_slots(self) -> int:
        return 6 if self.padded <= 16 else 4 if self.padded <= 32 else 3

    @property
    def out_slots(self) -> int:
        return self.widest if self.padded <= 16 else 2 if self.padded <= 32 else 1

    def tile_rows(self, slots: int) -> int:
        return 64 * self.warpgroups + (slots - 1) * self.stride

    @property
    def weight_slots(self) -> int:
        fixed = 2 * self.tile_rows(self.row_slots) + 4 * self.tile_rows(self.out_slots) + self.tile_rows(self.widest)
        return (ROOM - 2048 - TILE * (fixed + 2 * self.groups)) // (2 * TILE * TILE * self.widest)


def _launch(stages, b, held, taken, eps, interpret):
    """One kernel for `stages`. `held` has x, and rows or partial, as the kernel before left them; so has the result."""
    x = held["x"]
    padded, groups, _ = x.shape
    shares = [
        None if stage == "norm" else share_out(*weight.shape, padded, stage == "gated")
        for stage, weight in zip(stages, taken, strict=True)
    ]
    # Whatever passes between stages is an output of the kernel, stage by stage.
    shape = jax.ShapeDtypeStruct
    outs: list[dict[str, Any]] = []
    for stage, share in zip(stages, shares, strict=True):
        if stage == "norm":
            outs.append({"rows": shape((groups, padded, TILE), x.dtype), "x": shape(x.shape, x.dtype)})
        elif stage == "gated":
            outs.append({"rows": shape((share.outputs // 2 // TILE, padded, TILE), x.dtype)})
        else:
            outs.append({"partial": shape((share.splits, padded, share.outputs // TILE, TILE), jnp.float32)})

    geometry = Geometry(b, padded, max((s.groups for s in shares if s), default=1), groups)
    warpgroups, tile_rows = geometry.warpgroups, geometry.tile_rows
    results = plgpu.kernel(
        partial(_kernel, stages, shares, geometry, tuple(held), [tuple(out) for out in outs], eps),
        kernel_name="weight_stream",
        out_type=tuple(s for out in outs for s in out.values()),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=warpgroups + 2,
        thread_name="warpgroup",
        scratch_types=dict(
            weight_s=plgpu.SMEM((geometry.weight_slots, geometry.widest, TILE, TILE), x.dtype),
            rows_s=plgpu.SMEM((tile_rows(geometry.row_slots), TILE), x.dtype),
            out_s=plgpu.SMEM((tile_rows(geometry.out_slots), TILE), jnp.float32),
            gated_s=plgpu.SMEM((tile_rows(geometry.widest), HALF), x.dtype),
            norm_s=plgpu.SMEM((groups, TILE), x.dtype),
            weight_full=plgpu.Barrier(num_arrivals=geometry.widest, num_barriers=geometry.weight_slots),
            weight_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=geometry.weight_slots),
            rows_full=plgpu.Barrier(num_barriers=geometry.row_slots),
            rows_empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=geometry.row_slots),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*held.values(), *taken)
    results, left = iter(results), {"x": x}
    for out in outs:
        left = {"x": left["x"]} | {name: next(results) for name in out}
    return left


class _Block(NamedTuple):
    """One thread block's part of the chain: `work` has each stage, its share, what it reads and what it writes."""

    geometry: Geometry
    work: list[tuple[str, Share | None, Any, dict[str, Any], dict[str, Any]]]
    done: list[Any]  # counters of all but the last stage
    index: Any
    scratch: dict[str, Any]

    def items(self, i: int) -> int:
        """Of stage i, of all blocks."""
        share = self.work[i][1]
        return share.items if share else self.geometry.rows

    def mine(self, count: int) -> Any:
        """How many of `count` items are this block's: it takes index, index + BLOCKS, ..."""
        return lax.div(_i32(count + BLOCKS - 1) - self.index, _i32(BLOCKS))

    def wait_for(self, i: int) -> None:
        """Until all blocks that have work in stage i have done it."""
        if i >= 0:
            signals = min(self.items(i), BLOCKS) * (self.geometry.warpgroups if self.work[i][1] else 1)
            plgpu.semaphore_wait(self.done[i], signals, decrement=False, memory_scope="gpu")


def _kernel(stages, shares, geometry, held, outs, eps, *refs, **scratch):
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    warpgroups = geometry.warpgroups
    refs = iter(refs)
    given = {name: next(refs) for name in held}
    taken = [next(refs) for _ in stages]
    work = []
    for stage, share, operand, names in zip(stages, shares, taken, outs, strict=True):
        out = {name: next(refs) for name in names}
        work.append((stage, share, operand, dict(given), out))
        given |= out
    done = [pl.get_global(plgpu.SemaphoreType.REGULAR) for _ in stages[:-1]]
    block = _Block(geometry, work, done, index, scratch)
    pl.when(warpgroup == warpgroups)(partial(_bring_weights, block))
    pl.when(warpgroup == warpgroups + 1)(partial(_bring_rows, block))
    pl.when(warpgroup < warpgroups)(partial(_consume, block, warpgroup, eps))


def _bring_weights(block: _Block) -> None:
    """The warpgroup that keeps the ring of weights full, across stages."""
    plgpu.set_max_registers(40, action="decrease")
    ring, full = block.scratch["weight_s"], block.scratch["weight_full"]

    def fetch(i, k, tile, slot):
        _, share, weight, *_ = block.work[i]
        for c in range(share.groups):
            tile_of = weight.at[pl.ds(k * TILE, TILE), pl.ds((tile * share.groups + c) * TILE, TILE)]
            plgpu.copy_gmem_to_smem(tile_of, ring.at[slot, c], full.at[slot])
        for _ in range(share.groups, block.geometry.widest):  # a narrower stage leaves part of the slot unused
            plgpu.barrier_arrive(full.at[slot])

    _produce(block, fetch, block.scratch["weight_empty"], block.geometry.weight_slots)


def _bring_rows(block: _Block) -> None:
    """The warpgroup that keeps the ring of rows full, as stages hand them over."""
    plgpu.set_max_registers(40, action="decrease")
    ring, full, geometry = block.scratch["rows_s"], block.scratch["rows_full"], block.geometry

    def fetch(i, k, tile, slot):
        rows = block.work[i][3]["rows"]
        tile_of = rows.at[k] if len(rows.shape) == 3 else rows.at[:, pl.ds(k * TILE, TILE)]
        place = pl.ds(slot * geometry.stride, geometry.padded)
        plgpu.copy_gmem_to_smem(tile_of, ring.at[place], full.at[slot])

    empty = block.scratch["rows_empty"]
    _produce(block, fetch, empty, geometry.row_slots, before=lambda i: block.wait_for(i - 1))


def _produce(block, fetch, empty, slots, before=lambda i: None):
    """Run `fetch(stage index, input tile, column tile, slot)` over this block's items, as slots come free."""
    step = _i32(0)
    for i, (_, share, *_) in enumerate(block.work):
        if share is None:
            continue

        def item(j, step, i=i, share=share):
            tile, _, low, high = _bounds(share, block.index + j * BLOCKS)

            def one(k, step):
                slot = lax.rem(step, _i32(slots))
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                fetch(i, k, tile, slot)
                return step + 1

            return lax.fori_loop(low, high, one, step)

        before(i)
        step = lax.fori_loop(_i32(0), block.mine(share.items), item, step)

    def observe(step, _):  # a barrier must not be left with an arrival that nobody saw
        plgpu.barrier_wait(empty.at[lax.rem(step, _i32(slots))])
        return _

    lax.fori_loop(jnp.maximum(step - slots, 0), step, observe, _i32(0))


def _consume(block: _Block, warpgroup: Any, eps: float) -> None:
    """A warpgroup that multiplies, norms, and hands stages over."""
    geometry, scratch = block.geometry, block.scratch
    plgpu.set_max_registers(200 if geometry.warpgroups == 1 else 168, action="increase")
    step = _i32(0)
    for i, (stage, share, operand, reads, writes) in enumerate(block.work):
        if share is None:

            @pl.when((warpgroup == 0) & (block.index < block.items(i)))
            def _(i=i, operand=operand, reads=reads, writes=writes):
                block.wait_for(i - 1)

                def row(j, _):
                    _norm(block.index + j * BLOCKS, operand, eps, reads, writes, scratch["norm_s"])
                    return _

                lax.fori_loop(_i32(0), block.mine(block.items(i)), row, _i32(0))

            signals = (block.index < block.items(i)) & (warpgroup == 0)
        else:
            write = partial(_write_gated if stage == "gated" else _write_partial, share, geometry, writes, scratch)
            multiply = partial(_multiply, share, geometry, scratch, warpgroup, write)
            step = lax.fori_loop(
                _i32(0), block.mine(share.items), lambda j, step, m=multiply: m(block.index + j * BLOCKS, step), step
            )
            signals = block.index < block.items(i)
        plgpu.wait_smem_to_gmem(0)
        if i + 1 < len(block.work):
            pl.when(signals)(lambda i=i: plgpu.semaphore_signal(block.done[i], memory_scope="gpu"))


def _bounds(share, item):
    """An item's tile of columns, its split, and the input tiles from and to."""
    tile, split = lax.rem(item, _i32(share.tiles)), lax.div(item, _i32(share.tiles))
    steps = share.inputs // TILE
    low, high = (lax.div((split + end) * steps, _i32(share.splits)) for end in (0, 1))
    return tile, split, low, high


def _multiply(share, geometry, scratch, warpgroup, write, item, step):
    """Accumulate one item as its tiles arrive, `step` being how many this block has used so far, and write it."""
    tile, split, low, high = _bounds(share, item)

    def accumulate(*parts):
        def one(_, step):
            slot, row_slot = lax.rem(step, _i32(geometry.weight_slots)), lax.rem(step, _i32(geometry.row_slots))
            plgpu.barrier_wait(scratch["weight_full"].at[slot])
            plgpu.barrier_wait(scratch["rows_full"].at[row_slot])
            rows = scratch["rows_s"].at[pl.ds(row_slot * geometry.stride + warpgroup * 64, 64)]
            for c, part in enumerate(parts):
                plgpu.wgmma(part, rows, scratch["weight_s"].at[slot, c])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["weight_empty"].at[slot])
            plgpu.barrier_arrive(scratch["rows_empty"].at[row_slot])
            return step + 1

        lax.fori_loop(low, high, one, step)
        return tuple(part[...] for part in parts)

    parts = pl.run_scoped(accumulate, *[plgpu.ACC((64, TILE), jnp.float32)] * share.groups)
    for c, part in enumerate(parts):
        write(warpgroup, part, c, tile, split)
    return step + (high - low)


def _write_partial(share, geometry, writes, scratch, warpgroup, part, c, tile, split):
    target = writes["partial"].at[split, :, tile * share.groups + c]
    _store(geometry, warpgroup, part, scratch["out_s"], c % geometry.out_slots, target)


def _write_gated(share, geometry, writes, scratch, warpgroup, part, c, tile, split):
    """silu(gate) * up of one group of columns, half a tile of the next left operand. Rounds where plain layers do."""
    rows, group = writes["rows"], tile * share.groups + c
    gate, up = (half.astype(rows.dtype).astype(jnp.float32) for half in (part[:, :HALF], part[:, HALF:]))
    value = (gate / (1 + jnp.exp(-gate))).astype(rows.dtype).astype(jnp.float32) * up
    target = rows.at[lax.div(group, _i32(2)), :, pl.ds(lax.rem(group, _i32(2)) * HALF, HALF)]
    _store(geometry, warpgroup, value.astype(rows.dtype), scratch["gated_s"], c, target)


def _store(geometry, warpgroup, value, buffer, slot, target):
    """Send a tile's real rows to memory through a slot of `buffer`; slots are filled in order, from 0 on."""
    if slot == 0:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[pl.ds(slot * geometry.stride + warpgroup * 64, 64)] = value
    plgpu.commit_smem()
    for w in range(geometry.warpgroups):
        first, count = w * 64, min(64, geometry.padded - w * 64)

        @pl.when(warpgroup == w)
        def _(first=first, count=count):
            place = pl.ds(slot * geometry.stride + first, count)
            plgpu.copy_smem_to_gmem(buffer.at[place], target.at[pl.ds(first, count)])


def _norm(row, scale, eps, reads, writes, norm_s):
    """One row: add the partials to the residual stream, normalise, scale. Rounds where the plain layers do."""
    x, partials = reads["x"][row], reads["partial"]
    total = partials[0, row]
    for split in range(1, partials.shape[0]):
        total = total + partials[split, row]
    x = (x.astype(jnp.float32) + total.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / math.prod(x.shape) + eps)
    normed = normed.astype(x.dtype).astype(jnp.float32) * scale[...].astype(jnp.float32)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    norm_s[...] = normed.astype(x.dtype)
    writes["x"][row] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(norm_s, writes["rows"].at[:, row])
