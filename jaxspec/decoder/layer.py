"""The equations of a decoder layer, driven by its description. They stand here once, whichever path runs them.

    x = x + out(mix(norm(x)))
    x = x + feed(norm(x))

`mix` is `attention` or `delta_rule`, `feed` is `mlp` or `mixture`. Layers with post norms add norm(out(...)) and
norm(feed(...)) instead. A layer's weights are a dict of `Weight`s and arrays; q, k, v are one matmul, gate and up
another: fewer, larger reads of weights.

Axis letters: b batch, t tokens, d model width, n query heads, m KV heads, h head width, f MLP width, e experts,
k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import Table, cos_sin, normed, rms_norm, rope, row_of
from jaxspec.decoder.matmul import Quantised, gate, gating, matmul, normed_for, project, valid_count
from jaxspec.decoder.mixer import LinearMixer, Mixer, NormingMixer, PagedMixer
from jaxspec.decoder.path import Weights
from jaxspec.decoder.spec import ROPE_SCALINGS, Attention, DeltaRule, Layer, Mixture, Mlp, Norm, Rope, beyond
from jaxspec.pallas import write_heads
from jaxspec.pallas.delta_around import Around
from jaxspec.pallas.experts import NOBODY, experts_mlp
from jaxspec.pallas.hopper import chosen
from jaxspec.pallas.top_experts import top_experts
from jaxspec.peers import summed
from jaxspec.sharding import AXIS, devices, total

# What the kernel implements that norms and rotates heads, and writes keys and values into pages.
HEADS_WRITTEN = {
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "bias", "out_bias", "window", "sinks"}),
    Norm: frozenset({"eps"}),
    Rope: frozenset({"theta", "scaling"}),
    **ROPE_SCALINGS,
}


def run_layer(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    row: Int[Array, " b"] | None = None,
    rows: Float[Array, "b t w"] | None = None,
) -> tuple[Float[Array, "b _ d"], Any]:
    """The residual stream `x` after one layer, the i-th that mixes as it does, and the cache.

    `row`: of each sequence the one row that goes on after the mixing, -1 where nobody reads any; None: all rows.
    `rows`: what queries, keys and values are made of, if not the normed residual stream.
    """
    if rows is None:
        readers = [weights[name] for name in projections(layer)]
        rows = normed_for(readers, x, weights["attn_norm"], layer.norm)
    made = products(layer, weights, rows, positions)
    mixed, cache = mix(layer, weights, i, made, positions, mixer if row is None else mixer.only(row >= 0), cache)
    x, mixed, positions = (row_of(a, row) for a in (x, mixed, positions))
    return finish(layer, weights, x, mixed, positions), cache


def projections(layer: Layer) -> tuple[str, ...]:
    """Names of the weights that make of a layer's normed rows what it mixes."""
    return ("qkv",) if isinstance(layer.mixing, Attention) else ("qkvz", "ba")


@jax.named_scope("projections")
def products(
    layer: Layer, weights: Weights, rows: Float[Array, "b t w"] | Quantised, positions: Int[Array, "b t"]
) -> list[Array]:
    """The normed rows' products with these weights; those of `ba`, which go into exponents, in float32."""
    valid = valid_count(positions)
    return [
        matmul(rows, weights[name], jnp.float32) if name == "ba" else project(rows, weights[name], valid)
        for name in projections(layer)
    ]


def mix(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    made: list[Array],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
) -> tuple[Float[Array, "b _ k"], Any]:
    """From the projections to the input of the output projection."""
    if isinstance(layer.mixing, Attention):
        return attention(layer, weights, i, *made, positions, mixer, cache)
    return delta_rule(layer, weights, i, *made, positions, mixer, cache)


@jax.named_scope("attention")
def attention(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    qkv: Float[Array, "*s b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    dtype: Any = None,
    table: Table | None = None,
) -> tuple[Float[Array, "b t k"], Any]:
    """softmax(q k') v of each head's rotated queries and keys, in `dtype`, by default that of `qkv`.

    `qkv` may come in parts, to be summed in float32. `table`: the rope table, if it is made already.
    """
    a, (b, t), dtype = layer.mixing, positions.shape, dtype or qkv.dtype
    n, m, h = a.heads, a.kv_heads, a.head_dim
    if a.bias:
        qkv = qkv + weights["qkv_bias"] if qkv.ndim == 3 else qkv.at[0].add(weights["qkv_bias"])
    if chosen(_not_written(layer, weights, mixer, cache, dtype)):
        return _written_attention(layer, weights, i, qkv, positions, mixer, cache, table)
    if qkv.ndim > 3:
        qkv = qkv.sum(0).astype(dtype)
    queries = 2 * n if a.gated else n
    q, k, v = jnp.split(qkv.reshape(b, t, -1, h), [queries, queries + m], axis=2)
    if a.gated:
        q, gates = jnp.moveaxis(q.reshape(b, t, n, 2, h), 3, 0)
    if a.qk_norm:
        q, k = normed(q, weights["q_norm"], a.qk_norm), normed(k, weights["k_norm"], a.qk_norm)
    q, k = rope(q, positions, a, table), rope(k, positions, a, table)
    if a.scale is not None:  # a mixer multiplies by h**-0.5
        q = (q.astype(jnp.float32) * (a.scale * h**0.5)).astype(q.dtype)
    out, cache = mixer.attend(cache, i, q, k, v, a.window, **sinks(a, weights))
    if a.gated:
        out = out * jax.nn.sigmoid(gates)
    return out.reshape(b, t, n * h), cache


def sinks(a: Attention, weights: Weights) -> dict[str, Array]:
    """What a mixer is told beside of layers with sinks: so one that doesn't know of sinks fails."""
    return {"sinks": weights["sinks"].astype(jnp.float32)} if a.sinks else {}


def _not_written(layer: Layer, weights: Weights, mixer: Mixer, cache: Any, dtype: Any) -> str | None:
    """Why `write_heads` can't take a projection's rows to what `mixer` keeps, or None if it can."""
    a = layer.mixing
    if reason := beyond(a, HEADS_WRITTEN):
        return reason
    if a.qk_norm not in (None, layer.norm):
        return f"norms of q and k that aren't the layer's, {a.qk_norm}"
    if (pages := mixer.pages(cache)) is None:
        return "no pages to write to"
    norms = [weights[name].dtype for name in ("q_norm", "k_norm") if a.qk_norm]
    return write_heads.supported(a.heads, a.kv_heads, a.head_dim, a.head_dim, pages.dtype, dtype, *norms)


def _written_attention(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    qkv: Float[Array, "*s b t d"],
    positions: Int[Array, "b t"],
    mixer: PagedMixer,
    cache: Any,
    table: Table | None,
) -> tuple[Float[Array, "b t k"], Any]:
    """The same, with one kernel from the projection's parts to queries, and keys and values in their pages."""
    a, (b, t) = layer.mixing, positions.shape
    cos, sin = (x.reshape(b * t, -1) for x in table or cos_sin(positions, a))
    norms = [weights["q_norm"], weights["k_norm"]] if a.qk_norm else []

    def write(
        pages: Array, kv_slots: Int[Array, "b t"], inverse_scales: Array | None
    ) -> tuple[Float[Array, "b t n h"], Array]:
        rows, kv_slots = qkv.reshape(-1, b * t, qkv.shape[-1]), kv_slots.reshape(-1)
        of = rows, cos, sin, pages, i, kv_slots, norms, inverse_scales
        q, pages = write_heads.write_heads(*of, eps=layer.norm.eps)
        return q.reshape(b, t, a.heads, a.head_dim), pages

    out, cache = mixer.attend_written(cache, i, t, write, a.window, **sinks(a, weights))
    return out.reshape(b, t, a.heads * a.head_dim), cache


@jax.named_scope("delta_rule")
def delta_rule(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    qkvz: Float[Array, "b r d"],
    ba: Float[Array, "b r g"],
    positions: Int[Array, "b t"],
    mixer: LinearMixer,
    cache: Any,
) -> tuple[Float[Array, "b r k"], Any]:
    """norm(S q) * silu(z), of a state S that each token decays and corrects by beta.

    Rows from t on are padding that a kernel left: they come out as anything.
    """
    rule: DeltaRule = layer.mixing
    (b, r, _), t = qkvz.shape, positions.shape[1]
    (q, k, v), cache = mixer.convolve(cache, i, qkvz[:, :t], weights["conv"], rule)
    if isinstance(mixer, NormingMixer) and chosen(mixer.unnormed(cache, q, v)):
        around = Around(ba, weights["decay_log"], weights["decay_bias"], qkvz, weights["read_norm"])
        read, cache = mixer.recur_normed(cache, i, q, k, v, around, layer.norm.eps)
        return read.reshape(b, r, -1), cache
    beta, a, _ = jnp.split(ba[:, :t], (rule.value_heads, 2 * rule.value_heads), axis=-1)
    decay = jnp.exp(-jnp.exp(weights["decay_log"]) * jax.nn.softplus(a + weights["decay_bias"]))
    read, cache = mixer.recur(cache, i, q, k, v, decay, jax.nn.sigmoid(beta), r)
    z = jax.nn.silu(qkvz[..., rule.channels :].astype(jnp.float32).reshape(read.shape))
    read = rms_norm(read.astype(jnp.float32), weights["read_norm"].astype(jnp.float32), layer.norm.eps) * z
    return read.astype(qkvz.dtype).reshape(b, r, -1), cache


def finish(
    layer: Layer,
    weights: Weights,
    x: Float[Array, "b t d"],
    mixed: Float[Array, "b t k"],
    positions: Int[Array, "b _"],
) -> Float[Array, "b t d"]:
    """The rest of a layer after its mixing: output projection and MLP, each added to the residual stream."""
    valid = valid_count(positions)
    with jax.named_scope("output_projection"):
        x = added(layer, weights, "attn_post_norm", x, lambda x: add_product(x, mixed, weights, "out", valid))
    return feed(layer, weights, x, positions)


def added(
    layer: Layer, weights: Weights, name: str, x: Float[Array, "b t d"], sub: Callable[[Array | None], Array]
) -> Float[Array, "b t d"]:
    """The residual stream x after a sub-layer. `sub(x)` adds to x, `sub(None)` to nothing.

    Of weights that are divided among devices, each device has a part of the sum.
    """
    if devices() == 1 and not layer.post_norm:
        return sub(x)
    part = sub(None)
    if not layer.post_norm:
        return summed(part.reshape(-1, part.shape[-1]), x.reshape(-1, x.shape[-1])).reshape(x.shape)
    return x + normed(total(part), weights[name], layer.norm)


def feed(
    layer: Layer, weights: Weights, x: Float[Array, "b t d"], positions: Int[Array, "b _"]
) -> Float[Array, "b t d"]:
    """x + feed(norm(x)). Padding, at negative positions, is no row of an MLP and chooses no expert."""
    readers = [] if isinstance(layer.feed, Mixture) else [weights["gate_up"]]
    rows = normed_for(readers, x, weights["mlp_norm"], layer.norm)
    if isinstance(layer.feed, Mixture):
        return added(layer, weights, "mlp_post_norm", x, lambda x: mixture(layer.feed, weights, x, rows, positions))
    valid = valid_count(positions)
    return added(layer, weights, "mlp_post_norm", x, lambda x: mlp(layer.feed, weights, x, rows, valid))


@jax.named_scope("mlp")
def mlp(
    m: Mlp,
    weights: Weights,
    x: Float[Array, "b t d"] | None,
    rows: Float[Array, "b t d"] | Quantised,
    valid: Int[Array, "1"],
) -> Float[Array, "b t d"]:
    """x + down(activation(gate) * up) of the normed rows, of which the first `valid` count."""
    if m.bias or m.activation != "silu":
        gate_up = project(rows, weights["gate_up"], valid)
        gate_up = gate_up + weights["gate_up_bias"] if m.bias else gate_up
        hidden = gate(gate_up, weights["gate_up"].layout.interleave, m.activation)
    else:
        hidden = project(rows, weights["gate_up"], valid, gated=True)
    return add_product(x, hidden, weights, "down", valid)


def add_product(
    x: Float[Array, "b t d"] | None, rows: Float[Array, "b t k"], weights: Weights, name: str, valid: Int[Array, "1"]
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
) -> Float[Array, "b t d"]:
    """x + each token's experts, weighted as its router likes them (https://arxiv.org/abs/1701.06538), + the shared one.

    The router's logits and probabilities are float32 throughout: a rounded one may pick another expert.
    """
    # One array for the router and the experts, which XLA would otherwise normalise rows for once each.
    shape, rows = rows.shape, jax.lax.optimization_barrier(rows.reshape(-1, rows.shape[-1]))
    logits = matmul(rows, weights["router"], jnp.float32)
    logits = logits + weights["router_bias"] if m.router_bias else logits
    x = None if x is None else x.reshape(rows.shape)
    return mix_experts(m, weights, rows, logits, positions, x).reshape(shape)


def mix_experts(
    m: Mixture,
    weights: Weights,
    rows: Float[Array, "r d"],
    logits: Float[Array, "r e"],
    positions: Int[Array, "*b"],
    residual: Float[Array, "r d"] | None,
    **further: Any,
) -> Float[Array, "r d"] | tuple[Float[Array, "r d"], Any]:
    """The same of flat rows from the router's logits; all else as in `mix_chosen`."""
    shared = (rows, weights["shared_gate"].dequantised(rows.dtype)) if m.shared else None
    with jax.named_scope("experts"):
        ids, scores = top_experts(logits, positions.reshape(-1), shared, m.per_token, m.renormalised)
    return mix_chosen(m, weights, rows, ids, scores, residual, **further)


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
    """The same of flat rows whose experts are chosen; of the first `valid` rows alone, if that is given. `norm`: the
    norm after it (`scale`, `centred`), as in `experts_mlp`."""
    biases = (weights["experts_gate_up_bias"], weights["experts_down_bias"]) if m.bias else ()
    stacks, each = [(weights["experts_gate_up"], weights["experts_down"], *biases)], m.per_token
    if m.shared:  # one expert more, that every token chooses
        stacks.append((weights["shared_gate_up"], weights["shared_down"]))
        each += 1
    if m.groups > 1:
        ids = own_experts(ids, m.experts, m.groups)
    other = None if m.activation == "silu" else gating(m.activation)
    return experts_mlp(rows, stacks, ids, scores, each, residual, other, tokens=valid, **norm)


def own_experts(ids: Int[Array, "t w"], experts: int, groups: int) -> Int[Array, "t w"]:
    """The chosen experts by their numbers on this device, of whose group each is or isn't; the shared expert is on
    all devices and comes after the others."""
    held, among = experts // groups, devices() // groups
    first = jax.lax.axis_index(AXIS) // among * held
    own = (ids >= first) & (ids < first + held)
    return jnp.where(own, ids - first, jnp.where(ids == experts, held, NOBODY))
