"""From tiles of weights to hidden rows: the tokens' rows in shared memory, the products, and `up`'s activation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense.few_rows.block import by_row
from jaxspec.pallas.experts.expert_few.plan import HALF, PART, PARTS, ROWS, STEP, TILE, TOGETHER, expert_of
from jaxspec.pallas.experts.expert_stream import silu_gated

_i32, _f32 = jnp.int32, jnp.float32


def everywhere(width: int) -> Any:
    """The register layout of [ROWS, width]: four lanes have a row, and all four warps have the same."""
    tiling = plgpu.Tiling(((ROWS, width), (width // 4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -2), vector_dim=-1)


def place_rows(plan, x_g, x_s, x_full):
    """Put the tokens' rows into shared memory for the tensor cores. Padding rows repeat the first and aren't used."""
    if plan.t == ROWS:
        plgpu.barrier_wait(x_full)
        return
    step, layout = STEP, by_row(4)
    across = lambda row: plgpu.layout_cast(lax.broadcast_in_dim(row, (ROWS, step), [1]), layout)  # noqa: E731
    place = plgpu.broadcasted_iota(_i32, (ROWS, step), 0, layout=layout)
    pieces = plan.d // step
    at_once = max(pieces // plan.t, 1)  # loaded before the first is stored
    for first in range(0, pieces, at_once):
        those = range(first, min(first + at_once, pieces))
        load = partial(plgpu.load, layout=layout.reduce(0), optimized=False)
        loaded = [[load(x_g.at[i, pl.ds(k * step, step)]) for i in range(plan.t)] for k in those]
        for k, (row, *others) in zip(those, loaded, strict=True):
            rows = across(row)
            for i, other in enumerate(others, 1):
                rows = jnp.where(place == i, across(other), rows)
            x_s[k] = rows
    plgpu.commit_smem()


def multiply(plan, scratch, inputs, rows, step, hidden_step=None):
    """Multiply a tile of weights by the tokens' rows, or by hidden ones from `hidden_step` on, as its steps arrive:
    f32[TILE, rows]. `step` is how many steps the block has used."""
    slot_of = lambda step: lax.rem(step, _i32(plan.slots))  # noqa: E731
    hidden_slot_of = lambda k: lax.rem(hidden_step + k, _i32(plan.hidden_slots))  # noqa: E731

    def release(k):
        plgpu.barrier_arrive(scratch["weight_empty"].at[slot_of(step + k)])
        if hidden_step is not None:
            plgpu.barrier_arrive(scratch["hidden_empty"].at[hidden_slot_of(k)])

    def accumulate(total):
        def one(k, _):
            if hidden_step is None:
                operand = scratch["x_s"].at[k]
            else:
                plgpu.barrier_wait(scratch["hidden_full"].at[hidden_slot_of(k)])
                operand = scratch["hidden_s"].at[hidden_slot_of(k)]
            plgpu.barrier_wait(scratch["weight_full"].at[slot_of(step + k)])
            plgpu.wgmma(total, scratch["weight_s"].at[slot_of(step + k)], operand.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # this step's may go on: that of the step before is done
            pl.when(k > 0)(lambda: release(k - 1))
            return _

        steps = inputs // STEP
        lax.fori_loop(_i32(0), _i32(steps), one, _i32(0))
        result = total[...]
        release(_i32(steps - 1))
        return result

    return pl.run_scoped(accumulate, plgpu.ACC((TILE, rows), _f32)), step + inputs // STEP


def write_hidden(plan, scratch, both, hidden_g, first, high):
    """Write silu(gate) * up of a tile's parts, each to its expert's hidden rows."""
    size, both_s, part_s = PART, scratch["both_s"], scratch["part_s"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    both_s.transpose((1, 0))[...] = plgpu.layout_cast(both, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    load = partial(plgpu.load, layout=everywhere(size), optimized=False)
    for j in range(PARTS):
        gate, up = (load(both_s.at[:, pl.ds(at + j * size, size)]) for at in (0, HALF))
        part_s[j] = silu_gated(gate, up).astype(part_s.dtype)
    plgpu.commit_smem()
    for j in range(PARTS):
        part = first + j

        @pl.when(part < high)
        def _(j=j, part=part):
            item = expert_of(part, high, plan.parts)
            place = hidden_g.at[pl.ds(item * plan.pitch, plan.t), pl.ds((part - item * plan.parts) * size, size)]
            plgpu.copy_smem_to_gmem(part_s.at[j, pl.ds(0, plan.t)], place)


def tell(plan, done, first, high):
    """Signal that a tile's parts, from `first` on, are in memory."""
    plgpu.wait_smem_to_gmem(0)
    parts, group_of = PARTS, lambda part: lax.div(part, _i32(plan.parts * TOGETHER))
    signal = partial(plgpu.semaphore_signal, memory_scope="gpu")
    whole = (first + parts <= high) & (group_of(first) == group_of(first + parts - 1))
    pl.when(whole)(lambda: signal(done.at[group_of(first)], parts))
    for part in (first + j for j in range(parts)):
        pl.when(~whole & (part < high))(lambda part=part: signal(done.at[group_of(part)]))
