"""Gated delta-rule attention (linear attention): one state a slot and layer, verified by replay.

A head's state S [v, k] maps keys to values. A token decays it, corrects what its key yields, and reads it:

    S <- alpha S;  u = beta (v - S k);  S <- S + u k^T;  out = S q

(Gated DeltaNet, https://arxiv.org/abs/2412.06464, eq. 10; Qwen3-Next and Qwen3.5 have it in three of four layers).
alpha is a number of each head, or one of each of its key channels: S <- S diag(alpha), Kimi Delta Attention
(https://arxiv.org/abs/2510.26692).

`delta_pool` says how states are kept and replayed.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing
from jaxspec.pallas.portable import delta as portable_delta
from jaxspec.pallas.recurrence.delta_chunk import delta_chunk
from jaxspec.pallas.recurrence.delta_chunk import supported as delta_chunk_fits
from jaxspec.pallas.recurrence.delta_pool import (
    DeltaPool,
    by_channel,
    decay_between,
    einsum,
    log_decay,
    scan_blocks,
)
from jaxspec.pallas.recurrence.delta_step import delta_step
from jaxspec.pallas.recurrence.delta_step import supported as delta_step_fits
from jaxspec.pallas.recurrence.gates_and_norm import Around, AroundChannels

BY_CHANNEL = "decays by key channel"
NORMED_REQUESTS = 8  # at most, for gates and norm to be part of the kernel, or for decays by channel


def step(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    decay: Float[Array, "b t n *k"],
    beta: Float[Array, "b t n"],
    padded_rows: int | None = None,
) -> tuple[Float[Array, "b r n v"], DeltaPool]:
    """Run t new rows of each slot: a round's rows, some of which will be accepted.

    The first `replay[r]` records of slot `slots[r]` enter its state, which is written; the new rows go on from there,
    and their records replace the old ones. `q` and `k` are L2-normalised, q scaled too; both are taken in the dtype of
    the pool's keys. `decay` is alpha, in (0, 1]. A slot may be named twice only if nothing reads it.

    Returns what the rows read, in v's dtype: r = t rows a request, or `padded_rows` of them; rows from t on are padding
    and may hold anything. **Raises:** `ValueError` for more rows than there are records.
    """
    t, rows = q.shape[1], pool.keys.shape[2]
    if t > rows:
        raise ValueError(f"a step of {t} rows in a pool with records of {rows}; make the pool with rows={t} or more")
    q, k = q.astype(pool.keys.dtype), k.astype(pool.keys.dtype)
    call = pool, layer, slots, replay, q, k, v, decay, beta, padded_rows
    return choose("delta_step", RECURRENCE_STEP, *call).run(*call)


def _step_refuses(pool, layer, slots, replay, q, k, v, decay, *_) -> str | None:
    if decay.ndim > 3 and len(q) > NORMED_REQUESTS:
        return f"{BY_CHANNEL} of {len(q)} requests; supported: up to {NORMED_REQUESTS}"  # with more it wasn't measured
    return delta_step_fits(q.shape, v.shape, pool.keys.shape[2], pool.state.dtype, q.dtype, v.dtype)


def _step(pool, layer, slots, replay, q, k, v, decay, beta, padded_rows) -> tuple[Array, DeltaPool]:
    return delta_step(pool, layer, slots, replay, q, k, v, decay, beta, padded_rows=padded_rows)


def _portable_step_refuses(pool, layer, slots, replay, q, k, v, *_) -> str | None:
    return portable_delta.supported(q.shape, v.shape, pool.state.dtype, q.dtype, v.dtype)


def _portable_step(pool, layer, slots, replay, q, k, v, decay, beta, padded_rows) -> tuple[Array, DeltaPool]:
    out, pool = portable_delta.step(pool, layer, slots, replay, q, k, v, decay, beta)
    return _with_padding(out, padded_rows), pool


def _reference_step(*call) -> tuple[Array, DeltaPool]:
    *operands, padded_rows = call
    out, pool = reference_step(*operands)
    return _with_padding(out, padded_rows), pool


def _with_padding(out: Array, padded_rows: int | None) -> Array:
    t = out.shape[1]
    return jnp.pad(out, ((0, 0), (0, (padded_rows or t) - t), (0, 0), (0, 0)))


RECURRENCE_STEP = (
    Implementation("delta_step", HOPPER, _step_refuses, _step),
    Implementation("portable_step", HOPPER, _portable_step_refuses, _portable_step),  # of decays by channel, too
    Implementation("portable", PORTABLE, _portable_step_refuses, _portable_step),
    Implementation("reference", ANY, nothing, _reference_step, slow=True),
)


def normed_step(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    around: Around | AroundChannels,
    eps: float,
    fixed: bool = False,
) -> tuple[Float[Array, "b r n v"], DeltaPool]:
    """Run `step` by the kernel, with the gates before it and a norm of this `eps` after it (`gates_and_norm`).

    The result has as many rows a request as `around` has, padding included. `fixed`: as in `delta_step`, for any number
    of requests.

    **Raises:** `ValueError` if `unnormed` has a reason.
    """
    if reason := unnormed(pool, (1, *q.shape[1:]) if fixed else q.shape, v.shape, q.dtype, v.dtype):
        raise ValueError(f"delta_step doesn't support {reason}")
    padded = around.gates if isinstance(around, AroundChannels) else around.rows
    named = dict(around=around, eps=eps, padded_rows=padded.shape[1], fixed=fixed)
    return delta_step(pool, layer, slots, replay, q, k, v, **named)


def unnormed(pool: DeltaPool, q_shape: tuple[int, ...], v_shape: tuple[int, ...], *dtypes: Any) -> str | None:
    """Why `normed_step` can't serve such queries and values, or None if it can."""
    rows = pool.keys.shape[2]
    if q_shape[0] > NORMED_REQUESTS:
        return f"{q_shape[0]} requests; supported: up to {NORMED_REQUESTS}"  # with more it wasn't measured
    if q_shape[1] > rows:
        return f"{q_shape[1]} rows over records of {rows}"
    return delta_step_fits(q_shape, v_shape, rows, pool.state.dtype, pool.keys.dtype, *dtypes)


def reference_step(pool, layer, slots, replay, q, k, v, decay, beta) -> tuple[Array, DeltaPool]:
    """`step` in plain jnp, for any shapes and dtypes."""
    group = pool.state.shape[2] // q.shape[2]
    state = pool.replayed(layer, slots, replay)
    logs, beta = jnp.cumsum(log_decay(decay), axis=1).swapaxes(1, 2), beta.astype(jnp.float32).swapaxes(1, 2)
    corrected, mixed, total, _ = _within(q, k, logs, beta)
    rows = jnp.repeat(jnp.stack([k, q]).astype(jnp.float32), group, axis=3)
    read = einsum("bnvk,sbtnk->sbntv", state, rows * total.swapaxes(1, 2))
    updates = einsum("bnti,bniv->bntv", corrected, v.astype(jnp.float32).swapaxes(1, 2) - read[0])
    out = read[1] + einsum("bnti,bniv->bntv", mixed, updates)
    pool = pool.recorded(layer, slots, state, k, updates.swapaxes(1, 2), decay.astype(jnp.float32))
    return out.swapaxes(1, 2).astype(v.dtype), pool


def chunk(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    source: Int[Array, " b"],
    keep: Int[Array, " b"],
    count: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    decay: Float[Array, "b t n *k"],
    beta: Float[Array, "b t n"],
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run blocks of t prompt tokens, one after the other; the first `count[r]` tokens of block r are valid.

    Block r starts from the state of slot `source[r]`, or from zero if that is negative, as earlier blocks left it; a
    later block of the same request names its own slot. It writes slot `slots[r]`, and slot `keep[r]` the same, unless
    that is out of range. Sources must have no records to replay, and no slot has any afterwards: the next `step` of a
    written slot must be called with `replay` 0. Operands and result are as in `step`; results of padding rows have no
    meaning.
    """
    q, k = q.astype(pool.keys.dtype), k.astype(pool.keys.dtype)
    valid = (jnp.arange(q.shape[1]) < count[:, None])[..., None]
    logs = jnp.where(valid.reshape(*valid.shape, *[1] * (decay.ndim - 3)), log_decay(decay), 0)
    beta = jnp.where(valid, beta, 0).astype(jnp.float32)
    operands = q, k, v, jnp.cumsum(logs, axis=1).swapaxes(1, 2), beta.swapaxes(1, 2)
    call = pool.state, layer, slots, source, keep, *operands
    out, state = choose("delta_chunk", RECURRENCE_CHUNK, *call).run(*call)
    return out.astype(v.dtype), pool.replace(state=state)


def reference_chunk(states, layer, slots, source, keep, q, k, v, logs, beta, scan=scan_blocks) -> tuple[Array, Array]:
    """`delta_chunk` in plain jnp, for any shapes and dtypes, and decays by channel."""
    # Within a block, u is what the tokens write less what the state before the block makes of their keys, and both are
    # known for all blocks at once (the WY form of https://arxiv.org/abs/2412.06464, section 3.3).
    corrected, mixed, total, left = _within(q, k, logs, beta)
    group = states.shape[2] // q.shape[2]
    q, k = (jnp.repeat(jnp.moveaxis(x.astype(jnp.float32), 1, 2), group, axis=1) for x in (q, k))
    taken = einsum("bnti,bnik->bntk", corrected, total * k)
    written = einsum("bnti,binv->bntv", corrected, v.astype(jnp.float32))
    # Blocks that follow one another need S <- S carry + write: one product a head and block that depends on S.
    kept = left * k
    carry = total[..., -1:, :] * jnp.eye(k.shape[3]) - einsum("bntj,bntk->bnjk", taken, kept)
    write = einsum("bntv,bntk->bnvk", written, kept)

    states, before = scan(states, layer, slots, source, keep, carry, write)
    updates = written - einsum("bnvk,bntk->bntv", before, taken)
    out = einsum("bnvk,bntk->bntv", before, total * q) + einsum("bnti,bniv->bntv", mixed, updates)
    return out.swapaxes(1, 2), states


def _chunk_refuses(states, layer, slots, source, keep, q, k, v, logs, _) -> str | None:
    if logs.ndim > 3:
        return BY_CHANNEL
    return delta_chunk_fits(q.shape, v.shape, states.dtype, q.dtype, v.dtype)


def _portable_chunk_refuses(states, layer, slots, source, keep, q, *_) -> str | None:
    return portable_delta.scan_supported(states, q.dtype)


def _portable_chunk(*call) -> tuple[Array, Array]:
    return reference_chunk(*call, scan=portable_delta.scan)


RECURRENCE_CHUNK = (
    Implementation("delta_chunk", HOPPER, _chunk_refuses, lambda *call: delta_chunk(*call)),
    Implementation("portable_blocks", HOPPER, _portable_chunk_refuses, _portable_chunk),  # of decays by channel, too
    Implementation("portable_scan", PORTABLE, _portable_chunk_refuses, _portable_chunk),
    Implementation("reference", ANY, nothing, reference_chunk, slow=True),
)


def _within(
    q: Float[Array, "b t m k"], k: Float[Array, "b t m k"], logs: Float[Array, "b n t *k"], beta: Float[Array, "b n t"]
) -> tuple[Array, Array, Array, Array]:
    """How t rows that follow one another act on one another, whatever the state before them.

    With S the state before and V the rows' values: their updates are U = corrected (V - S (total k)), and they read
    S (total q) + mixed U. `total[t]` is the factor by which the state before has decayed at row t, `left[i]` the one of
    row i's update at the end. `corrected` and `mixed` are [b, n, t, t], `total` and `left` [b, n, t, 1], or
    [b, n, t, k] where decays are by channel. `logs` are running sums of the decays' logarithms.
    """
    group, rows = logs.shape[1] // k.shape[2], jnp.stack([k, q]).astype(jnp.float32)
    if logs.ndim == 3:
        products = jnp.repeat(einsum("sbtmk,bimk->sbmti", rows, rows[0]), group, axis=2) * decay_between(logs)
    else:
        rows = jnp.repeat(jnp.moveaxis(rows, 2, 3), group, axis=2)
        products = _products_by_channel(rows, rows[0], logs)
    corrected = _unit_lower_inverse(jnp.tril(beta[..., None] * products[0], -1)) * beta[..., None, :]
    logs = by_channel(logs)
    return corrected, products[1], jnp.exp(logs), jnp.exp(logs[..., -1:, :] - logs)


def _products_by_channel(
    rows: Float[Array, "s b n t k"], keys: Float[Array, "b n t k"], logs: Float[Array, "b n t k"]
) -> Float[Array, "s b n t t"]:
    """Products of rows with earlier keys and their own, each channel decayed in between; zero with later keys.

    By halves: from a key to the end of the first half, and from there to a row, so that no factor is above one.
    """
    t = logs.shape[2]
    if t == 1:
        return (rows * keys).sum(-1, keepdims=True)
    half = -(-t // 2)
    pad = lambda x, **how: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 2 * half - t), (0, 0)], **how)  # noqa: E731
    rows, keys, logs = pad(rows), pad(keys), pad(logs, mode="edge")
    (first, second), (before, after) = jnp.split(logs, 2, axis=2), jnp.split(rows, 2, axis=3)
    end, earlier, later = first[:, :, -1:], *jnp.split(keys, 2, axis=2)
    corner = einsum("sbntk,bnik->sbnti", after * jnp.exp(second - end), earlier * jnp.exp(end - first))
    halves = jnp.concatenate([before, after], axis=1), *map(jnp.concatenate, ((earlier, later), (first, second)))
    before, after = jnp.split(_products_by_channel(*halves), 2, axis=1)
    return jnp.block([[before, jnp.zeros_like(before)], [corner, after]])[..., :t, :t]


def _unit_lower_inverse(lower: Float[Array, "b *n t t"]) -> Float[Array, "b *n t t"]:
    """The inverse of I + `lower`, which is strictly lower triangular, by halves.

    Each level is two products over all its blocks, which are side by side in the first axis. (The product of
    I + (-lower)^(2^i) would be as short, but its terms grow like binomials where keys repeat, and float32 has no room
    for them.)
    """
    t = lower.shape[-1]
    if t == 1:
        return jnp.ones_like(lower)
    half = -(-t // 2)
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, 2 * half - t)] * 2)
    # Not stacked in an axis of their own: XLA's CPU compiler aborts on products of eight axes or more.
    blocks = jnp.concatenate([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = jnp.split(_unit_lower_inverse(blocks), 2)
    corner = -einsum("...ij,...jk,...kl->...il", second, lower[..., half:, :half], first)
    return jnp.block([[first, jnp.zeros_like(first)], [corner, second]])[..., :t, :t]
