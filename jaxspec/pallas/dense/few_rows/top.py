"""The token with the highest logit of each of few rows: final norm, head and argmax as one kernel and one reduction."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.dense.few_rows.block import by_row, norm_rows, params
from jaxspec.pallas.dense.few_rows.share import BLOCKS, GROUP, HEAD_STAGES, TILE, Share
from jaxspec.pallas.hopper.export import lower_once

_i32, _f32 = jnp.int32, jnp.float32


@lower_once("few_rows_top", "eps")
def top_tokens(
    x: Float[Array, "r d"],
    scale: Float[Array, " d"],
    weight: Float[Array, "v d"],
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Int[Array, " r"], Float[Array, " r"]]:
    """The row of `weight` that has the largest product with each normed row, among equals the first, and the product.

    The blocks take tiles of `weight` in turn, and prefetch the next ones while they multiply.
    """
    (rows, width), tiles = x.shape, weight.shape[0] // TILE
    share, blocks = Share(rows, (width,), TILE, 1, 1, True), min(BLOCKS, tiles)
    top, token = plgpu.kernel(
        partial(_top_of_tiles, share, eps, blocks),
        kernel_name="few_rows_top",
        out_type=[jax.ShapeDtypeStruct((blocks, rows), dtype) for dtype in (_f32, _i32)],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=dict(
            ring=plgpu.RefUnion(
                plgpu.SMEM((HEAD_STAGES, share.chunks, TILE, share.chunk), weight.dtype),
                plgpu.SMEM((2, rows, TILE), _f32),
            ),
            rows_s=plgpu.SMEM((share.chunks, rows, share.chunk), x.dtype),
            ready=plgpu.Barrier(num_barriers=(HEAD_STAGES, share.chunks)),
        ),
        compiler_params=params(),
        interpret=interpret,
    )(x, scale, weight)
    top, token = lax.reduce((top, token), (_f32(-jnp.inf), _i32(2**31 - 1)), _higher, (0,))
    return token, top


def _higher(one, other):
    """Select from two pairs (number, token) the one with the larger number; among equals, the smaller token."""
    first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return tuple(jnp.where(first, a, b) for a, b in zip(one, other, strict=True))


def _top_of_tiles(share, eps, blocks, x_g, scale_g, weight_g, top_g, token_g, *, ring, rows_s, ready):
    (weight_s, found_s), block, tiles = ring, lax.axis_index("block"), weight_g.shape[0] // TILE
    (chunks, rows, chunk), turns = rows_s.shape, -(-tiles // blocks)

    def tile(i):
        return jnp.minimum(block + i * blocks, tiles - 1)  # a block without one left takes the last one again

    def fetch(i, stage):
        for j in range(chunks):
            source = weight_g.at[pl.ds(tile(i) * TILE, TILE), pl.ds(j * chunk, chunk)]
            plgpu.copy_gmem_to_smem(source, weight_s.at[stage, j], ready.at[stage, j])

    for i in range(min(HEAD_STAGES, turns)):
        fetch(_i32(i), i)
    norm_rows(share, [x_g], [scale_g], eps, rows_s)

    def take(i, found):
        top, at = found
        stage = lax.rem(i, _i32(HEAD_STAGES))

        def run(total):
            for j in range(chunks):
                plgpu.barrier_wait(ready.at[stage, j])
                plgpu.wgmma(total, weight_s.at[stage, j], rows_s.at[j].transpose((1, 0)))
            return total[...]

        total = pl.run_scoped(run, plgpu.ACC((TILE, rows), _f32))
        pl.when(i + HEAD_STAGES < turns)(lambda: fetch(i + HEAD_STAGES, stage))
        higher = total > top
        return jnp.where(higher, total, top), jnp.where(higher, tile(i).astype(_f32), at)

    empty = (jnp.full((TILE, rows), start, _f32) for start in (-jnp.inf, 0))
    found = tuple(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in empty)
    found = lax.fori_loop(_i32(0), _i32(turns), take, found)
    plgpu.commit_smem()  # all warps have read the weights, which this overwrites
    for i, x in enumerate(found):
        found_s.at[i].transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    column = plgpu.broadcasted_iota(_i32, (GROUP, TILE), 1, layout=by_row(4)).astype(_f32)
    for at in range(0, rows, GROUP):
        group = pl.ds(at, GROUP)
        values, at_tile = (plgpu.load(found_s.at[i, group], layout=by_row(4), optimized=False) for i in range(2))
        top = jnp.max(values, axis=1)
        token = at_tile * TILE + column  # exact, as there are fewer than 2**24
        is_top = values == lax.broadcast_in_dim(top, values.shape, [0])
        top_g[block, group] = top
        token_g[block, group] = (-jnp.max(jnp.where(is_top, -token, -jnp.inf), axis=1)).astype(_i32)
