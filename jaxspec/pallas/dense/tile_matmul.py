"""A matmul of many rows, bound by arithmetic: of prompts, and of rounds that verify many rows of many requests.

`tiles` divides the tiles among blocks, and writes results. Here the producer copies both operands into a ring. The
traffic of shared memory is near its limit; larger tiles, and squarer ones, need less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import tiles
from jaxspec.pallas.dense.tiles import STEP, UNIT, Block, Hands, Results, Tile, Tiling
from jaxspec.pallas.dense.weight_stream import MAX_ROWS
from jaxspec.pallas.hopper.export import lower_once

RING_BYTES = 192 * 1024
LEAST = 128  # rows of the shortest tile; fewer are padded
_i32 = jnp.int32


def supported(rows: int, dtype: Any, inputs: int, outputs: int) -> str | None:
    """Why the kernel shouldn't multiply so many rows by such a weight, or None if it should."""
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    if rows <= MAX_ROWS:
        return f"{rows} rows: reading the weights takes longer than multiplying"
    if inputs % STEP or outputs % 128:
        return f"a weight of {inputs} x {outputs} is not a multiple of {STEP} x 128"
    return None


def tiling_of(rows: int, outputs: int, added: bool = False, splits: int = 1) -> Tiling:
    """The tiles that should take the least time. `added`: to a residual, for which the tallest tiles lack registers, as
    the widest do for several sums."""
    sizes = [(128, columns) for columns in (256, 192, 128, 64)]
    sizes = sizes[1:] if splits > 1 else sizes + [(256, 192)] * (rows >= 256 and not added)
    return Tiling.quickest(rows, outputs, {(r, c): r * c + 8 * (r + c) for r, c in sizes})  # products, copies


@lower_once("tile_matmul", "gated", "tiling", "splits", "rounded")
def matmul(
    x: Float[Array, "r k"],
    weight: Float[Array, "k n"],
    valid: Int[Array, "1"],
    residual: Float[Array, "r n"] | None = None,
    *,
    gated: bool = False,
    tiling: Tiling | None = None,
    splits: int = 1,
    rounded: bool = False,
    interpret: Any = False,
) -> Float[Array, "r o"]:
    """`x @ weight` of the first `valid` rows, summed in float32, rounded to x's dtype; padding rows hold that or zeros.

    `residual`, which a gated one can't have: the product is rounded, as in the plain layers, and added to it. `gated`:
    silu(gate) * up of the product, half as wide, rounded once. `tiling` overrides `tiling_of`. `splits`: the inputs'
    parts that are summed by themselves and then added up, as in `weight_stream`. `rounded`: gate and up, and
    silu(gate), are rounded as well, as there.
    """
    outputs = weight.shape[1]
    padded = [tiles.padded(a, LEAST) for a in (x, residual) if a is not None]
    rows, tiling = len(padded[0]), tiling or tiling_of(len(x), outputs, residual is not None, splits)
    slot_bytes = 2 * STEP * (tiling.rows + tiling.columns)
    slots = RING_BYTES // slot_bytes
    scratch = dict(
        rows_s=plgpu.SMEM((slots, tiling.rows, STEP), x.dtype),
        weight_s=plgpu.SMEM((slots, STEP, tiling.columns), x.dtype),
        out_s=tiling.results(HALF if gated else STEP, slots * slot_bytes),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        empty=plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=slots),
    )
    kernel, operands = partial(_kernel, tiling, gated, splits, rounded), (padded[0], weight, valid, *padded[1:])
    shape = jax.ShapeDtypeStruct((rows, outputs // 2 if gated else outputs), x.dtype)
    out = tiles.launch(kernel, "tile_matmul", operands, shape, tiling.warpgroups, scratch, interpret)
    return out[: len(x)]


def _kernel(tiling, gated, splits, rounded, x, weight, valid, *results, rows_s, weight_s, out_s, full, empty):
    *added, out = results
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    steps = weight.shape[0] // STEP
    # `valid` is read once, as memory is slow and each tile needs it.
    block = Block.of(tiling, x.shape[0], weight.shape[1], steps, valid[0], index)
    ring = _Ring(rows_s, weight_s, Hands(full, empty, len(rows_s)))

    results = Results(gated, added, out, out_s, late=splits > 1, rounded=rounded)
    multiply = partial(_multiply, block, ring) if splits == 1 else partial(_multiply_parts, block, ring, splits)
    copy = partial(tiles.produce, block, ring.hands, partial(_copy, block, ring, x, weight))
    consume = partial(tiles.consume, block, ring.hands, warpgroup, results, multiply)
    tiles.divide(warpgroup, tiling.warpgroups, copy, consume)


class _Ring(NamedTuple):
    """Pieces of both operands in shared memory, and their barriers."""

    rows_s: Any
    weight_s: Any
    hands: Hands


def _copy(block: Block, ring: _Ring, x: Any, weight: Any, slot: Any, k: Any, top: Any, c: Any) -> None:
    """Begin to copy step k of a tile's rows and weight into a slot, for `tiles.produce`."""
    full, inputs = ring.hands.full.at[slot], pl.ds(k * STEP, STEP)
    rows, outputs = pl.ds(top, block.tiling.rows), pl.ds(c * block.tiling.columns, block.tiling.columns)
    plgpu.copy_gmem_to_smem(x.at[rows, inputs], ring.rows_s.at[slot], full)
    plgpu.copy_gmem_to_smem(weight.at[inputs, outputs], ring.weight_s.at[slot], full)


def _add(ring: _Ring, units: list[Any], totals: Sequence[Any], step: Any, count: Any) -> Any:
    """Add so many steps' products to the units' totals, as they arrive; the last step's may still go on. Returns the
    step that follows."""
    hands = ring.hands

    def multiply(k, step):
        slot = hands.slot(step)
        plgpu.barrier_wait(hands.full.at[slot])
        for row, total in zip(units, totals, strict=True):
            plgpu.wgmma(total, ring.rows_s.at[slot, pl.ds(row, UNIT)], ring.weight_s.at[slot])
        plgpu.wgmma_wait(len(units))  # this step's may go on: those of the step before are done
        pl.when(k > 0)(lambda: plgpu.barrier_arrive(hands.empty.at[hands.slot(step - 1)]))
        return step + 1

    return lax.fori_loop(_i32(0), count, multiply, step)


def _multiply(block: Block, ring: _Ring, tile: Tile, write: Any) -> None:
    """Multiply a tile's steps as they arrive."""
    units, hands = tile.units, ring.hands

    def accumulate(*totals):
        def columns(unit, first, count):
            if unit not in made:  # the next unit's last products go on while this one is written
                made[unit] = plgpu.wgmma_accumulator_load(totals[unit], wait_n=len(units) - 1 - unit)
            return made[unit][:, first : first + count]

        made = {}
        last = _add(ring, units, totals, tile.step, tile.needed)
        write(columns)
        pl.when(tile.needed > 0)(lambda: plgpu.barrier_arrive(hands.empty.at[hands.slot(last - 1)]))

    pl.run_scoped(accumulate, *[plgpu.ACC((UNIT, block.tiling.columns), jnp.float32)] * len(units))


def _multiply_parts(block: Block, ring: _Ring, splits: int, tile: Tile, write: Any) -> None:
    """Multiply a tile's steps, with a sum for each of `splits` parts of the inputs; the sums are added up in order."""
    units, hands, step, sums = tile.units, ring.hands, tile.step, None
    for split in range(splits):
        low, high = (end * block.steps // splits for end in (split, split + 1))
        count = jnp.where(tile.needed > 0, _i32(high - low), 0)

        def accumulate(*totals, count=count, step=step):
            last = _add(ring, units, totals, step, count)
            plgpu.wgmma_wait(0)
            pl.when(count > 0)(lambda: plgpu.barrier_arrive(hands.empty.at[hands.slot(last - 1)]))
            return tuple(total[...] for total in totals)

        parts = pl.run_scoped(accumulate, *[plgpu.ACC((UNIT, block.tiling.columns), jnp.float32)] * len(units))
        step, sums = step + count, parts if sums is None else [a + b for a, b in zip(sums, parts, strict=True)]
    write(lambda unit, first, count: sums[unit][:, first : first + count])
