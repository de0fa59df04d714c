"""A thread block of these kernels: it prefetches weights, norms rows or loads them too, multiplies, adds up."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.fp8 import BLOCK, E4M3
from jaxspec.pallas.dense.few_rows import cluster
from jaxspec.pallas.dense.few_rows.four_bits import four_bit_sums, scale_copies
from jaxspec.pallas.dense.few_rows.fp8 import fp8_sums, outputs, scales_of
from jaxspec.pallas.dense.few_rows.share import (
    COPY_GROUPS,
    GROUP,
    TILE,
    Share,
    column_of,
    first_row,
    largest,
    split_of,
    tiles_of,
    turn_of,
)

AT_ONCE = 4  # groups of rows that are loaded before the first is normed
PIECE = 1024  # columns that are normed together
_i32, _f32 = jnp.int32, jnp.float32


def by_row(vector: int) -> Any:  # layouts: of a class that jax keeps to itself
    """Eight rows at a time, each in 16 lanes of a warp, which hold `vector` neighbours: a row's sum stays in a warp."""
    tiling = plgpu.Tiling(((GROUP, 16 * vector), (2, 16 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def one_row(width: int) -> Any:
    """One row of a head, which all four warps hold."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((width,), (width // 32,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def by_tile() -> Any:
    """Sums of squares, [tiles, rows]: every warp has them all, so that each row's sum is beside its products."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, GROUP), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -2), vector_dim=-1
    )


def params(across_warps: bool = False) -> plgpu.CompilerParams:
    """Compiler parameters. `across_warps`: sums go over columns of several warps; otherwise a row lies within one."""
    return plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128 * 4 if across_warps else 0)


def grid_of(share: Share) -> dict[str, Any]:
    """A block for each tile, or a cluster of them if its inputs are split."""
    cluster = {"cluster": (share.splits,), "cluster_names": ("split",)} if share.splits > 1 else {}
    threads = {"num_threads": share.warpgroups, "thread_name": "warpgroup"} if share.warpgroups > 1 else {}
    return {"grid": (share.tiles,), "grid_names": ("tile",)} | cluster | threads


def scratch_of(share: Share, interpret: Any = False) -> dict[str, Any]:
    """Shared memory and barriers of a block."""
    rows, groups = share.rows, share.groups
    if share.quantised:
        dtype = E4M3 if share.rounds else jnp.int8
        weight_s = plgpu.SMEM((share.slots, groups * TILE, int(share.item * share.chunk)), dtype)
    else:
        weight_s = plgpu.SMEM((share.slots, groups, share.chunk, TILE), jnp.bfloat16)
    if share.warpgroups > 1:  # in the end, a slot of each warpgroup holds its sums
        size = int(groups * share.chunk * share.item) // (4 * GROUP)
        weight_s = plgpu.RefUnion(weight_s, plgpu.SMEM((share.warpgroups, size, TILE, GROUP), _f32))
    scratch = dict(
        weight_s=weight_s,
        rows_s=plgpu.SMEM((share.chunks if share.normed else share.slots, rows, share.chunk), jnp.bfloat16),
        ready=plgpu.Barrier(num_arrivals=share.copies + (not share.normed), num_barriers=share.slots),
    )
    if share.splits > 1:
        scratch |= cluster.scratch(share)
    if share.warpgroups > 1:
        scratch["summed"] = plgpu.Barrier(num_arrivals=share.warpgroups - 1)
    if share.fp8:
        scratch["scales_s"] = plgpu.SMEM((share.warpgroups, groups, share.scales), _f32)
    if share.four:
        of = share.four.scales(share.chunk, share.together * TILE)
        scratch["scales_s"] = plgpu.SMEM((share.slots, groups // share.together, *of), jnp.dtype(share.four.dtype))
    if share.rounds:
        quantised = share.warpgroups, share.chunk // BLOCK, rows
        scratch |= {"values_s": plgpu.SMEM((*quantised, BLOCK), E4M3), "row_scales_s": plgpu.SMEM(quantised, _f32)}
    if share.quantised and interpret:
        scratch["staged_s"] = plgpu.SMEM((share.warpgroups, TILE, BLOCK), jnp.bfloat16)
    return scratch


def out_of(share: Share) -> dict[str, Any]:
    """Shared memory for the results of `to_rows`."""
    return {"out_s": plgpu.SMEM((share.finished, share.groups * TILE), jnp.bfloat16)}


def ranges(share, weights_g):
    """Each weight, its first tile, and the one after its last."""
    if share.quantised:
        return [(weights_g[0], 0, share.tiles)]
    ends = [sum(tiles_of(w, share.groups) for w in weights_g[: i + 1]) for i in range(len(weights_g))]
    return list(zip(weights_g, [0, *ends[:-1]], ends, strict=True))


def begin(share, weights_g, rows_g, adapters_g=(), *, weight_s, rows_s, ready, **others):
    """Begin to copy a block's weights, and the rows' inputs unless the block norms rows itself.

    Returns the function that copies chunk i to a slot, and an FP8 weight's scales. With several weights, the tiles of
    the first come first. What adapters add (`layer.Adapters`) are further chunks of a tile's first block.
    """
    if share.splits > 1:
        cluster.expect(share, others["sent_s"])
    scales = scales_of(share, *weights_g, interpret="staged_s" in others) if share.quantised else None
    weight_s = ring_of(share, weight_s)[0]
    tile, split, rows_g = lax.axis_index("tile"), split_of(share), () if share.normed else rows_g

    def fetch_adapters(i, slot):
        inner_g, b_g, present_g = adapters_g
        inputs, first = pl.ds(present_g[1 + i - share.chunks] * TILE, TILE), pl.ds(0, TILE)
        for g in range(share.groups):
            columns = pl.ds(column_of(share, share.columns, tile, g), TILE)
            plgpu.copy_gmem_to_smem(b_g.at[inputs, columns], weight_s.at[slot, g, first], ready.at[slot])
        plgpu.copy_gmem_to_smem(inner_g.at[:, inputs], rows_s.at[slot, :, first], ready.at[slot])

    def fetch(i, slot):
        if not adapters_g:
            fetch_weight(i, slot)
            return
        pl.when(i < share.chunks)(partial(fetch_weight, i, slot))
        pl.when(i >= share.chunks)(partial(fetch_adapters, i, slot))

    def fetch_weight(i, slot):
        chunk = split * share.chunks + i
        inputs = pl.ds(chunk * share.chunk, share.chunk)
        for weight_g, first, end in ranges(share, weights_g):

            def copy_weight(weight_g=weight_g, first=first):
                for at in range(0, share.groups if share.quantised else 0, COPY_GROUPS):
                    size, width = min(COPY_GROUPS, share.groups - at) * TILE, weight_s.shape[2]
                    first_column = column_of(share, outputs(weight_g), tile, at)
                    part = weight_g.values.at[pl.ds(first_column, size), pl.ds(chunk * width, width)]
                    plgpu.copy_gmem_to_smem(part, weight_s.at[slot, pl.ds(at * TILE, size)], ready.at[slot])
                for part, place in scale_copies(share, weight_g, chunk, tile) if share.four else ():
                    plgpu.copy_gmem_to_smem(part, others["scales_s"].at[slot, place], ready.at[slot])
                for g in range(0 if share.quantised else share.groups):
                    columns = pl.ds(column_of(share, outputs(weight_g), tile - first, g), TILE)
                    plgpu.copy_gmem_to_smem(weight_g.at[inputs, columns], weight_s.at[slot, g], ready.at[slot])

            copy_weight() if len(weights_g) == 1 else pl.when((tile >= first) & (tile < end))(copy_weight)
        copy = lambda row_g, at: plgpu.copy_gmem_to_smem(row_g.at[:, at], rows_s.at[slot], ready.at[slot])  # noqa: E731
        if len(rows_g) == 1:
            copy(rows_g[0], inputs)
        each = share.widths[0] // share.chunk
        for which, row_g in enumerate(rows_g if len(rows_g) > 1 else ()):
            at = pl.ds((chunk - which * each) * share.chunk, share.chunk)
            pl.when(lax.div(chunk, _i32(each)) == which)(partial(copy, row_g, at))

    for first in range(0, share.slots, share.warpgroups):
        i = first + turn_of(share)
        fetch(i, i) if first + share.warpgroups <= share.slots else pl.when(i < share.slots)(partial(fetch, i, i))
    return fetch, scales


def multiply(
    share,
    begun,
    prefetch,
    end,
    factor=None,
    adapters_g=(),
    *,
    weight_s,
    parts_s=None,
    sent_s=None,
    summed=None,
    **ring,
):
    """Call `end` with the products of a tile's columns, f32[TILE, rows] of each group.

    These are products of all rows, or, if several blocks of a cluster finish some rows each, of `finished` rows from
    `first_row` on. `prefetch`: weights to prefetch into the L2 cache meanwhile. `factor`: multiplies each row's
    products, if it is given.
    """
    split = split_of(share)
    _prefetch(prefetch, lax.axis_index("tile") * share.splits + split, share.tiles * share.splits)

    def finish(totals):
        if factor is not None:
            totals = [total * lax.broadcast_in_dim(factor, total.shape, [1]) for total in totals]
        end(totals)

    weight_s, sums_s = ring_of(share, weight_s)
    ring["weight_s"] = weight_s
    if share.quantised:
        totals = (four_bit_sums if share.four else fp8_sums)(share, begun, **ring)
    else:
        totals = _sums(share, begun[0], adapters_g, **ring)
    gather = partial(_gathered, share, finish, split, parts_s, sent_s)
    if share.splits > 1:
        cluster.meet()
    if share.warpgroups == 1:
        gather(totals)
        return
    turn = turn_of(share)

    @pl.when(turn > 0)
    def _():
        plgpu.commit_smem()  # all warps have read the weights that the sums overwrite
        for i, eight in enumerate(_eights(totals)):
            sums_s[turn, i] = eight
        plgpu.commit_smem()  # all threads have written when one of them signals
        plgpu.barrier_arrive(summed)

    @pl.when(turn == 0)
    def _():
        plgpu.barrier_wait(summed)
        gather(_added(share, [sums_s.at[i] for i in range(1, share.warpgroups)], totals))


def ring_of(share, weight_s):
    """Shared memory for weights, and for the sums of a block's warpgroups in the end, if it has several."""
    return weight_s if share.warpgroups > 1 else (weight_s, None)


def _eights(totals):
    """Cut the sums of each group into parts of `GROUP` rows, which don't share banks in memory."""
    return [total[:, at : at + GROUP] for total in totals for at in range(0, total.shape[1], GROUP)]


def _added(share, refs, totals):
    """Add to the sums of each group those in `refs`, in order; these hold parts from `_eights`."""
    load = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
    made = [sum((load(ref.at[i]) for ref in refs), eight) for i, eight in enumerate(_eights(totals))]
    count = len(made) // share.groups
    return [jnp.concatenate(made[g * count : (g + 1) * count], axis=1) for g in range(share.groups)]


def _gathered(share, finish, split, parts_s, sent_s, totals):
    """Call `finish` with the sums over all of a tile's blocks, in those of them that finish some rows."""
    if share.splits == 1:
        finish(totals)
        return
    cluster.send(share, split, totals, parts_s, sent_s)
    pl.when(split < share.finishers)(lambda: finish(cluster.receive(share, parts_s, sent_s)))


def _sums(share, fetch, adapters_g, *, weight_s, rows_s, ready):
    """f32[TILE, rows] of each group, over the block's inputs, and over those that adapters add to them."""
    slots, end = share.slots, share.chunks
    if adapters_g:
        end = end + adapters_g[2][0] * (split_of(share) == 0).astype(_i32)

    def run(*totals):
        def one(i, slot, part=()):
            plgpu.barrier_wait(ready.at[slot])
            rows = rows_s.at[(i if share.normed else slot, slice(None), *part)].transpose((1, 0))
            for g, total in enumerate(totals):
                plgpu.wgmma(total, weight_s.at[(slot, g, *part)].transpose((1, 0)), rows)

        def next_one(i, _, part=()):
            slot = lax.rem(i, _i32(slots))
            one(i, slot, part)
            plgpu.wgmma_wait(0)
            pl.when(i + slots < end)(lambda: fetch(i + slots, slot))
            return _

        if slots == share.chunks and not adapters_g:
            for i in range(slots):
                one(i, i)
        else:
            lax.fori_loop(_i32(0), _i32(share.chunks), next_one, _i32(0))
        if adapters_g:
            lax.fori_loop(_i32(share.chunks), end, partial(next_one, part=(pl.ds(0, TILE),)), _i32(0))
        return tuple(total[...] for total in totals)

    return pl.run_scoped(run, *[plgpu.ACC((TILE, share.rows), _f32)] * share.groups)


def _prefetch(prefetch, block, blocks):
    """Begin to prefetch this block's share of later kernels' weights into the L2 cache."""
    for weight_g in prefetch:
        height, width = (largest(size) for size in weight_g.shape)
        across = weight_g.shape[1] // width
        pieces = weight_g.shape[0] // height * across
        for first in range(0, pieces, blocks):
            piece = first + block
            down, along = lax.div(piece, _i32(across)), lax.rem(piece, _i32(across))
            part = weight_g.at[pl.ds(down * height, height), pl.ds(along * width, width)]
            plgpu.async_prefetch(part, predicate=piece < pieces)


def prepare(share, rows_g, scales_g, eps, rows_s, centred=False, *kept_g):
    """Norm the rows into shared memory, if a block does that for itself, or return the factors of `Scaled` rows; None
    without scales, of rows that are normed already.

    A factor is what each row's products are still to be multiplied by: f32[finished]. For `Scaled` rows `scales_g` are
    the sums of squares.
    """
    if not scales_g:
        return None
    if share.normed:
        return norm_rows(share, rows_g, scales_g, eps, rows_s, centred, *kept_g)
    (row_g,), (squares_g,) = rows_g, scales_g
    for out_g in kept_g:
        pl.when(lax.axis_index("tile") == 0)(partial(_keep, share, row_g, squares_g, eps, out_g))
    squares_g = squares_g.at[:, pl.ds(first_row(share), share.finished)]

    def factor():
        squares = plgpu.load(squares_g, layout=by_tile(), optimized=False)
        return lax.rsqrt(jnp.sum(squares, axis=0) / share.widths[0] + eps)

    if share.warpgroups == 1:
        return factor()
    # Other warpgroups don't use it, and would read as much.
    nothing = lambda: plgpu.layout_cast(jnp.ones((share.finished,), _f32), by_tile().reduce(0))  # noqa: E731
    return lax.cond(turn_of(share) == 0, factor, nothing)


def _keep(share, rows_g, squares_g, eps, out_g):
    """Write the norm of `Scaled` rows, of this block's inputs."""
    piece = largest(share.part, PIECE)
    for at in range(0, share.rows, GROUP):
        group = pl.ds(at, GROUP)
        squares = plgpu.load(squares_g.at[:, group].transpose((1, 0)), layout=by_row(1), optimized=False)
        factor = lax.rsqrt(jnp.sum(squares, axis=1) / share.widths[0] + eps)
        for first in range(0, share.part, piece):
            columns = pl.ds(split_of(share) * share.part + first, piece)
            x = plgpu.load(rows_g.at[group, columns], layout=by_row(4), optimized=False).astype(_f32)
            out_g[group, columns] = (x * lax.broadcast_in_dim(factor, x.shape, [0])).astype(jnp.bfloat16)


def norm_rows(share, rows_g, scales_g, eps, rows_s, centred=False, *kept_g):
    """Write the rows' root-mean-square norms to shared memory, side by side, computed as `decoder.functions.rms_norm`.

    In a split product, only this block's inputs. Rows too wide for registers are read twice. The first tile's blocks
    write the norm to `kept_g` as well, if there is one input.
    """
    layout, chunk = by_row(4), share.chunk
    whole = math.gcd(share.part, *share.widths)
    piece = next(size for size in range(PIECE // chunk * chunk, 0, -chunk) if whole % size == 0)
    begins = [sum(share.widths[:i]) for i in range(len(share.widths))]
    load = partial(plgpu.load, optimized=False)

    def read(i, group, at):
        return load(rows_g[i].at[group, pl.ds(at, piece)], layout=layout)

    def scale(i, at):
        return load(scales_g[i].at[pl.ds(at, piece)], layout=layout.reduce(0))

    def write(i, group, at, x, factor, scale):
        x, first = scaled(x.astype(_f32), factor, scale, centred), (begins[i] + at) % share.part // chunk
        for out_g in kept_g:

            @pl.when(lax.axis_index("tile") == 0)
            def _(out_g=out_g):
                out_g[group, pl.ds(at, piece)] = x

        for j in range(piece // chunk):
            rows_s[first + j, group] = x[:, j * chunk : (j + 1) * chunk]

    def factor(i, parts):
        squares = sum(jnp.sum(x * x, axis=1) for x in (x.astype(_f32) for x in parts))
        return lax.rsqrt(squares / share.widths[i] + eps)

    each = [(i, pl.ds(at, GROUP)) for i in range(len(begins)) for at in range(0, share.rows, GROUP)]
    if share.splits == 1 and all(width == piece for width in share.widths):
        scales = [scale(i, 0) for i in range(len(begins))]
        for first in range(0, len(each), AT_ONCE):
            together = each[first : first + AT_ONCE]
            loaded = [read(i, group, 0) for i, group in together]
            for (i, group), x in zip(together, loaded, strict=True):
                write(i, group, 0, x, factor(i, [x]), scales[i])
    else:
        places = [range(0, width, piece) for width in share.widths]
        factors = [factor(i, [read(i, group, at) for at in places[i]]) for i, group in each]
        for split in range(share.splits):

            @pl.when(split_of(share) == split)
            def _(split=split):
                for (i, group), by in zip(each, factors, strict=True):
                    here = [at for at in places[i] if (begins[i] + at) // share.part == split]
                    for pair in (here[j : j + 2] for j in range(0, len(here), 2)):
                        loaded = [(at, read(i, group, at), scale(i, at)) for at in pair]
                        for at, x, of in loaded:
                            write(i, group, at, x, by, of)

    plgpu.commit_smem()


def scaled(x, factor, scale, centred=False):
    """Multiply rows by their factors, round, and multiply by their columns' scales, or by one more if `centred`."""
    x, scale = x * lax.broadcast_in_dim(factor, x.shape, [0]), scale.astype(_f32)
    x, scale = (x, 1 + scale) if centred else (x.astype(jnp.bfloat16).astype(_f32), scale)
    return (x * lax.broadcast_in_dim(scale, x.shape, [1])).astype(jnp.bfloat16)


def to_rows(totals, out_s):
    """Write sums by column to shared memory by row, rounded as a product of its own would be.

    A column lies in one warp: through shared memory all of a row comes to the same warp.
    """
    for g, total in enumerate(totals):
        part = out_s.at[:, pl.ds(g * TILE, TILE)].transpose((1, 0))
        part[...] = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()


def from_rows(out_s, at, width):
    """Load `width` columns of all rows, from column `at` on, as float32."""
    return plgpu.load(out_s.at[:, pl.ds(at, width)], layout=by_row(width // 16), optimized=False).astype(_f32)
