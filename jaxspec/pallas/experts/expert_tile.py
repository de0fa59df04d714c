"""The common part of quantised experts' kernels: the pieces of a thread block, its warpgroups' turns, its results.

A ring in shared memory holds pieces of the weights and the rows' inputs that belong to them. Where a block has two
warpgroups, they alternate between its pieces, and the first adds up both sums. `expert_fp8` and `expert_four` define
how weights are fetched and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.experts.expert_stream import ALIGN, COUNT, EXPERT, ROW_BLOCKS, SOURCE, TARGET, Items
from jaxspec.pallas.hopper import WGMMA_ROWS

TILE = WGMMA_ROWS  # rows of weights in a group
MAX_ROWS = 64  # of an item: with more, there are no registers for sums of both groups
HEIGHTS = (8, 16, 32, 64)  # rows that a block multiplies
TURNS_ROWS = 8  # of items whose blocks have two warpgroups
FEW_ROWS = 32  # up to these, three blocks of one warpgroup share a multiprocessor; else two do
SHARED_BYTES = 228 * 1024  # of a multiprocessor
RESERVED = 2 * 1024  # of a block, for its barriers and the driver
PROMPT_ROWS = 64  # of an expert on average; with more, two launches take no longer, or less
_i32 = jnp.int32


@dataclass(frozen=True)
class Stage:
    """One of the two stages. Column `source` of the items has the first of their rows.

    `width`: columns of its result. `stacks`: how many experts each stack has. `rows`: of an item, at most. `alone`: as
    in `Items`. A format says how many inputs a `piece` has, how many `groups` of `TILE` rows of weights a block
    multiplies (gate's and up's, or neighbours of `down`), and how many `warpgroups` a block has.
    """

    name: str
    source: int
    inputs: int
    width: int
    stacks: tuple[int, ...]
    rows: int
    alone: int = field(default=0, kw_only=True)

    @property
    def parts(self) -> int:
        """Groups of `TILE` columns of the result that a block makes."""
        return 1 if self.name == "up" else self.groups

    @property
    def tiles(self) -> int:
        return self.width // (self.parts * TILE)

    @property
    def steps(self) -> int:
        return self.inputs // self.piece

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Thread blocks that share a multiprocessor."""
        return 3 if self.warpgroups == 1 and self.rows <= FEW_ROWS else 2

    @property
    def room(self) -> int:
        """Bytes of shared memory of a block."""
        return SHARED_BYTES // self.blocks_per_multiprocessor - RESERVED

    @property
    def heights(self) -> list[int]:
        """Row counts that blocks multiply, each in a loop of its own. Few items have less than a fourth of `rows`."""
        return [height for height in HEIGHTS if self.rows // 4 <= height <= self.rows]

    def group(self, tile: Any, group: int) -> Any:
        """The group of the expert's weight rows that is a block's first or second."""
        return tile + group * self.tiles if self.name == "up" else tile * self.groups + group


def one_launch(stages: list[Any], items: Items, interpret: Any) -> bool:
    """Whether both stages are one launch: where experts have up to `PROMPT_ROWS` rows on average, so that reading their
    weights is most of the work. Interpret mode has no counters between blocks."""
    return not interpret and items.capacity <= PROMPT_ROWS * sum(stages[0].stacks)


def each_stage(stages: list[Any], items_g: Any, run: Callable[[int, Any, Any], None]) -> None:
    """Call `run(n, unit, done)` for the n-th stage, which has this block's unit. A stage's units follow the last one's.

    A GPU starts blocks in their order, though CUDA doesn't promise it. So a block of `down` that awaits blocks of `up`
    (`done`) finds them running, and its first weights are prefetched before the last of `up` are done.
    """
    alone, first, block = stages[0].alone, _i32(0), lax.axis_index("unit")
    count = _i32(alone) if alone else items_g[0, COUNT]
    most = alone or items_g.shape[0]
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((most,))) if len(stages) > 1 else None
    for n, stage in enumerate(stages):
        behind = first + stage.tiles * count
        pl.when((block >= first) & (block < behind))(partial(run, n, block - first, done))
        first = behind


def of_outputs(arrays: list[Any], stacks: tuple[int, ...], expert: Any, group: Any) -> Any:
    """An expert's numbers for a group of outputs, f32[TILE]; each stack of so many experts has an array of them,
    [experts, outputs]."""
    found, first = None, 0
    for array, size in zip(arrays, stacks, strict=True):
        own = array.at[jnp.clip(expert - first, 0, size - 1), pl.ds(group * TILE, TILE)]
        own = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
        mine = (expert >= first).astype(jnp.float32)  # Mosaic can't choose between arrays by a scalar
        found = own if found is None else own * mine + found * (1 - mine)
        first += size
    return found


class Tile:
    """A thread block's work: its groups of columns of an item's rows.

    `unit`: its number in the stage. `stage` has the sizes: `source` (the items' column), `piece` (inputs), `steps`,
    `slots`, `tiles`, `heights`, `warpgroups`, `stacks` (experts of each), the `groups` of a block and the number of
    experts of a token that is `alone`. `weights` are the references of each stack.
    """

    done: Any = None  # by item, how many blocks of `up` have made their columns; None where these have their own launch
    awaited: int = 0  # how many blocks of `up` a block of `down` waits for

    def __init__(
        self, stage: Any, unit: Any, rows_g: Any, items_g: Any, weights: list[Any], out_g: Any, scratch: dict[str, Any]
    ):
        item = lax.div(unit, _i32(stage.tiles))
        self.stage, self.item, self.tile = stage, item, unit - item * stage.tiles
        # Loaded at once, and not again for each piece, as each load has its latency.
        if stage.alone:
            self.expert, self.target = items_g[0, item], item
            self.source = _i32(0) if stage.source == SOURCE else item
            self.blocks = (self.expert < sum(stage.stacks)).astype(_i32)
        else:
            item_g = items_g.at[item]
            self.expert, self.source, self.target = (item_g[i] for i in (EXPERT, stage.source, TARGET))
            self.blocks = item_g[ROW_BLOCKS]
        self.rows_g, self.weights, self.out_g = rows_g, weights, out_g
        self.scratch, self.turn = scratch, lax.axis_index("warpgroup")
        self.groups = [stage.group(self.tile, g) for g in range(stage.groups)]

    def sums(self, height: int) -> list[Any]:
        """Each group's sums over this warpgroup's pieces, float32[TILE, height]."""
        raise NotImplementedError

    def fetch_weights(self, i: Any, slot: Any, full: Any, stack: Any, expert: Any) -> None:
        """Begin to copy the i-th piece of all groups of a stack's expert. `full`: the slot's barrier."""
        raise NotImplementedError

    def finished(self, totals: list[Any]) -> list[Any]:
        """Columns of the result, from each group's sums over all inputs."""
        raise NotImplementedError

    def run(self) -> None:
        fewer = 0
        for height in self.stage.heights:
            rows = self.blocks * ALIGN
            pl.when((rows > fewer) & (rows <= height))(partial(self._run, height))
            fewer = height

    def _run(self, height):
        totals = self.sums(height)
        if self.stage.warpgroups == 1:
            return self._store(height, self.finished(totals))
        sums_s, summed = self.scratch["sums_s"], self.scratch["summed"]

        @pl.when(self.turn == 1)
        def _():
            for g, total in enumerate(totals):
                sums_s[g] = total
            plgpu.barrier_arrive(summed)

        @pl.when(self.turn == 0)
        def _():
            plgpu.barrier_wait(summed)
            others = [plgpu.load(sums_s.at[g], layout=plgpu.Layout.WGMMA, optimized=False) for g in range(len(totals))]
            self._store(height, self.finished([a + b for a, b in zip(totals, others, strict=True)]))

    def fetch_first(self, height: int, expert: Any) -> None:
        """Fetch this warpgroup's first pieces, which fill its slots of the ring."""
        mine = [first + self.turn for first in range(0, self.stage.slots, self.stage.warpgroups)]
        self.fetch_all(height, expert, list(zip(mine, mine, strict=True)))

    def fetch_all(self, height: int, expert: Any, pieces: list[tuple[Any, Any]]) -> None:
        """Fetch the first pieces, each with its slot. Weights don't wait for the hidden rows that other blocks make."""
        if not self.awaited:
            for i, slot in pieces:
                pl.when(i < self.stage.steps)(partial(self.fetch, height, expert, i, slot))
            return
        for i, slot in pieces:
            pl.when(i < self.stage.steps)(partial(self.fetch_from, expert, i, slot))
        plgpu.semaphore_wait(self.done.at[self.item], self.awaited, decrement=False, memory_scope="gpu")
        for i, slot in pieces:
            pl.when(i < self.stage.steps)(partial(self.fetch_rows, height, i, slot))

    @property
    def turns(self) -> Any:
        """How many pieces this warpgroup has: all, or every second."""
        apart = self.stage.warpgroups
        return lax.div(self.stage.steps - self.turn + (apart - 1), _i32(apart))

    def refill(self, *piece: Any) -> None:
        """Fetch a piece to a slot that had another, in a kernel without automatic barriers."""
        plgpu.commit_smem()  # all warps have read what was there
        self.fetch(*piece)

    def fetch(self, height: int, expert: Any, i: Any, slot: Any) -> None:
        """Begin to copy the i-th piece of the item's rows and of the weights."""
        self.fetch_rows(height, i, slot)
        self.fetch_from(expert, i, slot)

    def fetch_rows(self, height: int, i: Any, slot: Any) -> None:
        """Begin to copy the item's rows of a piece."""
        rows = self.rows_g.at[pl.ds(self.source * ALIGN, height), pl.ds(i * self.stage.piece, self.stage.piece)]
        plgpu.copy_gmem_to_smem(rows, self.scratch["rows_s"].at[slot, pl.ds(0, height)], self.scratch["ready"].at[slot])

    def fetch_from(self, expert: Any, i: Any, slot: Any) -> None:
        """Begin to copy the weights of a piece, from the stack that has the expert."""
        full = self.scratch["ready"].at[slot]
        if len(self.weights) == 1:
            return self.fetch_weights(i, slot, full, self.weights[0], expert)
        first = 0
        for stack, size in zip(self.weights, self.stage.stacks, strict=True):
            mine = (expert >= first) & (expert < first + size)
            pl.when(mine)(partial(self.fetch_weights, i, slot, full, stack, expert - first))
            first += size

    def _store(self, height, parts):
        """Write columns of all rows to shared memory, and those of the item's own rows from there to memory."""
        out_s = self.scratch["out_s"]
        for p, part in enumerate(parts):
            place = out_s.at[p, pl.ds(0, height)].transpose((1, 0))
            place[...] = plgpu.layout_cast(part.astype(out_s.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

        def copy(block, count):
            rows = pl.ds((self.target + block) * ALIGN, count)
            for p in range(len(parts)):
                columns = pl.ds((self.tile * len(parts) + p) * TILE, TILE)
                plgpu.copy_smem_to_gmem(out_s.at[p, pl.ds(block * ALIGN, count)], self.out_g.at[rows, columns])

        whole = height // ALIGN
        pl.when(self.blocks == whole)(partial(copy, 0, height))
        for block in range(whole - 1):
            pl.when((self.blocks < whole) & (block < self.blocks))(partial(copy, block, ALIGN))
        plgpu.wait_smem_to_gmem(0)
        if self.done is not None and not self.awaited:
            plgpu.semaphore_signal(self.done.at[self.item], memory_scope="gpu")
