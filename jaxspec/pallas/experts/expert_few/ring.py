"""Rings in shared memory: prefetched as slots come free, and drained at the end."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_i32 = jnp.int32


def fill(steps, fetch, empty, slots, step, full=None, flight=0):
    """Run `fetch(k, slot)` over `steps` steps as slots come free; `step` is how many there were before.

    Given `full`, no more than `flight` are in flight.
    """

    def one(k, step):
        slot = lax.rem(step, _i32(slots))
        pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
        if full is not None:
            pl.when(step >= flight)(lambda: plgpu.barrier_wait(full.at[lax.rem(step - flight, _i32(slots))]))
        fetch(k, slot)
        return step + 1

    return lax.fori_loop(_i32(0), _i32(steps), one, step)


def drain(barriers, slots, step, left):
    """Wait for the last `left` steps: a barrier must not be left with an arrival that wasn't waited for."""

    def observe(step, _):
        plgpu.barrier_wait(barriers.at[lax.rem(step, _i32(slots))])
        return _

    lax.fori_loop(jnp.maximum(step - left, 0), step, observe, _i32(0))
