"""FP8 weights in the chain, as bfloat16 in registers: a step is converted, then multiplied.

The weights' outputs are the left operand, 64 of them a warpgroup, and all rows are the narrow side, so that a few rows
cost little. Three warpgroups take 192 outputs of a tile and share its rows: at 128 rows these are four times a group's
bytes, and come from L2 once for all three. While one warpgroup converts (`upcast`), another one multiplies.

Each block of 128 inputs has scales, in float32. Sums are kept in units of the last block's scale: before the next block
is added they are multiplied by the quotient of the two scales. So a warpgroup holds one set of sums, not the block's
products beside the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.fp8 import BLOCK
from jaxspec.pallas import upcast
from jaxspec.pallas.few_rows.block import by_row
from jaxspec.pallas.weight_stream import chain
from jaxspec.pallas.weight_stream.chain import GROUP, MAX_GROUPS, ROOM, Geometry, Share, share_out
from jaxspec.weights import HALF

WARPGROUPS = MAX_GROUPS
GATED_ROWS = 32  # that a warpgroup gates and writes at once
RING = 48 * 1024  # of the rows, about
LEAST = 1e-30  # scales nearer to zero count as this: sums are divided by them
_i32, _f32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class Fp8(Geometry):
    """Consumer warpgroups of `GROUP` outputs each, all of one tile's."""

    name = "fp8_stream"
    step = BLOCK
    warpgroups = WARPGROUPS
    registers, other_registers = 136, 32  # 3 x 136 + 2 x 32 of the 5 x 96 that a block has

    @classmethod
    def share(cls, operands: tuple, padded: int, gated: bool) -> Share:
        outputs, inputs = operands[0].shape
        return share_out(inputs, outputs, padded, gated, BLOCK, item=1)

    @property
    def row_slots(self) -> int:
        return max(3, min(8, RING // (2 * self.padded * BLOCK)))

    @property
    def weight_slots(self) -> int:
        results = self.warpgroups * 2 * min(self.padded, GATED_ROWS) * (GROUP + HALF)
        fixed = 2 * self.row_slots * self.padded * BLOCK + results + 2 * self.width
        return (ROOM - 2048 - fixed) // (self.widest * GROUP * BLOCK)

    def scratch(self, dtype: Any, interpret: Any) -> dict[str, Any]:
        gated = self.warpgroups, min(self.padded, GATED_ROWS)
        return dict(
            weight_s=plgpu.SMEM((self.weight_slots, self.widest, GROUP, BLOCK), jnp.int8),
            rows_s=plgpu.SMEM((self.row_slots, self.padded, BLOCK), dtype),
            products_s=plgpu.SMEM((*gated, GROUP), dtype),
            gated_s=plgpu.SMEM((*gated, HALF), dtype),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((self.warpgroups, GROUP, BLOCK), dtype)} if interpret else {}),
        )

    def fetch_weights(self, block, i, k, tile, slot):
        ring, full = block.scratch["weight_s"], block.scratch["weight_full"].at[slot]
        _, share, (values, _), *_ = block.work[i]
        for c in range(self.widest):
            group = tile * share.groups + c
            outputs = pl.ds(group * GROUP, GROUP)

            def copy(c=c, outputs=outputs):
                plgpu.copy_gmem_to_smem(values.at[outputs, pl.ds(k * BLOCK, BLOCK)], ring.at[slot, c], full)

            has = self._has(share, tile, c)
            if has is True:
                copy()
            else:
                pl.when(has)(copy)
                pl.when(jnp.logical_not(has))(lambda: plgpu.barrier_arrive(full))

    def fetch_rows(self, block, i, k, slot):
        ring, full, rows = block.scratch["rows_s"], block.scratch["rows_full"], block.work[i].reads["rows"]
        tile_of = rows.at[k] if len(rows.shape) == 3 else rows.at[:, pl.ds(k * BLOCK, BLOCK)]
        plgpu.copy_gmem_to_smem(tile_of, ring.at[slot], full.at[slot])

    def _has(self, share: Share, tile: Any, c: Any) -> Any:
        """Whether a tile has a group number c: the last one may have fewer, and so may those of a narrow share."""
        if isinstance(c, int) and c < share.groups and share.outputs % share.columns == 0:
            return True
        return (c < share.groups) & ((tile * share.groups + c) * GROUP < share.outputs)

    def multiply(self, block, i, warpgroup, item, step):
        name, share, *_ = block.work[i]
        tile, split, low, high = share.bounds(item)
        has = self._has(share, tile, warpgroup)

        @pl.when(has)
        def _():
            total = self._sum(block, i, warpgroup, tile * share.groups + warpgroup, low, high, step)
            write = self._write_gated if name == "gated" else self._write_partial
            write(block, i, warpgroup, tile * share.groups + warpgroup, split, total)

        @pl.when(jnp.logical_not(has))
        def _():
            lax.fori_loop(low, high, lambda _, step: self._pass_over(block, step), step)

        return step + (high - low)

    def _slots(self, step: Any) -> tuple[Any, Any]:
        return lax.rem(step, _i32(self.weight_slots)), lax.rem(step, _i32(self.row_slots))

    def _await(self, block: chain.Block, step: Any) -> None:
        for name, slot in zip(("weight_full", "rows_full"), self._slots(step), strict=True):
            plgpu.barrier_wait(block.scratch[name].at[slot])

    def _release(self, block: chain.Block, step: Any) -> None:
        for name, slot in zip(("weight_empty", "rows_empty"), self._slots(step), strict=True):
            plgpu.barrier_arrive(block.scratch[name].at[slot])

    def _pass_over(self, block: chain.Block, step: Any) -> Any:
        self._await(block, step)
        self._release(block, step)
        return step + 1

    def _sum(self, block, i, warpgroup, group, low, high, step):
        """f32[GROUP, rows] of one group of outputs, over input steps from `low` to `high`."""
        scratch, (_, _, (values, scales), *_) = block.scratch, block.work[i]
        staged_s = scratch["staged_s"].at[warpgroup] if "staged_s" in scratch else None
        scales = _Scales(scales, values.shape[0] // scales.shape[0], group)
        shape = GROUP, self.padded

        def multiply(acc, slot, row_slot):
            weight = upcast.load(scratch["weight_s"].at[slot, warpgroup], staged_s)
            plgpu.wgmma(acc, weight, scratch["rows_s"].at[row_slot].transpose((1, 0)))

        def add(total, *slots):
            """The total and one step's products. Interpret mode can't begin with a sum."""
            if staged_s is None:
                return pl.run_state(lambda acc: multiply(acc, *slots))(plgpu.ACC.init(total))

            def alone(acc):
                multiply(acc, *slots)
                return acc[...]

            return total + pl.run_scoped(alone, plgpu.ACC(shape, _f32))

        def one(k, carried):
            total, last, scale, step = carried
            total = scales.times(total, [before / now for before, now in zip(last, scale, strict=True)])
            following = scales.at(jnp.minimum(k + 1, high - 1))  # reading takes about as long as a step
            self._await(block, step)
            total = add(total, *self._slots(step))
            self._release(block, step)
            return total, scale, following, step + 1

        start = plgpu.layout_cast(jnp.zeros(shape, _f32), plgpu.Layout.WGMMA)
        first = scales.at(low)
        total, last, *_ = lax.fori_loop(low, high, one, (start, first, first, step))
        return scales.times(total, last)

    def _write_partial(self, block, i, warpgroup, group, split, total):
        columns = pl.ds(lax.rem(group, _i32(2)) * GROUP, GROUP)
        target = block.work[i].writes["partial"].at[split, :, lax.div(group, _i32(2)), columns]
        target.transpose((1, 0))[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()  # for its barrier: all threads have written when one of them signals

    def _write_gated(self, block, i, warpgroup, group, split, total):
        """silu(gate) * up of one group, a quarter of a tile of the next rows. Rounds where plain layers do.

        Gate and up of a row are in different warps, and so change places through shared memory.
        """
        rows = block.work[i].writes["rows"]
        products_s, gated_s = (block.scratch[name].at[warpgroup] for name in ("products_s", "gated_s"))
        each = BLOCK // HALF
        columns = pl.ds(lax.rem(group, _i32(each)) * HALF, HALF)
        for at in range(0, self.padded, GATED_ROWS):
            count = min(GATED_ROWS, self.padded - at)
            here = pl.ds(0, count)
            part = total[:, at : at + count].astype(rows.dtype)
            products_s.at[here].transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            gate, up = (
                plgpu.load(products_s.at[here, pl.ds(first, HALF)], layout=by_row(HALF // 16), optimized=False)
                for first in (0, HALF)
            )
            gate, up = gate.astype(_f32), up.astype(_f32)
            value = (gate / (1 + jnp.exp(-gate))).astype(rows.dtype).astype(_f32) * up
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            gated_s[here] = value.astype(rows.dtype)
            plgpu.commit_smem()
            target = rows.at[lax.div(group, _i32(each)), pl.ds(at, count), columns]
            plgpu.copy_smem_to_gmem(gated_s.at[here], target)


class _Scales:
    """The scales of a group's outputs at each step of inputs: one number, or one for each part of them."""

    def __init__(self, scales: Any, unit: int, group: Any):
        self._scales, self._count = scales, GROUP // min(unit, GROUP)
        self._first = lax.div(group * GROUP, _i32(unit))

    def at(self, k: Any) -> list[Any]:
        found = [self._scales[self._first + u, k] for u in range(self._count)]
        return [jnp.where(jnp.abs(scale) < LEAST, _f32(LEAST), scale) for scale in found]

    def times(self, sums: Any, factors: list[Any]) -> Any:
        """f32[GROUP, rows] times each output's factor."""
        if len(factors) == 1:
            return sums * factors[0]
        layout = plgpu.Layout.WGMMA.reduce(1)
        unit = lax.div(plgpu.broadcasted_iota(_i32, (GROUP,), 0, layout=layout), _i32(GROUP // len(factors)))
        whole = factors[0]
        for u, factor in enumerate(factors[1:], 1):
            whole = jnp.where(unit >= u, factor, whole)
        return sums * lax.broadcast_in_dim(whole, sums.shape, [0])
