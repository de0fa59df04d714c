"""Sums of `down`'s results, weighted by each token's share of each expert."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.experts.expert_few.find import each_pair
from jaxspec.pallas.experts.expert_few.plan import COLUMNS, MOST, ODD, ROWS, TOGETHER
from jaxspec.pallas.experts.expert_few.products import everywhere

_i32, _f32 = jnp.int32, jnp.float32


def share_of(plan, ids_g, weights_g):
    """Return a function of (i, expert), the i-th of the chosen experts, that gives each token's share of its result:
    f32[ROWS], or a number if there is one token."""
    if plan.t == 1:
        return lambda i, expert: weights_g[0, i]
    token_of, which = (plgpu.broadcasted_iota(_i32, (ROWS, MOST), i, layout=everywhere(MOST)) for i in range(2))
    lane = token_of * MOST + which

    def take(token, j, pair, taken):
        ids, weights = taken
        return jnp.where(lane == pair, ids_g[token, j], ids), jnp.where(lane == pair, weights_g[token, j], weights)

    none = jnp.zeros_like(lane)
    ids, weights = each_pair(plan, plan.t, take, (none + plan.experts, none.astype(_f32)))
    return lambda i, expert: jnp.sum(jnp.where(ids == expert, weights, 0.0), axis=1)


def shares(plan, experts, share_of, group, count):
    """Each token's share of each of the group's experts, zero past the last expert and for ids that are none."""
    shares = []
    for item in (group * TOGETHER + j for j in range(TOGETHER)):
        valid, item = item < count, jnp.minimum(item, count - 1)
        expert = experts[item]
        valid = valid & (expert < plan.experts)
        shares.append(share_of(item, expert) * jnp.where(valid, 1.0, 0.0).astype(_f32))
    return shares


def add(plan, each_s, each, shares, total):
    """Add the group's experts to the sums, f32[ROWS, COLUMNS]; each result is rounded before it is weighted."""
    plgpu.commit_smem()  # all warps have read what was there before
    rounded = plgpu.layout_cast(each.astype(each_s.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    each_s.at[pl.ds(ODD, plan.made)].transpose((1, 0))[...] = rounded
    plgpu.commit_smem()
    for j, share in enumerate(shares):
        own = each_s.at[pl.ds(ODD + j * plan.apart, ROWS), pl.ds(j * COLUMNS, COLUMNS)]
        own = plgpu.load(own, layout=everywhere(COLUMNS), optimized=False).astype(_f32)
        share = lax.broadcast_in_dim(share, (ROWS, COLUMNS), [0] if plan.t > 1 else [])
        # Selected, not multiplied by zero: results of no expert may be NaN.
        total = total + jnp.where(share != 0, own * share, 0.0)
    return total
