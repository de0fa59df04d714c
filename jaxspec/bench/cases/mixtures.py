"""Mixtures of experts: the experts, and the router's choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import EXACT, Case
from jaxspec.decoder.feed import expert_gating
from jaxspec.models import fp8
from jaxspec.models.description import Mixture
from jaxspec.models.weights import Format, FourBits, Layout, Weight
from jaxspec.pallas.experts import experts_mlp as experts
from jaxspec.pallas.experts import top_experts


def experts_mlp(
    name: str,
    tokens: int,
    d: int,
    f: int,
    e: int,
    k: int,
    layers: int,
    dtype: str,
    *,
    group: str = "experts",
    groups: int = 1,
    kind: Format = EXACT,
    residual: bool = False,
    activation: str = "silu",
    gated: bool = True,
) -> Case:
    """A mixture of experts from its input to its output, the router's choice given: `tokens` tokens, of which each
    chooses `k` experts, all equally likely, of `groups` times the `e` that are here. What must be read are the weights
    of experts that anyone chose. With `residual` the result is added to a residual stream.
    """
    m = Mixture(e, k, f, activation=activation, gated=gated)
    gating, parts = expert_gating(m), 3 if gated else 2
    rng = np.random.default_rng(tokens)
    ids = rng.random((layers, tokens, e * groups)).argpartition(k - 1, axis=-1)[..., :k].astype(np.int32)
    ids = np.where(ids < e, ids, experts.NOBODY)
    distinct = np.mean([len(np.unique(layer[layer < e])) for layer in ids])

    def matrix(key, outputs, inputs):
        """Made expert by expert: random bits for all at once would take several times their memory."""
        each = lambda key: jax.random.normal(key, (outputs, inputs), dtype) * inputs**-0.5  # noqa: E731
        keys = jax.random.split(key, e)
        if isinstance(kind, FourBits):
            values, *scales = jax.lax.map(lambda key: kind.quantise(each(key)), keys)
            return Weight(values, kind, Layout(), *scales)
        if not kind.quantised:
            return Weight(jax.lax.map(each, keys))
        values = jax.lax.map(lambda key: each(key).astype(fp8.E4M3), keys)
        scales = jnp.ones((e, outputs // fp8.BLOCK, inputs // fp8.BLOCK), jnp.float32)
        return Weight(values, kind, Layout(), scales)

    def build(key):
        keys = jax.random.split(key, 3)
        x, weights = jax.random.normal(keys[0], (tokens, d), dtype), jax.random.uniform(keys[1], (tokens, k))
        # An array each: as a slice of one, a kernel's operand would be copied first.
        shared = x, weights, [jnp.asarray(each) for each in ids]
        own = lambda key: (matrix(key, (parts - 1) * f, d), matrix(jax.random.fold_in(key, 1), d, f))  # noqa: E731
        return shared, [own(each) for each in jax.random.split(keys[2], layers)]

    def mix(layer: int, shared: Any, own: Any) -> jax.Array:
        x, weights, ids = shared
        stream = jnp.zeros_like(x) if residual else None
        return experts.experts_mlp(x, [own[layer]], ids[layer], weights, residual=stream, gating=gating)

    item = jnp.dtype(dtype).itemsize
    return Case(
        name=f"{name}, {tokens} token{'s' * (tokens > 1)}",
        group=group,
        layers=layers,
        build=build,
        op=mix,
        plain=partial(_mix_plain, gating=gating),
        size=(kind.bytes_each or item) * distinct * parts * d * f + item * 2 * tokens * d,
        flops=2 * float(np.mean((ids < e).sum((1, 2)))) * parts * d * f,
    )


def router(name: str, tokens: int, e: int, k: int, layers: int) -> Case:
    """Each token's `k` likeliest of `e` experts, from their logits."""
    return Case(
        name=f"router {name}, {tokens} token{'s' * (tokens > 1)}",
        group="router",
        layers=layers,
        build=lambda key: (jnp.arange(tokens), jax.random.normal(key, (layers, tokens, e))),
        op=lambda layer, positions, logits: top_experts.top_experts(logits[layer], positions, None, k, True)[1],
        plain=lambda layer, positions, logits: top_experts.reference(logits[layer], positions, None, k, True)[1],
        size=4 * tokens * (e + 2 * k),
        flops=0,
    )


def _mix_plain(layer: int, shared: Any, own: Any, gating: experts.Gating | None) -> jax.Array:
    x, weights, ids = shared
    stack = own[layer]
    rows, items, place = experts.plan(x, ids[layer], len(stack[0].values))
    return experts.combine(experts.reference(rows, [stack], items, gating), place, weights)
