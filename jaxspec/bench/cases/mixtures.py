"""Mixtures of experts: the experts, and the router's choice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import Case
from jaxspec.models.weights import Weight
from jaxspec.pallas.experts import experts_mlp as experts
from jaxspec.pallas.experts import top_experts


def experts_mlp(name: str, tokens: int, d: int, f: int, e: int, k: int, layers: int, dtype: str) -> Case:
    """A mixture of experts from its input to its output, the router's choice given: `tokens` tokens, of which each
    chooses `k` of `e` experts, all equally likely. What must be read are the weights of experts that anyone chose.
    """
    rng = np.random.default_rng(tokens)
    ids = rng.random((layers, tokens, e)).argpartition(k - 1, axis=-1)[..., :k].astype(np.int32)
    distinct = np.mean([len(np.unique(layer)) for layer in ids])

    def build(key):
        keys = jax.random.split(key, 3)
        x, weights = jax.random.normal(keys[0], (tokens, d), dtype), jax.random.uniform(keys[1], (tokens, k))

        def own(key):  # expert by expert: random bits for all at once would take several times their memory
            matrices = lambda key: (  # noqa: E731
                jax.random.normal(key, (2 * f, d), dtype) * d**-0.5,
                jax.random.normal(jax.random.fold_in(key, 1), (d, f), dtype) * f**-0.5,
            )
            return jax.lax.map(matrices, jax.random.split(key, e))

        # An array each: as a slice of one, a kernel's operand would be copied first.
        shared = x, weights, [jnp.asarray(each) for each in ids]
        return shared, [tuple(map(Weight, own(each))) for each in jax.random.split(keys[2], layers)]

    return Case(
        name=f"experts {name}, {tokens} token{'s' * (tokens > 1)}",
        group="experts",
        layers=layers,
        build=build,
        op=_mix,
        plain=_mix_plain,
        size=jnp.dtype(dtype).itemsize * (distinct * 3 * d * f + 2 * tokens * d),
        flops=2 * tokens * k * 3 * d * f,
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


def _mix(layer: int, shared: Any, own: Any) -> jax.Array:
    x, weights, ids = shared
    return experts.experts_mlp(x, [own[layer]], ids[layer], weights)


def _mix_plain(layer: int, shared: Any, own: Any) -> jax.Array:
    x, weights, ids = shared
    stack = own[layer]
    rows, items, place = experts.plan(x, ids[layer], len(stack[0].values))
    return experts.combine(experts.reference(rows, [stack], items), place, weights)
