"""Writes of the decode kernel's results to memory: whole rows, parts of them, and parts combined to rows."""

from __future__ import annotations

import functools
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention.decode_attention.plan import PACK, Plan
from jaxspec.pallas.attention.decode_attention.tiles import put, row_a_warp, spread

TOGETHER = 8  # segments that are read before the first is added


def write_rows(plan: Plan, acc, total, rows_s, out_g, tile, head):
    """Begin to write the rows that one warpgroup has seen all tokens for."""
    put(plan, rows_s, acc * spread(plan, 1 / jnp.maximum(total, 1e-30), acc))
    plgpu.commit_smem()
    for i in range(plan.tile_tokens):
        token = tile * plan.tile_tokens + i
        target = out_g.at[token, pl.ds(head * plan.group, plan.group)]
        source = rows_s.at[pl.ds(i * plan.group, plan.group)]
        pl.when(token < plan.t)(partial(plgpu.copy_smem_to_gmem, source, target))


def write_part(plan: Plan, acc, top, total, part_s, sums_s, part_g, sums_g):
    """Write one part's sums, and wait until they are in memory."""
    if plan.segment:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    put(plan, part_s, acc)
    sums_s[0], sums_s[1] = top, total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(part_s, part_g)
    plgpu.copy_smem_to_gmem(sums_s, sums_g)
    plgpu.wait_smem_to_gmem(0)


def combine(plan: Plan, sinks_g, parts_g, sums_g, out_g, *, staging, **_):
    """Combine the parts, and `sinks_g` if there are some; each warpgroup does a share of the packs of rows."""
    b, head, tile, split, w = (lax.axis_index(name) for name in ("b", "m", "tile", "split", "warpgroup"))
    part, layout, mixed_s = split * plan.warpgroups + w, row_a_warp(plan.h), staging[2].at[w, 0]
    parts_g, sums_g, out_g = parts_g.at[b, head, tile], sums_g.at[b, head, tile], out_g.at[b]

    def body(i, _):
        first = (i * plan.parts + part) * PACK
        rows = pl.ds(first, PACK)
        load = partial(plgpu.load, optimized=False)
        tops, totals = (
            [load(sums_g.at[s, kind, rows], layout=layout.reduce(1)) for s in range(plan.parts)] for kind in (0, 1)
        )
        mixes = [load(parts_g.at[s, rows], layout=layout) for s in range(plan.parts)]
        top = functools.reduce(jnp.maximum, tops)
        weights = [jnp.exp2(x - top) for x in tops]
        total = sum(w * x for w, x in zip(weights, totals, strict=True))
        if sinks_g is not None:
            total = total + jnp.exp2(load(sinks_g.at[head, rows], layout=layout.reduce(1)) - top)
        mix = sum(x * lax.broadcast_in_dim(w, x.shape, [0]) for w, x in zip(weights, mixes, strict=True))
        mix = mix * lax.broadcast_in_dim(1 / jnp.maximum(total, 1e-30), mix.shape, [0])
        _write_pack(plan, mix, mixed_s, out_g, head, tile, first)
        return _

    lax.fori_loop(jnp.int32(0), lax.div(plan.packs - part + (plan.parts - 1), jnp.int32(plan.parts)), body, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def combine_segments(plan: Plan, start_g, parts_g, sums_g, out_g, *, staging, **_):
    """Combine the segments, in order and `TOGETHER` at a time; each warpgroup does a share of the packs of rows."""
    b, head, tile, split, w = (lax.axis_index(name) for name in ("b", "m", "tile", "split", "warpgroup"))
    part, layout, mixed_s = split * plan.warpgroups + w, row_a_warp(plan.h), staging[2].at[w, 0]
    parts_g, sums_g, out_g = parts_g.at[b, head, tile], sums_g.at[b, head, tile], out_g.at[b]
    end = jnp.clip(start_g[b] + (tile + 1) * plan.tile_tokens, 0, plan.entries * plan.page)
    tokens = plan.segment * plan.step
    count = lax.div(end + (tokens - 1), jnp.int32(tokens))
    load = partial(plgpu.load, optimized=False)
    across = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731

    def body(i, _):
        first = (i * plan.parts + part) * PACK
        rows, shape = pl.ds(first, PACK), (PACK, plan.h)

        def some(j, carry):
            mix, top, total = carry
            each = [j * TOGETHER + k for k in range(TOGETHER)]
            there = [jnp.minimum(s, count - 1) for s in each]
            tops, totals = ([load(sums_g.at[s, kind, rows], layout=layout.reduce(1)) for s in there] for kind in (0, 1))
            mixes = [load(parts_g.at[s, rows], layout=layout) for s in there]
            new_top = functools.reduce(jnp.maximum, tops, top)
            shrink = jnp.exp2(top - new_top)
            total, mix = total * shrink, mix * across(shrink, shape)
            for s, one_top, one_total, one_mix in zip(each, tops, totals, mixes, strict=True):
                weight = jnp.exp2(one_top - new_top) * (s < count).astype(jnp.float32)
                total, mix = total + weight * one_total, mix + one_mix * across(weight, shape)
            return mix, new_top, total

        cast = plgpu.layout_cast
        empty = (
            cast(jnp.zeros(shape, jnp.float32), layout),
            cast(jnp.full((PACK,), -1e30, jnp.float32), layout.reduce(1)),
            cast(jnp.zeros((PACK,), jnp.float32), layout.reduce(1)),
        )
        mix, _top, total = lax.fori_loop(
            jnp.int32(0), lax.div(count + (TOGETHER - 1), jnp.int32(TOGETHER)), some, empty
        )
        mix = mix * across(1 / jnp.maximum(total, 1e-30), shape)
        _write_pack(plan, mix, mixed_s, out_g, head, tile, first)
        return _

    lax.fori_loop(jnp.int32(0), lax.div(plan.packs - part + (plan.parts - 1), jnp.int32(plan.parts)), body, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _write_pack(plan: Plan, mix, mixed_s, out_g, head, tile, first):
    """Begin to write a pack of rows, of which `first` is the first."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mixed_s[...] = mix.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for r in range(PACK):
        row = first + r
        token = tile * plan.tile_tokens + lax.div(row, jnp.int32(plan.group))
        target = out_g.at[token, head * plan.group + lax.rem(row, jnp.int32(plan.group))]
        valid = (row < plan.tile_tokens * plan.group) & (token < plan.t)
        pl.when(valid)(partial(plgpu.copy_smem_to_gmem, mixed_s.at[r], target))
