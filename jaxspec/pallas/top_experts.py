"""A router's choice: each token's likeliest experts and their probabilities, on Hopper in one kernel.

A Mosaic GPU kernel. A warp takes one token: its experts' logits lie in registers, and are searched for the largest once
for each expert that a token gets. So what it finds passes between lanes alone, and nothing has to be waited for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.once import lower_once
from jaxspec.pallas.target import chosen, tell

WARPS = 4  # of a warpgroup
LANES = 128  # logits that a warp loads at once, four a thread
MOST_EXPERTS = 512  # sixteen logits a thread
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
LEAST = -3e38  # in place of what isn't a number, and above what has been chosen already
_i32 = jnp.int32


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def top_experts(
    logits: Float[Array, "t e"], k: int, renormalised: bool
) -> tuple[Int[Array, "t k"], Float[Array, "t k"]]:
    """Each token's k likeliest experts, likeliest first, the lower of equals first; and their probabilities, float32:
    among all experts or, if `renormalised`, among those chosen."""
    fits = supported(logits.shape[1], k)
    if fits is not None:
        tell("router", fits)
    if chosen("router", fits):
        return select(logits, k=k, renormalised=renormalised)
    return reference(logits, k, renormalised)


def _forward(logits, k, renormalised):
    return top_experts(logits, k, renormalised), logits


def _backward(k, renormalised, logits, gradient):
    return jax.vjp(lambda logits: reference(logits, k, renormalised)[1], logits)[1](gradient[1])


top_experts.defvjp(_forward, _backward)


def reference(logits: Float[Array, "t e"], k: int, renormalised: bool) -> tuple[Array, Array]:
    """`top_experts` in plain jnp."""
    best, ids = lax.top_k(logits.astype(jnp.float32), k)
    if renormalised:
        return ids, jax.nn.softmax(best, axis=-1)
    return ids, jnp.exp(best - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True))


def supported(experts: int, k: int) -> str | None:
    """Why the kernel can't choose k of so many experts, or None if it can."""
    if experts > MOST_EXPERTS:
        return f"{experts} experts, more than {MOST_EXPERTS}"
    return f"{k} experts a token, more than {LANES}" if k > LANES else None


@lower_once("k", "renormalised")
def select(
    logits: Float[Array, "t e"], *, k: int, renormalised: bool, interpret: Any = False
) -> tuple[Int[Array, "t k"], Float[Array, "t k"]]:
    """`top_experts` by the kernel. A token whose logits aren't numbers gets k experts all the same."""
    t, e = logits.shape
    rows, width = -(-t // WARPS) * WARPS, -(-e // LANES) * LANES
    logits = jnp.pad(logits.astype(jnp.float32), ((0, rows - t), (0, width - e)), constant_values=-jnp.inf)
    shape = partial(jax.ShapeDtypeStruct, (rows, LANES))
    ids, weights = plgpu.kernel(
        partial(_tokens, e, k, renormalised),
        kernel_name="top_experts",
        out_type=[shape(_i32), shape(jnp.float32)],
        grid=(rows // WARPS,),
        grid_names=("group",),
        interpret=interpret,
    )(logits)
    return ids[:t, :k], weights[:t, :k]


def _tokens(experts, k, renormalised, logits_g, ids_g, weights_g):
    tokens, width = pl.ds(lax.axis_index("group") * WARPS, WARPS), logits_g.shape[1]
    each, wide = (WARPS, width), (WARPS, LANES)
    across = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731
    expert = plgpu.broadcasted_iota(_i32, each, 1, layout=LAYOUT)
    lane = plgpu.broadcasted_iota(_i32, wide, 1, layout=LAYOUT)
    logits = plgpu.load(logits_g.at[tokens], layout=LAYOUT, optimized=False)
    logits = jnp.where(expert < experts, jnp.where(logits > LEAST, logits, LEAST), -jnp.inf)

    best = top = jnp.max(logits, axis=1)
    total = None if renormalised else jnp.sum(jnp.exp(logits - across(top, each)), axis=1)
    ids, weights = jnp.zeros_like(lane), jnp.zeros_like(lane).astype(jnp.float32)
    for j in range(k):
        which = jnp.min(jnp.where(logits == across(best, each), expert, width), axis=1)
        weight = jnp.exp(best - top)
        ids = jnp.where(lane == j, across(which, wide), ids)
        weights = jnp.where(lane == j, across(weight, wide), weights)
        if renormalised:
            total = weight if total is None else total + weight
        if j + 1 < k:
            logits = jnp.where(expert == across(which, each), -jnp.inf, logits)
            best = jnp.max(logits, axis=1)
    ids_g[tokens] = ids
    weights_g[tokens] = weights / across(total, wide)
