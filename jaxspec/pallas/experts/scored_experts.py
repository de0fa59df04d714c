"""A router's choice where experts are scored one by one (DeepSeek-V3's way), on Hopper in one kernel.

A Mosaic GPU kernel, as `top_experts`: a warp takes one token, and searches the experts' corrected scores in its
registers for the largest. The weight of an expert is its score without the correction.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.description import SigmoidScores
from jaxspec.pallas import operation
from jaxspec.pallas.experts.experts_mlp import NOBODY
from jaxspec.pallas.experts.top_experts import LANES, LAYOUT, LEAST, MOST_EXPERTS, across, most_chosen, top_experts
from jaxspec.pallas.hopper import WARPS
from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, nothing

NEAR_ZERO = 1e-20  # added to a sum of scores, which may all be zero
_i32, _f32 = jnp.int32, jnp.float32


class Routing(NamedTuple):
    """How a token's `k` experts are chosen and weighted, as in `description.Mixture`. `shared`: after them comes one
    that all tokens have, of weight one."""

    k: int
    renormalised: bool
    scores: SigmoidScores
    shared: bool = False


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def scored_experts(
    logits: Float[Array, "t e"], correction: Float[Array, " e"], positions: Int[Array, " t"], routing: Routing
) -> tuple[Int[Array, "t _"], Float[Array, "t _"]]:
    """Each token's experts of the highest scores, each with its correction, the lower of equals first; and their
    weights, float32, by the scores alone.

    A shared expert is numbered e. Columns beyond these, if there are any, hold `NOBODY`, as do those of padding rows,
    at negative positions.
    """
    call = logits, correction, positions, routing
    return operation.choose("a mixture's router", ROUTER, *call).run(*call)


def _forward(logits, correction, positions, routing):
    return scored_experts(logits, correction, positions, routing), (logits, correction, positions)


def _backward(routing, given, gradient):
    logits, correction, positions = given
    weights, back = jax.vjp(lambda logits: reference(logits, correction, positions, routing)[1], logits)
    return *back(gradient[1][:, : weights.shape[1]]), jnp.zeros_like(correction), None


scored_experts.defvjp(_forward, _backward)


def reference(
    logits: Float[Array, "t e"], correction: Float[Array, " e"], positions: Int[Array, " t"], routing: Routing
) -> tuple[Array, Array]:
    """`scored_experts` in plain jnp, but for the choice among scores, which `top_experts` makes."""
    k, renormalised, s, shared = routing
    scores = jax.nn.softmax(logits) if s.function == "softmax" else jax.nn.sigmoid(logits)
    choice = lax.stop_gradient(scores + correction)
    if s.groups > 1:
        groups = choice.reshape(len(choice), s.groups, -1)
        _, best = lax.top_k(lax.top_k(groups, 2)[0].sum(-1), s.top_groups)
        allowed = jax.nn.one_hot(best, s.groups, dtype=bool).any(axis=1)
        choice = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(choice.shape)
    ids = top_experts(choice, positions, None, k, True)[0][:, :k]
    weights = jnp.take_along_axis(scores, jnp.where(ids == NOBODY, 0, ids), axis=1)
    if renormalised:
        weights = weights / (weights.sum(axis=1, keepdims=True) + NEAR_ZERO)
    weights = weights * s.scale
    return with_shared(ids, weights, positions, logits.shape[1]) if shared else (ids, weights)


def with_shared(
    ids: Int[Array, "t k"], weights: Float[Array, "t k"], positions: Int[Array, " t"], number: int
) -> tuple[Int[Array, "t w"], Float[Array, "t w"]]:
    """The chosen experts and their weights, and after them one of this number that all tokens have, of weight one."""
    always = jnp.where(positions < 0, NOBODY, number)[:, None]
    return jnp.concatenate([ids, always], axis=1), jnp.concatenate([weights, jnp.ones_like(weights[:, :1])], axis=1)


def supported(experts: int, routing: Routing) -> str | None:
    """Why the kernel can't choose so among so many experts, or None if it can."""
    if routing.scores.groups > 1:
        return f"experts in {routing.scores.groups} groups"
    if experts > MOST_EXPERTS:
        return f"{experts} experts, more than {MOST_EXPERTS}"
    most = most_chosen(routing.shared)
    return f"{routing.k} experts a token, more than {most}" if routing.k > most else None


@lower_once("scored_experts", "routing")
def select(
    logits: Float[Array, "t e"],
    correction: Float[Array, " e"],
    positions: Int[Array, " t"],
    *,
    routing: Routing,
    interpret: Any = False,
) -> tuple[Int[Array, "t w"], Float[Array, "t w"]]:
    """Run `scored_experts` by the kernel, in w = `LANES` columns. A token whose logits are NaN gets k experts, too."""
    t, e = logits.shape
    rows, width = -(-t // WARPS) * WARPS, -(-e // LANES) * LANES
    logits = jnp.pad(logits.astype(_f32), ((0, rows - t), (0, width - e)), constant_values=-jnp.inf)
    shape = partial(jax.ShapeDtypeStruct, (rows, LANES))
    ids, weights = plgpu.kernel(
        partial(_tokens, e, routing),
        kernel_name="scored_experts",
        out_type=[shape(_i32), shape(_f32)],
        grid=(rows // WARPS,),
        grid_names=("group",),
        interpret=interpret,
    )(logits, jnp.pad(correction.astype(_f32), (0, width - e)), jnp.pad(positions, (0, rows - t)))
    return ids[:t], weights[:t]


def _tokens(experts, routing, logits_g, correction_g, positions_g, ids_g, weights_g):
    tokens = pl.ds(lax.axis_index("group") * WARPS, WARPS)
    load = partial(plgpu.load, optimized=False)
    logits = load(logits_g.at[tokens], layout=LAYOUT)
    correction = load(correction_g, layout=LAYOUT.reduce(0))
    position = load(positions_g.at[tokens], layout=LAYOUT.reduce(1))
    if routing.scores.function == "softmax":
        powers = jnp.exp(logits - across(jnp.max(logits, axis=1), logits.shape))
        scores = powers / across(jnp.sum(powers, axis=1), logits.shape)
    else:
        scores = 1 / (1 + jnp.exp(-logits))
    ids, weights = _choose(scores, lax.broadcast_in_dim(correction, scores.shape, [1]), experts, routing)
    ids_g[tokens] = jnp.where(across(position, ids.shape) >= 0, ids, NOBODY)
    weights_g[tokens] = weights


def _choose(scores, correction, experts, routing):
    """The experts of the highest corrected scores and their weights, in `LANES` columns."""
    each, wide = scores.shape, (scores.shape[0], LANES)
    expert = plgpu.broadcasted_iota(_i32, each, 1, layout=LAYOUT)
    lane = plgpu.broadcasted_iota(_i32, wide, 1, layout=LAYOUT)
    choice = scores + correction
    choice = jnp.where(expert < experts, jnp.where(choice > LEAST, choice, LEAST), -jnp.inf)
    ids, weights, total = jnp.zeros_like(lane) + NOBODY, jnp.zeros_like(lane).astype(_f32), NEAR_ZERO
    for j in range(routing.k):
        best = jnp.max(choice, axis=1)
        which = jnp.min(jnp.where(choice == across(best, each), expert, each[1]), axis=1)
        mine = expert == across(which, each)
        weight = jnp.sum(jnp.where(mine, scores, 0.0), axis=1)
        ids = jnp.where(lane == j, across(which, wide), ids)
        weights = jnp.where(lane == j, across(weight, wide), weights)
        choice, total = jnp.where(mine, -jnp.inf, choice), total + weight
    weights = (weights / across(total, wide) if routing.renormalised else weights) * routing.scores.scale
    if routing.shared:
        ids, weights = jnp.where(lane == routing.k, experts, ids), jnp.where(lane == routing.k, 1.0, weights)
    return ids, weights


ROUTER = (
    Implementation(
        "scored_experts",
        HOPPER,
        lambda logits, correction, positions, routing: supported(logits.shape[1], routing),
        lambda *given: select(*given[:3], routing=given[3]),
    ),
    Implementation("reference", ANY, nothing, reference),
)
