"""A matmul of many rows, bound by arithmetic: of prompts, and of rounds that verify many rows of many requests.

Each multiprocessor takes one tile of outputs after the other. Tiles of the same weights come next to one another, so
that these are read from memory once. A producer warpgroup copies both operands into a ring in shared memory, and
prefetches the next tile's while this one's results are written. Two warpgroups multiply, half of the tile's rows each.
The traffic of shared memory is near its limit; larger tiles, and squarer ones, need less of it.

The number of valid rows is data: programs come in few sizes, and padding takes no time. Where rows don't fill the last
tile, it begins among the rows of the tile before; a warpgroup whose rows all belong to that one has nothing to do. A
gated matmul, whose weight alternates `HALF` columns of gate and `HALF` of up, writes silu(gate) * up. Another may add
its results to a residual stream, which is loaded before the products, whose time hides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper import MULTIPROCESSORS, SWIZZLED, WGMMA_ROWS
from jaxspec.pallas.once import lower_once
from jaxspec.pallas.weight_stream import MAX_ROWS, ROOM
from jaxspec.weights import HALF

UNIT = WGMMA_ROWS
COPIED = 8  # rows of an array that copies take: a multiple of these
STEP = SWIZZLED  # inputs of one step: 128 bytes of bfloat16, the widest swizzle
BLOCKS = MULTIPROCESSORS  # on a card with fewer, some take two blocks' work, one after the other
RING_BYTES = 192 * 1024
WARPGROUPS = 2  # that multiply
_i32 = jnp.int32


def supported(rows: int, dtype: Any, inputs: int, outputs: int) -> str | None:
    """Why this isn't for the kernel, or None if it is."""
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    if rows <= MAX_ROWS:
        return f"{rows} rows: reading the weights takes longer than multiplying"
    if inputs % STEP or outputs % 128:
        return f"a weight of {inputs} x {outputs} is not a multiple of {STEP} x 128"
    return None


@dataclass(frozen=True)
class Tiling:
    """How outputs are divided: `rows` and `columns` of a tile."""

    rows: int
    columns: int

    @classmethod
    def of(cls, rows: int, outputs: int, added: bool = False) -> Tiling:
        """The tiles that should take the least time: that of a multiprocessor which has most of them.

        `added`: to a residual, for which the tallest lack registers.
        """
        sizes = [cls(128, columns) for columns in (256, 192, 128, 64)]
        if rows >= 256 and not added:
            sizes.append(cls(256, 192))

        def cost(tiling: Tiling) -> int:
            tiles = -(-rows // tiling.rows) * (outputs // tiling.columns)
            each = tiling.rows * tiling.columns + 8 * (tiling.rows + tiling.columns)  # products, copies
            return -(-tiles // BLOCKS) * each

        return min((tiling for tiling in sizes if outputs % tiling.columns == 0), key=cost)

    @property
    def slots(self) -> int:
        return RING_BYTES // (2 * STEP * (self.rows + self.columns))

    @property
    def ring_bytes(self) -> int:
        return self.slots * 2 * STEP * (self.rows + self.columns)


@lower_once("tile_matmul", "gated", "tiling")
def matmul(
    x: Float[Array, "r k"],
    weight: Float[Array, "k n"],
    real: Int[Array, "1"],
    residual: Float[Array, "r n"] | None = None,
    *,
    gated: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "r o"]:
    """`x @ weight` of the first `real` rows, summed in float32, rounded to x's dtype; of others that or zeros.

    `residual`, which a gated one can't have: what that is added to, rounded before as the plain layers do. `gated`:
    silu(gate) * up of it, half as wide, rounded once. `tiling` overrides its choice.
    """
    outputs = weight.shape[1]
    filled = [jnp.pad(a, ((0, -len(a) % COPIED), (0, 0))) for a in (x, residual) if a is not None]
    rows, tiling = len(filled[0]), tiling or Tiling.of(len(x), outputs, residual is not None)
    part = HALF if gated else STEP  # columns of one store
    stores = tiling.rows * tiling.columns // (WARPGROUPS * UNIT * STEP)  # of a warpgroup for one tile
    places = min(stores, (ROOM - tiling.ring_bytes) // (WARPGROUPS * UNIT * part * x.dtype.itemsize))
    out = plgpu.kernel(
        partial(_kernel, tiling, gated),
        kernel_name="tile_matmul",
        out_type=jax.ShapeDtypeStruct((rows, outputs // 2 if gated else outputs), x.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            rows_s=plgpu.SMEM((tiling.slots, tiling.rows, STEP), x.dtype),
            weight_s=plgpu.SMEM((tiling.slots, STEP, tiling.columns), x.dtype),
            out_s=plgpu.SMEM((WARPGROUPS, places, UNIT, part), x.dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.slots),
            empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tiling.slots),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(filled[0], weight, real, *filled[1:])
    return out[: len(x)]


class _Block(NamedTuple):
    """One thread block's tiles: which there are, and where they lie."""

    tiling: Tiling
    count: Any  # real rows
    lowest: int  # where the last tile of rows begins
    all_high: int  # tiles of rows, and of these those with real rows
    high: Any
    across: int  # tiles of columns
    tiles: Any  # of all blocks, those with real rows. The tiles after these have none, and become zeros
    steps: int  # of a tile's inputs
    index: Any

    @classmethod
    def of(cls, tiling: Tiling, x: Any, weight: Any, count: Any, index: Any) -> _Block:
        all_high, lowest = -(-x.shape[0] // tiling.rows), x.shape[0] - tiling.rows
        high = jnp.where(count > lowest, all_high, lax.div(count + tiling.rows - 1, _i32(tiling.rows)))
        across, steps = weight.shape[1] // tiling.columns, weight.shape[0] // STEP
        return cls(tiling, count, lowest, all_high, high, across, high * across, steps, index)

    def mine(self, count: Any) -> Any:
        """How many of `count` tiles are this block's: it takes index, index + BLOCKS, ..."""
        return lax.div(count + BLOCKS - 1 - self.index, _i32(BLOCKS))

    def place(self, j: Any) -> tuple[Any, Any, Any]:
        """Of this block's j-th tile the first row, how many are the tile before's too, and which columns it has."""
        tile = self.index + j * BLOCKS
        padding = jnp.maximum(self.all_high - self.high, 1)
        into = tile - self.tiles
        i = jnp.where(into < 0, lax.rem(tile, jnp.maximum(self.high, 1)), self.high + lax.rem(into, padding))
        c = jnp.where(into < 0, lax.div(tile, jnp.maximum(self.high, 1)), lax.div(into, padding))
        top = jnp.minimum(i * self.tiling.rows, self.lowest)
        return top, i * self.tiling.rows - top, c


def _kernel(tiling, gated, x, weight, real, *results, rows_s, weight_s, out_s, full, empty):
    *added, out = results
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    block = _Block.of(tiling, x, weight, real[0], index)  # real is read once: memory is slow, and each tile asks
    ring = _Ring(rows_s, weight_s, full, empty, _i32(tiling.slots))
    pl.when(warpgroup == WARPGROUPS)(partial(_produce, block, ring, x, weight))
    pl.when(warpgroup < WARPGROUPS)(partial(_consume, block, ring, warpgroup, gated, added, out, out_s))


class _Ring(NamedTuple):
    """Pieces of both operands in shared memory, and the barriers that say which are filled and which are free."""

    rows_s: Any
    weight_s: Any
    full: Any
    empty: Any
    slots: Any


def _produce(block: _Block, ring: _Ring, x: Any, weight: Any) -> None:
    """The warpgroup that copies."""
    plgpu.set_max_registers(40, action="decrease")
    tiling, slots = block.tiling, ring.slots

    def tile(j, step):
        top, _, c = block.place(j)

        def fetch(k, step):
            slot = lax.rem(step, slots)
            pl.when(step >= slots)(lambda: plgpu.barrier_wait(ring.empty.at[slot]))
            inputs = pl.ds(k * STEP, STEP)
            rows, outputs = pl.ds(top, tiling.rows), pl.ds(c * tiling.columns, tiling.columns)
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], ring.rows_s.at[slot], ring.full.at[slot])
            plgpu.copy_gmem_to_smem(weight.at[inputs, outputs], ring.weight_s.at[slot], ring.full.at[slot])
            return step + 1

        return lax.fori_loop(_i32(0), _i32(block.steps), fetch, step)

    step = lax.fori_loop(_i32(0), block.mine(block.tiles), tile, _i32(0))

    def observe(step, _):  # a barrier must not be left with an arrival that nobody saw
        plgpu.barrier_wait(ring.empty.at[lax.rem(step, slots)])
        return _

    lax.fori_loop(jnp.maximum(step - slots, 0), step, observe, _i32(0))


def _consume(block: _Block, ring: _Ring, warpgroup: Any, gated: bool, added: list[Any], out: Any, out_s: Any) -> None:
    """A warpgroup that multiplies: its part of each tile's rows."""
    plgpu.set_max_registers(232, action="increase")
    height = block.tiling.rows // WARPGROUPS
    units = [warpgroup * height + at for at in range(0, height, UNIT)]  # of a tile's rows, this warpgroup's
    results = partial(_results, block, ring, warpgroup, units, gated, added, out, out_s)

    def tile(j, step):
        top, shared, c = block.place(j)
        copied = jnp.where(j < block.mine(block.tiles), _i32(block.steps), 0)
        done = (warpgroup + 1) * height <= shared
        idle = done | (top + warpgroup * height >= block.count)

        def release(_, step):
            slot = lax.rem(step, ring.slots)
            plgpu.barrier_wait(ring.full.at[slot])
            plgpu.barrier_arrive(ring.empty.at[slot])
            return step + 1

        lax.fori_loop(_i32(0), jnp.where(idle, copied, 0), release, step)
        pl.when(jnp.logical_not(done))(lambda: results(top, c, step, jnp.where(idle, 0, copied)))
        return step + copied

    lax.fori_loop(_i32(0), block.mine(_i32(block.all_high * block.across)), tile, _i32(0))
    plgpu.wait_smem_to_gmem(0)


def _results(block, ring, warpgroup, units, gated, added, out, out_s, top, c, step, needed):
    """Multiply `needed` steps of a tile as they arrive, add what is to be added, and write it."""
    (_, places, _, part), columns = out_s.shape, block.tiling.columns
    width = columns // 2 if gated else columns
    stores = [
        (unit, p, (pl.ds(top + row, UNIT), pl.ds(c * width + p * part, part)))
        for unit, row in enumerate(units)
        for p in range(width // part)
    ]
    load = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
    before = [load(residual.at[at]) for residual in added for *_, at in stores]

    def accumulate(*totals):
        def multiply(k, step):
            slot = lax.rem(step, ring.slots)
            plgpu.barrier_wait(ring.full.at[slot])
            for row, total in zip(units, totals, strict=True):
                plgpu.wgmma(total, ring.rows_s.at[slot, pl.ds(row, UNIT)], ring.weight_s.at[slot])
            plgpu.wgmma_wait(len(units))  # this step's may go on: those of the step before are done
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(ring.empty.at[lax.rem(step - 1, ring.slots)]))
            return step + 1

        last = lax.fori_loop(_i32(0), needed, multiply, step)
        for i, (unit, p, at) in enumerate(stores):
            if p == 0:  # the next unit's last products go on while this one is written
                total = plgpu.wgmma_accumulator_load(totals[unit], wait_n=len(units) - 1 - unit)
            value = _gate(total, p) if gated else total[:, p * part : (p + 1) * part]
            if before:
                value = value.astype(out.dtype).astype(jnp.float32) + before[i].astype(jnp.float32)
            plgpu.wait_smem_to_gmem(min(i, places - 1), wait_read_only=True)  # what this place held is sent
            place_s = out_s.at[warpgroup, i % places]
            place_s[...] = value.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(place_s, out.at[at])
        pl.when(needed > 0)(lambda: plgpu.barrier_arrive(ring.empty.at[lax.rem(last - 1, ring.slots)]))

    pl.run_scoped(accumulate, *[plgpu.ACC((UNIT, columns), jnp.float32)] * len(units))


def _gate(total, run):
    """silu(gate) * up of one run of columns.

    Of a tile's last unit nothing is multiplied meanwhile, and instructions for special functions and conversions are
    slow: an exponential and a root are two of them, where a quotient of numbers rounded in between takes three.
    """
    gate, up = (total[:, at : at + HALF] for at in (2 * run * HALF, (2 * run + 1) * HALF))
    return gate * up * jnp.square(lax.rsqrt(1 + jnp.exp(-gate)))
