"""The second half of a layer: an MLP, or a mixture of experts.

Axis letters: b batch, t tokens, d model width, f MLP width, e experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.matmul import ACTIVATIONS, Quantised, Weighted, gate, gating, matmul, project
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.models.description import Mixture, Mlp, SigmoidScores
from jaxspec.pallas.experts.experts_mlp import NOBODY, Gating, Stack, experts_mlp, several_widths
from jaxspec.pallas.experts.scored_experts import Routing, scored_experts, with_shared
from jaxspec.pallas.experts.top_experts import top_experts
from jaxspec.parallel.sharding import AXIS, devices


@jax.named_scope("mlp")
def mlp(
    m: Mlp,
    weights: Weights,
    x: Float[Array, "b t d"] | None,
    rows: Float[Array, "b t d"] | Quantised | Weighted,
    valid: Int[Array, "1"],
) -> Float[Array, "b t d"]:
    """x + down(activation(gate) * up) of the normed rows, of which the first `valid` count."""
    if not m.gated:
        up = add_product(None, rows, weights, "up", valid)
        hidden = ACTIVATIONS[m.activation](up)
    elif m.bias or m.activation != "silu":
        gate_up = project(rows, weights["gate_up"], valid)
        gate_up = gate_up + weights["gate_up_bias"] if m.bias else gate_up
        hidden = gate(gate_up, weights["gate_up"].layout.interleave, m.activation)
    else:
        hidden = project(rows, weights["gate_up"], valid, gated=True)
    return add_product(x, hidden, weights, "down", valid)


def add_product(
    x: Float[Array, "b t d"] | None,
    rows: Float[Array, "b t k"] | Quantised | Weighted,
    weights: Weights,
    name: str,
    valid: Int[Array, "1"],
) -> Float[Array, "b t d"]:
    """x + a projection of the rows, with its bias if it has one."""
    if f"{name}_bias" in weights:
        product = project(rows, weights[name], valid) + weights[f"{name}_bias"]
        return product if x is None else x + product
    return project(rows, weights[name], valid, x)


@jax.named_scope("mixture")
def mixture(
    m: Mixture,
    weights: Weights,
    x: Float[Array, "b t d"] | None,
    rows: Float[Array, "b t d"],
    positions: Int[Array, "b _"],
    report: list[Array] | None = None,
    routed: Float[Array, "b t d"] | None = None,
) -> Float[Array, "b t d"]:
    """x + each token's experts, weighted as its router likes them (https://arxiv.org/abs/1701.06538), + the shared one.

    The router's logits and probabilities are float32 throughout: a rounded one may pick another expert. `report` gets
    the chosen experts, i32[b, t, k]. `routed`: rows for the router; None: the same ones.
    """
    # One array for the router and the experts, which XLA would otherwise normalise rows for once each.
    shape, rows = rows.shape, jax.lax.optimization_barrier(rows.reshape(-1, rows.shape[-1]))
    logits = matmul(rows if routed is None else routed.reshape(rows.shape), weights["router"], jnp.float32)
    logits = logits + weights["router_bias"] if m.router_bias else logits
    x = None if x is None else x.reshape(rows.shape)
    ids, scores = chosen_experts(m, weights, rows, logits, positions)
    if report is not None:
        report.append(ids[:, : m.per_token].reshape(*shape[:-1], -1))
    return mix_chosen(m, weights, rows, ids, scores, x).reshape(shape)


def mix_experts(
    m: Mixture,
    weights: Weights,
    rows: Float[Array, "r d"],
    logits: Float[Array, "r e"],
    positions: Int[Array, "*b"],
    residual: Float[Array, "r d"] | None,
    **further: Any,
) -> Float[Array, "r d"] | tuple[Float[Array, "r d"], Any]:
    """Mix flat rows' experts by the router's logits; all else as in `mix_chosen`."""
    return mix_chosen(m, weights, rows, *chosen_experts(m, weights, rows, logits, positions), residual, **further)


def chosen_experts(
    m: Mixture, weights: Weights, rows: Float[Array, "r d"], logits: Float[Array, "r e"], positions: Int[Array, "*b"]
) -> tuple[Int[Array, "r w"], Float[Array, "r w"]]:
    """The experts of flat rows by the router's logits, and their weights. The shared one follows, if it is gated or one
    that all choose."""
    positions, always = positions.reshape(-1), bool(m.shared and not m.shared_gated and not m.latent)
    shared = (rows, weights["shared_gate"].dequantised(rows.dtype)) if m.shared and m.shared_gated else None
    with jax.named_scope("experts"):
        if isinstance(m.scores, SigmoidScores):
            routing = Routing(m.per_token, m.renormalised, m.scores, always)
            correction = weights["router_correction"] if m.scores.corrected else jnp.zeros(m.experts, jnp.float32)
            ids, scores = scored_experts(logits, correction, positions, routing)
        else:
            ids, scores = top_experts(logits, positions, shared, m.per_token, m.renormalised)
            if always:
                ids, scores = with_shared(ids[:, : m.per_token], scores[:, : m.per_token], positions, m.experts)
        if m.beside:
            scores = scores * weights["expert_scale"].astype(scores.dtype)[jnp.where(ids < m.experts, ids, 0)]
    return ids, scores


@jax.named_scope("experts")
def mix_chosen(
    m: Mixture,
    weights: Weights,
    rows: Float[Array, "r d"],
    ids: Int[Array, "r w"],
    scores: Float[Array, "r w"],
    residual: Float[Array, "n d"] | None,
    valid: int | None = None,
    **norm: Any,
) -> Float[Array, "n d"] | tuple[Float[Array, "n d"], Any]:
    """Mix flat rows' chosen experts; those of the first `valid` rows alone, if that is given. `norm`: the
    norm after it (`scale`, `centred`), as in `experts_mlp`."""
    biases = (weights["experts_gate_up_bias"], weights["experts_down_bias"]) if m.bias else ()
    first = "gate_up" if m.gated else "up"
    stacks, each = [(weights[f"experts_{first}"], weights["experts_down"], *biases)], m.per_token
    shared = [(weights[f"shared_{first}"], weights["shared_down"])] if m.shared else []
    if m.latent:
        return latent_experts(m, weights, rows, stacks, ids, scores, shared, residual)
    alone = m.weighs_inputs  # the shared expert, whose rows aren't the others'
    if m.shared == m.width and not alone:  # one expert more, that every token chooses
        stacks += shared
        each += 1
    elif m.shared and not alone and m.groups == 1 and several_widths(rows, [*stacks, *shared], expert_gating(m)):
        stacks += shared
        ids, scores = _in_parts(m, ids, scores, m.shared // m.width)
        each += m.shared // m.width
    elif m.shared:
        own, shares = (array[:, each : each + 1] for array in (ids, scores))
        own = jnp.where(own == m.experts, 0, NOBODY)
        ids, scores = ids[:, :each], scores[:, :each]  # no column of the others' holds the shared one
        residual = experts_mlp(rows, shared, own, shares, 1, residual, expert_gating(m), tokens=valid)
    if m.weighs_inputs:
        rows, scores = (rows * scores[:, :1]).astype(rows.dtype), jnp.ones_like(scores)
    if m.groups > 1:
        ids = own_experts(ids, m.experts, m.groups)
    return experts_mlp(rows, stacks, ids, scores, each, residual, expert_gating(m), tokens=valid, **norm)


def _in_parts(
    m: Mixture, ids: Int[Array, "r w"], scores: Float[Array, "r w"], parts: int
) -> tuple[Int[Array, "r k"], Float[Array, "r k"]]:
    """The chosen experts and their weights, with the shared one, which comes after them, as so many of its parts."""
    k = m.per_token
    own = jnp.where(ids[:, k : k + 1] == m.experts, m.experts + jnp.arange(parts, dtype=ids.dtype), NOBODY)
    weights = jnp.repeat(scores[:, k : k + 1], parts, axis=1)
    return jnp.concatenate([ids[:, :k], own], axis=1), jnp.concatenate([scores[:, :k], weights], axis=1)


def expert_gating(m: Mixture) -> Gating | None:
    """The function of gate and up that experts have, or of up alone; None: silu(gate) * up."""
    if not m.gated:
        return ACTIVATIONS[m.activation]
    return None if m.activation == "silu" else gating(m.activation)


def latent_experts(
    m: Mixture,
    weights: Weights,
    rows: Float[Array, "r d"],
    stacks: list[Stack],
    ids: Int[Array, "r w"],
    scores: Float[Array, "r w"],
    shared: list[Stack],
    residual: Float[Array, "r d"] | None,
) -> Float[Array, "r d"]:
    """Mix experts of a projection of the rows, and project the mixture back. The shared expert takes the rows."""
    valid, other = jnp.full(1, len(rows), jnp.int32), expert_gating(m)
    if shared:
        always = jnp.zeros((len(rows), 1), jnp.int32), jnp.ones((len(rows), 1), jnp.float32)
        residual = experts_mlp(rows, shared, *always, 1, residual, other)
    latent = project(rows, weights["latent_in"], valid)
    return project(
        experts_mlp(latent, stacks, ids, scores, m.per_token, None, other), weights["latent_out"], valid, residual
    )


def own_experts(ids: Int[Array, "t w"], experts: int, groups: int) -> Int[Array, "t w"]:
    """The chosen experts by their numbers on this device, of whose group each is or isn't; the shared expert is on
    all devices and comes after the others."""
    held, among = experts // groups, devices() // groups
    first = jax.lax.axis_index(AXIS) // among * held
    own = (ids >= first) & (ids < first + held)
    return jnp.where(own, ids - first, jnp.where(ids == experts, held, NOBODY))
