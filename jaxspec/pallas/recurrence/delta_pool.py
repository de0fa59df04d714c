"""Recurrent states of linear attention, S <- decay S + u k', with records of the last round; what all kinds share.

Invariant: a slot's state has seen every committed token but those of its last round. It keeps *records* of these (k, u,
decay), and the next round replays as many as were accepted. So a round reads each state once and writes it once,
however many rows it verifies, and a rejected draft leaves nothing to undo. Slots of requests and of snapshots are the
same.

Decays below 1e-37 count as 1e-37. Arithmetic is float32. A state in bfloat16 is rounded whenever it is written, once a
round or a block of a prompt, so the division of a prompt into programs doesn't show.
"""

from __future__ import annotations

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@flax.struct.dataclass
class DeltaPool:
    """The states of all layers and slots, and each slot's records of its last round.

    Axes: l layers, r slots, q rows that a round verifies at most, m key heads, n value heads, k and v their widths; key
    head i serves the value heads i n/m to (i + 1) n/m - 1. w is q rounded up to a multiple of 4, for bulk copies.
    Decays are of a head, or of each of its key channels: then their last axis is k.
    """

    state: Float[Array, "l r n v k"]
    keys: Float[Array, "l r q m k"]
    updates: Float[Array, "l r q n v"]
    decay: Float[Array, "l r n w *k"]

    def recorded(
        self,
        layer: Int[Array, ""],
        slots: Int[Array, " b"],
        state: Float[Array, "b n v k"],
        k: Float[Array, "b t m k"],
        updates: Float[Array, "b t n v"],
        decay: Float[Array, "b t n *k"],
    ) -> DeltaPool:
        """The pool after a round of t rows: these states before them, and their records."""
        t = k.shape[1]
        return self.replace(
            state=self.state.at[layer, slots].set(state.astype(self.state.dtype)),
            keys=self.keys.at[layer, slots, :t].set(k),
            updates=self.updates.at[layer, slots, :t].set(updates),
            decay=self.decay.at[layer, slots, :, :t].set(decay.swapaxes(1, 2)),
        )

    def replayed(
        self, layer: Int[Array, ""], slots: Int[Array, " b"], replay: Int[Array, " b"]
    ) -> Float[Array, "b n v k"]:
        """The states of these slots, with the accepted records in them."""
        state, keys = self.state[layer, slots].astype(jnp.float32), self.keys[layer, slots].astype(jnp.float32)
        rows, group = keys.shape[1], state.shape[1] // keys.shape[2]
        accepted = jnp.arange(rows) < replay[:, None]
        logs = by_channel(log_decay(self.decay[layer, slots, :, :rows]))
        logs = jnp.where(accepted[:, None, :, None], logs, 0)
        later = jnp.exp(logs.sum(2, keepdims=True) - jnp.cumsum(logs, 2))
        updates = jnp.where(accepted[..., None, None], self.updates[layer, slots], 0)
        keys = jnp.where(accepted[..., None, None], keys, 0)  # others' may have overflowed in float16, and be NaN
        added = einsum("btnv,btnk->bnvk", updates, jnp.repeat(keys, group, axis=2) * later.swapaxes(1, 2))
        return state * jnp.exp(logs.sum(2))[..., None, :] + added


def empty(
    num_layers: int,
    num_slots: int,
    rows: int,
    *,
    key_heads: int,
    value_heads: int,
    key_width: int,
    value_width: int,
    dtype,
    key_dtype,
    channel_decay: bool = False,
) -> DeltaPool:
    """A pool of zero states in `dtype` (float32 or bfloat16), with records of `rows` rows and keys in `key_dtype`.

    `channel_decay`: each key channel has a decay of its own.
    """
    slots, channels = (num_layers, num_slots), (key_width,) if channel_decay else ()
    return DeltaPool(
        state=jnp.zeros((*slots, value_heads, value_width, key_width), dtype),
        keys=jnp.zeros((*slots, rows, key_heads, key_width), key_dtype),
        updates=jnp.zeros((*slots, rows, value_heads, value_width), jnp.float32),
        decay=jnp.ones((*slots, value_heads, -(-rows // 4) * 4, *channels), jnp.float32),
    )


def scan_blocks(states, layer, slots, source, keep, carry, write) -> tuple[Array, Array]:
    """States after blocks that follow one another, S <- S carry + write, and the state before each.

    `carry` is [b n k k], or [b n] where a block only decays the state.
    """

    def block(states, one):
        slot, source, keep, carry, write = one
        before = jnp.where(source < 0, 0, states[layer, jnp.maximum(source, 0)].astype(jnp.float32))
        kept = before * carry[:, None, None] if carry.ndim == 1 else einsum("nvj,njk->nvk", before, carry)
        after = (kept + write).astype(states.dtype)
        states = states.at[layer, slot].set(after)
        return states.at[layer, jnp.where(keep < 0, states.shape[1], keep)].set(after, mode="drop"), before

    return jax.lax.scan(block, states, (slots, source, keep, carry, write))


def log_decay(decay: Array) -> Array:
    return jnp.log(jnp.maximum(decay, 1e-37))


def by_channel(x: Array) -> Array:
    """Numbers [b, n, t] of heads with one more axis, the key channels that share them; those by channel as they are."""
    return x if x.ndim == 4 else x[..., None]


def decay_between(logs: Float[Array, "b n t"]) -> Float[Array, "b n t t"]:
    """The decay from each row's update to each later row; 0 to an earlier one. `logs`: running sums of `log_decay`."""
    past = jnp.tril(jnp.ones((logs.shape[-1],) * 2, bool))
    return jnp.exp(jnp.where(past, logs[..., :, None] - logs[..., None, :], -jnp.inf))
