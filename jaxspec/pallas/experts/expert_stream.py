"""Both matmuls of many experts' MLPs as one persistent kernel, on Hopper, that reads the chosen experts' weights once.

Work items (`Items`, made by `pallas.experts`) say which rows go through which expert. Each item's matmul is cut into
units of a few output columns, and thread blocks, one per multiprocessor, take units in turn: first all of `up` (gate
and up, and the hidden columns of them), then all of `down`. At a few tokens this is bound by reading weights, so
reading must not pause. A weight producer prefetches through units, and from up's into down's, as far as its ring of
tiles has room. Another producer loads rows and waits, item by item, until all columns of an item's hidden rows are
there. The consumers multiply. Valid rows needn't fill the M of a matmul: the padding rows of a tile may hold anything,
and their results aren't stored.

A unit has two tiles of weights side by side, so that the rings' slots are alike: gate's and up's columns of `up`, two
groups of columns of `down`, and of `up` where experts have no gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper import MULTIPROCESSORS, SHARED_BYTES, WGMMA_ROWS
from jaxspec.pallas.hopper.export import lower_once

# Experts' gate and up, [e, 2f, d], gate's rows first, or up alone, [e, f, d]; their down, [e, d, f].
Stack = tuple[jax.Array, jax.Array]
Gating = Callable[..., jax.Array]  # from gate and up, or up alone, to hidden columns
ALIGN = 8  # rows: bulk copies begin at a multiple
TILE_ROWS = WGMMA_ROWS
BLOCKS = MULTIPROCESSORS  # all must be resident, since they wait for one another
ROOM = SHARED_BYTES - 3 * 1024  # for tiles; the rest is for barriers
MOST_BARRIERS = 32  # that Mosaic puts into one group
COLUMNS = (128, 64, 32, 16)  # of a tile, so of half a unit
EXPERT, SOURCE, TARGET, ROW_BLOCKS, COUNT = range(5)  # columns of the items' table
_i32 = jnp.int32


@flax.struct.dataclass
class Items:
    """Work items, one a row of the table. Item i multiplies `ALIGN * ROW_BLOCKS` rows, from `ALIGN * SOURCE` on, by
    expert `EXPERT`; these are columns of row i.

    Results go to rows `ALIGN * TARGET` and on of `capacity` rows. The first row's `COUNT` is the number of valid items.
    Some of these may have no blocks, so nothing to do; other rows of the table may hold anything. From an item's first
    row on, there are `rows` rows to read.

    `alone`: there is one token, and in place of a table the numbers of its experts, so many, which need no plan. All
    items multiply the first `ALIGN` rows, and item i's results go to rows `ALIGN * i` and on.
    """

    table: Int[Array, "i 5"] | Int[Array, "1 w"]
    rows: int = flax.struct.field(pytree_node=False)
    capacity: int = flax.struct.field(pytree_node=False)
    alone: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def most(self) -> int:
        """The most items that there may be."""
        return self.alone or len(self.table)


@dataclass(frozen=True)
class Tiling:
    """Static sizes: `rows` of an item at most, `columns` of a tile, inputs of a `step`; whether experts are `gated`."""

    rows: int
    columns: int
    step: int
    gated: bool = True

    @property
    def warpgroups(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def row_slots(self) -> int:
        return 4 if self.rows > 32 else 6

    @property
    def row_space(self) -> int:
        """Rows of the rows' ring. Slots lie `rows` apart, so a tile's missing rows are the next slots' rows."""
        return (self.row_slots - 1) * self.rows + TILE_ROWS * self.warpgroups

    @property
    def weight_slots(self) -> int:
        taken = 2 * (self.row_space * self.step + TILE_ROWS * self.warpgroups * self.columns)
        return min((ROOM - taken) // (4 * self.columns * self.step), MOST_BARRIERS)


def tiling(rows: int, d: int, f: int, gated: bool = True, items: int = BLOCKS) -> Tiling:
    """Choose sizes for up to so many items of up to `rows` rows. Wide tiles take fewer steps, though some blocks may
    have none to do; narrow ones, where that would be more than half of the blocks."""
    widest = COLUMNS[0] if rows >= 32 else COLUMNS[1]
    fit = [c for c in COLUMNS if c <= widest and f % (c if gated else 2 * c) == 0 and d % (2 * c) == 0]
    columns = next((c for c in fit if items * min((1 + gated) * f, d) >= c * BLOCKS), fit[-1])
    step = max(64, 4096 // columns)
    while d % step or f % step:
        step //= 2
    return Tiling(rows, columns, step, gated)


def supported(dtype: Any, stacks: list[Stack]) -> str | None:
    """Why these experts can't be served, or None if they can."""
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    (d, f), *others = [down.shape[1:] for _, down in stacks]
    if odd := [each for each in others if each[0] != d or each[1] % f]:
        return f"experts of widths {f} and {odd[0][1]} in one mixture"
    if bad := [width for width in (d, f) if width % 64]:
        return f"width {bad[0]} is not a multiple of 64"
    return None


def stream(
    rows: Float[Array, "r d"],
    stacks: list[Stack],
    items: Items,
    gating: Gating | None = None,
    *,
    sizes: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "c d"]:
    """Each item's rows through its expert, `down @ gating(gate, up)`, as `experts_mlp.reference`; all in bfloat16. No
    `gating`: `silu(gate) * up`. Experts without a gate have one of up alone.

    An expert that is n times as wide as those of the first stack counts as n of them: its hidden columns are divided.
    Rows that no item has are arbitrary, NaN included. `sizes` overrides `tiling`. In interpret mode, which has no
    counters between blocks, each of the two matmuls is a kernel of its own.

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    if reason := supported(rows.dtype, stacks):
        raise ValueError(f"the expert kernel can't run: {reason}")
    ups, downs = zip(*stacks, strict=True)
    _, d, f = downs[0].shape
    sizes = sizes or tiling(items.rows, d, f, ups[0].shape[1] > f, items.most)
    launch = partial(_launch, sizes=sizes, gating=gating, interpret=interpret)
    if not interpret:
        return launch(rows, [ups, downs], items, names=("up", "down"))[1]
    (hidden,) = launch(rows, [ups], items, names=("up",))
    return launch(hidden, [downs], items, names=("down",))[0]


@dataclass(frozen=True)
class Stage:
    """One of the two matmuls: its name, its input width, and how many units an item has."""

    name: str
    inputs: int
    units: int
    gated: bool  # whether the two tiles of a unit are gate's and up's, or neighbours
    width: int  # of its result

    @classmethod
    def of(cls, name: str, weights: jax.Array, sizes: Tiling) -> Stage:
        _, outputs, inputs = weights.shape
        gated = sizes.gated and name == "up"
        return cls(name, inputs, outputs // (2 * sizes.columns), gated, outputs // 2 if gated else outputs)

    def tile(self, unit: Array, half: int, columns: int) -> Array:
        """The first of the expert's weight rows, each an output, of a unit's first or second tile."""
        return unit * columns + half * self.width if self.gated else (unit * 2 + half) * columns

    def part(self, expert: Array, parts: int, inputs: Any) -> tuple[Array, Any, tuple[Any, Any]]:
        """Where a stack whose experts count as so many each holds one of these: in which expert, at which inputs, and
        after how many more outputs than `tile` says, for both tiles."""
        if parts == 1:
            return expert, inputs, (0, 0)
        expert, part = lax.div(expert, _i32(parts)), lax.rem(expert, _i32(parts))
        if self.name == "down":
            return expert, pl.ds(inputs.start + part * self.inputs, inputs.size), (0, 0)
        first = part * self.width
        return expert, inputs, (first, first + (parts - 1) * self.width if self.gated else first)


@lower_once("expert_stream", "names", "sizes", "gating")
def _launch(rows, weights, items, *, names, sizes, gating, interpret):
    stages = [Stage.of(name, stack[0], sizes) for name, stack in zip(names, weights, strict=True)]
    tall = TILE_ROWS * sizes.warpgroups
    axis = 1 if names[0] == "up" else 2  # of hidden columns
    parts = [stack.shape[axis] // weights[0][0].shape[axis] for stack in weights[0]]
    return plgpu.kernel(
        partial(_kernel, stages, sizes, gating, [(len(stack), n) for stack, n in zip(weights[0], parts, strict=True)]),
        kernel_name="expert_stream",
        out_type=[jax.ShapeDtypeStruct((items.capacity, stage.width), rows.dtype) for stage in stages],
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=sizes.warpgroups + 2,
        thread_name="warpgroup",
        scratch_types=dict(
            weight_s=plgpu.SMEM((sizes.weight_slots, 2, sizes.columns, sizes.step), rows.dtype),
            rows_s=plgpu.SMEM((sizes.row_space, sizes.step), rows.dtype),
            out_s=plgpu.SMEM((tall, sizes.columns), rows.dtype),
            weight_full=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.weight_slots),
            weight_empty=plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.weight_slots),
            rows_full=plgpu.Barrier(num_barriers=sizes.row_slots),
            rows_empty=plgpu.Barrier(num_arrivals=sizes.warpgroups, num_barriers=sizes.row_slots),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(rows, *jax.tree.leaves(weights), items.table)


def _kernel(stages, sizes, gating, stacks, rows_g, *refs, **scratch):
    block = _Block(stages, sizes, gating, stacks, rows_g, list(refs), scratch)
    warpgroup, warpgroups = block.warpgroup, sizes.warpgroups
    pl.when(warpgroup == warpgroups)(lambda: _produce_weights(block))
    pl.when(warpgroup == warpgroups + 1)(lambda: _produce_rows(block))
    pl.when(warpgroup < warpgroups)(lambda: _consume(block))


class _Block:
    """State that the warpgroups of a block share."""

    def __init__(self, stages, sizes, gating, stacks, rows_g, refs, scratch):
        self.stages, self.sizes, self.stacks, self.rows_g, self.scratch = stages, sizes, stacks, rows_g, scratch
        self.gating = gating
        self.weights = [[refs.pop(0) for _ in stacks] for _ in stages]
        self.items_g, *self.outs = refs
        self.count = self.items_g[0, COUNT]
        self.number, self.warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        # By item: how many of its units of `up` are done, counted by each consumer.
        items = self.items_g.shape[0]
        self.done = pl.get_global(plgpu.SemaphoreType.REGULAR((items,))) if len(stages) > 1 else None

    def each_unit(self, body, carry):
        """Loop `body(stage index, item, unit, steps, carry)` over this block's units; `steps` is 0 for empty items."""
        first = self.number
        for i, stage in enumerate(self.stages):
            total = self.count * stage.units
            mine = jnp.maximum(lax.div(total - first + (BLOCKS - 1), _i32(BLOCKS)), 0)

            def one(j, carry, i=i, stage=stage, first=first):
                u = first + j * BLOCKS
                item = lax.div(u, _i32(stage.units))
                steps = jnp.where(self.items_g[item, ROW_BLOCKS] > 0, stage.inputs // self.sizes.step, 0)
                return body(i, item, u - item * stage.units, steps, carry)

            carry = lax.fori_loop(_i32(0), mine, one, carry)
            first = first + mine * BLOCKS - total  # the next stage's units follow this one's
        return carry

    def produce(self, begin, empty, slots):
        """Fetch the tiles of each unit's steps as slots come free; `begin(...)` gives the function that fetches one."""

        def unit(i, item, unit, steps, step):
            fetch = begin(i, item, unit, steps)

            def one(k, step):
                slot = lax.rem(step, _i32(slots))
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                fetch(pl.ds(k * self.sizes.step, self.sizes.step), slot)
                return step + 1

            return lax.fori_loop(_i32(0), steps, one, step)

        step = self.each_unit(unit, _i32(0))

        def observe(step, _):  # a barrier must not be left with an arrival that wasn't waited for
            plgpu.barrier_wait(empty.at[lax.rem(step, _i32(slots))])
            return _

        lax.fori_loop(jnp.maximum(step - slots, 0), step, observe, _i32(0))


def _produce_weights(block: _Block):
    plgpu.set_max_registers(40, action="decrease")
    stages, sizes, scratch = block.stages, block.sizes, block.scratch

    def begin(i, item, unit, steps):
        ring, full, expert = scratch["weight_s"], scratch["weight_full"], block.items_g[item, EXPERT]

        def fetch_from(stack, parts, expert, inputs, slot):
            expert, inputs, firsts = stages[i].part(expert, parts, inputs)
            for half in range(2):
                tile = pl.ds(firsts[half] + stages[i].tile(unit, half, sizes.columns), sizes.columns)
                plgpu.copy_gmem_to_smem(stack.at[expert, tile, inputs], ring.at[slot, half], full.at[slot])

        def fetch(inputs, slot):
            if len(block.stacks) == 1:
                return fetch_from(block.weights[i][0], 1, expert, inputs, slot)
            first = 0
            for stack, (size, parts) in zip(block.weights[i], block.stacks, strict=True):
                mine = (expert >= first) & (expert < first + size * parts)
                pl.when(mine)(partial(fetch_from, stack, parts, expert - first, inputs, slot))
                first += size * parts

        return fetch

    block.produce(begin, scratch["weight_empty"], sizes.weight_slots)


def _produce_rows(block: _Block):
    """Fetch rows; for `down`, an item's hidden rows once all consumers have signalled that they are in memory."""
    plgpu.set_max_registers(40, action="decrease")
    stages, sizes, scratch = block.stages, block.sizes, block.scratch

    def begin(i, item, unit, steps):
        source = block.outs[0] if i > 0 else block.rows_g  # `down` reads the hidden rows that `up` wrote
        place = block.items_g[item, SOURCE if stages[i].name == "up" else TARGET]
        if i > 0:

            @pl.when(steps > 0)
            def _():
                signals = stages[0].units * sizes.warpgroups
                plgpu.semaphore_wait(block.done.at[item], signals, decrement=False, memory_scope="gpu")

        def fetch(inputs, slot):
            tile = scratch["rows_s"].at[pl.ds(slot * sizes.rows, sizes.rows)]
            rows = source.at[pl.ds(place * ALIGN, sizes.rows), inputs]
            plgpu.copy_gmem_to_smem(rows, tile, scratch["rows_full"].at[slot])

        return fetch

    block.produce(begin, scratch["rows_empty"], sizes.row_slots)


def silu_gated(gate: Array, up: Array) -> Array:
    return gate / (1 + jnp.exp(-gate)) * up


def _consume(block: _Block):
    """Multiply and store each unit, and signal when `up`'s are in memory."""
    sizes, done, columns, gating = block.sizes, block.done, block.sizes.columns, block.gating or silu_gated
    plgpu.set_max_registers(200 if sizes.warpgroups == 1 else 208, action="increase")

    def tell(item):
        """Signal that this warpgroup's part of a unit of the item is in memory; item -1: nothing to signal."""

        @pl.when(item >= 0)
        def _():
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(done.at[item], memory_scope="gpu")

    def unit(i, item, unit, steps, carry):
        step, untold = carry
        is_up = block.stages[i].name == "up"
        if i > 0:  # before waiting for others' signals, since they may be waiting for this one
            tell(untold)
            untold = _i32(-1)
        tiles, step = _multiply(sizes, block.scratch, block.warpgroup, steps, step)

        @pl.when(steps > 0)
        def _():
            parts = tiles
            if is_up:
                parts = [gating(*tiles)] if sizes.gated else [gating(tile) for tile in tiles]
                if done is not None:
                    tell(untold)  # its copies were begun a unit ago
            place = block.items_g[item, TARGET], block.items_g[item, ROW_BLOCKS]
            store = partial(_store, sizes, block.warpgroup, block.scratch["out_s"], *place)
            for half, part in enumerate(parts):
                store(part, block.outs[i].at[:, pl.ds((unit * len(parts) + half) * columns, columns)])

        return step, jnp.where(steps > 0, item, untold) if is_up else untold

    _, untold = block.each_unit(unit, (_i32(0), _i32(-1)))
    if done is not None:
        tell(untold)
    plgpu.wait_smem_to_gmem(0)


def _multiply(sizes, scratch, warpgroup, steps, step):
    """Both tiles of a unit, f32[64, columns] each, as its `steps` arrive; `step` is how many this block has used."""

    def release(step):
        plgpu.barrier_arrive(scratch["weight_empty"].at[lax.rem(step, _i32(sizes.weight_slots))])
        plgpu.barrier_arrive(scratch["rows_empty"].at[lax.rem(step, _i32(sizes.row_slots))])

    def accumulate(*tiles):
        def one(k, step):
            slot, row_slot = lax.rem(step, _i32(sizes.weight_slots)), lax.rem(step, _i32(sizes.row_slots))
            plgpu.barrier_wait(scratch["weight_full"].at[slot])
            plgpu.barrier_wait(scratch["rows_full"].at[row_slot])
            rows = scratch["rows_s"].at[pl.ds(row_slot * sizes.rows + warpgroup * TILE_ROWS, TILE_ROWS)]
            for half, tile in enumerate(tiles):
                plgpu.wgmma(tile, rows, scratch["weight_s"].at[slot, half].transpose((1, 0)))
            plgpu.wgmma_wait(2)  # this step's two may go on: those of the step before are done
            pl.when(k > 0)(lambda: release(step - 1))
            return step + 1

        last = lax.fori_loop(_i32(0), steps, one, step)
        results = tuple(tile[...] for tile in tiles)
        pl.when(steps > 0)(lambda: release(last - 1))
        return results

    tile = plgpu.ACC((TILE_ROWS, sizes.columns), jnp.float32)
    return pl.run_scoped(accumulate, tile, tile), step + steps


def _store(sizes, warpgroup, out_s, target, blocks, tile, out):
    """Send a tile's valid rows to memory: all at once, or `ALIGN` at a time where the item ends within the tile."""
    rows, first = min(sizes.rows, TILE_ROWS), warpgroup * TILE_ROWS
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    out_s[pl.ds(first, TILE_ROWS)] = tile.astype(out.dtype)
    plgpu.commit_smem()

    def copy(block, count):
        place = pl.ds(target * ALIGN + first + block * ALIGN, count)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(first + block * ALIGN, count)], out.at[place])

    left, whole = blocks - warpgroup * (TILE_ROWS // ALIGN), rows // ALIGN
    pl.when(left >= whole)(lambda: copy(0, rows))
    for block in range(whole - 1):
        pl.when((left < whole) & (block < left))(partial(copy, block, ALIGN))
