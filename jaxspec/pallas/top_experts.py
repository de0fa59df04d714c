"""A router's choice: each token's likeliest experts and their probabilities, on Hopper in one kernel.

A Mosaic GPU kernel. A warpgroup takes one token: its experts' logits lie in registers, and are searched for the largest
once for each expert that a token gets.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.once import lower_once
from jaxspec.pallas.target import chosen, tell

LANES = 128  # threads of a warpgroup
MOST_EXPERTS = 512  # four logits a thread, which it loads at once
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
    width = next(n * LANES for n in (1, 2, 4) if e <= n * LANES)  # a thread's logits are a vector as memory has them
    logits = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, width - e)), constant_values=-jnp.inf)
    shape = partial(jax.ShapeDtypeStruct, (t, LANES))
    ids, weights = plgpu.kernel(
        partial(_token, e, k, renormalised),
        kernel_name="top_experts",
        out_type=[shape(_i32), shape(jnp.float32)],
        grid=(t,),
        grid_names=("token",),
        interpret=interpret,
    )(logits)
    return ids[:, :k], weights[:, :k]


def _token(experts, k, renormalised, logits_g, ids_g, weights_g):
    token, width = lax.axis_index("token"), logits_g.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), width // LANES)
    expert = plgpu.broadcasted_iota(_i32, (width,), 0, layout=layout)
    lane = plgpu.broadcasted_iota(_i32, (LANES,), 0, layout=plgpu.Layout.WG_STRIDED((LANES,), 1))
    logits = plgpu.load(logits_g.at[token], layout=layout, optimized=False)
    logits = jnp.where(expert < experts, jnp.where(logits > LEAST, logits, LEAST), -jnp.inf)

    top = jnp.max(logits)
    total = jnp.float32(0) if renormalised else jnp.sum(jnp.exp(logits - top))
    ids, weights, best = jnp.zeros_like(lane), jnp.zeros_like(lane).astype(jnp.float32), top
    for j in range(k):
        which = jnp.min(jnp.where(logits == best, expert, width))
        weight = jnp.exp(best - top)
        ids, weights = jnp.where(lane == j, which, ids), jnp.where(lane == j, weight, weights)
        if renormalised:
            total = total + weight
        if j + 1 < k:
            logits = jnp.where(expert == which, -jnp.inf, logits)
            best = jnp.max(logits)
    ids_g[token] = ids
    weights_g[token] = weights / total
