"""The chain with bfloat16 weights: 64 rows a warpgroup are the left operand, the weights' columns the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models.weights import HALF
from jaxspec.pallas.dense.tiles import rounded_gate
from jaxspec.pallas.dense.weight_stream.chain import (
    MAX_ROWS,
    ROOM,
    STAGES,
    Geometry,
    Share,
    norm_of,
    run,
    run_stages,
    share_out,
)
from jaxspec.pallas.hopper import SWIZZLED
from jaxspec.pallas.hopper.export import lower_once

TILE = SWIZZLED  # inputs of one step, and the unit of outputs: 128 bytes of bf16, the widest swizzle
FIXED_ROWS = 64  # sums are divided as for so many rows where they may not depend on the number of rows
MIN_ROWS = 9  # up to 8 handing over costs more than XLA's launches do; 9 to 15 are padded to 16
_i32 = jnp.int32


def supported(rows: int, dtype: Any, *widths: int) -> str | None:
    """Why a chain over these widths can't run, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return f"{rows} rows, not {MIN_ROWS} to {MAX_ROWS}"
    if bad := [w for w in widths if w % (2 * TILE) or w < 4 * TILE]:
        return f"width {bad[0]} is not a multiple of {2 * TILE}, from {4 * TILE} on"
    return None


@lower_once("weight_stream", "eps")
def stream(
    x: Float[Array, "b d"],
    rows: Float[Array, "b k"],
    weights: list[Float[Array, "_ _"]],
    scales: list[Float[Array, " d"]],
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "b d"], Float[Array, "s b n"]]:
    """Run `STAGES`: from attention's output `rows` and the residual stream `x` to the next layer's projections.

    `weights` are those of the output projection, gate and up, down, and the next layer's q, k, v; `scales` those of the
    two norms; all bfloat16. Returns the residual stream, and the projections as partials, float32, to be summed over
    axis 0.
    """
    return run(Unquantised, x, rows, [(weight,) for weight in weights], scales, eps, interpret)


@lower_once("weight_stream", "stages", "eps")
def stream_part(
    x: Float[Array, "p d"],
    rows: Float[Array, "p k"] | None,
    weights: list[Float[Array, "_ _"]],
    scales: list[Float[Array, " d"]],
    *,
    stages: tuple[str, ...],
    eps: float,
    interpret: Any = False,
) -> Float[Array, "s p n"]:
    """Run some stages that end in a matmul, over a multiple of eight rows, padding included; returns the partials.

    A layer that is divided among devices is cut at its sums into such parts. Stages begin with a `norm` of x, which
    nothing is added to, or with a matmul of `rows`.
    """
    of = [(weight,) for weight in weights]
    return run_stages(Unquantised, stages, len(x), x, rows, of, scales, eps, interpret)[1]


@lower_once("weight_stream_fixed", "eps", "centred")
def stream_fixed(
    x: Float[Array, "b d"],
    rows: Float[Array, "b k"],
    weights: list[Float[Array, "_ _"]],
    scales: list[Float[Array, " d"]],
    *,
    eps: float,
    centred: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "b d"], Float[Array, "s b n"]]:
    """Run `stream` for 1 to `MAX_ROWS` rows, with the same bits of a row whatever rows are beside it.

    Without weights of the next layer's q, k, v, and the scale before them, the partials are those of `down`.
    """
    chain = STAGES if len(weights) == 4 else STAGES[:4]
    return run(Fixed, x, rows, [(weight,) for weight in weights], scales, eps, interpret, chain, centred)


@lower_once("product_fixed")
def product_fixed(
    rows: Float[Array, "b k"], weight: Float[Array, "k n"], *, interpret: Any = False
) -> Float[Array, "s b n"]:
    """The product of 1 to `MAX_ROWS` rows as partials, float32, with the same bits of a row whatever rows there are."""
    return run(Fixed, rows, rows, [(weight,)], [], 0.0, interpret, ("matmul",))[1]


@lower_once("norm_fixed", "eps", "centred")
def norm_fixed(
    x: Float[Array, "r d"], scale: Float[Array, " d"], *, eps: float, centred: bool = False, interpret: Any = False
) -> Float[Array, "r d"]:
    """The norm of any number of rows, with the bits that the chain's norms have."""
    rows, width = x.shape
    shape = (width // TILE, TILE)
    out = plgpu.kernel(
        partial(_norm_row, eps, centred),
        kernel_name="norm_fixed",
        out_type=jax.ShapeDtypeStruct((rows, *shape), x.dtype),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x.reshape(rows, *shape), scale.reshape(shape))
    return out.reshape(x.shape)


def _norm_row(eps, centred, x_g, scale_g, out_g):
    row = lax.axis_index("row")
    out_g[row] = norm_of(x_g[row], scale_g, eps, centred).astype(out_g.dtype)


def splits_fixed(inputs: int, outputs: int, gated: bool) -> int:
    """The number of parts in which the chain sums such a product, for any number of rows."""
    return share_out(inputs, outputs, FIXED_ROWS, gated, TILE, item=2).splits


def fixed_supported(dtype: Any, inputs: int, outputs: int) -> str | None:
    """Why `product_fixed`, and `tile_matmul` with any number of rows, can't take such a weight, or None if they can."""
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    return f"a weight of {inputs} x {outputs} is not a multiple of {TILE}" if inputs % TILE or outputs % TILE else None


@dataclass(frozen=True)
class Unquantised(Geometry):
    """Consumer warpgroups of 64 rows.

    Tiles in shared memory have 64 rows, which the tensor cores take, and `padded` of them are used. Slots lie `stride`
    rows apart and overlap only in unused rows.
    """

    name = "weight_stream"
    step = TILE

    @classmethod
    def share(cls, operands: tuple, padded: int, gated: bool) -> Share:
        return share_out(*operands[0].shape, padded, gated, TILE, item=2)

    @property
    def warpgroups(self) -> int:
        return 1 if self.padded <= 64 else 2

    @property
    def registers(self) -> int:
        return 200 if self.warpgroups == 1 else 168

    @property
    def stride(self) -> int:
        return self.padded if self.warpgroups == 1 else 64 * self.warpgroups

    @property
    def row_slots(self) -> int:
        return 6 if self.padded <= 16 else 4 if self.padded <= 32 else 3

    @property
    def out_slots(self) -> int:
        return self.widest if self.padded <= 16 else 2 if self.padded <= 32 else 1

    def tile_rows(self, slots: int) -> int:
        return 64 * self.warpgroups + (slots - 1) * self.stride

    @property
    def weight_slots(self) -> int:
        fixed = 2 * self.tile_rows(self.row_slots) + 4 * self.tile_rows(self.out_slots) + self.tile_rows(self.widest)
        return (ROOM - 2048 - TILE * fixed - 2 * self.width) // (2 * TILE * TILE * self.widest)

    def scratch(self, dtype: Any, interpret: Any) -> dict[str, Any]:
        return dict(
            weight_s=plgpu.SMEM((self.weight_slots, self.widest, TILE, TILE), dtype),
            rows_s=plgpu.SMEM((self.tile_rows(self.row_slots), TILE), dtype),
            out_s=plgpu.SMEM((self.tile_rows(self.out_slots), TILE), jnp.float32),
            gated_s=plgpu.SMEM((self.tile_rows(self.widest), HALF), dtype),
        )

    def fetch_weights(self, block, i, k, tile, slot):
        ring, full = block.scratch["weight_s"], block.scratch["weight_full"]
        _, share, (weight,), *_ = block.work[i]
        for c in range(share.groups):
            tile_of = weight.at[pl.ds(k * TILE, TILE), pl.ds((tile * share.groups + c) * TILE, TILE)]
            plgpu.copy_gmem_to_smem(tile_of, ring.at[slot, c], full.at[slot])
        for _ in range(share.groups, self.widest):  # a narrower stage leaves part of the slot unused
            plgpu.barrier_arrive(full.at[slot])

    def fetch_rows(self, block, i, k, slot):
        ring, full, rows = block.scratch["rows_s"], block.scratch["rows_full"], block.work[i].reads["rows"]
        tile_of = rows.at[k] if len(rows.shape) == 3 else rows.at[:, pl.ds(k * TILE, TILE)]
        place = pl.ds(slot * self.stride, self.padded)
        plgpu.copy_gmem_to_smem(tile_of, ring.at[place], full.at[slot])

    def multiply(self, block, i, warpgroup, item, step):
        scratch, (name, share, _, _, writes) = block.scratch, block.work[i]
        tile, split, low, high = share.bounds(item)
        write = partial(_write_gated if name == "gated" else _write_partial, share, self, writes, scratch)

        def accumulate(*parts):
            def one(_, step):
                slot, row_slot = lax.rem(step, _i32(self.weight_slots)), lax.rem(step, _i32(self.row_slots))
                plgpu.barrier_wait(scratch["weight_full"].at[slot])
                plgpu.barrier_wait(scratch["rows_full"].at[row_slot])
                rows = scratch["rows_s"].at[pl.ds(row_slot * self.stride + warpgroup * 64, 64)]
                for c, part in enumerate(parts):
                    plgpu.wgmma(part, rows, scratch["weight_s"].at[slot, c])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(scratch["weight_empty"].at[slot])
                plgpu.barrier_arrive(scratch["rows_empty"].at[row_slot])
                return step + 1

            lax.fori_loop(low, high, one, step)
            return tuple(part[...] for part in parts)

        parts = pl.run_scoped(accumulate, *[plgpu.ACC((64, TILE), jnp.float32)] * share.groups)
        for c, part in enumerate(parts):
            write(warpgroup, part, c, tile, split)
        return step + (high - low)


def _write_partial(share, geometry, writes, scratch, warpgroup, part, c, tile, split):
    target = writes["partial"].at[split, :, tile * share.groups + c]
    _store(geometry, warpgroup, part, scratch["out_s"], c % geometry.out_slots, target)


def _write_gated(share, geometry, writes, scratch, warpgroup, part, c, tile, split):
    """Write silu(gate) * up of one group of columns, half a tile of the next rows. Rounds where plain layers do."""
    rows, group = writes["rows"], tile * share.groups + c
    value = rounded_gate(part[:, :HALF], part[:, HALF:], rows.dtype)
    target = rows.at[lax.div(group, _i32(2)), :, pl.ds(lax.rem(group, _i32(2)) * HALF, HALF)]
    _store(geometry, warpgroup, value.astype(rows.dtype), scratch["gated_s"], c, target)


def _store(geometry, warpgroup, value, buffer, slot, target):
    """Send a tile's `padded` rows to memory through a slot of `buffer`; slots are filled in order, from 0 on."""
    if slot == 0:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[pl.ds(slot * geometry.stride + warpgroup * 64, 64)] = value
    plgpu.commit_smem()
    for w in range(geometry.warpgroups):
        first, count = w * 64, min(64, geometry.padded - w * 64)

        @pl.when(warpgroup == w)
        def _(first=first, count=count):
            place = pl.ds(slot * geometry.stride + first, count)
            plgpu.copy_smem_to_gmem(buffer.at[place], target.at[pl.ds(first, count)])


@dataclass(frozen=True)
class Fixed(Unquantised):
    """`Unquantised` with products shared out as for `FIXED_ROWS` rows, so that a row's sums have one order."""

    @classmethod
    def share(cls, operands: tuple, padded: int, gated: bool) -> Share:
        return share_out(*operands[0].shape, FIXED_ROWS, gated, TILE, item=2)
