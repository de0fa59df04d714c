"""A matmul of quantised rows with FP8 weights, both e4m3, on Hopper's FP8 tensor cores.

`tiles` divides the tiles among blocks, and writes results. A step is of 128 inputs. FP8 tensor cores keep some 14 bits
of a sum, so a step's products are a sum of their own: it is multiplied by its rows' scales, and by the weight's if
these are for 128 inputs, and added to the total in float32. Meanwhile the tensor cores have the other warpgroup's
products. An output's scale for all inputs multiplies the total.

A warpgroup has 64 rows of a tile: the sums of 128 need more registers than there are, and ran at two fifths of the
speed. Tiles of 192 rows have three warpgroups.

Few rows have few tiles. Then the inputs are split, so that most multiprocessors have a part of a tile. The parts' sums
are added in float32, by XLA or by the kernel that norms the result.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models import fp8
from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import tiles
from jaxspec.pallas.dense.tiles import UNIT, Block, Hands, Results, Tile, Tiling
from jaxspec.pallas.hopper.export import lower_once

STEP = fp8.BLOCK  # inputs: 128 bytes, the widest swizzle
MIN_UNIT = 32  # outputs that share a scale for 128 inputs
LEAST_ROWS = 128  # of a tile: fewer rows are padded
# Rows and columns of a tile, and its time with 4,096 inputs in us on an H200. Three warpgroups pay where gates are
# computed: one tile's are hidden behind the others' products.
SIZES = {(128, 192): 22.7, (128, 128): 18.0, (128, 64): 11.0}
GATED = SIZES | {(192, 128): 20.8}
RING_BYTES = 176 * 1024
PART, ADD = 0.7, 1.2  # us to write and read 4,096 outputs of a part, and to launch what adds parts
PART_STEPS = 4  # of a part at least
WIDEST_PART = 32  # columns of a part's results that are written at once: 128 bytes
_i32, _f32 = jnp.int32, jnp.float32


def supported(dtype: Any, block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why the kernel can't multiply rows of `dtype`, once they are quantised, by such a weight, or None if it can.

    `block` inputs, None being all, and `unit` outputs share a scale.
    """
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if block not in (None, STEP):
        return f"scales for {block} inputs each; supported: {STEP}, and all of them"
    if block and unit < MIN_UNIT:
        return f"scales for {unit} outputs; supported: {MIN_UNIT} and more"
    if inputs % STEP or outputs % UNIT:
        return f"a weight of {inputs} x {outputs}, not a multiple of {STEP} x {UNIT}"
    return None


def tiling_of(rows: int, outputs: int, gated: bool = False) -> Tiling:
    """The tiles that should take the least time."""
    sizes = GATED if gated else SIZES
    return Tiling.quickest(rows, outputs, {size: sizes[size] for size in sizes if size[0] <= max(rows, LEAST_ROWS)})


def division_of(rows: int, outputs: int, inputs: int, gated: bool = False) -> tuple[Tiling, int]:
    """The tiles, and in how many parts their inputs are summed, that should take the least time."""
    whole = tiling_of(rows, outputs, gated)
    if gated or rows > LEAST_ROWS:
        return whole, 1
    steps = inputs // STEP

    def cost(division: tuple[Tiling, int]) -> float:
        tiling, splits = division
        waves = -(-outputs // tiling.columns * splits // tiles.BLOCKS)
        parts = (PART * splits * outputs / 4096 + ADD) if splits > 1 else 0
        return waves * SIZES[tiling.rows, tiling.columns] * steps / 32 / splits + parts

    sizes = [Tiling(*size) for size in SIZES if outputs % size[1] == 0]
    parts = [n for n in range(1, steps // PART_STEPS + 1) if steps % n == 0] or [1]
    return min(((tiling, n) for tiling in sizes for n in parts), key=cost)


def padded_rows(rows: int) -> int:
    """How many rows there are in memory where nothing is padded for the kernel."""
    return max(-(-rows // tiles.COPIED) * tiles.COPIED, LEAST_ROWS)


@lower_once("fp8_tiles", "block", "gated", "tiling", "splits", "rows")
def matmul(
    x: Float[Array, "p k"],
    x_scales: Float[Array, "p b"],
    values: Float[Array, "n k"],
    scales: Float[Array, "a b"],
    valid: Int[Array, "1"],
    residual: Float[Array, "r n"] | None = None,
    *,
    block: int | None,
    gated: bool = False,
    tiling: Tiling | None = None,
    splits: int = 1,
    rows: int | None = None,
    interpret: Any = False,
) -> Float[Array, "r o"]:
    """`fp8.product` of the first `valid` rows, given by values and scales, as bfloat16; padding holds that or zeros.

    `residual`, which a gated one can't have: the product is rounded, as in the plain layers, and added to it. `gated`:
    silu(gate) * up of the product, half as wide, rounded where few rows' kernels round. `tiling` and `splits` override
    `division_of`. `rows`: of the product, if x comes with padding.
    """
    r, (n, k) = rows or len(x), values.shape
    if tiling is None:
        tiling, splits = division_of(r, n, k, gated)
    added = residual if splits == 1 else None
    out = _tiled(x, x_scales, values, scales, valid, added, block, gated, tiling, splits, interpret)[:r]
    if splits == 1:
        return out
    total = out.reshape(r, splits, n).sum(1).astype(jnp.bfloat16)
    return total if residual is None else residual + total


@lower_once("fp8_tiles", "block", "rows")
def parts(
    x: Float[Array, "p k"],
    x_scales: Float[Array, "p b"],
    values: Float[Array, "n k"],
    scales: Float[Array, "a b"],
    valid: Int[Array, "1"],
    *,
    block: int | None,
    rows: int,
    interpret: Any = False,
) -> Float[Array, "p s n"]:
    """The product as `matmul` has it, in the parts of its sum that `division_of` makes of it."""
    n, k = values.shape
    tiling, splits = division_of(rows, n, k)
    out = _tiled(x, x_scales, values, scales, valid, None, block, False, tiling, splits, interpret)
    return out.reshape(len(out), splits, n)


def _tiled(x, x_scales, values, scales, valid, added, block, gated, tiling, splits, interpret) -> Float[Array, "p o"]:
    n = len(values)
    padded = [tiles.padded(a, tiling.rows) for a in (x, x_scales, added) if a is not None]
    rows, unit = len(padded[0]), n // len(scales)
    scale = scales if block else jnp.repeat(scales[:, 0], unit)
    slot_bytes = STEP * (tiling.rows + tiling.columns) + 4 * tiling.rows
    slots = RING_BYTES // slot_bytes
    piece = math.gcd(unit, tiling.columns) if block else tiling.columns
    dtype, part = (jnp.bfloat16, HALF if gated else min(piece, tiles.STEP)) if splits == 1 else (_f32, WIDEST_PART)
    scratch = dict(
        rows_s=plgpu.SMEM((slots, tiling.rows, STEP), fp8.E4M3),
        scales_s=plgpu.SMEM((slots, tiling.rows), _f32),
        weight_s=plgpu.SMEM((slots, tiling.columns, STEP), fp8.E4M3),
        out_s=tiling.results(part, slots * slot_bytes, dtype),
        full=plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        empty=plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=slots),
    )
    kernel = partial(_kernel, tiling, splits, gated, block, piece)
    operands = padded[0], padded[1].T, values, scale, valid, *padded[2:]
    shape = jax.ShapeDtypeStruct((rows, n // 2 if gated else n * splits), dtype)
    return tiles.launch(kernel, "fp8_tiles", operands, shape, tiling.warpgroups, scratch, interpret)


class _Operands(NamedTuple):
    """Operands in memory: rows' scales are [groups of inputs, rows], the weight's [units, groups] or [outputs]."""

    x: Any
    x_scales: Any
    values: Any
    scales: Any

    def place(self, block: Block, c: Any) -> tuple[Any, Any]:
        """The tile of the weight's columns, and the first step of its inputs, of the c-th tile of columns."""
        across = self.values.shape[0] // block.tiling.columns
        if across == block.across:
            return c, 0
        return lax.rem(c, _i32(across)), lax.div(c, _i32(across)) * block.steps


class _Ring(NamedTuple):
    """Pieces of rows, of their scales and of the weight in shared memory, and their barriers."""

    rows_s: Any
    scales_s: Any
    weight_s: Any
    hands: Hands


def _kernel(
    tiling, splits, gated, in_blocks, piece, x, x_scales, values, scales, valid, *results,
    rows_s, scales_s, weight_s, out_s, full, empty,
):  # fmt: skip
    *added, out = results
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    (rows, inputs), outputs = x.shape, values.shape[0]
    # Parts of a tile's inputs are tiles of their own, side by side: first those of the first part.
    block = Block.of(tiling, rows, outputs * splits, inputs // STEP // splits, valid[0], index)
    operands = _Operands(x, x_scales, values, scales)
    ring = _Ring(rows_s, scales_s, weight_s, Hands(full, empty, len(rows_s)))

    multiply = partial(_multiply, block, ring, operands, in_blocks, piece)
    results = Results(gated, added, out, out_s, late=True, rounded=True)  # sums take all registers until late
    copy = partial(tiles.produce, block, ring.hands, partial(_copy, block, ring, operands))
    consume = partial(tiles.consume, block, ring.hands, warpgroup, results, multiply)
    tiles.divide(warpgroup, tiling.warpgroups, copy, consume)


def _copy(block: Block, ring: _Ring, operands: _Operands, slot: Any, k: Any, top: Any, c: Any) -> None:
    """Begin to copy step k of a tile into a slot, for `tiles.produce`: rows, weight, and rows' scales by step."""
    c, first = operands.place(block, c)
    k = first + k
    full, inputs = ring.hands.full.at[slot], pl.ds(k * STEP, STEP)
    rows, outputs = pl.ds(top, block.tiling.rows), pl.ds(c * block.tiling.columns, block.tiling.columns)
    plgpu.copy_gmem_to_smem(operands.x.at[rows, inputs], ring.rows_s.at[slot], full)
    plgpu.copy_gmem_to_smem(operands.values.at[outputs, inputs], ring.weight_s.at[slot], full)
    plgpu.copy_gmem_to_smem(operands.x_scales.at[k, rows], ring.scales_s.at[slot], full)


def _multiply(block: Block, ring: _Ring, operands: _Operands, in_blocks: Any, piece: int, tile: Tile, write: Any):
    """Multiply a tile's steps as they arrive. Totals are in pieces of columns that share a scale."""
    width, hands = block.tiling.columns, ring.hands
    tile_c, first_step = operands.place(block, tile.c)
    firsts = range(0, width, piece)
    load = partial(plgpu.load, optimized=False)

    def scales_of(k):
        """Load each piece's scale for a step's inputs: a step early, as reading takes about as long as a step."""
        if not in_blocks:
            return [None] * len(firsts)
        unit = operands.values.shape[0] // operands.scales.shape[0]
        k = first_step + jnp.minimum(k, block.steps - 1)
        return [operands.scales[lax.div(tile_c * width + first, _i32(unit)), k] for first in firsts]

    def product(slot, row, total):
        plgpu.wgmma(total, ring.rows_s.at[slot, pl.ds(row, UNIT)], ring.weight_s.at[slot].transpose((1, 0)))
        return total[...]

    def step(k, carried):
        totals, scales = carried
        slot, following = hands.slot(tile.step + k), scales_of(k + 1)
        plgpu.barrier_wait(hands.full.at[slot])
        sums = []
        for row, total in zip(tile.units, totals, strict=True):
            made = pl.run_scoped(partial(product, slot, row), plgpu.ACC((UNIT, width), _f32))
            parts = [made[:, first : first + piece] for first in firsts]
            by_row = load(ring.scales_s.at[slot, pl.ds(row, UNIT)], layout=_layout(1))
            by = [by_row if scale is None else by_row * scale for scale in scales]
            parts = [part * _across(each, part) for part, each in zip(parts, by, strict=True)]
            sums.append([before + part for before, part in zip(total, parts, strict=True)])
        plgpu.barrier_arrive(hands.empty.at[slot])
        return sums, following

    def columns(unit, first, count):
        at = first % piece
        part = totals[unit][first // piece][:, at : at + count]
        if in_blocks:
            return part
        by_column = load(operands.scales.at[pl.ds(tile_c * width + first, count)], layout=_layout(0))
        return part * lax.broadcast_in_dim(by_column, part.shape, (1,))

    zeros = plgpu.layout_cast(jnp.zeros((UNIT, piece), _f32), plgpu.Layout.WGMMA)
    totals = [[zeros] * len(firsts)] * len(tile.units)
    totals, _ = lax.fori_loop(_i32(0), tile.needed, step, (totals, scales_of(_i32(0))))
    write(columns)


def _layout(summed: int) -> Any:
    return plgpu.Layout.WGMMA.reduce(summed)


def _across(by_row: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(by_row, like.shape, (0,))
