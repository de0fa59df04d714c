"""FP8 experts' tiles of weights times rows: pairs of e4m3 rows for `up`, bfloat16 ones for `down` and for one token.

FP8 tensor cores add up some 14 digits of each product, so a `BLOCK` of inputs is summed by itself, and the sums of
blocks are added in float32.

A warp has 16 of a tile's 64 weight rows: of `up` half of gate's or of up's, of `down` an expert's `COLUMNS` outputs,
which it multiplies by that expert's hidden rows. So all of a warp's products have one scale for each `BLOCK` of inputs.
A lane keeps the scale of one block, prefetched a tile early. Scales of outputs, for all inputs, multiply a tile's sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxspec.models.fp8 import BLOCK, E4M3
from jaxspec.pallas.dense.few_rows import registers
from jaxspec.pallas.dense.few_rows.block import by_row
from jaxspec.pallas.experts.expert_few.plan import COLUMNS, LANES, ROWS, STEP, TILE
from jaxspec.pallas.hopper import THREADS, WARPS
from jaxspec.pallas.hopper.thread_ints import byte_at, const, i32, mul

TOP, LOWER = 7, 4  # exponents: of a block's largest number as e4m3, and of a second piece's factor
BIAS, MANTISSA, EXPONENT = 127, 23, 0x7F800000  # of float32
LEAST = BIAS - 64  # exponent of a block's largest number; smaller ones lose digits
UPPER = -1 << MANTISSA - 3  # all but the digits of float32 that e4m3 lacks
BY_ROW = plgpu.Layout.WGMMA.reduce(0)
BY_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), 1)
BY_OUTPUT = plgpu.Layout.WGMMA.reduce(1)
SHUFFLE = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
_i32, _f32 = jnp.int32, jnp.float32


class Sizes(NamedTuple):
    """Sizes of the products of a step, as `registers.products` reads them."""

    rows: int = ROWS
    groups: int = 1
    chunk: int = STEP


def scales_of(plan, scales_g, outputs, rows, interpret):
    """f32[THREADS]: lane i of warp j has the scale of expert and weight row `rows[j]` for the i-th block of inputs."""
    thread = plgpu.broadcasted_iota(_i32, (THREADS,), 0, layout=BY_THREAD)
    warp, lane = lax.div(thread, _i32(LANES)), lax.rem(thread, _i32(LANES))
    found, first = None, 0
    for scale_g, size in zip(scales_g, plan.stacks, strict=True):
        _, units, blocks = scale_g.shape
        place, own = jnp.zeros_like(thread), jnp.zeros_like(thread)
        for i, (expert, row) in enumerate(rows):
            within = jnp.clip(expert - first, 0, size - 1)
            at = (within * units + lax.div(row, _i32(outputs // units))) * blocks
            place = jnp.where(warp == i, at, place)
            own = jnp.where(warp == i, expert, own)
        each = gathered(scale_g, place + jnp.minimum(lane, blocks - 1), BY_THREAD, interpret)
        found = each if found is None else jnp.where(own >= first, each, found)
        first += size
    return found


def of_outputs(plan, arrays, rows, interpret) -> Any:
    """f32[TILE]: the numbers of a tile's outputs, of which a warp's are those of expert and weight row `rows[warp]`.
    Each stack has an array, [experts, outputs]."""
    output = plgpu.broadcasted_iota(_i32, (TILE,), 0, layout=BY_OUTPUT)
    warp, own, found, first = lax.div(output, _i32(COLUMNS)), jnp.zeros_like(output), None, 0
    for array, size in zip(arrays, plan.stacks, strict=True):
        place = lax.rem(output, _i32(COLUMNS))
        for i, (expert, row) in enumerate(rows):
            at = jnp.clip(expert - first, 0, size - 1) * array.shape[1] + row
            place, own = place + jnp.where(warp == i, at, 0), jnp.where(warp == i, expert, own)
        each = gathered(array, place, BY_OUTPUT, interpret)
        found = each if found is None else jnp.where(own >= first, each, found)
        first += size
    return found


def gathered(ref, place, layout, interpret):
    """Load f32 from a whole array in memory: each number is at its own flat index `place`, an array of that layout."""
    if interpret:
        return ref[...].reshape(-1)[place]
    result = plgpu.ShapeDtypeStruct(place.shape, _f32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=result)(_gather)(ref, place)


def _gather(_, ref, place):
    f32 = ir.F32Type.get()
    base, made = mgpu.utils.memref_ptr(ref), np.empty_like(place.registers)
    for at, vector in np.ndenumerate(place.registers):
        value = llvm.load(f32, byte_at(base, mul(llvm.extractelement(vector, const(0)), 4)), alignment=4)
        made[at] = _alone(value)
    return mgpu.FragmentedArray(_registers=made, _layout=place.layout, _is_signed=None)


def _alone(value):
    """Make a register that holds one number."""
    return llvm.insertelement(llvm.mlir_undef(ir.VectorType.get((1,), value.type)), value, position=const(0))


def _of_outputs(scales, block, interpret):
    """f32[TILE]: each output's scale for a block of inputs."""
    if interpret:
        return jnp.repeat(scales.reshape(WARPS, LANES)[:, block], TILE // WARPS)
    result = plgpu.ShapeDtypeStruct((TILE,), _f32, layout=BY_OUTPUT)
    shuffle = plgpu.inline_mgpu(arg_types=(BY_THREAD, plgpu.Layout.WG_SPLAT), return_type=result)
    return shuffle(_shuffle)(scales, block)


def _shuffle(_, scales, block):
    f32, layout = ir.F32Type.get(), mgpu.WGMMA_ROW_LAYOUT
    (vector,) = scales.registers.flat
    word = mgpu.utils.bitcast(vector, i32())
    block = block.registers.flat[0]
    value = mgpu.utils.bitcast(mgpu.utils.inline_ptx(SHUFFLE, word, block, result_types=word.type), f32)
    made = np.empty(layout.registers_shape((TILE,)), dtype=object)
    made[...] = _alone(value)
    return mgpu.FragmentedArray(_registers=made, _layout=layout, _is_signed=None)


def added(scratch, scales, interpret, total, k, weight_s, rows, wait) -> Any:
    """Add the products of the k-th step to the total. `rows`: a reference to its rows, and how far a warp's first one
    is from the next warp's; None for the tokens' pairs. `scales`: None where outputs have them. `wait`: until the
    weights are there."""
    blocks = range(STEP // BLOCK)
    by = [None if scales is None else _of_outputs(scales, k * len(blocks) + b, interpret) for b in blocks]
    if rows is None:
        factors = [plgpu.load(scratch["factors_s"].at[k, b], layout=BY_ROW, optimized=False) for b in blocks]
        wait()
        made = _products_of_pieces(weight_s, scratch["pieces_s"].at[k])
        made = [each * lax.broadcast_in_dim(f, each.shape, [1]) for each, f in zip(made, factors, strict=True)]
    else:
        wait()
        rows_s, apart = rows
        (made,) = (_interpreted if interpret else registers.products)(Sizes(), weight_s, rows_s, apart=apart)
    for scale, each in zip(by, made, strict=True):
        total = total + (each if scale is None else each * lax.broadcast_in_dim(scale, each.shape, [0]))
    return total


def load_rows(plan, turn, x_g) -> list[Any]:
    """Load the tokens' rows for each of this warpgroup's steps of `up`, by the step's `BLOCK`s of inputs.

    Both warpgroups have as many steps, so they have the same ones in each tile.
    """
    steps = range(turn, plan.d // STEP, plan.multipliers)
    return [[_rows(plan, x_g, step * STEP + b * BLOCK) for b in range(STEP // BLOCK)] for step in steps]


def _rows(plan, x_g, first):
    """Load the tokens' rows of a block of inputs, [ROWS, BLOCK]; padding rows are zeros."""
    layout, inputs = by_row(8), pl.ds(first, BLOCK)
    load = partial(plgpu.load, optimized=False)
    if plan.t == ROWS:
        return load(x_g.at[:, inputs], layout=layout)
    place = plgpu.broadcasted_iota(_i32, (ROWS, BLOCK), 0, layout=layout)
    rows = plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), _f32), layout)
    for i in range(plan.t):
        row = load(x_g.at[i, inputs], layout=layout.reduce(0)).astype(_f32)
        row = plgpu.layout_cast(lax.broadcast_in_dim(row, rows.shape, [1]), layout)
        rows = jnp.where(place == i, row, rows)
    return rows


def place_pieces(plan, turn, rows, pieces_s, factors_s) -> None:
    """Put `pieces` of the rows from `load_rows` into shared memory, where `multiply` reads them."""
    for i, blocks in enumerate(rows):
        step = i * plan.multipliers + turn
        for b, block in enumerate(blocks):
            factors_s[step, b], upper, lower = pieces(block.astype(_f32))
            pieces_s[step, b, pl.ds(0, ROWS)], pieces_s[step, b, pl.ds(ROWS, ROWS)] = upper, lower
    plgpu.commit_smem()


def pieces(rows):
    """Split rows into two e4m3 rows each, with a power of two for each row, f32[r]. A row is the sum of its two, the
    second times 2^-`LOWER`, times that power.

    Its largest number becomes one between 128 and 256. e4m3 has four digits of bfloat16's eight: the first of the two
    has each number's first four, and the second has the others. Numbers below 2^-13 of the largest lose digits.
    """
    exponent = (_bits(jnp.max(jnp.abs(rows), axis=1)) & EXPONENT) >> MANTISSA
    exponent = jnp.maximum(exponent, LEAST)
    factor = _number((2 * BIAS + TOP - exponent) << MANTISSA)
    rows = rows * lax.broadcast_in_dim(factor, rows.shape, [0])
    upper = _number(_bits(rows) & UPPER)
    lower = (rows - upper) * 2.0**LOWER
    return _number((exponent - TOP) << MANTISSA), upper.astype(E4M3), lower.astype(E4M3)


def _bits(x):
    return lax.bitcast_convert_type(x, _i32)


def _number(bits):
    return lax.bitcast_convert_type(bits, _f32)


def _products_of_pieces(weight_s, pieces_s):
    """The products of weights with rows in two pieces, f32[TILE, ROWS] for each block of inputs of a step."""

    def run(*sums):
        for b, each in enumerate(sums):
            plgpu.wgmma(each, weight_s.at[:, pl.ds(b * BLOCK, BLOCK)], pieces_s.at[b].transpose((1, 0)))
        return [each[...] for each in sums]

    made = pl.run_scoped(run, *[plgpu.ACC((TILE, 2 * ROWS), _f32)] * (STEP // BLOCK))
    return [each[:, :ROWS] + each[:, ROWS:] * 2.0**-LOWER for each in made]


def _interpreted(sizes, weight_s, rows_s, apart):
    """Compute `registers.products` in plain jnp, for interpret mode."""
    values = weight_s[...].astype(_f32)
    rows = rows_s[...].astype(_f32)
    made = []
    for b in range(sizes.chunk // BLOCK):
        inputs = slice(b * BLOCK, (b + 1) * BLOCK)
        parts = []
        for warp in range(WARPS):
            own = jnp.minimum(warp * apart + jnp.arange(ROWS), len(rows) - 1)
            parts.append(values[warp * COLUMNS : (warp + 1) * COLUMNS, inputs] @ rows[own][:, inputs].T)
        made.append(jnp.concatenate(parts))
    return [made]
