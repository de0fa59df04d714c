"""Attention of a few new rows a request over its paged keys and values, on Hopper: decode, verify, trees.

A Mosaic GPU kernel. A warpgroup owns one request, one KV head, one tile of query rows and a part of the request's
tokens (`kernel`). It streams keys and values through a ring in shared memory, one bulk copy a page, and keeps a running
maximum and sum (online softmax, in base 2). The query heads that share a KV head are in one tile, so every key is read
from memory once. Few rows are the N side of the matmuls: M is 64 or more, and would be mostly padding. With few
requests, several blocks and their warpgroups divide a request's tokens into parts (split-KV), count in memory how many
are done, and combine their results (`results`). A request's parts take its steps in turn. So without a window a part
can prefetch its first steps before the request's length is known.

Invariant: work follows the tokens that rows see, never the page table's width. A part has a share of a request's actual
steps, with a window only of those that hold a token within it, and may be empty.

The cache must hold finite numbers everywhere, since masked values enter a sum with weight zero.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.positions import Window, most_seen
from jaxspec.pallas.attention.decode_attention.kernel import warpgroup
from jaxspec.pallas.attention.decode_attention.plan import (
    FP8,
    HEAD_WIDTHS,
    MAX_ROWS,
    NARROW_ROWS,
    PACK,
    ROWS,
    Plan,
    division,
    step_tokens,
    supported,
)
from jaxspec.pallas.attention.decode_attention.results import combine, combine_segments
from jaxspec.pallas.hopper.export import lower_once

__all__ = ["FP8", "HEAD_WIDTHS", "MAX_ROWS", "decode_attention", "division", "step_tokens", "supported"]


def decode_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    *,
    scales: Float[Array, "l 2 m"] | None = None,
    mask: Bool[Array, "b t w"] | None = None,
    window: Window | None = None,
    depth: Int[Array, "b t"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    fixed: int = 0,
    interpret=False,
) -> Float[Array, "b t n h"]:
    """Attention of rows at KV slots `start + 0..t-1`, whose keys and values are already in `kv`.

    **Arguments:**

    - `q` in bfloat16, unscaled: scores are scaled by h**-0.5.
    - `kv` in bfloat16 or float8_e4m3fn, and for the latter `scales`, float32, which the keys (0) and values (1) of each
      head are multiplied with. `table[b]` lists a request's pages in order.
    - `mask`: without one, row i sees the KV slots up to its own; with one, all before `start` and those `start + j`
      where `mask[b, i, j]`, wherever its own keys are.
    - `window`: how many positions a row sees, its own included, or chunks; None: all. KV slots before `start` are their
      positions; from there on the mask decides. Row i's own position is `start + i`, or with a mask
      `start + depth[b, i]` if `depth`, nowhere negative, is given. Pages before the window aren't read.
    - `sinks`: one more logit of each head's softmax, which no value belongs to.
    - `fixed`: a row's result has the same bits however many requests and rows there are: so many tokens, a multiple of
      `step_tokens`, are summed by themselves, whichever block does it. 0: no. Without a mask, a window or sinks.
    - `interpret`: as in `plgpu.kernel`.

    Returns the mix of values in bfloat16. Rows that see nothing, as those at negative KV slots, are zero.
    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    if reason := supported(q.shape, kv.shape, kv.dtype, 0 if mask is None else mask.shape[2]):
        raise ValueError(f"decode_attention doesn't support {reason}")
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"decode_attention doesn't support queries in {q.dtype}; bfloat16 is")
    sight = {} if window is None else {"window": window}
    if window is not None and mask is not None and depth is not None:
        sight["depth"] = depth
    if sinks is not None:
        sight["sinks"] = sinks
    if fixed:
        if mask is not None or window is not None or sinks is not None:
            raise ValueError("decode_attention has no fixed order of sums with a mask, a window or sinks")
        if fixed % step_tokens(q.shape[3]):
            raise ValueError(f"fixed={fixed} must be a multiple of {step_tokens(q.shape[3])} tokens")
        # Narrow tiles: sums over tokens are by the same threads for any number of rows.
        sight |= {"segment": fixed // step_tokens(q.shape[3]), "tallest": NARROW_ROWS}
    return _attend(q, kv, layer, table, start, scales, mask, interpret=interpret, **sight)


@lower_once("decode_attention", "parts", "window", "tallest", "segment")
def _attend(
    q, kv, layer, table, start, scales, mask, depth=None, sinks=None, *, interpret, parts=None, window=None,
    tallest=ROWS, segment=0,
):  # fmt: skip
    """Launch the kernel.

    `parts`: blocks that divide a request's tokens, and warpgroups of a block; None: by `division`. `tallest`: rows of a
    tile, at most. `segment`: as in `Plan`.
    """
    b, t, n, h = q.shape
    m, s = kv.shape[3], kv.shape[4]
    tile_tokens = min(t, tallest // (n // m))
    masked_slots = 0 if mask is None else mask.shape[2]
    span = None if window is None else most_seen(window) - 1 + (masked_slots or tile_tokens)
    parts = parts or division(b * m * -(-t // tile_tokens), h, span)
    fp8 = kv.dtype == FP8
    given = depth is not None, sinks is not None
    plan = Plan(
        b, t, n, m, h, s, table.shape[1], fp8, masked_slots, window, *given, *parts, tallest, segment, bool(interpret)
    )
    operands = [q, kv, table, start, layer.reshape(1)]
    if scales is not None:
        operands.append(scales)
    if mask is not None:
        operands.append(_row_bits(plan, mask))
    if depth is not None:
        operands.append(_by_tile(plan, depth))
    sunk = [] if sinks is None else [_by_row(plan, sinks)]
    operands += sunk
    out = jax.ShapeDtypeStruct((b, t, n, h), q.dtype)
    each = (b, m, plan.tiles, plan.kept)
    results = [jax.ShapeDtypeStruct((*each, *x), jnp.float32) for x in ((plan.rows, h), (2, plan.rows))]
    results = results if plan.combined else [out]

    launch = partial(
        plgpu.kernel,
        kernel_name="decode_attention",
        grid=(b, m, plan.tiles, plan.splits),
        grid_names=("b", "m", "tile", "split"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=_scratch(plan),
        # Safe here: warps exchange data through a barrier or `commit_smem`, written out in `kernel`.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    attend = partial(warpgroup, plan, scales is not None)
    if plan.combined and not plan.interpret:
        results.append(out)
    results = launch(attend, out_type=results)(*operands)
    if plan.segment and plan.interpret:
        results = launch(partial(combine_segments, plan), out_type=[out])(start, *results)
    elif plan.combined and plan.interpret:
        results = launch(partial(combine, plan, *([] if sunk else [None])), out_type=[out])(*sunk, *results)
    return results[-1]


def _by_tile(plan: Plan, x):
    """Repeat each token's numbers, [b, t, ...], for its rows in each tile: [b, tiles, rows, ...]."""
    rest = [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, ((0, 0), (0, plan.tiles * plan.tile_tokens - plan.t), *rest))
    x = jnp.repeat(x.reshape(plan.b, plan.tiles, plan.tile_tokens, *x.shape[2:]), plan.group, axis=2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, plan.rows - x.shape[2]), *rest))


def _by_row(plan: Plan, sinks):
    """The sink of each row of a tile, in base 2: f32[m, rows]. Padding rows repeat those of others."""
    sinks = (sinks.astype(jnp.float32) * math.log2(math.e)).reshape(plan.m, plan.group)
    return jnp.take(sinks, jnp.arange(plan.rows) % plan.group, axis=1)


def _row_bits(plan: Plan, mask):
    """The mask of each row of each tile, a bit for each KV slot: i32[b, tiles, rows]."""
    mask = _by_tile(plan, mask)
    # Summed last, so that it is one kernel with all of the above.
    bits = (mask.astype(jnp.uint32) << jnp.arange(plan.masked_slots, dtype=jnp.uint32)).sum(3, dtype=jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.int32)


def _scratch(plan: Plan) -> dict:
    """Shared memory and barriers. An axis of `w` has an entry for each warpgroup; arrays without it are shared."""
    w, rows = plan.warpgroups, (plan.rows, plan.h)
    ring = plgpu.SMEM((w, plan.stages, 2, plan.step, plan.h), FP8 if plan.fp8 else jnp.bfloat16)
    scratch = dict(
        ring=ring,
        q_s=plgpu.SMEM(rows, plan.dtype),
        # Rows as they are in memory, before and after, all of them or packs; in between the weights of a step, and the
        # numbers that warps exchange.
        staging=plgpu.RefUnion(
            plgpu.SMEM(rows, jnp.bfloat16),
            (
                plgpu.SMEM((w, plan.rows, plan.step), plan.dtype),
                *([plgpu.SMEM((w, plan.exchanged), jnp.float32)] if plan.narrow else []),
            ),
            plgpu.SMEM((w, max(1, plan.rows * plan.step // (PACK * plan.h)), PACK, plan.h), jnp.bfloat16),
        ),
        ready=plgpu.Barrier(num_arrivals=plan.copies, num_barriers=(w, plan.stages, 2)),
        q_ready=plgpu.Barrier(num_arrivals=plan.tile_tokens, num_barriers=w),
    )
    if plan.fp8 and not plan.in_registers:
        scratch["wide_s"] = plgpu.SMEM((w, plan.step, plan.h), plan.dtype)
    if plan.warpgroups > 1:
        scratch["staged"] = plgpu.Barrier(num_arrivals=w)
    if plan.segment:  # the ring goes on meanwhile
        scratch["part_s"] = plgpu.SMEM((w, *rows), jnp.float32)
        scratch["sums_s"] = plgpu.SMEM((w, 2, plan.rows), jnp.float32)
    elif plan.parts > 1:
        # A part's result overwrites its ring, so its first axes must stride over as many bytes.
        tiles = plan.stages * plan.stage_bytes // (plan.rows * plan.h * 4)
        scratch["ring"] = plgpu.RefUnion(ring, plgpu.SMEM((w, tiles, *rows), jnp.float32))
        scratch["sums_s"] = plgpu.SMEM((w, 2, plan.rows), jnp.float32)
    return scratch
