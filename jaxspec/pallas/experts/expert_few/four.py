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

from jaxspec.models.int4 import UNIT
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.few_rows import four_bits
from jaxspec.pallas.dense.few_rows.registers import rows_transforms, weight_transforms
from jaxspec.pallas.dense.few_rows.share import FourBits
from jaxspec.pallas.experts.expert_few import fp8
from jaxspec.pallas.experts.expert_few.plan import COLUMNS, ROWS, TILE
from jaxspec.pallas.hopper import BULK_COPY, WARPS

_i32, _f32 = jnp.int32, jnp.float32


class Scales(NamedTuple):
    """A tile's scales in shared memory, [WARPS, ...], and how its weights are stored."""

    ref: Any
    stored: FourBits

    def lines(self, step: int) -> int:
        """Lines of scales between a step of so many inputs and the next one."""
        if self.stored.floats:
            return step // UNIT
        return step // self.stored.group * (1 + self.stored.zeros) if self.stored.group <= step else 0


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
    """f32[TILE]: the factors of a tile's outputs, of which a warp's are those of expert and weight row `rows[warp]`."""
    output = plgpu.broadcasted_iota(_i32, (TILE,), 0, layout=fp8.BY_OUTPUT)
    warp, own, found, first = lax.div(output, _i32(COLUMNS)), jnp.zeros_like(output), None, 0
    for factor_g, size in zip(factors_g, plan.stacks, strict=True):
        place = lax.rem(output, _i32(COLUMNS))
        for i, (expert, row) in enumerate(rows):
            at = jnp.clip(expert - first, 0, size - 1) * factor_g.shape[1] + row
            place, own = place + jnp.where(warp == i, at, 0), jnp.where(warp == i, expert, own)
        each = fp8.gathered(factor_g, place, fp8.BY_OUTPUT, interpret)
        found = each if found is None else jnp.where(own >= first, each, found)
        first += size
    return found * four_bits.LEFT


def added(plan, scratch, scales, interpret, total, k, weight_s, rows, wait) -> Any:
    """Compute `fp8.added`. `scales` are `Scales`; NVFP4's factors are left out."""
    refs, apart = rows
    wait()
    if interpret:
        return total + _interpreted(plan.step, scales, k, weight_s, refs, apart)
    transforms = [weight_transforms(), (), *[rows_transforms()] * len(refs)]
    types = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT, *map(plgpu.RefType, transforms)
    one = plgpu.ShapeDtypeStruct((TILE, ROWS), _f32, layout=plgpu.Layout.WGMMA)
    add = partial(_added, plan.step, scales, apart, refs[0].shape[0] - 1)
    return plgpu.inline_mgpu(arg_types=types, return_type=one)(add)(total, k, weight_s, scales.ref, *refs)


def _added(step, scales, apart, last, _, total, k, weight_s, scales_s, *rows):
    (warp, row, _), (k,) = four_bits.lanes(), k.registers.flat
    line = arith.addi(four_bits.mul(warp, scales.ref.shape[1]), four_bits.mul(k, scales.lines(step)))
    own = arith.addi(four_bits.mul(line, COLUMNS), row)
    loader = four_bits.scales_in(scales.stored, step, COLUMNS, scales_s, own)
    sizes = fp8.Sizes(chunk=step)
    (made,) = four_bits.add_products(sizes, [total], weight_s, list(rows), loader, apart, last)
    return made


def _interpreted(step, scales, k, weight_s, rows, apart):
    """A step's products in plain jnp."""
    values, stored, made = weight_s[...], scales.stored, []
    count = stored.scales(step, COLUMNS)[0]
    inputs = jnp.concatenate([ref[...].astype(_f32) for ref in rows], axis=1)
    for warp in range(WARPS):
        own = slice(warp * COLUMNS, (warp + 1) * COLUMNS)
        of = lax.dynamic_slice_in_dim(scales.ref[warp], k * scales.lines(step), count)
        weight = four_bits.dequantised(stored, values[own], of)
        mine = jnp.minimum(warp * apart + jnp.arange(ROWS), len(inputs) - 1)
        made.append(weight @ inputs[mine].T)
    return jnp.concatenate(made)
