"""Matmuls of many rows, tile by tile: the division of tiles among blocks, and the writing of results.

Each multiprocessor takes one tile of outputs after the other. Tiles of the same weights come next to one another, so
that these are read from memory once. A producer warpgroup fills a ring in shared memory, and prefetches the next tile's
operands while this one's results are written. Two or three warpgroups multiply, an equal part of the tile's rows each.
The operands and their products are the kernel's own: `tile_matmul` and `fp8_tiles`.

The number of valid rows is data: programs come in few sizes, and padding takes no time. Where rows don't fill the last
tile, it begins among the rows of the tile before; a warpgroup whose rows all belong to that one has nothing to do. A
gated matmul, whose weight alternates `HALF` columns of gate and `HALF` of up, writes silu(gate) * up. Another may add
its results to a residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.weights import HALF
from jaxspec.pallas.hopper import MULTIPROCESSORS, SHARED_BYTES, SWIZZLED, WGMMA_ROWS

UNIT = WGMMA_ROWS
COPIED = 8  # arrays that are copied have a multiple of these rows
STEP = SWIZZLED  # bfloat16 numbers of 128 bytes, the widest swizzle
BLOCKS = MULTIPROCESSORS  # on a card with fewer, some take two blocks' work, one after the other
# Registers of a thread, by the number of warpgroups that multiply: in those, and in the one that copies.
REGISTERS = {2: (232, 40), 3: (160, 32)}
ROOM = SHARED_BYTES - 1024  # for ring and results; the rest is for barriers
_i32 = jnp.int32


@dataclass(frozen=True)
class Tiling:
    """How outputs are divided: `rows` and `columns` of a tile."""

    rows: int
    columns: int

    @property
    def warpgroups(self) -> int:
        """How many warpgroups multiply."""
        return 3 if self.rows == 3 * UNIT else 2

    @classmethod
    def quickest(cls, rows: int, outputs: int, times: Mapping[tuple[int, int], float]) -> Tiling:
        """Choose the tiles whose busiest multiprocessor should take the least time.

        `times`: of one tile, by rows and columns.
        """

        def cost(size: tuple[int, int]) -> float:
            return -(-(-(-rows // size[0]) * (outputs // size[1])) // BLOCKS) * times[size]

        return cls(*min((size for size in times if outputs % size[1] == 0), key=cost))

    def results(self, part: int, ring_bytes: int, dtype: Any = jnp.bfloat16) -> Any:
        """Shared memory for results, `part` columns at a time: the ring's rest, at most a tile's."""
        stores = self.rows * self.columns // (self.warpgroups * UNIT * STEP)  # of a warpgroup for one tile
        places = min(stores, (ROOM - ring_bytes) // (self.warpgroups * UNIT * part * jnp.dtype(dtype).itemsize))
        return plgpu.SMEM((self.warpgroups, places, UNIT, part), dtype)


class Block(NamedTuple):
    """One thread block's tiles: how many there are, and where they lie."""

    tiling: Tiling
    count: Any  # valid rows
    lowest: int  # where the last tile of rows begins
    all_high: int  # tiles of rows
    high: Any  # tiles of rows that have valid rows
    across: int  # tiles of columns
    tiles: Any  # tiles with valid rows, of all blocks. The tiles after these are padding, and become zeros
    steps: int  # of a tile's inputs
    index: Any

    @classmethod
    def of(cls, tiling: Tiling, rows: int, outputs: int, steps: int, count: Any, index: Any) -> Block:
        all_high, lowest = -(-rows // tiling.rows), rows - tiling.rows
        high = jnp.where(count > lowest, all_high, lax.div(count + tiling.rows - 1, _i32(tiling.rows)))
        across = outputs // tiling.columns
        return cls(tiling, count, lowest, all_high, high, across, high * across, steps, index)

    def mine(self, count: Any) -> Any:
        """How many of `count` tiles are this block's: it takes index, index + BLOCKS, ..."""
        return lax.div(count + BLOCKS - 1 - self.index, _i32(BLOCKS))

    def place(self, j: Any) -> tuple[Any, Any, Any]:
        """This block's j-th tile: its first row, how many of its rows the tile before has too, its tile of columns."""
        tile, high = self.index + j * BLOCKS, jnp.maximum(self.high, 1)
        padding = jnp.maximum(self.all_high - self.high, 1)
        into, c = tile - self.tiles, lax.div(tile, high)
        # The last rows' tiles may have few valid rows. Where `high` divides `BLOCKS`, a block would have all of these
        # or none, so the order of rows is rotated from one of a block's tiles to the next.
        turn = jnp.where(lax.rem(_i32(BLOCKS), high) == 0, lax.div(c * high, _i32(BLOCKS)), 0)
        turned = lax.rem(tile + turn, high)
        i = jnp.where(into < 0, turned, self.high + lax.rem(into, padding))
        c = jnp.where(into < 0, c, lax.div(into, padding))
        top = jnp.minimum(i * self.tiling.rows, self.lowest)
        return top, i * self.tiling.rows - top, c


class Hands(NamedTuple):
    """The barriers of a ring of `slots`: `full` for slots that are filled, `empty` for slots that consumers freed."""

    full: Any
    empty: Any
    slots: int

    def slot(self, step: Any) -> Any:
        """The slot of a step's operands."""
        return lax.rem(step, _i32(self.slots))

    def observe(self, steps: Any) -> None:
        """End the producer, after so many steps: a barrier must not be left with an arrival that wasn't waited for."""

        def wait(step, _):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])
            return _

        lax.fori_loop(jnp.maximum(steps - self.slots, 0), steps, wait, _i32(0))


class Tile(NamedTuple):
    """A warpgroup's part of a tile.

    - `units`: the first rows of its units, within the tile.
    - `top`, `c`: the tile's first row, and its tile of columns.
    - `step`: the block's step that the tile begins at.
    - `needed`: steps to multiply. None if all rows are padding.
    """

    units: list[Any]
    top: Any
    c: Any
    step: Any
    needed: Any


@dataclass(frozen=True)
class Results:
    """The destination of results: `out`, by way of `out_s`.

    - `gated`: results are silu(gate) * up.
    - `added`: the residual stream that results are added to, or nothing.
    - `rounded`: gate, up and silu(gate) are rounded too.
    - `late`: load that stream after the products. Before them, the products hide the load, but it takes registers.
    """

    gated: bool
    added: list[Any]
    out: Any
    out_s: Any
    late: bool = False
    rounded: bool = False

    def write(self, warpgroup: Any, block: Block, tile: Tile, multiply: Callable) -> None:
        """Multiply a tile, add the residual stream if there is one, and write it.

        `multiply(tile, write)` has all products when it calls `write(columns)`; `columns(unit, first, count)` gives
        `count` columns of a unit's products from `first` on, in float32.
        """
        (_, places, _, part), width = self.out_s.shape, block.tiling.columns // (1 + self.gated)
        stores = [
            (unit, p, (pl.ds(tile.top + row, UNIT), pl.ds(tile.c * width + p * part, part)))
            for unit, row in enumerate(tile.units)
            for p in range(width // part)
        ]
        load = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
        loaded = lambda: [load(residual.at[at]) for residual in self.added for *_, at in stores]  # noqa: E731
        early = None if self.late else loaded()

        def write(columns: Callable) -> None:
            before = loaded() if self.late else early
            for i, (unit, p, at) in enumerate(stores):
                if self.gated:
                    halves = (columns(unit, (2 * p + half) * HALF, HALF) for half in (0, 1))
                    value = rounded_gate(*halves, self.out.dtype) if self.rounded else gate(*halves)
                else:
                    value = columns(unit, p * part, part)
                if before:
                    value = value.astype(self.out.dtype).astype(jnp.float32) + before[i].astype(jnp.float32)
                plgpu.wait_smem_to_gmem(min(i, places - 1), wait_read_only=True)  # this buffer's last results are sent
                place_s = self.out_s.at[warpgroup, i % places]
                place_s[...] = value.astype(self.out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(place_s, self.out.at[at])

        multiply(tile, write)


def launch(
    kernel: Callable,
    name: str,
    operands: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    multiplying: int,
    scratch: dict[str, Any],
    interpret: Any,
) -> jax.Array:
    """Run a kernel in all blocks, each of so many warpgroups that multiply and one that copies."""
    return plgpu.kernel(
        kernel,
        kernel_name=name,
        out_type=out,
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=multiplying + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out in kernels.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*operands)


def divide(warpgroup: Any, multiplying: int, copy: Callable, multiply: Callable) -> None:
    """Run `copy` in a block's last warpgroup and `multiply` in the others, with registers for each."""
    registers = REGISTERS.get(multiplying)

    @pl.when(warpgroup == multiplying)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        copy()

    @pl.when(warpgroup < multiplying)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        multiply()


def produce(block: Block, hands: Hands, copy: Callable, slot_of: Callable | None = None) -> None:
    """Run the warpgroup that copies. `copy(slot, k, top, c)` begins to copy step k of a tile into a free slot.

    The tile begins at row `top` and has the c-th tile of columns. `slot_of`: replaces `Hands.slot`.
    """

    def tile(j, step):
        top, _, c = block.place(j)

        def fetch(k, step):
            slot = (slot_of or hands.slot)(step)
            pl.when(step >= hands.slots)(lambda: plgpu.barrier_wait(hands.empty.at[slot]))
            copy(slot, k, top, c)
            return step + 1

        return lax.fori_loop(_i32(0), _i32(block.steps), fetch, step)

    hands.observe(lax.fori_loop(_i32(0), block.mine(block.tiles), tile, _i32(0)))


def consume(block: Block, hands: Hands, warpgroup: Any, results: Results, multiply: Callable) -> None:
    """Run a warpgroup that multiplies its part of each tile's rows. `multiply`: see `Results.write`."""
    height = block.tiling.rows // block.tiling.warpgroups
    units = [warpgroup * height + at for at in range(0, height, UNIT)]  # of a tile's rows, this warpgroup's

    def each(j, step):
        top, shared, c = block.place(j)
        copied = jnp.where(j < block.mine(block.tiles), _i32(block.steps), 0)
        done = (warpgroup + 1) * height <= shared
        idle = done | (top + warpgroup * height >= block.count)

        def release(_, step):
            slot = hands.slot(step)
            plgpu.barrier_wait(hands.full.at[slot])
            plgpu.barrier_arrive(hands.empty.at[slot])
            return step + 1

        lax.fori_loop(_i32(0), jnp.where(idle, copied, 0), release, step)
        tile = Tile(units, top, c, step, jnp.where(idle, 0, copied))
        pl.when(jnp.logical_not(done))(lambda: results.write(warpgroup, block, tile, multiply))
        return step + copied

    lax.fori_loop(_i32(0), block.mine(_i32(block.all_high * block.across)), each, _i32(0))
    plgpu.wait_smem_to_gmem(0)


def gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up.

    While a tile's last unit is gated, nothing is multiplied, and instructions for special functions and conversions are
    slow: an exponential and a root are two of them, where a quotient of numbers rounded in between takes three.
    """
    return gate * up * jnp.square(lax.rsqrt(1 + jnp.exp(-gate)))


def rounded_gate(gate: jax.Array, up: jax.Array, dtype: Any) -> jax.Array:
    """silu(gate) * up, rounded wherever plain layers do."""
    gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
    return (gate / (1 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32) * up


def padded(x: jax.Array, least: int = 0) -> jax.Array:
    """Pad rows to a multiple of `COPIED`, and to `least` at least."""
    return jnp.pad(x, ((0, max(-len(x) % COPIED, least - len(x))), (0, 0)))
