"""Linear attention by a gated delta rule: norm(S q) * silu(z). Each token decays the state S, and corrects it by beta.

`pallas.recurrence.gated_delta` has the rule itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.fixed_order import in_order
from jaxspec.decoder.functions import rms_norm
from jaxspec.decoder.mixer import NormingMixer
from jaxspec.decoder.mixings.kind import Mixing, Weights
from jaxspec.models.description import DeltaRule, Layer
from jaxspec.pallas import hopper
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.pallas.recurrence import conv_chunk, conv_step, delta_chunk, delta_step
from jaxspec.pallas.recurrence.gated_norm import gated_norm
from jaxspec.pallas.recurrence.gates_and_norm import Around
from jaxspec.pallas.sliced_rows import SLICE, sliced

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@jax.named_scope("delta_rule")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    """Mix channels and gates' numbers. Rows from t on are padding that a kernel left."""
    qkvz, ba = made
    (q, k, v), cache = mixer.convolve(cache, i, qkvz[:, : positions.shape[1]], weights["conv"], layer.mixing.memory)
    call = layer, weights, i, (q, k, v), qkvz, ba, mixer, cache
    return choose("linear attention of a layer", RULE, *call).run(*call)


def _not_in_one(layer, weights, i, qkv, qkvz, ba, mixer, cache) -> str | None:
    """Why no kernel has the rule with the gates before it and the norm after it, or None if one does."""
    q, _, v = qkv
    if layer.mixing.gate != "silu":
        return f"gates by {layer.mixing.gate}"
    return mixer.unnormed(cache, q, v) if isinstance(mixer, NormingMixer) else "a mixer without"


def _in_one(layer, weights, i, qkv, qkvz, ba, mixer, cache):
    around = Around(ba, weights["decay_log"], weights["decay_bias"], qkvz, weights["read_norm"])
    read, cache = mixer.recur_normed(cache, i, *qkv, around, layer.norm.eps)
    return read.reshape(*qkvz.shape[:2], -1), cache


def _in_steps(layer, weights, i, qkv, qkvz, ba, mixer, cache):
    rule, (b, r, _), t = layer.mixing, qkvz.shape, qkv[0].shape[1]
    beta, a, _ = jnp.split(ba[:, :t], (rule.value_heads, 2 * rule.value_heads), axis=-1)
    read, cache = mixer.recur(cache, i, *qkv, _decay(weights, a), jax.nn.sigmoid(beta), r)
    z = qkvz[..., rule.channels :]
    return _normed(read, z, weights["read_norm"], layer.norm.eps, rule.gate).reshape(b, r, -1), cache


RULE = Implementation("delta_step", HOPPER, _not_in_one, _in_one), Implementation("plain", ANY, nothing, _in_steps)


def _decay(weights: Weights, a: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    return jnp.exp(-jnp.exp(weights["decay_log"]) * jax.nn.softplus(a + weights["decay_bias"]))


def _normed(
    read: Float[Array, "*b n v"], z: Float[Array, "*b _"], scale: Float[Array, " v"], eps: float, gate: str = "silu"
) -> Float[Array, "*b n v"]:
    """norm(read) * gate(z), in z's dtype."""
    gates = GATES[gate](z.astype(jnp.float32).reshape(read.shape))
    return (rms_norm(read.astype(jnp.float32), scale.astype(jnp.float32), eps) * gates).astype(z.dtype)


def fixed(layer, weights, i, made, positions, mixer, cache, dtype, table, in_parts):
    """Mix with one order of sums. A state goes from one token to the next, in a round and in replay alike; prompts have
    blocks at fixed positions. `ba` may be wider than its heads."""
    rule, (qkvz, ba), (b, t), eps = layer.mixing, made, positions.shape, layer.norm.eps
    if in_parts:
        qkvz = in_order(qkvz).astype(dtype).reshape(b, t, -1)
    ba, scale = ba[..., : 2 * rule.value_heads], weights["read_norm"]
    (q, k, v), cache = mixer.convolve(cache, i, qkvz, weights["conv"], rule.memory)
    kernels = hopper.multiprocessors() > 0
    if kernels and t < conv_chunk.BLOCK:
        around = Around(ba, weights["decay_log"], weights["decay_bias"], qkvz, scale)
        read, cache = mixer.recur_normed(cache, i, q, k, v, around, eps)
        return read.reshape(b, t, -1), cache

    def gates(ba):
        beta, a = jnp.split(ba, 2, axis=-1)
        return _decay(weights, a), jax.nn.sigmoid(beta)

    if kernels:
        read, cache = mixer.recur(cache, i, q, k, v, *gates(ba), t)
        return gated_norm(read, qkvz, scale, eps=eps).reshape(b, t, -1), cache
    decay, beta = (x.reshape(b, t, -1) for x in sliced(gates, SLICE, ba.reshape(b * t, -1)))
    read, cache = mixer.recur(cache, i, q, k, v, decay, beta, t)
    z = qkvz[..., rule.channels :].reshape(b * t, -1)
    out = sliced(lambda read, z: _normed(read, z, scale, eps), SLICE, read.reshape(b * t, *read.shape[2:]), z)
    return out.reshape(b, t, -1), cache


def _fixed_refuses(layer: Layer, rows: int) -> str | None:
    rule: DeltaRule = layer.mixing
    q, v = (1, rows, rule.key_heads, rule.key_dim), (1, rows, rule.value_heads, rule.value_dim)
    widths = rule.key_dim, rule.value_dim
    if rows == conv_chunk.BLOCK:
        reason = delta_chunk.supported(q, v, "float32", "bfloat16", "bfloat16", "bfloat16")
        return reason or conv_chunk.supported(conv_chunk.FEWEST, rows, rule.taps, *widths, "bfloat16")
    reason = delta_step.supported(q, v, rows, "float32", "bfloat16", "bfloat16", "bfloat16")
    return reason or conv_step.supported(rows, *widths, "bfloat16")


_FIELDS = frozenset({"key_heads", "value_heads", "key_dim", "value_dim", "taps"})
DELTA_RULE = Mixing(
    projections=("qkvz", "ba"),
    mix=mix,
    implements={
        "plain": _FIELDS | {"gate"},
        **dict.fromkeys(("fused_norms", "fp8_rows", "fp8_tiles", "deterministic"), _FIELDS),
    },
    exact=frozenset({"ba"}),
    padding=True,
    fixed=fixed,
    fixed_refuses=_fixed_refuses,
)
