"""Kimi Delta Attention: norm(S q) * sigmoid(z). Each token decays the state S by key channel, and corrects it by beta.

`pallas.recurrence.gated_delta` has the rule itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.decoder.functions import rms_norm
from jaxspec.decoder.matmul import project, valid_count
from jaxspec.decoder.mixer import NormingMixer
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.models.description import KimiDelta
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.pallas.recurrence.gates_and_norm import AroundChannels


@jax.named_scope("kimi_delta")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    """Mix channels; and decays' and gates' narrow projections, then beta of each head, which are one product. Rows from
    t on are padding that a kernel left."""
    m, (qkv, gates), (_, t), valid = layer.mixing, made, positions.shape, valid_count(positions)
    qkv, cache = mixer.convolve(cache, i, qkv[:, :t], weights["conv"], m.memory)
    narrow = gates[:, :t, : m.width], gates[:, :t, m.width : 2 * m.width]
    steps, z = (project(x, weights[name], valid) for x, name in zip(narrow, ("steps", "output_gates"), strict=True))
    call = layer, weights, i, qkv, steps, z, gates, mixer, cache
    return choose("Kimi Delta Attention of a layer", RULE, *call).run(*call)


def _not_in_one(layer, weights, i, qkv, steps, z, gates, mixer, cache) -> str | None:
    """Why no kernel has the rule with the gates before it and the norm after it, or None if one does."""
    q, _, v = qkv
    return mixer.unnormed(cache, q, v) if isinstance(mixer, NormingMixer) else "a mixer without"


def _in_one(layer, weights, i, qkv, steps, z, gates, mixer, cache):
    around = AroundChannels(steps, gates, weights["decay_log"], weights["decay_bias"], z, weights["read_norm"])
    read, cache = mixer.recur_normed(cache, i, *qkv, around, layer.norm.eps)
    return read.reshape(*gates.shape[:2], -1), cache


def _in_steps(layer, weights, i, qkv, steps, z, gates, mixer, cache):
    m, (b, t, _) = layer.mixing, steps.shape
    wide, beta = (b, t, m.heads, m.width), jax.nn.sigmoid(gates[:, :t, 2 * m.width :].astype(jnp.float32))
    steps = steps.astype(jnp.float32) + weights["decay_bias"]
    decay = jnp.exp(-jnp.exp(weights["decay_log"])[:, None] * jax.nn.softplus(steps).reshape(wide))
    read, cache = mixer.recur(cache, i, *qkv, decay, beta, t)
    read = rms_norm(read.astype(jnp.float32), weights["read_norm"].astype(jnp.float32), layer.norm.eps)
    out = (read * jax.nn.sigmoid(z.astype(jnp.float32).reshape(wide))).astype(z.dtype).reshape(b, t, -1)
    return jnp.pad(out, ((0, 0), (0, gates.shape[1] - t), (0, 0))), cache


RULE = Implementation("delta_step", HOPPER, _not_in_one, _in_one), Implementation("plain", ANY, nothing, _in_steps)
_FIELDS = frozenset(KimiDelta.__dataclass_fields__)
KIMI_DELTA = Mixing(
    projections=("qkv", "gates"), mix=mix, implements={"plain": _FIELDS, "fused_norms": _FIELDS}, padding=True
)
