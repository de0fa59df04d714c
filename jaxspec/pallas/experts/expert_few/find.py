"""The different experts that several tokens chose, found by one warpgroup while the first token's are multiplied."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.experts.expert_few.plan import MOST, PAIRS

_i32 = jnp.int32


def each_pair(plan, tokens, body, carry):
    """Loop `body(token, j, pair, carry)` over the j-th expert of each of so many tokens; j is unrolled."""

    def one(token, carry):
        for j in range(plan.k):
            carry = body(token, j, token * MOST + j, carry)
        return carry

    return lax.fori_loop(_i32(0), _i32(tokens), one, carry)


def find(plan, ids_g, scratch):
    """Write the different experts that the tokens chose to shared memory, in order, and their number. The first are
    all of the first token's, even those that are no experts.

    One thread for each (token, expert) pair compares it with all pairs before it.
    """
    first_s, rank_s = (scratch["rank_s"].at[i] for i in range(2))
    experts_s, count_s = (scratch["experts_s"].at[i] for i in range(2))
    lane = plgpu.broadcasted_iota(_i32, (PAIRS,), 0, layout=plgpu.Layout.WG_STRIDED((PAIRS,), 1))
    none = jnp.zeros_like(lane)

    def take(token, j, pair, own):
        return jnp.where(lane == pair, ids_g[token, j], own)

    def compare(token, j, pair, found):
        return jnp.where((own == ids_g[token, j]) & (lane > pair), 1, found)

    def count(token, j, pair, counts):
        before, total = counts
        one = first_s[pair]
        return before + jnp.where(lane > pair, one, 0), total + one

    def place(token, j, pair, found):
        return jnp.where(lane == rank_s[pair], ids_g[token, j], found)

    own = each_pair(plan, plan.t, take, none + plan.experts)
    is_first = (own < plan.experts) & (each_pair(plan, plan.t - 1, compare, none) == 0) | (lane < plan.k)
    first_s[...] = is_first.astype(_i32)
    plgpu.commit_smem()
    before, total = each_pair(plan, plan.t, count, (none, _i32(0)))
    rank_s[...] = jnp.where(is_first, before, -1)
    count_s[...] = lax.broadcast_in_dim(total, (PAIRS,), [])
    plgpu.commit_smem()
    experts_s[...] = each_pair(plan, plan.t, place, none)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["known"])
