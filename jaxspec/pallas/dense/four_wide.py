"""A matmul of many bfloat16 rows with a weight of four bits, which becomes bfloat16 in registers, on Hopper.

As `fp8_wide`, whose skeleton (`wide`) it has. A lane takes its words as `int4` arranges them, and they become numbers
times scales as in `few_rows.four_bits`, rounded to bfloat16 once. NVFP4's are exact, and its factors multiply the sums.

Weights and their scales come in units of 256 inputs, rows in steps of 64, so there are two rings. While one step is
multiplied, the next one's weights are converted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.int4 import UNIT as INPUTS
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense import tiles, wide
from jaxspec.pallas.dense.few_rows import four_bits
from jaxspec.pallas.dense.few_rows.four_bits import LEFT
from jaxspec.pallas.dense.few_rows.registers import weight_transforms
from jaxspec.pallas.dense.few_rows.share import FourBits
from jaxspec.pallas.dense.tiles import STEP, UNIT, Block, Hands, Tiling
from jaxspec.pallas.dense.wide import MOST
from jaxspec.pallas.hopper.export import lower_once

# Rows and columns of a tile, and about how long it takes: fp8_wide's, and a guess for fewer rows.
SIZES = {
    (32, 64): 9.0, (32, 128): 14.0, (32, 192): 19.0,
    (64, 64): 12.0, (64, 128): 18.0, (64, 192): 25.0, (96, 64): 15.0, (96, 128): 24.0, (96, 192): 34.0,
    (128, 64): 19.5, (160, 64): 22.5, (192, 64): 28.0, (256, 64): 35.5,
    (128, 128): 31.0, (160, 128): 38.0, (192, 128): 40.0, (256, 128): 48.0, (128, 192): 44.5,
}  # fmt: skip
LEAST = 32  # rows of a tile; fewer are padded
STEPS = INPUTS // STEP
UNITS = 3  # of weights in flight
MAX_BARRIERS = 32  # that jax makes in one group
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, dtype: Any, weight: Weight) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows > MOST:
        return f"{rows} rows; supported: up to {MOST}"
    return four_bits.four_bits_supported(weight)


def tiling_of(rows: int, outputs: int) -> Tiling:
    """The tiles that should take the least time."""
    return Tiling.quickest(rows, outputs, {size: time for size, time in SIZES.items() if size[0] <= max(rows, LEAST)})


def slots_of(tiling: Tiling, four: FourBits, gated: bool) -> int:
    """How many steps of rows shared memory holds beside weights and results."""
    weights = UNITS * tiling.columns // UNIT * (UNIT * INPUTS // 2 + four.bytes(INPUTS, UNIT))
    return min((wide.ring_bytes(tiling, gated) - weights) // (2 * STEP * tiling.rows), MAX_BARRIERS)


@lower_once("four_wide", "gated", "tiling")
def matmul(
    x: Float[Array, "r k"],
    weight: Weight,
    valid: Int[Array, "1"],
    residual: Float[Array, "r n"] | None = None,
    *,
    gated: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "r o"]:
    """x @ weight of the first `valid` rows, summed in float32, as bfloat16; padding holds that or zeros.

    `residual` and `gated` as in `fp8_wide.matmul`. `tiling` overrides `tiling_of`. An order of inputs is the caller's.
    """
    r, n, four = len(x), weight.outputs, four_bits.four_bits_of(weight)
    tiling = tiling or tiling_of(r, n)
    padded = [tiles.padded(a, tiling.rows) for a in (x, residual) if a is not None]
    groups, scales = tiling.columns // UNIT, four.scales(INPUTS, UNIT)
    slots = slots_of(tiling, four, gated)
    rings = dict(
        rows_s=plgpu.SMEM((slots, tiling.rows, STEP), jnp.bfloat16),
        weight_s=plgpu.SMEM((UNITS, groups, UNIT, INPUTS // 2), jnp.int8),
        scales_s=plgpu.SMEM((UNITS, groups, *scales), jnp.dtype(four.dtype)),
        rows_full=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        rows_empty=plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
        full=plgpu.Barrier(num_arrivals=2 * groups, num_barriers=UNITS),
        empty=plgpu.Barrier(num_arrivals=groups, num_barriers=UNITS),
    )
    operands = padded[0], valid, *four_bits.operands(weight), *padded[1:]
    return wide.launch(partial(_kernel, tiling, four), "four_wide", operands, n, tiling, gated, rings, interpret)[:r]


class _Rings(NamedTuple):
    """Steps of rows, and units of the weight with their scales, in shared memory."""

    four: FourBits
    rows_s: Any
    rows: Hands
    weight_s: Any
    scales_s: Any
    units: Hands
    staged_s: Any

    @property
    def groups(self) -> int:
        return self.weight_s.shape[1]

    def right(self, step: Any) -> Any:
        """The right operand of a step."""
        return self.rows_s.at[self.rows.slot(step)].transpose((1, 0))

    def left(self, unit: Any, warpgroup: Any, s: int) -> Any:
        """The left operand of step `s` of a unit: its weights times their scales, [UNIT, STEP] in bfloat16."""
        slot = self.units.slot(unit)
        refs = self.weight_s.at[slot, warpgroup], self.scales_s.at[slot, warpgroup]
        if self.staged_s is not None:
            whole, staged_s = four_bits.dequantised(self.four, *(ref[...] for ref in refs)), self.staged_s.at[warpgroup]
            staged_s[...] = whole[:, s * STEP : (s + 1) * STEP].astype(jnp.bfloat16)
            plgpu.commit_smem()
            return staged_s
        types = plgpu.RefType(weight_transforms()), plgpu.RefType()
        result = plgpu.ShapeDtypeStruct((UNIT, STEP), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        convert = partial(four_bits.left_operand, self.four, s, 0, 1)
        return plgpu.inline_mgpu(arg_types=types, return_type=result)(convert)(*refs)


def _kernel(
    tiling, four, x, valid, *refs,
    rows_s, weight_s, scales_s, products_s, rows_full, rows_empty, full, empty, gated_s=None, staged_s=None,
):  # fmt: skip
    weight = four_bits.FourBitWeight(*refs[: 2 + four.floats])
    results = refs[2 + four.floats :]
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    (rows, inputs), outputs = x.shape, weight.values.shape[0]
    block = Block.of(tiling, rows, outputs, inputs // INPUTS, valid[0], index)
    rings = _Rings(
        four, rows_s, Hands(rows_full, rows_empty, len(rows_s)), weight_s, scales_s, Hands(full, empty, UNITS), staged_s
    )

    def sums(group, unit, units):
        total = _sums(rings, tiling.rows, warpgroup, unit, units)
        if four.floats:
            by_output = plgpu.Layout.WGMMA.reduce(1)
            by = plgpu.load(weight.factors.at[pl.ds(group * UNIT, UNIT)], layout=by_output, optimized=False)
            total *= lax.broadcast_in_dim(by * LEFT, total.shape, [0])
        return total

    copy = partial(_produce, block, rings, x, weight)
    wide.run(block, warpgroup, copy, sums, results, [products_s, gated_s])


def _produce(block: Block, rings: _Rings, x: Any, weight: four_bits.FourBitWeight) -> None:
    """Run the warpgroup that copies."""
    four, groups, copy = rings.four, rings.groups, plgpu.copy_gmem_to_smem

    def wait(hands, n):
        slot = hands.slot(n)
        pl.when(n >= hands.slots)(lambda: plgpu.barrier_wait(hands.empty.at[slot]))
        return slot

    def tile(j, unit):
        top, _, c = block.place(j)

        def fetch(k, unit):
            slot = wait(rings.units, unit)
            for w in range(groups):
                first, full = (c * groups + w) * UNIT, rings.units.full.at[slot]
                part = weight.values.at[pl.ds(first, UNIT), pl.ds(k * (INPUTS // 2), INPUTS // 2)]
                copy(part, rings.weight_s.at[slot, w], full)
                copy(four_bits.scales_at(four, weight, INPUTS, UNIT, k, first), rings.scales_s.at[slot, w], full)
            for s in range(STEPS):
                slot = wait(rings.rows, unit * STEPS + s)
                part = x.at[pl.ds(top, block.tiling.rows), pl.ds((k * STEPS + s) * STEP, STEP)]
                copy(part, rings.rows_s.at[slot], rings.rows.full.at[slot])
            return unit + 1

        return lax.fori_loop(_i32(0), _i32(block.steps), fetch, unit)

    units = lax.fori_loop(_i32(0), block.mine(block.tiles), tile, _i32(0))
    rings.units.observe(units)
    rings.rows.observe(units * STEPS)


def _sums(rings: _Rings, rows: int, warpgroup: Any, unit: Any, units: Any) -> Any:
    """Multiply a tile's units as they arrive: a warpgroup's outputs, f32[UNIT, rows]. Zeros if there are none."""
    shape = UNIT, rows
    wait = lambda hands, n: plgpu.barrier_wait(hands.full.at[hands.slot(n)])  # noqa: E731
    release = lambda hands, n: plgpu.barrier_arrive(hands.empty.at[hands.slot(n)])  # noqa: E731

    def staged(_, carried):
        """For interpret mode, which can neither begin with a sum nor take a left operand from registers."""
        total, unit = carried
        wait(rings.units, unit)
        for s in range(STEPS):
            wait(rings.rows, unit * STEPS + s)

            def products(acc, s=s):
                plgpu.wgmma(acc, rings.left(unit, warpgroup, s), rings.right(unit * STEPS + s))
                return acc[...]

            total += pl.run_scoped(products, plgpu.ACC(shape, _f32))
            release(rings.rows, unit * STEPS + s)
        release(rings.units, unit)
        return total, unit + 1

    def pipelined(acc):
        def one(k, carried):
            left, unit = carried
            more = k + 1 < units
            for s in range(STEPS):
                step = unit * STEPS + s
                plgpu.wgmma(acc, left, rings.right(step))
                plgpu.wgmma_wait(1)  # the step before is done: its registers are free, and so are its rows
                if s:
                    release(rings.rows, step - 1)
                else:
                    pl.when(k > 0)(lambda step=step: release(rings.rows, step - 1))
                if s + 1 < STEPS:
                    left = rings.left(unit, warpgroup, s + 1)
                    wait(rings.rows, step + 1)
                    continue
                release(rings.units, unit)
                pl.when(more)(lambda: wait(rings.units, unit + 1))
                left = rings.left(jnp.where(more, unit + 1, unit), warpgroup, 0)
                pl.when(more)(lambda step=step: wait(rings.rows, step + 1))
            return left, unit + 1

        wait(rings.units, unit)
        wait(rings.rows, unit * STEPS)
        _, after = lax.fori_loop(_i32(0), units, one, (rings.left(unit, warpgroup, 0), unit))
        total = acc[...]
        release(rings.rows, after * STEPS - 1)
        return total

    start = plgpu.layout_cast(jnp.zeros(shape, _f32), plgpu.Layout.WGMMA)
    if rings.staged_s is not None:
        return lax.fori_loop(_i32(0), units, staged, (start, unit))[0]
    return lax.cond(units > 0, lambda: pl.run_scoped(pipelined, plgpu.ACC(shape, _f32)), lambda: start)
