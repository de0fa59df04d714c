"""FP8 weights in the chain, as bfloat16 in registers: one half of a step is converted while the other is multiplied.

The weights' outputs are the left operand, 64 of them a warpgroup, and all rows are the narrow side, so that a few rows
cost little. Three warpgroups take 192 outputs of a tile and share its rows: at 128 rows these are four times a group's
bytes, and come from L2 once for all three.

Weights are multiplied by their scales as they are converted (`scaled`), so that no sum is rescaled between an item's
first step and its last. A weight's slot is free as soon as it is converted. Rows come in pieces of 64 inputs, and leave
with them. A lane has the products of gate and of up, and two warpgroups norm a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import scaled
from jaxspec.pallas.dense.weight_stream import chain
from jaxspec.pallas.dense.weight_stream.chain import GROUP, MAX_GROUPS, ROOM, Geometry, Share, share_out
from jaxspec.pallas.dense.weight_stream.norm import norm_rows, norm_scratch

RING = 48 * 1024  # of the rows, about
PIECE = BLOCK // 2  # inputs that are multiplied at once
LEAST_SLOTS = 4  # of weights; if there would be fewer, rows have one slot less
NORM_UNIT = 4 * BLOCK  # columns that a warpgroup norms at once
_i32, _f32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class Fp8(Geometry):
    """Consumer warpgroups of `GROUP` outputs each, all of one tile's."""

    name = "fp8_stream"
    step = BLOCK
    row_pieces = BLOCK // PIECE
    warpgroups = MAX_GROUPS
    registers, other_registers = 136, 32  # 3 x 136 + 2 x 32 of the 5 x 96 that a block has

    @classmethod
    def share(cls, operands: tuple, padded: int, gated: bool) -> Share:
        outputs, inputs = operands[0].shape
        return share_out(inputs, outputs, padded, gated, BLOCK, item=1)

    @property
    def norming(self) -> int:
        return 2 if self.width % (2 * NORM_UNIT) == 0 else 1

    @property
    def sums_bytes(self) -> int:
        return 2048 if self.norming == 1 else 0

    @property
    def row_slots(self) -> int:
        slots = max(6, min(16, RING // (2 * self.padded * PIECE)))
        return slots - (self._weight_slots(slots) < LEAST_SLOTS)

    @property
    def weight_slots(self) -> int:
        return self._weight_slots(self.row_slots)

    def _weight_slots(self, row_slots: int) -> int:
        results = self.warpgroups * 2 * self.padded * HALF
        fixed = 2 * row_slots * self.padded * PIECE + results + 2 * self.width
        return (ROOM - 2048 - fixed) // (self.widest * GROUP * BLOCK)

    def scratch(self, dtype: Any, interpret: Any) -> dict[str, Any]:
        return dict(
            weight_s=plgpu.SMEM((self.weight_slots, self.widest, GROUP, BLOCK), jnp.int8),
            rows_s=plgpu.SMEM((self.row_slots, self.padded, PIECE), dtype),
            gated_s=plgpu.SMEM((self.warpgroups, self.padded, HALF), dtype),
            **(norm_scratch(self.width // BLOCK, self.norming) if self.norming > 1 else {}),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((self.warpgroups, GROUP, PIECE), dtype)} if interpret else {}),
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

    def fetch_rows(self, block, i, piece, slot):
        ring, full, rows = block.scratch["rows_s"], block.scratch["rows_full"], block.work[i].reads["rows"]
        if len(rows.shape) == 3:
            k, half = lax.div(piece, _i32(self.row_pieces)), lax.rem(piece, _i32(self.row_pieces))
            tile_of = rows.at[k, :, pl.ds(half * PIECE, PIECE)]
        else:
            tile_of = rows.at[:, pl.ds(piece * PIECE, PIECE)]
        plgpu.copy_gmem_to_smem(tile_of, ring.at[slot], full.at[slot])

    def _has(self, share: Share, tile: Any, c: Any) -> Any:
        """Whether a tile has a group number c: the last tile may have fewer, and so may those of a narrow share."""
        if isinstance(c, int) and c < share.groups and share.outputs % share.columns == 0:
            return True
        return (c < share.groups) & ((tile * share.groups + c) * GROUP < share.outputs)

    def norm(self, block, i, warpgroup, norm):
        if self.norming == 1:
            super().norm(block, i, warpgroup, norm)
        else:
            norm_rows(block, i, warpgroup, norm)

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

    def _pass_over(self, block: chain.Block, step: Any) -> Any:
        for name, at in ("weight", step), ("rows", 2 * step), ("rows", 2 * step + 1):
            self._wait(block, name, at)
            self._free(block, name, at)
        return step + 1

    def _ring(self, block: chain.Block, name: str, at: Any) -> tuple[Any, Any, Any]:
        """A step's slot in the ring of weights, or a piece's in that of rows, and its barriers: full, empty."""
        scratch = block.scratch
        slot = lax.rem(at, _i32(self.weight_slots if name == "weight" else self.row_slots))
        return scratch[f"{name}_s"].at[slot], scratch[f"{name}_full"].at[slot], scratch[f"{name}_empty"].at[slot]

    def _wait(self, block: chain.Block, name: str, at: Any) -> None:
        plgpu.barrier_wait(self._ring(block, name, at)[1])

    def _free(self, block: chain.Block, name: str, at: Any) -> None:
        plgpu.barrier_arrive(self._ring(block, name, at)[2])

    def _sum(self, block, i, warpgroup, group, low, high, step):
        """f32[GROUP, rows] of one group of outputs, over input steps from `low` to `high`.

        A step is multiplied in two halves. While tensor cores have one, the next one's weight is converted.
        """
        scratch, (name, _, (values, scales), *_) = block.scratch, block.work[i]
        staged_s = scratch["staged_s"].at[warpgroup] if "staged_s" in scratch else None
        scales = scaled.Scales(scales, values.shape[0], group)
        shape = GROUP, self.padded

        def weight(step, half, by):
            inputs = pl.ds(half * PIECE, PIECE)
            bytes_s = self._ring(block, "weight", step)[0].at[warpgroup, :, inputs]
            return scaled.load(bytes_s, by, staged_s, paired=name == "gated")

        def multiply(acc, left, piece):
            plgpu.wgmma(acc, left, self._ring(block, "rows", piece)[0].transpose((1, 0)))

        def staged(k, carried):
            """For interpret mode, which can neither begin with a sum nor take a left operand from registers."""
            total, step = carried

            def alone(half, acc):
                multiply(acc, weight(step, half, scales.at(k)), 2 * step + half)
                return acc[...]

            self._wait(block, "weight", step)
            for half in range(2):
                self._wait(block, "rows", 2 * step + half)
                total += pl.run_scoped(partial(alone, half), plgpu.ACC(shape, _f32))
                self._free(block, "rows", 2 * step + half)
            self._free(block, "weight", step)
            return total, step + 1

        def arrived(step):
            self._wait(block, "weight", step)
            self._wait(block, "rows", 2 * step)

        def pipelined(acc):
            def one(k, carried):
                left, by, step = carried
                multiply(acc, left, 2 * step)
                following = scales.at(jnp.minimum(k + 1, high - 1))  # reading takes about as long as a step
                self._wait(block, "rows", 2 * step + 1)
                plgpu.wgmma_wait(1)  # the piece before is done
                pl.when(k > low)(lambda: self._free(block, "rows", 2 * step - 1))
                left = weight(step, 1, by)
                self._free(block, "weight", step)
                multiply(acc, left, 2 * step + 1)
                more = k + 1 < high
                pl.when(more)(lambda: arrived(step + 1))
                plgpu.wgmma_wait(1)
                self._free(block, "rows", 2 * step)
                return weight(jnp.where(more, step + 1, step), 0, following), following, step + 1

            by = scales.at(low)  # before waiting for the rows, as this load takes long
            arrived(step)
            *_, after = lax.fori_loop(low, high, one, (weight(step, 0, by), by, step))
            total = acc[...]
            self._free(block, "rows", 2 * after - 1)
            return total

        start = plgpu.layout_cast(jnp.zeros(shape, _f32), plgpu.Layout.WGMMA)
        if staged_s is not None:
            total, _ = lax.fori_loop(low, high, staged, (start, step))
        else:
            total = pl.run_scoped(pipelined, plgpu.ACC(shape, _f32))
        return total * _f32(scaled.LEFT)

    def _write_partial(self, block, i, warpgroup, group, split, total):
        columns = pl.ds(lax.rem(group, _i32(2)) * GROUP, GROUP)
        target = block.work[i].writes["partial"].at[split, :, lax.div(group, _i32(2)), columns]
        scaled.store_transposed(total, target, "staged_s" in block.scratch)
        plgpu.commit_smem()  # for its barrier: all threads have written when one of them signals

    def _write_gated(self, block, i, warpgroup, group, split, total):
        """Write silu(gate) * up of one group, a quarter of a tile of the next rows. Rounds where plain layers do."""
        rows, gated_s = block.work[i].writes["rows"], block.scratch["gated_s"].at[warpgroup]
        each = BLOCK // HALF
        columns = pl.ds(lax.rem(group, _i32(each)) * HALF, HALF)
        gate, up = (
            part.astype(rows.dtype).astype(_f32) for part in scaled.unpaired(total, "staged_s" in block.scratch)
        )
        value = (gate / (1 + jnp.exp(-gate))).astype(rows.dtype).astype(_f32) * up
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        gated_s.transpose((1, 0))[...] = value.astype(rows.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(gated_s, rows.at[lax.div(group, _i32(each)), :, columns])
