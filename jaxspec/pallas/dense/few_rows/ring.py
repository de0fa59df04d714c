"""Rings of quantised weights: the warpgroups of a block alternate between its chunks.

Each has slots of the ring to itself, so that none waits for another before the end, when the first one adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense.few_rows.share import TILE, Share, turn_of

_i32, _f32 = jnp.int32, jnp.float32


def over_chunks(share: Share, fetch: Callable, ready: Any, early: Callable, add: Callable) -> list[Any]:
    """f32[TILE, rows] of each group, over this warpgroup's chunks as they arrive.

    `early(i)`: what is loaded for chunk i before it is waited for. `add(i, slot, loaded, totals)`: the totals with it.
    """
    slots, turn, count = share.slots, turn_of(share), share.warpgroups

    def one(j, totals):
        i = j * count + turn
        slot, loaded = lax.rem(i, _i32(slots)), early(i)
        plgpu.barrier_wait(ready.at[slot])
        totals = add(i, slot, loaded, totals)
        if slots < share.chunks or share.rounds:
            plgpu.commit_smem()  # all warps have read the slot, and quantised rows
        if slots < share.chunks:
            pl.when(i + slots < share.chunks)(partial(fetch, i + slots, slot))
        return totals

    start = plgpu.layout_cast(jnp.zeros((TILE, share.rows), _f32), plgpu.Layout.WGMMA)
    mine = lax.div(_i32(share.chunks + count - 1) - turn, _i32(count))
    return lax.fori_loop(_i32(0), mine, one, [start] * share.groups)
