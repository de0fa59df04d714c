"""Tiles of experts in four bits, integers or NVFP4, times rows, in registers as `few_rows.four_bits` has it.

A warp has 16 of a tile's 64 weight rows, as in `fp8`. The scales of all inputs of a tile come with its first step, to a
ring of their own: those of each warp's rows side by side. NVFP4's factors are loaded a tile early.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.few_rows import four_bits
from jaxspec.pallas.dense.few_rows.registers import rows_transforms, weight_transforms
from jaxspec.pallas.dense.few_rows.share import FourBits
from jaxspec.pallas.experts.expert_few import fp8
from jaxspec.pallas.experts.expert_few.plan import COLUMNS, ROWS, STEP, TILE
from jaxspec.pallas.hopper import BULK_COPY, WARPS

_i32, _f32 = jnp.int32, jnp.float32


class Scales(NamedTuple):
    """A tile's scales in shared memory, [WARPS, ...], and how its weights are stored."""

    ref: Any
    stored: FourBits

    @property
    def lines(self) -> int:
        """Lines of scales between a step and the next one; none if all inputs share a scale."""
        return self.stored.scales(STEP, COLUMNS)[0] if self.stored.group <= STEP else 0


def operands(weight: Weight) -> dict[str, Any]:
    """The arrays that the kernel takes for a weight, by what follows its name. A line of NVFP4's scales is those of
    `COLUMNS` outputs."""
    scales, factors = weight.scales, {} if weight.factors is None else {"_factors": weight.factors}
    if factors:
        scales = scales.reshape(*scales.shape[:2], -1, BULK_COPY)
    return {"": weight.raw, "_scales": scales} | factors


def scales_at(stored: FourBits, ref: Any, expert: Any, row: Any) -> Any:
    """All scales of an expert's `COLUMNS` outputs from `row` on, in memory."""
    if stored.floats:
        return ref.at[expert, :, lax.div(row, _i32(COLUMNS))]
    return ref.at[expert, :, pl.ds(row, COLUMNS)]


def factors_of(plan, factors_g, rows, interpret) -> Any:
    """The factors of a tile's outputs, as `fp8.of_outputs` has them."""
    return fp8.of_outputs(plan, factors_g, rows, interpret) * four_bits.LEFT


def added(scratch, scales, interpret, total, k, weight_s, rows, wait) -> Any:
    """Compute `fp8.added`. `scales` are `Scales`; NVFP4's factors are left out."""
    rows_s, apart = rows
    wait()
    if interpret:
        return total + _interpreted(scales, k, weight_s[...], rows_s[...].astype(_f32), apart)
    types = map(plgpu.RefType, (weight_transforms(), (), rows_transforms()))
    types = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT, *types
    one = plgpu.ShapeDtypeStruct((TILE, ROWS), _f32, layout=plgpu.Layout.WGMMA)
    add = partial(_added, scales, apart, rows_s.shape[0] - 1)
    return plgpu.inline_mgpu(arg_types=types, return_type=one)(add)(total, k, weight_s, scales.ref, rows_s)


def _added(scales, apart, last, _, total, k, weight_s, scales_s, rows_s):
    (warp, row, _), (k,) = four_bits.lanes(), k.registers.flat
    line = arith.addi(four_bits.mul(warp, scales.ref.shape[1]), four_bits.mul(k, scales.lines))
    own = arith.addi(four_bits.mul(line, COLUMNS), row)
    loader = four_bits.scales_in(scales.stored, STEP, COLUMNS, scales_s, own)
    (made,) = four_bits.add_products(fp8.Sizes(), [total], weight_s, rows_s, loader, apart, last)
    return made


def _interpreted(scales, k, values, rows, apart):
    """A step's products in plain jnp, of weights [TILE, STEP / 2]."""
    count = scales.stored.scales(STEP, COLUMNS)[0]
    of_step = lax.dynamic_slice_in_dim(scales.ref[...], k * scales.lines, count, axis=1)
    by_output = jnp.moveaxis(of_step.reshape(WARPS, count, -1), 0, 1).reshape(count, -1)  # all warps' side by side
    weights = four_bits.dequantised(scales.stored, values, by_output).reshape(WARPS, COLUMNS, -1)
    own = jnp.minimum(apart * jnp.arange(WARPS)[:, None] + jnp.arange(ROWS), len(rows) - 1)
    return jnp.einsum("wck,wrk->wcr", weights, rows[own]).reshape(TILE, ROWS)
