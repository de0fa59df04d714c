"""The matmuls of a layer at few rows, each with the operations before and after it, on Hopper.

At few rows a layer takes little longer than reading its weights. The rest of its time goes to the number of kernels,
and to each one's wait for memory. Here a layer is four of them and attention:

- `heads`: norm, q, k and v, the norms of q and k if there are any, their rotation, keys and values into their pages;
- `add_product`: the output projection and `down`, each added to the residual stream (`product`: without);
- `gated`: norm, gate and up, silu(gate) * up or another activation's;
- `normed`: norm and any products, such as of the router of a mixture of experts, for which it keeps the rows.

Beside the layers, `keys_values` makes keys and values of all of a drafter's layers, and `top_tokens` is norm, head and
argmax.

A block of one warpgroup takes some columns of a product in groups of `TILE`: those of a head, or half a group each of
gate and up. It prefetches its weights, all at once or as many as a ring in shared memory holds. Meanwhile it makes the
other operand: every block norms all rows for itself, since they are few. On the tensor cores the weights' columns are
the side that is 64 wide, and rows the narrow one, so eight rows cost an eighth of 64. Inputs can be divided among the
blocks of a cluster, which send their sums into the shared memory of the first one. In a small model memory is idle for
most of a layer; there a waiting block prefetches later kernels' weights into the L2 cache (`prefetch`). In wide layers
that took longer than it saved.

Norming wide rows takes longer than loading the first weights, and takes shared memory from the weights. But a norm's
factor is one number a row, and can as well multiply the products. So `add_product` also returns its sums times the
scale of the norm that comes next, and their squares (`Scaled`). Such rows come in chunks with the weights, and the
products are multiplied by the factor, in float32. Narrow rows are normed before their weights arrive.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas.attention.kv_write import stored
from jaxspec.pallas.dense.few_rows.block import (
    begin,
    by_row,
    from_rows,
    grid_of,
    multiply,
    one_row,
    out_of,
    params,
    prepare,
    ranges,
    scaled,
    scratch_of,
    to_rows,
)
from jaxspec.pallas.dense.few_rows.fp8 import Fp8Weight, format_of, operands, outputs, taken
from jaxspec.pallas.dense.few_rows.share import (
    BLOCKS,
    MAX_GROUPS,
    TILE,
    column_of,
    first_row,
    share_out,
    tiles_of,
    tiles_of_squares,
)
from jaxspec.pallas.hopper.export import lower_once

_i32, _f32 = jnp.int32, jnp.float32


class Scaled(NamedTuple):
    """Rows for a product that takes their root-mean-square norm, and the squares that give the norm's factor."""

    rows: Float[Array, "r d"]  # times the norm's scale, rounded to bfloat16
    squares: Float[Array, "t r"]  # of the unscaled rows, summed over `TILE` columns, in float32; after them zeros


class Adapters(NamedTuple):
    """Operands by which adapters (LoRA) add `inner @ b` to a product of unquantised weights, before the norm's factor
    and all that is made of the product. `inner` is `shrink`'s. `present`: how many runs of `TILE` of its columns have
    numbers, and then these runs; the others aren't read.
    """

    inner: Float[Array, "r q"]
    b: Float[Array, "q n"]
    present: Int[Array, " c"]


def scale_rows(x: Float[Array, "r d"], scale: Float[Array, " d"], centred: bool = False) -> Scaled:
    """Scale rows for the norm that comes next, as `add_product` scales its sums."""
    wide, scale = x.astype(_f32), scale.astype(_f32) + centred
    squares = jnp.sum(jnp.square(wide).reshape(len(x), -1, TILE), axis=2).T
    more = tiles_of_squares(x.shape[1]) - len(squares)
    return Scaled((wide * scale).astype(x.dtype), jnp.pad(squares, ((0, more), (0, 0))))


@lower_once("few_rows_gated", "eps", "activation")
def gated(
    x: Float[Array, "r d"],
    scale: Float[Array, " d"] | Float[Array, "t r"] | None,
    weight: Float[Array, "d n"] | Fp8Weight | Weight,
    prefetch: Sequence[Float[Array, "_ _"]] = (),
    adapters: Adapters | tuple[()] = (),
    *,
    eps: float,
    activation: Literal["silu", "gelu_tanh"] = "silu",
    interpret: Any = False,
) -> Float[Array, "r f"]:
    """activation(gate) * up of the normed rows, f = n / 2; all in bfloat16, rounded where plain layers round.

    `x` and `scale` are rows and the scale of their norm, or `Scaled` rows and their squares: then the norm is rounded
    once less. With an `Fp8WeightAndRows` they are `Scaled`. Or there is no scale, and rows are normed already.
    `prefetch`: weights that later kernels will read. `adapters`: of `Scaled` rows.
    """
    rows, columns, scales = len(x), outputs(weight), [] if scale is None else [scale]
    options = format_of(weight) | {"adapters": bool(adapters), "divided": not interpret}
    share = share_out(rows, [x.shape[1]], columns, normed=_unscaled(scale), **options)
    return plgpu.kernel(
        partial(_gated_tile, share, eps, activation, len(scales), len(adapters)),
        kernel_name="few_rows_gated",
        out_type=jax.ShapeDtypeStruct((rows, columns // 2), x.dtype),
        **grid_of(share),
        scratch_types=scratch_of(share, interpret) | out_of(share),
        compiler_params=params(),
        interpret=interpret,
    )(x, *scales, *operands(weight), *adapters, *prefetch)


def _unscaled(scale):
    """Whether a block norms rows itself, by a scale of their columns."""
    return scale is not None and scale.ndim == 1


def _gated_tile(share, eps, activation, scales, added, x_g, *refs, out_s, **scratch):
    tile, refs = lax.axis_index("tile"), list(refs)
    scales_g = [refs.pop(0) for _ in range(scales)]
    weights_g, out_g = [taken(share, refs)], refs.pop()
    adapters_g, prefetch_g = refs[:added], refs[added:]
    begun = begin(share, weights_g, [x_g], adapters_g, **scratch)
    factor, rows = prepare(share, [x_g], scales_g, eps, scratch["rows_s"]), pl.ds(first_row(share), share.finished)

    def finish(totals):
        to_rows(totals, out_s)
        for g in range(share.groups):
            gate, up = (from_rows(out_s, g * TILE + at, HALF) for at in (0, HALF))
            gate = gate / (1 + jnp.exp(-gate)) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
            value = gate.astype(jnp.bfloat16).astype(_f32) * up
            column = lax.div(column_of(share, share.columns, tile, g), _i32(2))
            out_g[rows, pl.ds(column, HALF)] = value.astype(jnp.bfloat16)

    multiply(share, begun, prefetch_g, finish, factor, adapters_g, **scratch)


@lower_once("few_rows_heads", "eps")
def heads(
    rows: Sequence[Float[Array, "r _"]],
    scales: Sequence[Float[Array, " _"] | Float[Array, "t r"]],
    weight: Float[Array, "k n"] | Fp8Weight | Weight,
    cos: Float[Array, "r half"],
    sin: Float[Array, "r half"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    kv_slots: Int[Array, " r"],
    norms: Sequence[Float[Array, " h"]] = (),
    prefetch: Sequence[Float[Array, "_ _"]] = (),
    bias: Float[Array, " n"] | None = None,
    inverse_scales: Float[Array, "l 2 m"] | None = None,
    adapters: Adapters | tuple[()] = (),
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "r q"], Float[Array, "l p 2 m s h"]]:
    """Rotated queries of the normed rows, and the pages with their rotated keys and values in `layer`.

    Several `rows` stand side by side, each normed with its own of `scales`; or there are only `Scaled` rows, and for a
    scale their squares. `weight` has columns of the query heads, then of as many keys and values as the pages have.
    `norms`: the scales of the norms of each head's queries and keys, if there are any. `cos` and `sin`: the rope table
    of the rows, float32; if it is narrower than half a head, the columns behind those that rotate stay as they are.
    `kv_slots` are counted over all pages: row i's keys and values go to slot `kv_slots[i] % s` of
    page `kv_slots[i] // s`, converted by `kv_write.stored` with `inverse_scales`; those of padding rows, whose KV slots
    are negative, go nowhere. `bias` is added to the rounded products. `prefetch` and `adapters` as in `gated`.
    """
    queries = outputs(weight) // kv.shape[5] - 2 * kv.shape[3]
    norms, of = [norm[None] for norm in norms], (rows, scales, weight, cos, sin, kv, layer, kv_slots)
    return _heads(queries, *of, norms, prefetch, bias, inverse_scales, eps, interpret, adapters)


@lower_once("few_rows_keys_values", "eps")
def keys_values(
    rows: Float[Array, "r d"],
    scale: Float[Array, " d"],
    weight: Float[Array, "d n"],
    cos: Float[Array, "r half"],
    sin: Float[Array, "r half"],
    kv: Float[Array, "l p 2 m s h"],
    kv_slots: Int[Array, " r"],
    norm: Float[Array, "l h"],
    bias: Float[Array, " n"] | None = None,
    *,
    eps: float,
    interpret: Any = False,
) -> Float[Array, "l p 2 m s h"]:
    """Write keys and values of the normed rows in all layers into their pages, as `heads` does; returns the pages.

    `weight` has columns of the first layer's keys, then of its values, then of the next layer's. `norm`: the scales of
    the norms of each layer's keys. `bias`: of the products, as in `heads`.
    """
    of = [rows], [scale], weight, cos, sin, kv, jnp.zeros((), jnp.int32), kv_slots
    return _heads(0, *of, [norm], (), bias, None, eps, interpret)[0]


def _heads(
    queries, rows, scales, weight, cos, sin, kv, layer, kv_slots, norms, prefetch, bias, inverse_scales, eps, interpret,
    adapters=(),
):  # fmt: skip
    """The queries, if there are any, and the pages."""
    count, width, ref = len(kv_slots), kv.shape[5], jax.new_ref(kv)
    widths, unscaled = [x.shape[1] for x in rows], scales[0].ndim == 1
    options = format_of(weight) | {"adapters": bool(adapters), "divided": not interpret}
    share = share_out(count, widths, outputs(weight), width // TILE, normed=unscaled, **options)
    bias = [] if bias is None else [bias.reshape(-1, width)]  # a head each
    inverse = [] if inverse_scales is None else [inverse_scales]
    q = plgpu.kernel(
        partial(_head, share, eps, queries, (len(rows), len(rows), len(norms), len(bias), len(inverse), len(adapters))),
        kernel_name="few_rows_heads",
        out_type=[jax.ShapeDtypeStruct((count, queries * width), rows[0].dtype)] if queries else [],
        **grid_of(share),
        scratch_types=scratch_of(share, interpret)
        | out_of(share)
        | {"head_s": plgpu.SMEM((share.finished, width), rows[0].dtype)},
        compiler_params=params(),
        interpret=interpret,
    )(
        *operands(weight), cos, sin, layer.reshape(1), kv_slots, ref, *rows, *scales, *norms, *bias, *inverse,
        *adapters, *prefetch,
    )  # fmt: skip
    return *q, jax.freeze(ref)


def _head(share, eps, queries, counts, *refs, out_s, head_s, **scratch):
    column, refs = lax.axis_index("tile"), list(refs)
    weights_g = [taken(share, refs)]
    cos_g, sin_g, layer_g, kv_slots_g, kv_g = (refs.pop(0) for _ in range(5))
    rows_g, scales_g, norms_g, biases_g, inverse_g, adapters_g = ([refs.pop(0) for _ in range(n)] for n in counts)
    q_g = refs.pop() if queries else None
    kv_heads, page_size, width = kv_g.shape[3:]
    parts = _rotated_parts(cos_g.shape[1], width)
    further, head = (f(column, _i32(queries + 2 * kv_heads)) for f in (lax.div, lax.rem))
    turns = (head < queries + kv_heads).astype(_f32)  # values are neither rotated nor normed
    asks = (head < queries).astype(_f32)
    begun = begin(share, weights_g, rows_g, adapters_g, **scratch)
    # These loads are issued before any wait, or each would add its latency later.
    first, rows = first_row(share), pl.ds(first_row(share), share.finished)
    layout = by_row(cos_g.shape[1] // 16)
    cos, sin = (plgpu.load(ref.at[rows], layout=layout, optimized=False) for ref in (cos_g, sin_g))
    cos, sin = cos * turns + (1 - turns), sin * turns
    layer, kv_slots = layer_g[0] + further, [kv_slots_g[first + i] for i in range(share.finished)]
    kind, kv_head = (f(jnp.maximum(head - queries, 0), _i32(kv_heads)) for f in (lax.div, lax.rem))
    inverse_scale = inverse_g[0][layer, kind, kv_head] if inverse_g else None
    norms = [[_part_of_row(norm_g.at[further], *part) for part in parts] for norm_g in norms_g]
    biases = [[_part_of_row(bias_g.at[column], *part) for part in parts] for bias_g in biases_g]
    if len(norms) == 2:
        norms = [[q * asks + k * (1 - asks) for q, k in zip(*norms, strict=True)]]
    factor = prepare(share, rows_g, scales_g, eps, scratch["rows_s"])

    def finish(totals):
        to_rows(totals, out_s)
        made = [from_rows(out_s, *part) for part in parts]
        for each in biases:
            made = [_biased(x, bias, 1) for x, bias in zip(made, each, strict=True)]
        for each in norms:
            squares = functools.reduce(operator.add, [jnp.sum(x * x, axis=1) for x in made])
            factor = lax.rsqrt(squares / width + eps)
            weighed = [scaled(x, factor, scale).astype(_f32) for x, scale in zip(made, each, strict=True)]
            made = [new * turns + x * (1 - turns) for new, x in zip(weighed, made, strict=True)]
        first, second, *rest = made
        made = [first * cos - second * sin, second * cos + first * sin, *rest]

        if queries:

            @pl.when(head < queries)
            def _():
                for (at, columns), x in zip(parts, made, strict=True):
                    q_g[rows, pl.ds(head * width + at, columns)] = x.astype(jnp.bfloat16)

        @pl.when(head >= queries)
        def _():
            for (at, columns), x in zip(parts, made, strict=True):
                head_s[:, pl.ds(at, columns)] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for i, kv_slot in enumerate(kv_slots):

                @pl.when(kv_slot >= 0)
                def _(i=i, kv_slot=kv_slot):
                    page, slot = lax.div(kv_slot, _i32(page_size)), lax.rem(kv_slot, _i32(page_size))
                    row = plgpu.load(head_s.at[i], layout=one_row(width), optimized=False)
                    kv_g[layer, page, kind, kv_head, slot] = stored(row, kv_g.dtype, inverse_scale)

    multiply(share, begun, refs, finish, factor, adapters_g, **scratch)


def _rotated_parts(half, width):
    """First columns and numbers of them: those that rotate against each other, and the rest of a head, if any."""
    return [(0, half), (half, half), *([(2 * half, width - 2 * half)] if width > 2 * half else [])]


def _part_of_row(row_g, at, columns):
    """Load a part of a head's scales, in the layout of `from_rows`."""
    part = row_g.at[pl.ds(at, columns)]
    return plgpu.load(part, layout=by_row(columns // 16).reduce(0), optimized=False).astype(_f32)


def _biased(product, bias, axis):
    """Add the bias of its columns, which lie along `axis`, to a rounded product, and round again; in float32."""
    return (product + lax.broadcast_in_dim(bias, product.shape, [axis])).astype(jnp.bfloat16).astype(_f32)


@lower_once("few_rows_add", "centred")
def add_product(
    x: Float[Array, "r d"],
    rows: Float[Array, "r k"],
    weight: Float[Array, "k d"] | Fp8Weight | Weight,
    scale: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    adapters: Adapters | tuple[()] = (),
    *,
    centred: bool = False,
    interpret: Any = False,
) -> Float[Array, "r d"] | tuple[Float[Array, "r d"], Scaled]:
    """x + (rows @ weight + bias), in bfloat16, rounded where plain layers round. `adapters` as in `gated`.

    With the `scale` of the norm that comes next, the sums come as `Scaled` rows as well; `centred`: that norm is
    `decoder.functions.centred_rms_norm`.
    """
    scales, biases = ([] if each is None else [each] for each in (scale, bias))
    out, *scaled = _products([x], [rows], weight, scales, interpret, centred, biases, adapters)
    return (out, Scaled(*scaled)) if scaled else out


@lower_once("few_rows_product", "dtype")
def product(
    rows: Sequence[Float[Array, "r _"]],
    weight: Float[Array, "n d"] | Fp8Weight | Weight,
    *,
    dtype: Any = None,
    interpret: Any = False,
) -> Float[Array, "r d"]:
    """The product of several rows of the same width, side by side; otherwise as `add_product`. `dtype`: float32 for
    sums as they are; None: that of the rows."""
    return _products([], rows, weight, [], interpret, dtype=dtype)[0]


@lower_once("few_rows_shrink")
def shrink(
    rows: Float[Array, "r k"],
    a: Float[Array, "k q"],
    own: Float[Array, "r q"],
    *,
    interpret: Any = False,
) -> Float[Array, "r q"]:
    """rows @ a, of all adapters side by side, times `own`: 1 in the columns of a row's own adapter, 0 elsewhere."""
    return _products([], [rows], a, [], interpret, own=[own])[0]


def _products(x, rows, weight, scale, interpret, centred=False, bias=(), adapters=(), own=(), dtype=None):
    """The products, or their sums with `x`; with a scale also the arrays of `Scaled`."""
    count, columns = len(rows[0]), outputs(weight)
    options = format_of(weight) | {"adapters": bool(adapters), "divided": not interpret}
    share = share_out(count, [each.shape[1] for each in rows], columns, 1, normed=False, **options)
    out = jax.ShapeDtypeStruct((count, columns), dtype or rows[0].dtype)
    squares = jax.ShapeDtypeStruct((tiles_of_squares(columns), count), _f32)
    return plgpu.kernel(
        partial(_product_tile, share, centred, tuple(map(len, (x, rows, scale, bias, adapters, own)))),
        kernel_name="few_rows_add" if x else "few_rows_shrink" if own else "few_rows_product",
        out_type=[out, out, squares] if scale else [out],
        **grid_of(share),
        scratch_types=scratch_of(share, interpret),
        compiler_params=params(across_warps=bool(scale)),
        interpret=interpret,
    )(*x, *operands(weight), *rows, *scale, *bias, *adapters, *own)


def _product_tile(share, centred, counts, *refs, **scratch):
    (plus, *counts), refs = counts, list(refs)
    x_g, weights_g = [refs.pop(0) for _ in range(plus)], [taken(share, refs)]
    rows_g, scale_g, bias_g, adapters_g, own_g = ([refs.pop(0) for _ in range(n)] for n in counts)
    out_g, *scaled_g = refs
    here = pl.ds(first_row(share), share.finished), pl.ds(lax.axis_index("tile") * TILE, TILE)
    layout = plgpu.Layout.WGMMA_TRANSPOSED
    begun = begin(share, weights_g, rows_g, adapters_g, **scratch)
    whole = lambda ref: plgpu.load(ref.at[here].transpose((1, 0)), layout=layout, optimized=False)  # noqa: E731
    x, own = list(map(whole, x_g)), list(map(whole, own_g))
    of_columns = partial(plgpu.load, layout=layout.reduce(1), optimized=False)
    scale, bias = ([of_columns(ref.at[here[1]]).astype(_f32) for ref in refs] for refs in (scale_g, bias_g))

    def finish(totals):
        total = plgpu.layout_cast(totals[0], layout)
        for each in own:
            total = total * each.astype(_f32)
        total = total.astype(out_g.dtype)
        for each in bias:
            total = _biased(total.astype(_f32), each, 0).astype(jnp.bfloat16)
        for each in x:
            total = (each.astype(_f32) + total.astype(_f32)).astype(jnp.bfloat16)
        out_g.at[here].transpose((1, 0))[...] = total
        if scale:
            _write_scaled(share, here, total.astype(_f32), 1 + scale[0] if centred else scale[0], *scaled_g)

    multiply(share, begun, (), finish, None, adapters_g, **scratch)


def _write_scaled(share, here, x, scale, rows_g, squares_g):
    """Write a tile of `Scaled` rows and its sums of squares, and its share of the zeros after all tiles'."""
    tile, rows = lax.axis_index("tile"), here[0]
    part = rows_g.at[here].transpose((1, 0))
    part[...] = (x * lax.broadcast_in_dim(scale, x.shape, [0])).astype(jnp.bfloat16)
    squares_g[tile, rows] = jnp.sum(x * x, axis=0)
    for at in range(share.tiles, squares_g.shape[0], share.tiles):

        @pl.when(tile + at < squares_g.shape[0])
        def _(at=at):
            zeros = jnp.zeros((share.finished,), _f32)
            squares_g[tile + at, rows] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA_TRANSPOSED.reduce(0))


@lower_once("few_rows_normed", "eps", "dtypes", "centred", "keep")
def normed(
    x: Float[Array, "r d"],
    scale: Float[Array, " d"] | Float[Array, "t r"] | None,
    weights: Sequence[Float[Array, "d _"] | Fp8Weight | Weight],
    bias: Float[Array, " n"] | None = None,
    *,
    eps: float,
    dtypes: tuple[str, ...],
    centred: bool = False,
    keep: bool = False,
    interpret: Any = False,
) -> list[Float[Array, "r _"]]:
    """The products of the normed rows with each of `weights`, in bfloat16 or float32 as `dtypes` say.

    `x` and `scale` as in `gated`. `centred`: the norm is `functions.centred_rms_norm`; `Scaled` rows have
    that in them already. `bias`: of the first weight's columns, in float32, if that is the dtype of its product. With
    `keep` the normed rows come after the products. A quantised weight comes alone. Sizes: `normed_supported`.
    """
    biases, of = [] if bias is None else [bias.astype(_f32)], format_of(weights[0])
    quantised = any(of.values())
    if biases and dtypes[0] != "float32":
        raise ValueError(f"a bias and a product in {dtypes[0]}; supported: float32")
    if quantised and len(weights) > 1:
        raise ValueError(f"{len(weights)} weights, of which the first is quantised; supported: one such weight")
    if quantised:
        groups, columns = None, outputs(weights[0])
    else:
        groups = next(n for n in range(1, MAX_GROUPS + 1) if sum(tiles_of(w, n) for w in weights) <= BLOCKS)
        columns = sum(tiles_of(w, groups) for w in weights) * groups * TILE
    scales = [] if scale is None else [scale]
    share = share_out(len(x), [x.shape[1]], columns, groups, normed=_unscaled(scale), divided=not interpret, **of)
    outs = [jax.ShapeDtypeStruct((len(x), outputs(w)), dtype) for w, dtype in zip(weights, dtypes, strict=True)]
    scratch = scratch_of(share, interpret)
    return plgpu.kernel(
        partial(_normed_tile, share, eps, centred, len(scales), len(weights), len(biases)),
        kernel_name="few_rows_normed",
        out_type=outs + [jax.ShapeDtypeStruct(x.shape, x.dtype)] * keep,
        **grid_of(share),
        scratch_types=scratch,
        compiler_params=params(),
        interpret=interpret,
    )(x, *scales, *itertools.chain(*map(operands, weights)), *biases)


def _normed_tile(share, eps, centred, scales, weights, biases, x_g, *refs, **scratch):
    refs = list(refs)
    scales_g = [refs.pop(0) for _ in range(scales)]
    weights_g = [taken(share, refs) for _ in range(weights)]
    biases_g, outs_g = refs[:biases], refs[biases:]
    tile = lax.axis_index("tile")
    begun, rows = begin(share, weights_g, [x_g], **scratch), pl.ds(first_row(share), share.finished)
    factor = prepare(share, [x_g], scales_g, eps, scratch["rows_s"], centred, *outs_g[weights:])

    def finish(totals):
        for i, ((_, first, end), out_g) in enumerate(zip(ranges(share, weights_g), outs_g[:weights], strict=True)):

            @pl.when((tile >= first) & (tile < end))
            def _(i=i, first=first, out_g=out_g):
                for g, total in enumerate(totals):
                    if i == 0 and biases:
                        bias = biases_g[0].at[pl.ds(column_of(share, outputs(out_g), tile, g), TILE)]
                        bias = plgpu.load(bias, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                        total = total + lax.broadcast_in_dim(bias, total.shape, [0])
                    total = plgpu.layout_cast(total.astype(out_g.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    columns = pl.ds(column_of(share, outputs(out_g), tile - first, g), TILE)
                    out_g.at[rows, columns].transpose((1, 0))[...] = total

    multiply(share, begun, (), finish, factor, **scratch)
