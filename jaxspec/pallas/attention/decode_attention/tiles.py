"""Tiles in registers and shared memory: layouts, products and reductions of a warpgroup, with rows on either side."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention.decode_attention.plan import PACK, Plan


def by_row(plan: Plan):
    """The register layout of one number for each row."""
    return plgpu.Layout.WGMMA.reduce(0 if plan.narrow else 1)


def row_a_warp(h: int) -> Any:
    """The register layout of packs [PACK, h]: one row in each warp, whose lanes hold neighbouring columns."""
    vector = min(h // 32, 4)
    tiling = plgpu.Tiling(((PACK, 32 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def transposed(ref):
    return ref.transpose((1, 0))


def spread(plan: Plan, x, like):
    """Broadcast each row's number to the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1 if plan.narrow else 0])


def put(plan: Plan, ref, x):
    """Write x to `ref`, which has rows first; if the plan is narrow, x has them last."""
    if plan.narrow:
        ref, x = transposed(ref), plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    ref[...] = x.astype(ref.dtype)


def over_tokens(plan: Plan, kind, x, exchange_s=None):
    """Each row's largest score ("max") or sum ("add"), f32[rows]. If rows are narrow, all warps have some of a row.

    A thread adds up its tokens one after the other. By default its number of partial sums would depend on that of rows,
    with one order of sums for 8 and 32 rows, and another for 16.
    """
    if not plan.narrow or plan.interpret:
        axis = 0 if plan.narrow else 1
        return x.max(axis=axis) if kind == "max" else x.sum(axis=axis)
    result = plgpu.ShapeDtypeStruct(x.shape[1:], jnp.float32, layout=by_row(plan))
    # Pallas itself would have all warpgroups exchange through the same shared memory.
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result)(
        lambda _, x, exchange_s: x.reduce(kind, 0, exchange_s, acc_ilp=1 if kind == "add" else None)
    )(x, exchange_s)


def product(a_s, b_s):
    """The product of two tiles in shared memory, in registers."""

    def run(acc):
        plgpu.wgmma(acc, a_s, b_s)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a_s.shape[0], b_s.shape[1]), jnp.float32))


def add_product(plan: Plan, value, a_s, b_s):
    """Add the product of two tiles in shared memory to `value`, in the same registers."""
    if plan.interpret:
        return value + product(a_s, b_s)

    def run(acc):
        acc[...] = value
        plgpu.wgmma(acc, a_s, b_s)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(value.shape, jnp.float32))
