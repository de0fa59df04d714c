"""Gated delta-rule attention one token after the other, in plain jnp: `--deterministic` runs it on a CPU.

Replayed records, the rows of a round and the tokens of a prompt go through one loop, whose body is the same for any
number of them. So the state after a token has the same bits however the tokens before it were divided.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.pallas.recurrence.delta_pool import DeltaPool
from jaxspec.pallas.sliced_rows import sliced


class Tokens(NamedTuple):
    """Tokens in order. A `known` token's update is given, others' are computed. Only `valid` tokens enter the state."""

    valid: Bool[Array, " t"]
    known: Bool[Array, " t"]
    update: Float[Array, "t n v"]
    q: Float[Array, "t m k"]
    k: Float[Array, "t m k"]
    v: Float[Array, "t n v"]
    decay: Float[Array, "t n"]
    beta: Float[Array, "t n"]


def step(pool: DeltaPool, layer, slots, replay, q, k, v, decay, beta) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run t new rows of each slot, after its accepted records, as `gated_delta.step` does."""
    t, rows = q.shape[1], pool.keys.shape[2]
    q, k = q.astype(pool.keys.dtype), k.astype(pool.keys.dtype)

    def request(slots, replay, *new):
        slot = slots[0]
        q, k, v, decay, beta = (jnp.concatenate([jnp.zeros((rows, *x.shape[2:]), x.dtype), x[0]]) for x in new)
        order = jnp.arange(rows + t)
        updates = pool.updates[layer, slot]
        tokens = Tokens(
            valid=(order < replay[0]) | (order >= rows),
            known=order < rows,
            update=jnp.concatenate([updates, jnp.zeros((t, *updates.shape[1:]))]),
            q=q,
            k=k.at[:rows].set(pool.keys[layer, slot]),
            v=v,
            decay=decay.at[:rows].set(pool.decay[layer, slot, :, :rows].T),
            beta=beta,
        )
        _, replayed, updates, outs = _run(pool.state[layer, slot], tokens, rows)
        return replayed[None], updates[None, rows:], outs[None, rows:]

    gates = decay.astype(jnp.float32), beta.astype(jnp.float32)
    state, updates, outs = sliced(request, 1, slots, replay, q, k, v, *gates)
    return outs.astype(v.dtype), pool.recorded(layer, slots, state, k, updates, gates[0])


def chunk(
    pool: DeltaPool, layer, slots, source, keep, count, q, k, v, decay, beta
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run blocks of t prompt tokens, one after the other, as `gated_delta.chunk` does."""
    q, k = q.astype(pool.keys.dtype), k.astype(pool.keys.dtype)

    def block(states, one):
        slot, source, keep, count, *new = one
        order = jnp.arange(q.shape[1])
        tokens = Tokens(order < count, order < 0, jnp.zeros(v.shape[1:], jnp.float32), *new)
        before = jnp.where(source < 0, 0, states[layer, jnp.maximum(source, 0)])
        after, _, _, outs = _run(before, tokens, 0)
        states = states.at[layer, slot].set(after)
        return states.at[layer, jnp.where(keep < 0, states.shape[1], keep)].set(after, mode="drop"), outs

    gates = decay.astype(jnp.float32), beta.astype(jnp.float32)
    states, outs = jax.lax.scan(block, pool.state, (slots, source, keep, count, q, k, v, *gates))
    return outs.astype(v.dtype), pool.replace(state=states)


def _run(state: Float[Array, "n v k"], tokens: Tokens, first: int) -> tuple[Array, Array, Array, Array]:
    """Run tokens in order. Returns the state after all, the state after the first `first`, each token's update
    [t, n, v], and what it reads [t, n, v].

    A state that is narrower than float32 is rounded after every token.
    """
    dtype, group = state.dtype, state.shape[0] // tokens.k.shape[1]
    precision = jnp.finfo(dtype)

    def one(carry, given):
        at, token = given
        state, kept, token = jax.lax.optimization_barrier((*carry, token))
        k, q = (jnp.repeat(x.astype(jnp.float32), group, axis=0) for x in (token.k, token.q))
        decay, beta = token.decay[:, None], token.beta[:, None]
        made = (token.v.astype(jnp.float32) - (state * k[:, None]).sum(-1) * decay) * beta
        update = jax.lax.optimization_barrier(jnp.where(token.known, token.update, made))
        after = state * decay[..., None] + update[..., None] * k[:, None]
        after = jax.lax.reduce_precision(after, precision.nexp, precision.nmant)
        after = jax.lax.optimization_barrier(jnp.where(token.valid, after, state))
        out = (after * q[:, None]).sum(-1)
        return jax.lax.optimization_barrier((after, jnp.where(at < first, after, kept))), (update, out)

    start = state.astype(jnp.float32)
    (state, kept), (updates, outs) = jax.lax.scan(one, (start, start), (jnp.arange(len(tokens.valid)), tokens))
    return state.astype(dtype), kept.astype(dtype), updates, outs
