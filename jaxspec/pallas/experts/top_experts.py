"""A router's choice: each token's likeliest experts and their weights, on Hopper in one kernel.

A Mosaic GPU kernel. A warp takes one token. The experts' logits lie in its registers, and it searches them for the
largest once for each expert that a token gets. Results pass between lanes alone, so nothing waits. The expert that all
tokens share has no logit but a gate; the warp also computes the gate's product with the token's row.
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

from jaxspec.pallas import operation
from jaxspec.pallas.experts.experts_mlp import NOBODY
from jaxspec.pallas.hopper import WARPS
from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, nothing
from jaxspec.pallas.portable import router

LANES = 128  # numbers that a warp loads at once, four a thread
MOST_EXPERTS = 512  # sixteen logits a thread
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
LEAST = -3e38  # replaces NaN; above the -inf of experts that are chosen already
_i32 = jnp.int32

Shared = tuple[Float[Array, "t d"], Float[Array, "d 1"]]  # tokens' rows, and the gate of an expert that all share


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def top_experts(
    logits: Float[Array, "t e"], positions: Int[Array, " t"], shared: Shared | None, k: int, renormalised: bool
) -> tuple[Int[Array, "t _"], Float[Array, "t _"]]:
    """Each token's k likeliest experts, likeliest first, the lower of equals first; and their probabilities, float32:
    among all experts or, if `renormalised`, among those chosen.

    After them comes an expert that is `shared`, numbered e, with its gate's sigmoid for a weight. Columns beyond these,
    if there are any, hold `NOBODY`, as do those of padding rows, at negative positions.
    """
    call = logits, positions, shared, k, renormalised
    return operation.choose("a mixture's router", ROUTER, *call).run(*call)


def _forward(logits, positions, shared, k, renormalised):
    return top_experts(logits, positions, shared, k, renormalised), (logits, positions, shared)


def _backward(k, renormalised, given, gradient):
    logits, positions, shared = given
    weights, back = jax.vjp(lambda *given: reference(given[0], positions, given[1], k, renormalised)[1], logits, shared)
    logits, shared = back(gradient[1][:, : weights.shape[1]])
    return logits, None, shared


top_experts.defvjp(_forward, _backward)


def reference(
    logits: Float[Array, "t e"], positions: Int[Array, " t"], shared: Shared | None, k: int, renormalised: bool
) -> tuple[Array, Array]:
    """`top_experts` in plain jnp."""
    best, ids = lax.top_k(logits.astype(jnp.float32), k)
    if renormalised:
        weights = jax.nn.softmax(best, axis=-1)
    else:
        weights = jnp.exp(best - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True))
    if shared is not None:
        ids = jnp.pad(ids, ((0, 0), (0, 1)), constant_values=logits.shape[1])
        # By itself: XLA would compute it within the concatenation, with a thread for each token.
        product = lax.optimization_barrier(jnp.matmul(*shared, preferred_element_type=jnp.float32))
        weights = jnp.concatenate([weights, jax.nn.sigmoid(product)], axis=1)
    return jnp.where(positions[:, None] >= 0, ids, NOBODY), weights


def _refuses(logits, positions, shared, k, renormalised) -> str | None:
    return supported(logits.shape[1], k, shared)


def _portable_refuses(logits, positions, shared, k, renormalised) -> str | None:
    return router.supported(logits.shape[1], k, shared)


def _select(logits, positions, shared, k, renormalised) -> tuple[Array, Array]:
    return select(logits, positions, shared, k=k, renormalised=renormalised)


def _portable_select(logits, positions, shared, k, renormalised) -> tuple[Array, Array]:
    return router.select(logits, positions, shared, k=k, renormalised=renormalised)


ROUTER = (
    Implementation("top_experts", HOPPER, _refuses, _select),
    Implementation("portable", PORTABLE, _portable_refuses, _portable_select),
    Implementation("reference", ANY, nothing, reference, slow=True),
)


def supported(experts: int, k: int, shared: Shared | None = None) -> str | None:
    """Why the kernel can't choose k of so many experts, or None if it can."""
    if experts > MOST_EXPERTS:
        return f"{experts} experts, more than {MOST_EXPERTS}"
    if shared is not None and shared[0].shape[1] % LANES:
        return f"rows {shared[0].shape[1]} wide, not a multiple of {LANES}"
    most = most_chosen(shared is not None)
    return f"{k} experts a token, more than {most}" if k > most else None


def most_chosen(shared: bool) -> int:
    """How many experts a token's columns hold beside one that is `shared`."""
    return LANES - 1 if shared else LANES


@lower_once("top_experts", "k", "renormalised")
def select(
    logits: Float[Array, "t e"],
    positions: Int[Array, " t"],
    shared: Shared | None = None,
    *,
    k: int,
    renormalised: bool,
    interpret: Any = False,
) -> tuple[Int[Array, "t w"], Float[Array, "t w"]]:
    """Run `top_experts` by the kernel, in w = `LANES` columns. A token whose logits are NaN gets k experts as well."""
    t, e = logits.shape
    rows, width = -(-t // WARPS) * WARPS, -(-e // LANES) * LANES
    fill = lambda x: jnp.pad(x, ((0, rows - t), *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
    logits = jnp.pad(fill(logits.astype(jnp.float32)), ((0, 0), (0, width - e)), constant_values=-jnp.inf)
    given = [] if shared is None else [fill(shared[0]), shared[1].reshape(-1)]
    shape = partial(jax.ShapeDtypeStruct, (rows, LANES))
    ids, weights = plgpu.kernel(
        partial(_tokens, e, k, renormalised),
        kernel_name="top_experts",
        out_type=[shape(_i32), shape(jnp.float32)],
        grid=(rows // WARPS,),
        grid_names=("group",),
        interpret=interpret,
    )(logits, fill(positions), *given)
    return ids[:t], weights[:t]


def _tokens(experts, k, renormalised, logits_g, positions_g, *refs):
    *shared, ids_g, weights_g = refs
    tokens = pl.ds(lax.axis_index("group") * WARPS, WARPS)
    load = partial(plgpu.load, optimized=False)
    logits = load(logits_g.at[tokens], layout=LAYOUT)
    position = load(positions_g.at[tokens], layout=LAYOUT.reduce(1))
    product = gate_product(shared[0].at[tokens], shared[1]) if shared else None
    ids, weights = choose(logits, experts, k, renormalised)
    if shared:
        lane = plgpu.broadcasted_iota(_i32, ids.shape, 1, layout=LAYOUT)
        gate = 1 / (1 + jnp.exp(-product))
        ids, weights = jnp.where(lane == k, experts, ids), jnp.where(lane == k, across(gate, ids.shape), weights)
    ids_g[tokens] = jnp.where(across(position, ids.shape) >= 0, ids, NOBODY)
    weights_g[tokens] = weights


def across(x, shape):
    """Broadcast each token's number over all columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def choose(logits, experts, k, renormalised):
    """The k likeliest of `experts` experts and their probabilities, in `LANES` columns, from logits in `LAYOUT`."""
    (tokens, width), wide = logits.shape, (logits.shape[0], LANES)
    expert = plgpu.broadcasted_iota(_i32, (tokens, width), 1, layout=LAYOUT)
    lane = plgpu.broadcasted_iota(_i32, wide, 1, layout=LAYOUT)
    each = logits.shape
    logits = jnp.where(expert < experts, jnp.where(logits > LEAST, logits, LEAST), -jnp.inf)
    best = top = jnp.max(logits, axis=1)
    total = None if renormalised else jnp.sum(jnp.exp(logits - across(top, each)), axis=1)
    ids, weights = jnp.zeros_like(lane) + NOBODY, jnp.zeros_like(lane).astype(jnp.float32)
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
    return ids, weights / across(total, wide)


def gate_product(rows_g, gate_g):
    """Each row's product with the gate."""
    total = None
    for first in range(0, rows_g.shape[1], LANES):
        inputs = pl.ds(first, LANES)
        rows = plgpu.load(rows_g.at[:, inputs], layout=LAYOUT, optimized=False).astype(jnp.float32)
        gate = plgpu.load(gate_g.at[inputs], layout=LAYOUT.reduce(0), optimized=False).astype(jnp.float32)
        product = rows * lax.broadcast_in_dim(gate, rows.shape, [1])
        total = product if total is None else total + product
    return jnp.sum(total, axis=1)
