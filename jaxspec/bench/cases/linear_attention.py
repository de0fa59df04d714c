"""Linear attention: the convolution, the gated delta rule and state spaces, of rounds and of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.cases.case import BLOCK, Case
from jaxspec.models.description import DeltaRule
from jaxspec.pallas import hopper
from jaxspec.pallas.recurrence import accumulate, causal_conv, delta_pool, gated_delta
from jaxspec.pallas.recurrence.gates_and_norm import Steps


def convolution(b: int, t: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """The convolution of `t` rows for each of `b` requests, half of the rows of the round before accepted."""
    mix = DeltaRule(m, n, h, h, taps=4)
    slots, replay = jnp.arange(b, dtype=jnp.int32), jnp.full((b,), t // 2, jnp.int32)

    def plain(layer, shared, windows):
        (q, _, _), windows = causal_conv.reference_step(windows, jnp.int32(layer), slots, replay, *shared, mix)
        return q, windows

    def op(layer, shared, windows):
        (q, _, _), windows = causal_conv.step(windows, jnp.int32(layer), slots, replay, *shared, mix)
        return q, windows

    return Case(
        name=f"convolution {b} x {t} row{'s' * (t > 1)}",
        group="convolution",
        layers=layers,
        build=partial(_convolved, (b, t, mix.channels), mix, layers, b, t, dtype),
        op=op,
        plain=plain,
        in_place=True,
        size=jnp.dtype(dtype).itemsize * b * mix.channels * 2 * (mix.taps - 1 + 2 * t),
        flops=2 * b * t * mix.channels * mix.taps,
    )


def prompt_convolution(count: int, length: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """The convolution of `count` whole prompts of `length` tokens, in blocks; among columns that it has no use for."""
    mix = DeltaRule(m, n, h, h, taps=4)
    blocks = -(-length // BLOCK)
    slots = jnp.repeat(jnp.arange(count, dtype=jnp.int32), blocks)
    which = *_prompts(slots), jnp.full(len(slots), BLOCK, jnp.int32)

    def plain(layer, shared, windows):
        heads, windows = causal_conv.reference_chunk(windows, jnp.int32(layer), *which, *shared, mix)
        return jax.lax.optimization_barrier(heads)[2], windows

    def op(layer, shared, windows):
        heads, windows = causal_conv.chunk(windows, jnp.int32(layer), *which, *shared, mix)
        return jax.lax.optimization_barrier(heads)[2], windows

    return Case(
        name=f"convolution prompts {count} x {length}",
        group="convolution prompts",
        layers=layers,
        build=partial(_convolved, (len(slots), BLOCK, mix.channels + n * h), mix, layers, count, 1, dtype),
        op=op,
        plain=plain,
        in_place=True,
        size=2 * jnp.dtype(dtype).itemsize * len(slots) * BLOCK * mix.channels,
        flops=2 * len(slots) * BLOCK * mix.channels * mix.taps,
    )


def _convolved(shape: tuple[int, ...], mix: DeltaRule, layers: int, slots: int, rows: int, dtype: str, key: jax.Array):
    """Inputs of this shape and a weight, the same for all layers, and windows of zeros for rounds of `rows` rows."""
    x, weight = (
        jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
        for i, shape in enumerate((shape, (mix.taps, mix.channels)))
    )
    return (x, weight), causal_conv.empty_windows(layers, slots, rows, mix.channels, mix.taps, dtype)


def delta_step(b: int, t: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """A round of `t` rows for each of `b` requests, all but one row of the round before accepted; float32 states."""
    return Case(
        name=f"gated delta {b} x {t} row{'s' * (t > 1)}",
        group="gated delta",
        layers=layers,
        build=partial(_delta, b, b, t, m, n, h, layers, dtype),
        op=partial(_run_step, gated_delta.step),
        plain=partial(_run_step, gated_delta.reference_step),
        in_place=True,
        size=2 * 4 * b * n * h * h,
        flops=2 * b * n * h * h * 4 * t,
    )


def channel_step(b: int, t: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """A round as `delta_step` of n heads without groups, with decays of key channels (Kimi Delta Attention)."""
    case = delta_step(b, t, n, n, h, layers, dtype)
    name, build = f"delta by channel {b} x {t} row{'s' * (t > 1)}", partial(case.build, channels=True)
    return dataclasses.replace(case, name=name, group="delta by channel", build=build)


def delta_chunk(count: int, length: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """`count` whole prompts of `length` tokens through gated delta-rule attention, in blocks as a prefill has them."""
    blocks = -(-length // BLOCK)
    tokens = count * blocks * BLOCK
    return Case(
        name=f"gated delta prompts {count} x {length}",
        group="gated delta prompts",
        layers=layers,
        build=partial(_delta, count, count * blocks, BLOCK, m, n, h, layers, dtype),
        op=_run_chunk,
        plain=_run_chunk_plain,
        in_place=True,
        size=jnp.dtype(dtype).itemsize * tokens * h * (2 * m + 2 * n),
        flops=2 * tokens * n * h * h * 3,
    )


def state_step(b: int, t: int, m: int, n: int, h: int, k: int, layers: int, dtype: str) -> Case:
    """A round of a state space, as `delta_step`, from each row's steps: states of `n` heads, [h k]."""
    return Case(
        name=f"state space {b} x {t} row{'s' * (t > 1)}",
        group="state space",
        layers=layers,
        build=partial(_steps, k, b, b, t, m, n, h, layers, dtype),
        op=_run_space,
        plain=partial(_run_space, plain=True),
        in_place=True,
        size=2 * 4 * b * n * h * k,
        flops=2 * b * n * h * k * 3 * t,
    )


def state_chunk(count: int, length: int, m: int, n: int, h: int, k: int, layers: int, dtype: str) -> Case:
    """`count` whole prompts of `length` tokens through a state space, in blocks as a prefill has them."""
    blocks = -(-length // BLOCK)
    tokens = count * blocks * BLOCK
    return Case(
        name=f"state space prompts {count} x {length}",
        group="state space prompts",
        layers=layers,
        build=partial(_updates, k, count, count * blocks, BLOCK, m, n, h, layers, dtype),
        op=partial(_run_states, None),
        plain=partial(_run_states, delta_pool.scan_blocks),
        in_place=True,
        size=tokens * (jnp.dtype(dtype).itemsize * 2 * m * k + 4 * 2 * n * h),
        flops=2 * tokens * n * h * k * 2,
    )


def _updates(width: int, *sizes: Any):
    (slots, (q, k, v, decay, _)), pool = _delta(*sizes, width=width)
    return (slots, (q, k, v.astype(jnp.float32), decay)), pool


def _steps(width: int, *sizes: Any):
    (slots, (q, k, x, decay, beta)), pool = _delta(*sizes, width=width)
    each = (jnp.full(decay.shape[2], value, jnp.float32) for value in (0, -2, 1))
    return (slots, (q, k, x, Steps(beta.astype(x.dtype), *each))), pool


def _run_space(layer: int, shared: Any, pool: Any, plain: bool = False) -> tuple[jax.Array, Any]:
    slots, (q, k, x, steps) = shared
    of, limits = (pool, jnp.int32(layer), slots, jnp.full(len(slots), q.shape[1] - 1), q, k), (0.0, float("inf"))
    if not plain and (hopper.kernels_here() or accumulate.unstepped(pool, q.shape, x.shape, q.dtype, x.dtype)) is None:
        return accumulate.stepped(*of, x, steps, limits)
    updates, decay, skipped = accumulate.by_steps(x, steps, limits)
    out, pool = (accumulate.reference_step if plain else accumulate.step)(*of, updates, decay)
    return out + skipped, pool


def _run_states(scan: Callable | None, layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, new = shared
    return accumulate.chunk(pool, jnp.int32(layer), *_prompts(slots), jnp.full(len(slots), BLOCK), *new, scan)


def _delta(
    slots: int, b: int, t: int, m: int, n: int, h: int, layers: int, dtype: str, key: jax.Array, width: int = 0,
    channels: bool = False,
):  # fmt: skip
    """b times t tokens, the same for all layers, and a pool of `slots` states of zero. `width`: of keys, if not h.
    `channels`: each of a key has a decay."""
    width = width or h
    keys = jax.random.split(key, 5)
    rows = (b, t)
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)  # noqa: E731
    q, k = (unit(jax.random.normal(k, (*rows, m, width))) for k in keys[:2])
    v = jax.random.normal(keys[2], (*rows, n, h), dtype)
    decay, beta = (
        jax.nn.sigmoid(jax.random.normal(k, (*rows, n, *more)) + bias)
        for k, bias, more in zip(keys[3:], (4, 0), ((width,) * channels, ()), strict=True)
    )
    heads = dict(key_heads=m, value_heads=n, key_width=width, value_width=h, channel_decay=channels)
    pool = delta_pool.empty(layers, slots, t, **heads, dtype="float32", key_dtype=dtype)
    return (jnp.repeat(jnp.arange(slots), b // slots), (q * width**-0.5, k, v, decay, beta)), pool


def _run_step(step: Callable, layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, new = shared
    return step(pool, jnp.int32(layer), slots, jnp.full(len(slots), new[0].shape[1] - 1), *new)


def _run_chunk(layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, new = shared
    count = jnp.full(len(slots), BLOCK)
    return gated_delta.chunk(pool, jnp.int32(layer), *_prompts(slots), count, *new)


def _run_chunk_plain(layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, (q, k, v, decay, beta) = shared
    logs = jnp.cumsum(jnp.log(decay), axis=1).swapaxes(1, 2)
    within = q, k, v, logs, beta.swapaxes(1, 2)
    out, state = gated_delta.reference_chunk(pool.state, jnp.int32(layer), *_prompts(slots), *within)
    return out, pool.replace(state=state)


def _prompts(slots: jax.Array) -> tuple[jax.Array, ...]:
    """Slots, sources and snapshots of blocks of whole prompts."""
    first = jnp.concatenate([jnp.ones(1, bool), slots[1:] != slots[:-1]])
    return slots, jnp.where(first, -1, slots), jnp.full(len(slots), -1)
