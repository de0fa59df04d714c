"""Heads of rows on Hopper: queries and keys normed and rotated, keys and values written into their pages.

A Mosaic GPU kernel in place of four of XLA's and `kv_write`. The projection's result is read once, and a round waits
for one kernel's start. A warpgroup takes one row and loads all of it before it begins. A head lies in some lanes of one
warp, so its length is a sum over these, and columns that rotate together lie in one thread. Heads that four warps can't
share out evenly, such as one or two a device, are all in every warp, and all warps write the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.attention.kv_write import PAGES, stored
from jaxspec.pallas.hopper.export import lower_once

WARPS, LANES = 4, 32  # of a warpgroup
TILE = 16  # heads that a warpgroup takes at once, or the most that divide how many there are
UNEVEN = 0  # heads that four warps can't share out evenly, all in each warp: 16 have registers, but no GPU timed any
WIDTH = 128  # of a head
ROUND_WIDTHS = 128, 256, 512  # of heads in rounds of few rows

_f32 = jnp.float32


def supported(
    heads: int, kv_heads: int, width: int, rotated: int, pages: Any, *dtypes: Any, few: bool = False
) -> str | None:
    """Why the kernel can't take rows of so many heads, or None if it can.

    `pages`: the pages' dtype; `dtypes`: all other operands'. `few`: there are so few rows that wider heads, and one to
    three heads that are in every warp, pay.
    """
    widths, uneven = (ROUND_WIDTHS, WARPS - 1) if few else ((WIDTH,), UNEVEN)
    if jnp.dtype(pages) not in PAGES:
        return f"pages in {jnp.dtype(pages).name}; supported: bfloat16 and float8_e4m3fn"
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"rows or norms in {wrong[0]}; supported: bfloat16"
    if width not in widths:
        return f"heads of width {width}; supported: {', '.join(map(str, widths))}"
    if rotated != width:
        return f"{rotated} of {width} columns rotated"
    if any(count % WARPS and count > uneven for count in (heads, kv_heads)):
        others = f", or up to {uneven} others" if uneven else ""
        return f"{heads} query and {kv_heads} KV heads; supported: multiples of {WARPS}{others}"
    return None


@lower_once("write_heads", "eps", "centred", "query_scale", "normed_values", "k_is_v")
def write_heads(
    qkv: Float[Array, "parts r d"],
    cos: Float[Array, "r half"],
    sin: Float[Array, "r half"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    kv_slots: Int[Array, " r"],
    norms: Sequence[Float[Array, " h"]] = (),
    inverse_scales: Float[Array, "l 2 m"] | None = None,
    *,
    eps: float,
    centred: bool = False,
    query_scale: float = 1.0,
    normed_values: bool = False,
    k_is_v: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "r n h"], Float[Array, "l p 2 m s h"]]:
    """Rotate queries, and write rotated keys and values into their pages in `layer`; rounded where plain layers round.

    Returns the queries and the pages. `qkv` are the parts of a projection, summed here over the first axis in float32
    and rounded. It has columns of the query heads, then of as many keys and values as the pages have. `cos` and `sin`:
    the rope table of the rows, float32. `norms`: the scales of the norms of each head's queries and keys, if there are
    any. `kv_slots` are counted over all pages: row i's keys and values go to slot `kv_slots[i] % s` of page
    `kv_slots[i] // s`, converted by `kv_write.stored`; those of padding rows, whose KV slots are negative, go nowhere.
    `inverse_scales`: of each layer's keys (0) and values (1) by head, float32; None: they have no scales.

    `centred`: norms are `decoder.functions.centred_rms_norm`. `query_scale` multiplies queries at last.
    `normed_values`: each value head has a norm without a scale. `k_is_v`: `qkv` has no columns of values, which are the
    keys' before any norm.
    """
    (parts, rows, columns), (kv_heads, _, width), ref = qkv.shape, kv.shape[3:], jax.new_ref(kv)
    heads, scales = columns // width, [] if inverse_scales is None else [inverse_scales]
    options = eps, centred, query_scale, normed_values, k_is_v
    q = plgpu.kernel(
        partial(_row, options, bool(scales)),
        kernel_name="write_heads",
        out_type=jax.ShapeDtypeStruct((rows, heads - (1 if k_is_v else 2) * kv_heads, width), jnp.bfloat16),
        grid=(rows,),
        grid_names=("row",),
        # Safe here: there is no shared memory, not even for sums, as a head lies within a warp.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(qkv.reshape(parts, rows, heads, width), cos, sin, layer.reshape(1), kv_slots, ref, *scales, *norms)
    return q, jax.freeze(ref)


def _row(options, scaled, qkv_g, cos_g, sin_g, layer_g, kv_slots_g, kv_g, *refs):
    (eps, centred, query_scale, normed_values, k_is_v), (*norms_g, q_g) = options, refs
    inverse_g = norms_g.pop(0) if scaled else None
    row, (heads, width), (kv_heads, page_size) = lax.axis_index("row"), q_g.shape[1:], kv_g.shape[3:5]
    halves = [pl.ds(at, width // 2) for at in (0, width // 2)]
    parts_g = [qkv_g.at[part] for part in range(qkv_g.shape[0])]
    load = partial(plgpu.load, optimized=False)

    def load_heads(first, count):
        """Load `count` of the row's heads from `first` on, in tiles: which heads, counted from `first`, and the two
        halves of their columns, [heads, width / 2] each."""
        size = math.gcd(count, max(TILE * WIDTH // width, WARPS))
        layout = _layout(size, width // 2)

        def half_of(at, half):
            parts = [load(part.at[row, pl.ds(first + at, size), half], layout=layout) for part in parts_g]
            return sum(parts[1:], parts[0]).astype(q_g.dtype)

        return [(pl.ds(at, size), [half_of(at, half) for half in halves]) for at in range(0, count, size)]

    def unit(pair, dtype):
        """Heads in float32, made as long as the root of their width; in `dtype`."""
        first, second = pair
        factor = lax.rsqrt(jnp.sum(first * first + second * second, axis=1) / width + eps)
        factor = lax.broadcast_in_dim(factor, first.shape, [0])
        return [(x * factor).astype(dtype) for x in pair]

    def weighted(x, scale):
        return (x * (1 + scale.astype(_f32))).astype(jnp.bfloat16) if centred else x * scale

    def turned(tiles, norm_g, times=1.0):
        """Norm the heads of `load_heads`, if `norm_g` has a scale, and rotate them; yields tiles of that form."""
        shape = tiles[0][1][0].shape
        across = _layout(*shape).reduce(0)
        spread = lambda ref: lax.broadcast_in_dim(load(ref, layout=across), shape, [1])  # noqa: E731
        cos, sin = spread(cos_g.at[row]), spread(sin_g.at[row])
        scales = [spread(ref.at[half]) for ref in norm_g for half in halves]
        for of, pair in tiles:
            first, second = (x.astype(_f32) for x in pair)
            if scales:
                normed = unit((first, second), _f32 if centred else jnp.bfloat16)
                first, second = (weighted(*each).astype(_f32) for each in zip(normed, scales, strict=True))
            pair = [x.astype(jnp.bfloat16) for x in (first * cos - second * sin, second * cos + first * sin)]
            yield of, pair if times == 1 else [(x.astype(_f32) * times).astype(jnp.bfloat16) for x in pair]

    def values(tiles):
        for of, pair in tiles:
            yield of, unit([x.astype(_f32) for x in pair], jnp.bfloat16) if normed_values else pair

    def put(tiles, out_g, scales_g=None):
        for of, pair in tiles:
            shape, scale = pair[0].shape, None
            if scales_g is not None:
                scale = load(scales_g.at[of], layout=_layout(*shape).reduce(1))
                scale = lax.broadcast_in_dim(scale, shape, [0])
            for half, x in zip(halves, pair, strict=True):
                out_g[of, half] = stored(x, out_g.dtype, scale)

    kv_slot, layer = kv_slots_g[row], layer_g[0]
    q, k = load_heads(0, heads), load_heads(heads, kv_heads)
    v = k if k_is_v else load_heads(heads + kv_heads, kv_heads)
    put(turned(q, norms_g[:1], query_scale), q_g.at[row])

    @pl.when(kv_slot >= 0)
    def _():
        page, slot = lax.div(kv_slot, jnp.int32(page_size)), lax.rem(kv_slot, jnp.int32(page_size))
        for kind, tiles in enumerate((turned(k, norms_g[1:]), values(v))):
            scales_g = None if inverse_g is None else inverse_g.at[layer, kind]
            put(tiles, kv_g.at[layer, page, kind, :, slot], scales_g)


def _layout(heads: int, columns: int) -> Any:
    """The register layout of [heads, columns]: each warp has a quarter of the heads, or all if they don't divide by
    four. A head lies in as many lanes of a warp as there are for it."""
    if heads % WARPS:
        tiling, warps = plgpu.Tiling(((1, columns), (columns // LANES,))), plgpu.Replicated(WARPS)
        return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=(-2,), vector_dim=-1)
    vector = heads * columns // (WARPS * LANES)
    if heads == WARPS:
        tiling = plgpu.Tiling(((heads, columns), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((heads, columns), (heads // WARPS, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
