"""A recurrence whose updates don't depend on the state: S <- decay S + u k', out = S q (Mamba 2's, and running means).

`gated_delta` makes u of the state first, and its kernels for any NVIDIA GPU run this as well. On Hopper its kernel of
rounds also runs a state space's, with the updates and decays made of its steps (`stepped`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing
from jaxspec.pallas.portable import delta as portable_delta
from jaxspec.pallas.recurrence.delta_pool import DeltaPool, decay_between, einsum, log_decay, scan_blocks
from jaxspec.pallas.recurrence.delta_step import space_step, space_supported
from jaxspec.pallas.recurrence.gates_and_norm import Steps


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
    call = pool, layer, slots, replay, q.astype(pool.keys.dtype), k.astype(pool.keys.dtype), u, decay
    return choose("a round of updates", ACCUMULATE_STEP, *call).run(*call)


def reference_step(pool, layer, slots, replay, q, k, u, decay) -> tuple[Array, DeltaPool]:
    """`step` in plain jnp, for any shapes and dtypes."""
    state = pool.replayed(layer, slots, replay)
    mixed, total, _ = _within(q, k, decay)
    group = u.shape[2] // q.shape[2]
    read = einsum("bnvk,btnk->bntv", state, jnp.repeat(q.astype(jnp.float32), group, axis=2))
    out = read * total[..., None] + einsum("bnti,binv->bntv", mixed, u.astype(jnp.float32))
    pool = pool.recorded(layer, slots, state, k, u.astype(jnp.float32), decay.astype(jnp.float32))
    return out.swapaxes(1, 2).astype(u.dtype), pool


def _portable_step(pool, layer, slots, replay, q, k, u, decay) -> tuple[Array, DeltaPool]:
    return portable_delta.step(pool, layer, slots, replay, q, k, u, decay, None)


def _step_refuses(pool, layer, slots, replay, q, k, u, decay) -> str | None:
    return portable_delta.supported(q.shape, u.shape, pool.state.dtype)


ACCUMULATE_STEP = (
    Implementation("portable_step", HOPPER, _step_refuses, _portable_step),  # Hopper has no kernel of its own yet
    Implementation("portable", PORTABLE, _step_refuses, _portable_step),
    Implementation("reference", ANY, nothing, reference_step, slow=True),
)


def stepped(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    x: Float[Array, "b t n v"],
    steps: Steps,
    limits: tuple[float, float],
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run `step` by the kernel, with updates and decays made of `steps`, and skip x added to what is read.

    **Raises:** `ValueError` if `unstepped` has a reason.
    """
    return space_step(pool, layer, slots, replay, q, k, x, steps, limits)


def unstepped(pool: DeltaPool, q_shape: tuple[int, ...], x_shape: tuple[int, ...], *dtypes: Any) -> str | None:
    """Why `stepped` can't serve such queries and heads, or None if it can."""
    return space_supported(q_shape, x_shape, pool.keys.shape[2], pool.state.dtype, pool.keys.dtype, *dtypes)


def by_steps(
    x: Float[Array, "b t n v"], steps: Steps, limits: tuple[float, float]
) -> tuple[Float[Array, "b t n v"], Float[Array, "b t n"], Float[Array, "b t n v"]]:
    """Updates, decays and skip x in plain jnp, float32: `stepped` has what `step` makes of the first two, and the
    last."""
    x, dt = x.astype(jnp.float32), steps.rows[:, : x.shape[1], -len(steps.skip) :].astype(jnp.float32)
    step = jax.nn.softplus(dt + steps.step_bias).clip(*limits)
    return x * step[..., None], jnp.exp(-jnp.exp(steps.decay_log) * step), steps.skip[:, None] * x


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
    scan: Callable[..., tuple[Array, Array]] | None = None,
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run blocks as `gated_delta.chunk`, with the updates `u` given. `scan`: in place of a kernel's."""
    valid, k = (jnp.arange(q.shape[1]) < count[:, None])[..., None], k.astype(pool.keys.dtype)
    decay, given = jnp.where(valid, decay, 1), jnp.where(valid[..., None], u, 0).astype(jnp.float32)
    mixed, total, left = _within(q, k, decay)
    group = u.shape[2] // q.shape[2]
    rows = [jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (q, k)]
    write = einsum("btnv,bnt,btnk->bnvk", given, left, rows[1])
    call = pool.state, layer, slots, source, keep, total[..., -1], write
    state, before = (scan or choose("the states of a prompt's blocks", ACCUMULATE_SCAN, *call).run)(*call)
    out = einsum("bnvk,btnk->bntv", before, rows[0]) * total[..., None]
    out += einsum("bnti,binv->bntv", mixed, given)
    return out.swapaxes(1, 2).astype(u.dtype), pool.replace(state=state)


def _portable_scan(*call: Array) -> tuple[Array, Array]:
    return portable_delta.scan(*call)


def _scan_refuses(states, *_) -> str | None:
    return portable_delta.scan_supported(states, jnp.bfloat16)  # whatever keys are: it makes no products


ACCUMULATE_SCAN = (
    Implementation("portable_scan", HOPPER, _scan_refuses, _portable_scan),
    Implementation("portable", PORTABLE, _scan_refuses, _portable_scan),
    Implementation("reference", ANY, nothing, scan_blocks, slow=True),
)


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
