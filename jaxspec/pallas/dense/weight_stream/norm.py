"""A row's norm by several warpgroups: reading its partials takes most of the time between two products.

A warpgroup can have only so many bytes in flight. Two of them hold a row's partials of up to eight splits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense.weight_stream import chain
from jaxspec.pallas.hopper import LANES, WARPS

_i32, _f32 = jnp.int32, jnp.float32


def norm_scratch(groups: int, warpgroups: int) -> dict[str, Any]:
    """Shared memory and a barrier to norm rows of `groups` groups of columns."""
    return dict(
        squares_s=plgpu.SMEM((2, groups), _f32),
        squares_full=plgpu.Barrier(num_arrivals=warpgroups),
    )


def norm_rows(block: chain.Block, i: int, warpgroup: Any, norm: tuple[float, bool]) -> None:
    """Add the partials to the residual stream and norm it: a warpgroup's columns of this block's rows.

    Rounds where the plain layers do. No sum goes over the warps of a warpgroup: jax has memory for one such sum at a
    time. Squares of even and odd rows are stored apart, so that a warpgroup can't overwrite those that others still
    read.
    """
    (eps, centred), scratch, (_, _, (scale,), reads, writes) = norm, block.scratch, block.work[i]
    x, norm_s, squares_s = reads["x"], scratch["norm_s"], scratch["squares_s"]
    (groups, step), warpgroups = norm_s.shape, block.geometry.norming
    here = pl.ds(warpgroup * (groups // warpgroups), groups // warpgroups)
    load = partial(plgpu.load, layout=_by_group(step), optimized=False)
    by = load(scale.at[here]).astype(_f32)  # before waiting for the partials, as this load takes long
    block.wait_for(i - 1)

    def one(j, none):
        row, slot = block.index + j * chain.BLOCKS, lax.rem(j, _i32(2))
        value = load(x.at[row, here])
        if "partial" in reads:
            partials = [load(reads["partial"].at[split, row, here]) for split in range(reads["partial"].shape[0])]
            total = sum(partials[1:], partials[0])
            value = (value.astype(_f32) + total.astype(value.dtype).astype(_f32)).astype(value.dtype)
        wide = value.astype(_f32)
        squares_s[slot, here] = jnp.sum(wide * wide, axis=1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["squares_full"])
        if "x" in writes:
            writes["x"][row, here] = value
        plgpu.barrier_wait(scratch["squares_full"])
        squares = plgpu.load(squares_s.at[slot], layout=_by_lane(), optimized=False)
        wide = wide * lax.rsqrt(jnp.sum(squares) / (groups * step) + eps)
        wide = wide * (1 + by) if centred else wide.astype(value.dtype).astype(_f32) * by
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        norm_s[here] = wide.astype(value.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(norm_s.at[here], writes["rows"].at[here, row])
        return none

    lax.fori_loop(_i32(0), block.mine(block.items(i)), one, _i32(0))


def _by_group(step: int) -> Any:  # layouts: of a class that jax keeps to itself
    """Four groups of `step` columns at a time, each in a warp of its own."""
    tiling = plgpu.Tiling(((WARPS, step), (step // LANES,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _by_lane() -> Any:
    """Every fourth number in a lane, the same in all warps."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS,), (1,))),
        warp_dims=(plgpu.Replicated(4),), lane_dims=(plgpu.Replicated(LANES // WARPS), -2), vector_dim=-1,
    )  # fmt: skip
