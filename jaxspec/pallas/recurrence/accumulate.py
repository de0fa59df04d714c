"""A recurrence whose updates don't depend on the state: S <- decay S + u k', out = S q (Mamba 2's, and running means).

`gated_delta` makes u of the state first. In plain jnp.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.recurrence.delta_pool import DeltaPool, decay_between, einsum, log_decay, scan_blocks


def step(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    u: Float[Array, "b t n v"],
    decay: Float[Array, "b t n"],
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run rows as `gated_delta.step`, with the updates `u` given."""
    state, k = pool.replayed(layer, slots, replay), k.astype(pool.keys.dtype)
    mixed, total, _ = _within(q, k, decay)
    group = u.shape[2] // q.shape[2]
    read = einsum("bnvk,btnk->bntv", state, jnp.repeat(q.astype(jnp.float32), group, axis=2))
    out = read * total[..., None] + einsum("bnti,binv->bntv", mixed, u.astype(jnp.float32))
    pool = pool.recorded(layer, slots, state, k, u.astype(jnp.float32), decay.astype(jnp.float32))
    return out.swapaxes(1, 2).astype(u.dtype), pool


def chunk(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    source: Int[Array, " b"],
    keep: Int[Array, " b"],
    count: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    u: Float[Array, "b t n v"],
    decay: Float[Array, "b t n"],
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run blocks as `gated_delta.chunk`, with the updates `u` given."""
    valid, k = (jnp.arange(q.shape[1]) < count[:, None])[..., None], k.astype(pool.keys.dtype)
    decay, given = jnp.where(valid, decay, 1), jnp.where(valid[..., None], u, 0).astype(jnp.float32)
    mixed, total, left = _within(q, k, decay)
    group = u.shape[2] // q.shape[2]
    rows = [jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (q, k)]
    carry = total[..., -1, None, None] * jnp.eye(k.shape[3])
    write = einsum("btnv,bnt,btnk->bnvk", given, left, rows[1])
    state, before = scan_blocks(pool.state, layer, slots, source, keep, carry, write)
    out = einsum("bnvk,btnk->bntv", before, rows[0]) * total[..., None]
    out += einsum("bnti,binv->bntv", mixed, given)
    return out.swapaxes(1, 2).astype(u.dtype), pool.replace(state=state)


def _within(
    q: Float[Array, "b t m k"], k: Float[Array, "b t m k"], decay: Float[Array, "b t n"]
) -> tuple[Float[Array, "b n t t"], Float[Array, "b n t"], Float[Array, "b n t"]]:
    """Weights of the updates in what each row reads; what is left at each row of the state before the rows; and of each
    row's update at the last row."""
    group = decay.shape[2] // q.shape[2]
    logs = jnp.cumsum(log_decay(decay.astype(jnp.float32)), axis=1).swapaxes(1, 2)
    spans = decay_between(logs)
    seen = einsum("btmk,bimk->bmti", q.astype(jnp.float32), k.astype(jnp.float32))
    return jnp.repeat(seen, group, axis=1) * spans, jnp.exp(logs), spans[..., -1, :]
