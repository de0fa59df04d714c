"""A matmul of many bfloat16 rows with FP8 weights, which become bfloat16 in registers, on Hopper.

Each weight is read as one byte (`wide`): two are loaded in the order in which tensor cores take them, and a byte's
bits are moved to where bfloat16 has them.

A weight is multiplied by its block's scale while it is converted, and rounded to bfloat16 once, as `Weight.dequantised`
does. For that the scale is a sum of two bfloat16 numbers. So the tensor cores accumulate from a tile's first step to
its last without being rescaled. A step has 64 inputs. While one step is multiplied, the next one's weights are
converted. Scales of whole outputs multiply the total.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.fp8 import BLOCK
from jaxspec.pallas.dense import scaled, tiles, wide
from jaxspec.pallas.dense.fp8_rows import weight_supported
from jaxspec.pallas.dense.tiles import STEP, UNIT, Block, Hands, Tiling
from jaxspec.pallas.dense.weight_stream import MAX_ROWS
from jaxspec.pallas.dense.wide import MOST
from jaxspec.pallas.hopper.export import lower_once

# Rows and columns of a tile, and its time with 4,096 inputs in us on an H100, measured in layers' products. Times of
# 192 rows and of 160 x 128 are from single tiles.
SIZES = {
    (128, 64): 19.5, (160, 64): 22.5, (192, 64): 28.0, (256, 64): 35.5,
    (128, 128): 31.0, (160, 128): 38.0, (192, 128): 40.0, (256, 128): 48.0,
    (128, 192): 44.5, (160, 192): 63.0, (192, 192): 66.0,
}  # fmt: skip
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, dtype: Any, block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can.

    `block` inputs, None being all, and `unit` outputs share a scale.
    """
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if not MAX_ROWS < rows <= MOST:
        return f"{rows} rows; supported: more than {MAX_ROWS}, up to {MOST}"
    return weight_supported(block or BLOCK, outputs, inputs, unit if block else UNIT)


def tiling_of(rows: int, outputs: int) -> Tiling:
    """The tiles that should take the least time."""
    return Tiling.quickest(rows, outputs, {size: time for size, time in SIZES.items() if size[0] <= rows})


@lower_once("fp8_wide", "block", "gated", "tiling")
def matmul(
    x: Float[Array, "r k"],
    values: Float[Array, "n k"],
    scales: Float[Array, "a b"],
    valid: Int[Array, "1"],
    residual: Float[Array, "r n"] | None = None,
    *,
    block: int | None,
    gated: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "r o"]:
    """x @ (values * scales)' of the first `valid` rows, summed in float32, as bfloat16; padding holds that or zeros.

    The weight is rounded to bfloat16 if its scales are for blocks. `residual`, which a gated one can't have: the
    product is rounded, as in the plain layers, and added to it. `gated`: silu(gate) * up of the product, half as wide,
    rounded where plain layers round. `tiling` overrides `tiling_of`.
    """
    r, n = len(x), len(values)
    tiling = tiling or tiling_of(r, n)
    padded = [tiles.padded(a, tiling.rows) for a in (x, residual) if a is not None]
    scale = scales if block else jnp.repeat(scales[:, 0], n // len(scales))
    groups, slot_bytes = tiling.columns // UNIT, STEP * (2 * tiling.rows + tiling.columns)
    slots = 1 << (wide.ring_bytes(tiling, gated) // slot_bytes).bit_length() - 1
    rings = dict(
        rows_s=plgpu.SMEM((slots, tiling.rows, STEP), jnp.bfloat16),
        weight_s=plgpu.SMEM((slots, groups, UNIT, STEP), jnp.int8),
        full=plgpu.Barrier(num_arrivals=1 + groups, num_barriers=slots),
        empty=plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
    )
    operands = padded[0], lax.bitcast_convert_type(values, jnp.int8), scale, valid, *padded[1:]
    kernel = partial(_kernel, tiling, block)
    return wide.launch(kernel, "fp8_wide", operands, n, tiling, gated, rings, interpret)[:r]


class _Ring(NamedTuple):
    """Pieces of rows and of the weight in shared memory, and their barriers."""

    rows_s: Any
    weight_s: Any
    hands: Hands
    staged_s: Any

    @property
    def groups(self) -> int:
        return self.weight_s.shape[1]

    def slot(self, step: Any) -> Any:
        return step & (self.hands.slots - 1)

    def wait(self, step: Any) -> None:
        plgpu.barrier_wait(self.hands.full.at[self.slot(step)])

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.hands.empty.at[self.slot(step)])

    def rows(self, step: Any) -> Any:
        """The right operand of a step."""
        return self.rows_s.at[self.slot(step)].transpose((1, 0))


def _kernel(
    tiling, in_blocks, x, values, scales, valid, *results,
    rows_s, weight_s, products_s, full, empty, gated_s=None, staged_s=None,
):  # fmt: skip
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    (rows, inputs), outputs = x.shape, values.shape[0]
    block = Block.of(tiling, rows, outputs, inputs // STEP, valid[0], index)
    ring = _Ring(rows_s, weight_s, Hands(full, empty, len(rows_s)), staged_s)

    def sums(group, step, steps):
        own = _Weight(ring, warpgroup, scaled.Scales(scales, outputs, group) if in_blocks else None)
        total, by = _sums(ring, tiling.rows, own, step, steps), _f32(scaled.LEFT)
        if not in_blocks:
            by *= plgpu.load(scales.at[pl.ds(group * UNIT, UNIT)], layout=scaled.by_output(), optimized=False)
            by = lax.broadcast_in_dim(by, total.shape, [0])
        return total * by

    copy = partial(tiles.produce, block, ring.hands, partial(_copy, block, ring, x, values), ring.slot)
    wide.run(block, warpgroup, copy, sums, results, [products_s, gated_s])


def _copy(block: Block, ring: _Ring, x: Any, values: Any, slot: Any, k: Any, top: Any, c: Any) -> None:
    """Begin to copy step k of a tile's rows and of each warpgroup's weights into a slot, for `tiles.produce`."""
    full, inputs = ring.hands.full.at[slot], pl.ds(k * STEP, STEP)
    plgpu.copy_gmem_to_smem(x.at[pl.ds(top, block.tiling.rows), inputs], ring.rows_s.at[slot], full)
    for w in range(ring.groups):
        outputs = pl.ds((c * ring.groups + w) * UNIT, UNIT)
        plgpu.copy_gmem_to_smem(values.at[outputs, inputs], ring.weight_s.at[slot, w], full)


class _Weight(NamedTuple):
    """A warpgroup's weights in the ring, as left operands."""

    ring: _Ring
    warpgroup: Any
    scales: scaled.Scales | None

    def scales_at(self, k: Any) -> list[Any]:
        return self.scales.at(k) if self.scales else []

    def at(self, step: Any, scales: list[Any]) -> Any:
        """A step's weights [UNIT, STEP] times their scales over `scaled.LEFT`, in bfloat16."""
        bytes_s, staged_s = self.ring.weight_s.at[self.ring.slot(step), self.warpgroup], self.ring.staged_s
        return scaled.load(bytes_s, scales, None if staged_s is None else staged_s.at[self.warpgroup])


def _sums(ring: _Ring, rows: int, weight: _Weight, step: Any, steps: Any) -> Any:
    """Multiply a tile's steps as they arrive: a warpgroup's outputs, f32[UNIT, rows]. Zeros if there are no steps."""
    shape, pairs = (UNIT, rows), lax.div(steps, _i32(BLOCK // STEP))

    def staged(k, carried):
        """For interpret mode, which can neither begin with a sum nor take a left operand from registers."""
        total, step = carried

        def products(step, acc):
            plgpu.wgmma(acc, weight.at(step, weight.scales_at(k)), ring.rows(step))
            return acc[...]

        for at in range(BLOCK // STEP):
            ring.wait(step + at)
            total += pl.run_scoped(partial(products, step + at), plgpu.ACC(shape, _f32))
            ring.release(step + at)
        return total, step + BLOCK // STEP

    def pipelined(acc):
        def one(k, carried):
            left, scales, step = carried
            plgpu.wgmma(acc, left, ring.rows(step))
            following = weight.scales_at(jnp.minimum(k + 1, pairs - 1))  # reading takes about as long as a step
            ring.wait(step + 1)
            plgpu.wgmma_wait(1)  # the registers of the step before are free, and so are its rows
            pl.when(k > 0)(lambda: ring.release(step - 1))
            plgpu.wgmma(acc, weight.at(step + 1, scales), ring.rows(step + 1))
            more = k + 1 < pairs
            pl.when(more)(lambda: ring.wait(step + 2))
            plgpu.wgmma_wait(1)
            ring.release(step)
            left = weight.at(jnp.where(more, step + 2, step + 1), following)
            return left, following, step + 2

        ring.wait(step)
        scales = weight.scales_at(_i32(0))
        *_, after = lax.fori_loop(_i32(0), pairs, one, (weight.at(step, scales), scales, step))
        total = acc[...]
        ring.release(after - 1)
        return total

    start = plgpu.layout_cast(jnp.zeros(shape, _f32), plgpu.Layout.WGMMA)
    if ring.staged_s is not None:
        return lax.fori_loop(_i32(0), pairs, staged, (start, step))[0]
    return lax.cond(pairs > 0, lambda: pl.run_scoped(pipelined, plgpu.ACC(shape, _f32)), lambda: start)
