"""Mixing of layers on the path of `--deterministic` that no kernel for whole heads serves: gated attention, and linear
attention.

Its norms and products have one order of sums, in kernels or in slices of rows (`row_norm`, `exact_product`). What is
left to XLA looks at one number at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import Table, normed, rms_norm, rope
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.path import Weights
from jaxspec.models.description import Attention, DeltaRule, Layer, Norm
from jaxspec.models.weights import Weight, matmul
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import weight_stream
from jaxspec.pallas.dense.add_norm import UNIT, add_norm
from jaxspec.pallas.recurrence import conv_chunk, conv_step, delta_chunk, delta_step
from jaxspec.pallas.recurrence.gated_norm import gated_norm
from jaxspec.pallas.recurrence.gates_and_norm import Around
from jaxspec.pallas.sliced_rows import SLICE, sliced


def supported(rule: DeltaRule, rows: int) -> str | None:
    """Why linear attention has no kernels of a fixed order for this, `rows` of a request or of a prompt's block."""
    q, v = (1, rows, rule.key_heads, rule.key_dim), (1, rows, rule.value_heads, rule.value_dim)
    widths = rule.key_dim, rule.value_dim
    if rows == conv_chunk.BLOCK:
        reason = delta_chunk.supported(q, v, "float32", "bfloat16", "bfloat16", "bfloat16")
        return reason or conv_chunk.supported(conv_chunk.FEWEST, rows, rule.taps, *widths, "bfloat16")
    reason = delta_step.supported(q, v, rows, "float32", "bfloat16", "bfloat16", "bfloat16")
    return reason or conv_step.supported(rows, *widths, "bfloat16")


def row_norm(x: Float[Array, "*b d"], scale: Float[Array, " d"], norm: Norm) -> Float[Array, "*b d"]:
    """`decoder.functions.normed`, of each row by itself."""
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    if not hopper.multiprocessors():
        return sliced(lambda rows: normed(rows, scale, norm), SLICE, rows).reshape(x.shape)
    unit = UNIT // 2 if width <= UNIT // 2 else UNIT
    wide = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -width % unit)])  # noqa: E731
    named = {"eps": norm.eps, "centred": norm.centred, "columns": width}
    return add_norm(wide(rows), None, wide(scale), **named)[1][: len(rows), :width].reshape(x.shape)


def exact_product(x: Float[Array, "*b d"], weight: Weight) -> Float[Array, "*b n"]:
    """x @ weight in float32, of any number of rows."""
    rows = x.reshape(-1, x.shape[-1])
    if not hopper.multiprocessors():
        out = sliced(lambda rows: matmul(rows, weight, jnp.float32), SLICE, rows)
    elif len(rows) <= weight_stream.MAX_ROWS:
        out = in_order(weight_stream.product_fixed(rows, weight.unquantised))
    else:
        out = sliced(
            lambda rows: in_order(weight_stream.product_fixed(rows, weight.unquantised)), weight_stream.MAX_ROWS, rows
        )
    return out.reshape(*x.shape[:-1], -1)


def in_order(partials: Float[Array, "s r n"]) -> Float[Array, "r n"]:
    """Their sum, one after the other."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


def attention(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    qkv: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: object,
    table: Table,
) -> tuple[Float[Array, "b t k"], object]:
    """`layer.attention` with or without gates, of norms that `write_heads` doesn't have."""
    a: Attention = layer.mixing
    (b, t), n, m, h = positions.shape, a.heads, a.kv_heads, a.head_dim
    queries = 2 * n if a.gated else n
    q, k, v = jnp.split(qkv.reshape(b, t, -1, h), [queries, queries + m], axis=2)
    if a.gated:
        q, gates = jnp.moveaxis(q.reshape(b, t, n, 2, h), 3, 0)
    if a.qk_norm:
        q, k = row_norm(q, weights["q_norm"], a.qk_norm), row_norm(k, weights["k_norm"], a.qk_norm)
    out, cache = mixer.attend(cache, i, rope(q, positions, a, table), rope(k, positions, a, table), v, None)
    if a.gated:
        out = out * jax.nn.sigmoid(gates)
    return out.reshape(b, t, n * h), cache


def delta_rule(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    qkvz: Float[Array, "b t d"],
    ba: Float[Array, "b t g"],
    mixer: Mixer,
    cache: object,
) -> tuple[Float[Array, "b t k"], object]:
    """`layer.delta_rule`. `ba` may be wider than its heads."""
    rule: DeltaRule = layer.mixing
    (b, t, _), eps, scale = qkvz.shape, layer.norm.eps, weights["read_norm"]
    ba = ba[..., : 2 * rule.value_heads]
    (q, k, v), cache = mixer.convolve(cache, i, qkvz, weights["conv"], rule)
    kernels = hopper.multiprocessors() > 0
    if kernels and t < conv_chunk.BLOCK:
        around = Around(ba, weights["decay_log"], weights["decay_bias"], qkvz, scale)
        read, cache = mixer.recur_normed(cache, i, q, k, v, around, eps)
        return read.reshape(b, t, -1), cache

    def gates(ba):
        beta, a = jnp.split(ba, 2, axis=-1)
        return jnp.exp(-jnp.exp(weights["decay_log"]) * jax.nn.softplus(a + weights["decay_bias"])), jax.nn.sigmoid(
            beta
        )

    def finished(read, z):
        read = rms_norm(read.astype(jnp.float32), scale.astype(jnp.float32), eps)
        return (read * jax.nn.silu(z.astype(jnp.float32).reshape(read.shape))).astype(z.dtype)

    if kernels:
        read, cache = mixer.recur(cache, i, q, k, v, *gates(ba), t)
        return gated_norm(read, qkvz, scale, eps=eps).reshape(b, t, -1), cache
    decay, beta = (x.reshape(b, t, -1) for x in sliced(gates, SLICE, ba.reshape(b * t, -1)))
    read, cache = mixer.recur(cache, i, q, k, v, decay, beta, t)
    z = qkvz[..., rule.channels :].reshape(b * t, -1)
    return sliced(finished, SLICE, read.reshape(b * t, *read.shape[2:]), z).reshape(b, t, -1), cache
