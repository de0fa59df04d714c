"""Gated delta-rule attention, a token after the other: its order of sums doesn't depend on how many rows a round has.
It is inside `delta_step`, for `fixed` and for decays by key channel, which are rows of numbers.

A state takes one token after the other, each in the same few operations, whether it is a new row or a record that is
replayed:

    u = beta (v - alpha (S k));  S <- alpha S + u k^T;  out = S q

So the state after a token, and what the token reads, depend on the tokens before it alone. `delta_step` sums rows of a
round together, on tensor cores; here a warpgroup has 64 rows of a state in its registers, and multiplies there.

Invariant: `one` is the only place where a token enters a state.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout.WGMMA
_i32 = jnp.int32


def one(state: Any, decay: Any, update: Any, key: Any, dtype: Any) -> Any:
    """The state after a token, float32, rounded as `dtype` if that is narrower."""
    state = state * _spread(decay, state.shape) + _down(update, state.shape) * _across(key, state.shape)
    return state if dtype == jnp.float32 else state.astype(dtype).astype(jnp.float32)


def replayed(dtype: Any, replay: Any, state_s: Any, keys_s: Any, updates_s: Any, decays_s: Any) -> Any:
    """Replay the accepted records into a part of the state with all columns; float32, in registers, rounded as `dtype`
    after each."""

    def record(i, state):
        update = plgpu.load(updates_s.at[i], layout=LAYOUT.reduce(1), optimized=False)
        decay = decays_s[i] if len(decays_s.shape) == 1 else row(decays_s.at[i])
        return one(state, decay, update, row(keys_s.at[i]), dtype)

    state = plgpu.load(state_s, layout=LAYOUT).astype(jnp.float32)
    return lax.fori_loop(_i32(0), replay, record, state)


def run_rows(state: Any, values: list[Any], rows_s: Any, gates: list[tuple[Any, Any]], dtype: Any) -> tuple[list, list]:
    """Each row's update and what it reads, from the state before all of them. `rows_s`: their keys, then queries;
    `gates`: the decay and the beta of each row."""
    updates, outs = [], []
    for t, (value, (decay, beta)) in enumerate(zip(values, gates, strict=True)):
        key, query = row(rows_s.at[t]), row(rows_s.at[len(values) + t])
        by_channel = jnp.ndim(decay) > 0
        read = (state * _across(key * decay if by_channel else key, state.shape)).sum(axis=1)
        updates.append((value - (read if by_channel else read * decay)) * beta)
        state = one(state, decay, updates[t], key, dtype)
        outs.append((state * _across(query, state.shape)).sum(axis=1))
    return updates, outs


def _spread(decay: Any, shape: tuple[int, ...]) -> Any:
    """A decay of a head as it is, one of each channel over all rows of a state."""
    return _across(decay, shape) if jnp.ndim(decay) else decay


def row(row_s: Any) -> Any:
    return plgpu.load(row_s, layout=LAYOUT.reduce(0), optimized=False).astype(jnp.float32)


def _across(row: Any, shape: tuple[int, ...]) -> Any:
    return lax.broadcast_in_dim(row, shape, [1])


def _down(column: Any, shape: tuple[int, ...]) -> Any:
    return lax.broadcast_in_dim(column, shape, [0])
