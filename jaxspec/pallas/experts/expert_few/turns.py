"""Two warpgroups that multiply quantised weights by turns: a step each, and the first one adds up both sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.experts.expert_few import four, fp8
from jaxspec.pallas.experts.expert_few.plan import PART, PARTS, ROWS, STEP, TILE, TOGETHER, expert_of
from jaxspec.pallas.hopper import WARPS

_i32, _f32 = jnp.int32, jnp.float32


def up_rows(plan, experts, first, high) -> list[tuple[Any, Any]]:
    """Each warp's expert and first weight row in a tile of parts from `first` on: those of one part, in gate or up."""
    rows = []
    for warp in range(WARPS):
        half, j = divmod(warp, PARTS)
        part = jnp.minimum(first + j, high - 1)
        item = expert_of(part, high, plan.parts)
        rows.append((experts[item], half * plan.f + (part - item * plan.parts) * PART))
    return rows


def down_rows(plan, experts, count, group, column) -> list[tuple[Any, Any]]:
    """Each warp's expert and first weight row in a group of `down`: a block's outputs, from `column` on, of each."""
    items = [jnp.minimum(group * TOGETHER + warp, count - 1) for warp in range(WARPS)]
    return [(experts[item], column) for item in items]


def multiply(plan, scratch, turn, scales, inputs, step, hidden_step=None, interpret=False) -> Any:
    """Multiply a tile of weights by the tokens' rows, or by hidden ones from `hidden_step` on, over this warpgroup's
    steps: f32[TILE, ROWS]. `step` is how many steps the block has used; `scales` are the tile's, as `added` has them.
    """
    steps, slot_of = inputs // STEP, lambda step: lax.rem(step, _i32(plan.slots))
    hidden_slot_of = lambda k: lax.rem(hidden_step + k, _i32(plan.hidden_slots))  # noqa: E731
    first = lax.rem(step + turn, _i32(plan.multipliers))
    added = (four if plan.four else fp8).added

    def rows_of(k):
        if hidden_step is None:
            return None if plan.pairs else (scratch["x_s"].at[k], 0)
        plgpu.barrier_wait(scratch["hidden_full"].at[hidden_slot_of(k)])
        return scratch["hidden_s"].at[hidden_slot_of(k)], plan.pitch

    def one(j, total):
        k = first + j * plan.multipliers
        slot = slot_of(step + k)
        weight_s, full = scratch["weight_s"].at[slot], scratch["weight_full"].at[slot]
        wait = lambda: plgpu.barrier_wait(full)  # noqa: E731
        total = added(scratch, scales, interpret, total, k, weight_s, rows_of(k), wait)
        plgpu.barrier_arrive(scratch["weight_empty"].at[slot])
        if hidden_step is not None:
            plgpu.barrier_arrive(scratch["hidden_empty"].at[hidden_slot_of(k)])
        return total

    start = plgpu.layout_cast(jnp.zeros((TILE, ROWS), _f32), plgpu.Layout.WGMMA)
    mine = lax.div(steps - first + (plan.multipliers - 1), _i32(plan.multipliers))
    return lax.fori_loop(_i32(0), mine, one, start), step + steps


def send(scratch, total, before) -> None:
    """Send the second warpgroup's sums to the first one. `before`: how many it has sent."""
    pl.when(before > 0)(lambda: plgpu.barrier_wait(scratch["taken"]))
    scratch["sums_s"][...] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["sent"])


def receive(scratch, total) -> Any:
    """Add the second warpgroup's sums to the first one's `total`."""
    plgpu.barrier_wait(scratch["sent"])
    other = plgpu.load(scratch["sums_s"], layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.barrier_arrive(scratch["taken"])
    return total + other
