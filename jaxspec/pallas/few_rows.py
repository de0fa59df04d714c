"""The matmuls of a small model's layer at few rows, each with what stands before and after it, on Hopper.

A small layer's weights are read in less time than a kernel takes to start, so what counts is how many kernels there
are, and how long each waits for memory in turn. Here a layer is four of them and attention:

- `heads`: norm, q, k and v, their rotation, keys and values into their pages;
- `add_product`: the output projection and `down`, each added to the residual stream;
- `gated`: norm, gate and up, silu(gate) * up.

A warpgroup takes `TILE` columns of a product, a head of that width or half a tile each of gate and up. It asks for its
weights first, all at once, and while they come it makes the other operand: every block norms all rows for itself, since
they are few. On the tensor cores the weights' columns are what is 64 wide, and rows are the narrow side, so eight rows
cost an eighth of 64. While it waits it has the weights of later kernels brought into the L2 cache (`ahead`), since
memory is idle for most of a layer. Inputs of `add_product` are divided among the blocks of a cluster, which send their
sums into the shared memory of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.once import lower_once
from jaxspec.pallas.weight_stream import HALF

TILE = 64  # columns of a tile: the M of a Hopper warpgroup's matmul, and the width of a head
GROUP = 8  # rows that are normed together, and what the number of rows must be a multiple of
MAX_ROWS = 64  # more would need another tile of rows, and registers for it
MAX_WIDTH = 1024  # of the residual stream; wider layers take longer to read than kernels to start
MAX_CHUNK = 256  # inputs of one copy of weights: what a bulk copy can bring
MAX_CLUSTER = 4  # blocks that share a tile's inputs
AT_ONCE = 4  # groups of rows that are asked for before the first is normed
SHARED_BYTES = 220 * 1024
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, head: int, inputs: tuple[int, ...], *dtypes: Any) -> str | None:
    """Why so many rows can't go through layers with heads of width `head`, or None if they can.

    `inputs` are those of the layer's products: the model's width, that of all query heads, the MLP's; `dtypes` those of
    weights and pages.
    """
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"weights or pages in {wrong[0]}; bfloat16 are"
    if head != TILE:
        return f"heads of width {head}; {TILE} is"
    if rows > MAX_ROWS:
        return f"{rows} rows; up to {MAX_ROWS} are"
    if inputs[0] > MAX_WIDTH:
        return f"a model {inputs[0]} wide; up to {MAX_WIDTH} is"
    if odd := [width for width in inputs if width % TILE]:
        return f"width {odd[0]}; multiples of {TILE} are"
    rows = -(-rows // GROUP) * GROUP
    needed = max(_normed_bytes(rows, inputs[0]), *(_split_bytes(rows, width, _splits(width)) for width in inputs[1:]))
    return f"{needed} bytes of shared memory; up to {SHARED_BYTES} are" if needed > SHARED_BYTES else None


def _normed_bytes(rows: int, inputs: int) -> int:
    return 2 * (inputs * (TILE + rows) + 2 * rows * TILE)


def _split_bytes(rows: int, inputs: int, splits: int) -> int:
    return 2 * inputs // splits * (TILE + rows) + 4 * splits * rows * TILE


def _splits(inputs: int) -> int:
    """Among how many blocks to divide the inputs of a product."""
    return next(splits for splits in range(MAX_CLUSTER, 0, -1) if inputs // TILE % splits == 0)


def _chunk(inputs: int) -> int:
    """How many inputs' weights to bring with one copy: as many as it can, all copies alike."""
    return next(chunk for chunk in range(MAX_CHUNK, 0, -TILE) if inputs % chunk == 0)


def _by_row(vector: int) -> plgpu.Layout:
    """Eight rows at a time, each in 16 lanes of a warp, which hold `vector` neighbours: so a row's sum stays there."""
    tiling = plgpu.Tiling(((GROUP, 16 * vector), (2, 16 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _row() -> plgpu.Layout:
    """One row of a head, which all four warps hold."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TILE,), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def _params(**options: Any) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, **options)  # rows lie within a warp


@lower_once("eps")
def gated(
    x: Float[Array, "r d"],
    scale: Float[Array, " d"],
    weight: Float[Array, "d n"],
    ahead: Sequence[Float[Array, "k o"]] = (),
    *,
    eps: float,
    interpret: Any = False,
) -> Float[Array, "r f"]:
    """silu(gate) * up of the normed rows, f = n / 2; all in bfloat16, rounded where plain layers round.

    `ahead`: weights that the kernels after it will read.
    """
    rows, width = x.shape
    return plgpu.kernel(
        partial(_gated_tile, eps, len(ahead)),
        kernel_name="few_rows_gated",
        out_type=jax.ShapeDtypeStruct((rows, weight.shape[1] // 2), x.dtype),
        grid=(weight.shape[1] // TILE,),
        grid_names=("tile",),
        scratch_types=_normed_scratch(rows, width),
        compiler_params=_params(),
        interpret=interpret,
    )(x, scale, weight, *ahead)


def _gated_tile(eps, ahead, x_g, scale_g, weight_g, *refs, weight_s, rows_s, out_s, ready):
    tile, out_g = lax.axis_index("tile"), refs[ahead]
    _fetch(weight_g, tile, weight_s, ready)
    _norm(x_g, scale_g, eps, rows_s)
    _bring(refs[:ahead], tile, weight_g.shape[1] // TILE)
    gate, up = _halves(_product(weight_s, rows_s, ready), out_s)
    value = (gate / (1 + jnp.exp(-gate))).astype(jnp.bfloat16).astype(_f32) * up
    out_g[:, pl.ds(tile * HALF, HALF)] = value.astype(jnp.bfloat16)


@lower_once("eps")
def heads(
    x: Float[Array, "r d"],
    scale: Float[Array, " d"],
    weight: Float[Array, "d n"],
    cos: Float[Array, "r half"],
    sin: Float[Array, "r half"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    place: Int[Array, " r"],
    ahead: Sequence[Float[Array, "k o"]] = (),
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "r q"], Float[Array, "l p 2 m s h"]]:
    """Rotated queries of the normed rows, and the pages with their rotated keys and values in `layer`.

    `weight` has columns of the query heads, then of as many keys and values as the pages have. `cos` and `sin` are
    those of each row's position, float32. Row i's keys and values go to slot `place[i] % s` of page `place[i] // s`;
    those of a row at a negative place go nowhere. `ahead`: weights that the kernels after it will read.
    """
    rows, width = x.shape
    queries = weight.shape[1] // TILE - 2 * kv.shape[3]
    ref = jax.new_ref(kv)
    q = plgpu.kernel(
        partial(_head, eps, queries, len(ahead)),
        kernel_name="few_rows_heads",
        out_type=jax.ShapeDtypeStruct((rows, queries * TILE), x.dtype),
        grid=(weight.shape[1] // TILE,),
        grid_names=("head",),
        scratch_types=_normed_scratch(rows, width) | {"head_s": plgpu.SMEM((rows, TILE), x.dtype)},
        compiler_params=_params(),
        interpret=interpret,
    )(x, scale, weight, cos, sin, layer.reshape(1), place, ref, *ahead)
    return q, jax.freeze(ref)


def _head(eps, queries, ahead, x_g, scale_g, weight_g, cos_g, sin_g, layer_g, place_g, kv_g, *refs, weight_s, rows_s,
          out_s, head_s, ready):  # fmt: skip
    head, half, q_g = lax.axis_index("head"), TILE // 2, refs[ahead]
    kv_heads, page_size = kv_g.shape[3], kv_g.shape[4]
    _fetch(weight_g, head, weight_s, ready)
    # Asked for before anything is waited for, as each would take its time later.
    cos, sin = (plgpu.load(ref, layout=_by_row(2), optimized=False) for ref in (cos_g, sin_g))
    layer, places = layer_g[0], [place_g[i] for i in range(x_g.shape[0])]
    _norm(x_g, scale_g, eps, rows_s)
    _bring(refs[:ahead], head, weight_g.shape[1] // TILE)
    first, second = _halves(_product(weight_s, rows_s, ready), out_s)
    turns = (head < queries + kv_heads).astype(_f32)  # values aren't rotated
    cos, sin = cos * turns + (1 - turns), sin * turns
    first, second = first * cos - second * sin, second * cos + first * sin

    @pl.when(head < queries)
    def _():
        q_g[:, pl.ds(head * TILE, half)] = first.astype(jnp.bfloat16)
        q_g[:, pl.ds(head * TILE + half, half)] = second.astype(jnp.bfloat16)

    @pl.when(head >= queries)
    def _():
        head_s[:, pl.ds(0, half)] = first.astype(jnp.bfloat16)
        head_s[:, pl.ds(half, half)] = second.astype(jnp.bfloat16)
        plgpu.commit_smem()
        kind = lax.div(head - queries, _i32(kv_heads))
        kv_head = lax.rem(head - queries, _i32(kv_heads))
        for i, place in enumerate(places):

            @pl.when(place >= 0)
            def _(i=i, place=place):
                page, slot = lax.div(place, _i32(page_size)), lax.rem(place, _i32(page_size))
                kv_g[layer, page, kind, kv_head, slot] = plgpu.load(head_s.at[i], layout=_row(), optimized=False)


@lower_once("splits")
def add_product(
    x: Float[Array, "r d"],
    rows: Float[Array, "r k"],
    weight: Float[Array, "k d"],
    *,
    splits: int | None = None,
    interpret: Any = False,
) -> Float[Array, "r d"]:
    """x + rows @ weight, in bfloat16, rounded where plain layers round.

    `splits`: among how many blocks of a cluster to divide the inputs; interpret mode can't send anything between them,
    and takes 1.
    """
    (count, inputs), outputs = rows.shape, weight.shape[1]
    splits = splits or _splits(inputs)
    share = inputs // splits
    chunk = _chunk(share)
    scratch = dict(
        weight_s=plgpu.SMEM((share // chunk, chunk, TILE), x.dtype),
        rows_s=plgpu.SMEM((share // chunk, count, chunk), x.dtype),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=share // chunk),
    )
    if splits > 1:
        scratch["parts_s"] = plgpu.SMEM((splits, TILE, count), _f32)
        scratch["sent"] = plgpu.Barrier(num_arrivals=splits)
    return plgpu.kernel(
        partial(_add_tile, splits),
        kernel_name="few_rows_add",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(outputs // TILE,),
        grid_names=("tile",),
        cluster=(splits,),
        cluster_names=("split",),
        scratch_types=scratch,
        compiler_params=_params(),
        interpret=interpret,
    )(x, rows, weight)


def _add_tile(splits, x_g, rows_g, weight_g, out_g, *, weight_s, rows_s, ready, parts_s=None, sent=None):
    tile, split = lax.axis_index("tile"), lax.axis_index("split")
    _fetch(weight_g, tile, weight_s, ready, split, rows_g, rows_s)
    columns = pl.ds(tile * TILE, TILE)
    layout = plgpu.Layout.WGMMA_TRANSPOSED
    x = plgpu.load(x_g.at[:, columns].transpose((1, 0)), layout=layout, optimized=False).astype(_f32)
    total = _product(weight_s, rows_s, ready)

    def finish(total):
        total = plgpu.layout_cast(total, layout).astype(jnp.bfloat16).astype(_f32)
        out_g.at[:, columns].transpose((1, 0))[...] = (x + total).astype(jnp.bfloat16)

    if splits == 1:
        finish(total)
        return
    plgpu.async_store_smem(total, parts_s.at[split], sent, cluster_idx=_i32(0), cluster_dim="split", optimized=False)

    @pl.when(split == 0)
    def _():
        plgpu.barrier_wait(sent)
        load = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
        finish(sum((load(parts_s.at[i]) for i in range(1, splits)), load(parts_s.at[0])))


def _normed_scratch(rows: int, width: int) -> dict[str, Any]:
    """Shared memory and barriers of a tile of columns over normed rows."""
    chunk = _chunk(width)
    return dict(
        weight_s=plgpu.SMEM((width // chunk, chunk, TILE), jnp.bfloat16),
        rows_s=plgpu.SMEM((width // chunk, rows, chunk), jnp.bfloat16),
        out_s=plgpu.SMEM((rows, TILE), jnp.bfloat16),
        ready=plgpu.Barrier(num_barriers=width // chunk),
    )


def _fetch(weight_g, tile, weight_s, ready, split=0, rows_g=None, rows_s=None):
    """Begin to copy a tile's weights of this split's inputs, and these inputs of the rows if they come from memory."""
    chunks, chunk, _ = weight_s.shape
    for i in range(chunks):
        inputs = pl.ds((split * chunks + i) * chunk, chunk)
        plgpu.copy_gmem_to_smem(weight_g.at[inputs, pl.ds(tile * TILE, TILE)], weight_s.at[i], ready.at[i])
        if rows_g is not None:
            plgpu.copy_gmem_to_smem(rows_g.at[:, inputs], rows_s.at[i], ready.at[i])


def _bring(ahead, block, blocks):
    """Begin to bring this block's share of the weights `ahead` into the L2 cache."""
    for weight_g in ahead:
        height, width = (_chunk(size) for size in weight_g.shape)
        across = weight_g.shape[1] // width
        pieces = weight_g.shape[0] // height * across
        for first in range(0, pieces, blocks):
            piece = first + block
            down, along = lax.div(piece, _i32(across)), lax.rem(piece, _i32(across))
            part = weight_g.at[pl.ds(down * height, height), pl.ds(along * width, width)]
            plgpu.async_prefetch(part, predicate=piece < pieces)


def _norm(x_g, scale_g, eps, rows_s):
    """The rows' root-mean-square norm into shared memory, as `models.layers.rms_norm` has it."""
    (rows, width), (chunks, _, chunk) = x_g.shape, rows_s.shape
    layout = _by_row(4)
    scale = plgpu.load(scale_g, layout=layout.reduce(0), optimized=False)
    for first in range(0, rows, AT_ONCE * GROUP):
        groups = [pl.ds(at, GROUP) for at in range(first, min(first + AT_ONCE * GROUP, rows), GROUP)]
        loaded = [plgpu.load(x_g.at[group], layout=layout, optimized=False) for group in groups]
        for group, x in zip(groups, loaded, strict=True):
            x = x.astype(_f32)
            factor = lax.rsqrt(jnp.sum(x * x, axis=1) / width + eps)
            x = (x * lax.broadcast_in_dim(factor, x.shape, [0])).astype(jnp.bfloat16).astype(_f32)
            x = x * lax.broadcast_in_dim(scale.astype(_f32), x.shape, [1])
            for i in range(chunks):
                rows_s[i, group] = x[:, i * chunk : (i + 1) * chunk].astype(jnp.bfloat16)
    plgpu.commit_smem()


def _product(weight_s, rows_s, ready):
    """The product of a tile's columns with all rows, f32[TILE, rows], as the weights arrive."""

    def run(total):
        for i in range(weight_s.shape[0]):
            plgpu.barrier_wait(ready.at[i])
            plgpu.wgmma(total, weight_s.at[i].transpose((1, 0)), rows_s.at[i].transpose((1, 0)))
        return total[...]

    return pl.run_scoped(run, plgpu.ACC((TILE, rows_s.shape[1]), _f32))


def _halves(total, out_s):
    """The first and the second half of a tile's columns, f32[rows, TILE / 2], rounded as a product of its own would be.

    A column lies in one warp: through shared memory both halves of a row come to the same thread.
    """
    out_s.transpose((1, 0))[...] = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    halves = (out_s.at[:, pl.ds(at, TILE // 2)] for at in (0, TILE // 2))
    return tuple(plgpu.load(half, layout=_by_row(2), optimized=False).astype(_f32) for half in halves)
