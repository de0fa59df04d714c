"""Few tokens' experts added up, to the residual stream and for the norm after it, on Hopper.

A Mosaic GPU kernel. A block takes `TILE` columns of `GROUP` tokens: it weighs and adds their experts' rows, adds that
to the residual stream, and scales the sums as `few_rows.scale_rows` does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.dense.few_rows import FP8_ROWS, GROUP, TILE, Scaled, tiles_of_squares
from jaxspec.pallas.dense.few_rows.block import by_row, one_row, params
from jaxspec.pallas.experts.expert_stream import ALIGN
from jaxspec.pallas.hopper.export import lower_once

MOST = 16  # rows of a token
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, each: int, width: int, dtype: Any) -> str | None:
    """Why the kernel can't serve `rows` rows of this width, of up to `each` experts, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows % GROUP or rows > FP8_ROWS:
        return f"{rows} rows; supported: multiples of {GROUP} up to {FP8_ROWS}"
    if each > MOST:
        return f"{each} experts a token; supported: up to {MOST}"
    return f"rows {width} wide; supported: multiples of {TILE}" if width % TILE else None


def _place(number, j, alone):
    """The row of a token's j-th expert, -1 if there is none. `number`: the j-th column of its `place`."""
    return jnp.where(number < alone, ALIGN * j, -1) if alone else number


@lower_once("expert_add", "each", "centred", "alone")
def add_scaled(
    rows: Float[Array, "r d"],
    place: Int[Array, "t _"],
    weights: Float[Array, "t _"],
    residual: Float[Array, "n d"],
    scale: Float[Array, " d"],
    *,
    each: int | None = None,
    centred: bool = False,
    alone: int = 0,
    interpret: Any = False,
) -> tuple[Float[Array, "n d"], Scaled]:
    """Add to row i of `residual`, of the first t, the sum over j of `weights[i, j] * rows[place[i, j]]`.

    Returns the sums, and them as `Scaled`. Sums over j are float32 and rounded before they are added. Row -1 counts as
    zeros. `each`: how many columns of `place` and `weights` count, if not all of `place`. `centred`: as in
    `few_rows.add_product`. `alone`: the number of experts, if `place` has one token's experts in place of rows, which
    are then those of `Items.alone`; 0: it has rows.
    """
    (n, width), tiles = residual.shape, residual.shape[1] // TILE
    like = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    out, *scaled = plgpu.kernel(
        partial(_tile, tiles, each or place.shape[1], centred, alone),
        kernel_name="expert_add",
        out_type=[like, like, jax.ShapeDtypeStruct((tiles_of_squares(width), n), _f32)],
        grid=(tiles, n // GROUP),
        grid_names=("tile", "group"),
        scratch_types=dict(mixed_s=plgpu.SMEM((GROUP, TILE), rows.dtype)),
        compiler_params=params(),
        interpret=interpret,
    )(rows, place, weights, residual, scale)
    return out, Scaled(*scaled)


def _tile(tiles, each, centred, alone, *refs, mixed_s):
    rows_g, place_g, weights_g, residual_g, scale_g, out_g, scaled_g, squares_g = refs
    tile, tokens = lax.axis_index("tile"), place_g.shape[0]
    first = lax.axis_index("group") * GROUP if residual_g.shape[0] > GROUP else 0
    group, columns, load = pl.ds(first, GROUP), pl.ds(tile * TILE, TILE), partial(plgpu.load, optimized=False)
    before = load(residual_g.at[group, columns], layout=by_row(4))
    scale = load(scale_g.at[columns], layout=by_row(4).reduce(0)).astype(_f32)
    scale = 1 + scale if centred else scale
    here = [jnp.minimum(first + i, tokens - 1) for i in range(min(GROUP, tokens))]
    places = [[_place(place_g[i, j], j, alone) for j in range(each)] for i in here]
    loaded = [[load(rows_g.at[jnp.maximum(p, 0), columns], layout=one_row(TILE)) for p in some] for some in places]
    column = plgpu.broadcasted_iota(_i32, (TILE,), 0, layout=one_row(TILE))
    for i in range(GROUP):
        total = plgpu.layout_cast(jnp.zeros((TILE,), _f32), one_row(TILE))
        for j in range(each if i < tokens else 0):
            # Selected, not multiplied by zero: unwritten rows may be NaN.
            valid = (places[i][j] >= 0) & (first + i < tokens)
            wanted = column < jnp.where(valid, _i32(TILE), _i32(0))
            total = total + jnp.where(wanted, loaded[i][j].astype(_f32) * weights_g[here[i], j], 0.0)
        mixed_s[i] = total.astype(mixed_s.dtype)
    plgpu.commit_smem()
    x = (before.astype(_f32) + load(mixed_s, layout=by_row(4)).astype(_f32)).astype(out_g.dtype)
    out_g[group, columns] = x
    x = x.astype(_f32)
    scaled_g[group, columns] = (x * lax.broadcast_in_dim(scale, x.shape, [1])).astype(scaled_g.dtype)
    squares_g[tile, group] = jnp.sum(x * x, axis=1)
    for more in range(tiles, squares_g.shape[0], tiles):  # those past the width are zero

        @pl.when(tile + more < squares_g.shape[0])
        def _(more=more):
            squares_g[tile + more, group] = plgpu.layout_cast(jnp.zeros((GROUP,), _f32), by_row(4).reduce(1))
