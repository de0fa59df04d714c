"""Attention over pages on any NVIDIA GPU: decode, verify, trees and prompts in one kernel.

A program has a tile of a request's rows that share a KV head: new tokens by query heads, so that products go to tensor
cores. It walks over the pages that these rows see, a step of tokens at a time, with a running maximum and sum. With few
requests, several programs divide a request's steps (`Plan.parts`), and a second kernel combines their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.fp8 import E4M3 as FP8
from jaxspec.models.positions import Window, first_seen, most_seen
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.portable import fp8

HEAD_WIDTHS = (16, 32, 64, 128, 256, 512)
LEAST_PAGE, LEAST_ROWS = 16, 16  # the narrowest sides of a product
MAX_PARTS = 16
LOG2E = math.log2(math.e)
NARROW_INDEX = range(2**31 + 1, 2**32 + 1)  # bytes: jax indexes such arrays by 32 bits, with a sign


@dataclass(frozen=True)
class Plan:
    """Static sizes of a call."""

    b: int
    t: int
    n: int
    m: int
    h: int
    pages: int
    page: int
    entries: int
    masked_slots: int  # KV slots that a mask covers; 0: there is none
    window: Window | None
    itemsize: int  # bytes of a query's number
    parts: int = 1  # programs that divide a request's steps
    cap: float | None = None  # that scores are squashed below

    @property
    def group(self) -> int:
        return self.n // self.m

    @property
    def rows(self) -> int:
        """Rows of a tile, some of which may be padding."""
        return max(LEAST_ROWS, min(1 << (self.t * self.group - 1).bit_length(), most_rows(self.h)))

    @property
    def tile_tokens(self) -> int:
        return self.rows // self.group

    @property
    def tiles(self) -> int:
        return -(-self.t // self.tile_tokens)

    @property
    def step(self) -> int:
        """Cached tokens that one step takes."""
        return min(self.page, step_tokens(self.h, self.itemsize))

    @property
    def launch(self) -> tuple[int, int]:
        """Warps of a program, and its pipeline stages.

        Four warps are faster where products leave their operands in shared memory. Elsewhere a thread would have too
        many numbers of 128 rows.
        """
        return 8 if self.rows == 128 and not portable.operands_stay() else 4, 2

    @property
    def last_step(self) -> int:
        """How many steps a page table has."""
        return self.entries * (self.page // self.step)


def most_rows(h: int) -> int:
    return 128 if h <= 128 else 2**14 // h


def step_tokens(h: int, itemsize: int) -> int:
    return max(LEAST_PAGE, (128 if h <= 128 else 2**14 // h) // itemsize)


def supported(q_shape: tuple[int, ...], kv: Any, dtype: Any) -> str | None:
    """Why the kernel can't serve queries [b, t, n, h] of `dtype` over `kv` [l, p, 2, m, s, h], None if it can."""
    n, h = q_shape[2:]
    m, s = kv.shape[3:5]
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries in {jnp.dtype(dtype).name}; bfloat16, float16 and float32 are supported"
    if kv.dtype not in (dtype, FP8):
        return f"a cache in {kv.dtype.name}; that of the queries and float8_e4m3fn are supported"
    if kv.dtype == FP8 and kv.size in NARROW_INDEX:
        return "a cache in float8_e4m3fn of 2 to 4 GiB; give --max-total-tokens for more or less"
    if h not in HEAD_WIDTHS:
        return f"heads of width {h}; {', '.join(map(str, HEAD_WIDTHS))} are supported"
    if s < LEAST_PAGE or s & (s - 1):
        return f"pages of {s} tokens; powers of two from {LEAST_PAGE} on are supported"
    return None if n // m <= most_rows(h) else f"{n // m} query heads for each KV head; up to {most_rows(h)} are"


def attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    mask: Bool[Array, "b t w"] | None = None,
    window: Window | None = None,
    depth: Int[Array, "b _"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    scales: Float[Array, "l 2 m"] | None = None,
    last: Int[Array, "b t"] | None = None,
    cap: float | None = None,
    *,
    parts: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b t n h"]:
    """Run `paged_attention.paged_attention`. `parts`: see `Plan`; None: by `division`."""
    hopper.count("portable_attention")
    (b, t, n, h), (p, _, m, s) = q.shape, kv.shape[1:5]
    masked_slots = 0 if mask is None else mask.shape[2]
    plan = Plan(b, t, n, m, h, p, s, table.shape[1], masked_slots, window, q.dtype.itemsize)
    plan = replace(plan, parts=parts or division(plan), cap=cap)
    given = dict(q=q.reshape(-1), table=table, start=start, layer=layer.reshape(1))
    if kv.dtype == FP8:
        kv = lax.bitcast_convert_type(kv, jnp.int8)  # which every card converts: see `fp8.numbers`
    given["kv"] = kv.reshape(-1, h)
    if mask is not None:
        given["mask"] = mask.astype(jnp.int8).reshape(-1)
    if mask is not None and depth is not None and window is not None:
        given["depth"] = depth[:, :t].reshape(-1)
    if scales is not None:
        given["scales"] = scales.reshape(-1)
    if sinks is not None:
        given["sinks"] = sinks.astype(jnp.float32)
    if last is not None:
        given["last"] = last.reshape(-1)
    return attend(plan, given, interpret=interpret).reshape(q.shape)


def division(plan: Plan) -> int:
    """The number of parts of a request's steps: so many that two programs a multiprocessor run at once."""
    tiles = plan.b * plan.m * plan.tiles
    seen = plan.last_step
    if plan.window is not None:
        seen = min(seen, (most_seen(plan.window) + (plan.masked_slots or plan.tile_tokens)) // plan.step + 2)
    parts = 1
    while parts < MAX_PARTS and 2 * parts <= seen and 2 * parts * tiles <= 2 * portable.multiprocessors():
        parts *= 2
    return parts


@partial(jax.jit, static_argnames=("plan", "tile", "interpret"))
def attend(plan: Plan, given: dict[str, Array], tile: Callable | None = None, *, interpret: bool) -> Float[Array, " x"]:
    """Launch the kernel, and the one that combines its parts. `tile`: what a program does; None: `_tile`."""
    rows, dtype = plan.b * plan.t * plan.n, given["q"].dtype
    out = jax.ShapeDtypeStruct((rows * plan.h,), dtype)
    sizes = plan.parts * rows * plan.h, 2 * plan.parts * rows
    parts = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    warps, stages = plan.launch
    made = pl.pallas_call(
        partial(tile or _tile, plan, tuple(given)),
        out_shape=[out] if plan.parts == 1 else parts,
        grid=(plan.tiles * plan.m, plan.b, plan.parts),
        compiler_params=portable.triton().CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="portable_attention",
    )(*given.values())
    if plan.parts == 1:
        return made[0]
    sinks = [given["sinks"]] if "sinks" in given else []
    return pl.pallas_call(
        partial(_combine, plan),
        out_shape=out,
        grid=(rows,),
        compiler_params=portable.triton().CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="portable_combine",
    )(*made, *sinks)


@dataclass(frozen=True)
class Rows:
    """The rows of a tile, and the steps that they see."""

    index: Array  # i32[rows] of q's rows
    valid: Array  # bool[rows]
    token: Array  # i32[rows] over all requests
    kv_slots: Array  # i32[rows], counted along the request's pages
    first: Array | None  # i32[rows], the first KV slot that a row sees; None: all so far
    steps: tuple[Array, Array]


def _rows_of(plan: Plan, ref: dict[str, Any], b: Array, tile: Array, head: Array) -> Rows:
    r = jnp.arange(plan.rows, dtype=jnp.int32)
    token = tile * plan.tile_tokens + lax.div(r, jnp.int32(plan.group))
    valid = (r < plan.tile_tokens * plan.group) & (token < plan.t)
    row = b * plan.t + token
    start = ref["start"][b]
    kv_slots = start + token
    last = start + (plan.masked_slots or jnp.minimum((tile + 1) * plan.tile_tokens, plan.t)) - 1
    first, begin = None, jnp.int32(0)
    position = kv_slots
    if "last" in ref:
        kv_slots = load(ref["last"].at[row], valid, -1)
        last = jnp.max(kv_slots)
    if plan.window is not None:
        earliest = start + tile * plan.tile_tokens
        if "depth" in ref:
            position, earliest = start + load(ref["depth"].at[row], valid, 0), start
        first = first_seen(position, plan.window)
        begin = jnp.maximum(first_seen(earliest, plan.window), 0)
    end = jnp.clip(steps(last, plan.step) + 1, 0, plan.last_step)
    begin = jnp.minimum(lax.div(begin, jnp.int32(plan.step)), end)
    index = row * plan.n + head * plan.group + lax.rem(r, jnp.int32(plan.group))
    return Rows(index, valid, row, kv_slots, first, (begin, end))


def steps(kv_slot: Array, step: int) -> Array:
    """kv_slot // step, rounded down for negative KV slots too."""
    return lax.shift_right_arithmetic(kv_slot, jnp.int32(step.bit_length() - 1))


def load(ref: Any, mask: Array, other: Any) -> Array:
    return portable.triton().load(ref, mask=mask, other=other)


def _store(ref: Any, value: Array, mask: Array) -> None:
    portable.triton().store(ref, value, mask=mask)


def _tile(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    """Attend a tile's rows to one part of the steps that they see."""
    ref = dict(zip(names, refs, strict=False))
    outs = refs[len(names) :]
    tile, head = lax.div(pl.program_id(0), jnp.int32(plan.m)), lax.rem(pl.program_id(0), jnp.int32(plan.m))
    b, part = plan.b - 1 - pl.program_id(1), pl.program_id(2)  # the last block of a prompt takes longest
    rows = _rows_of(plan, ref, b, tile, head)
    at = rows.index[:, None] * plan.h + jnp.arange(plan.h, dtype=jnp.int32)[None]
    q = load(ref["q"].at[at], rows.valid[:, None], 0.0)
    seen = None
    if plan.window is None:
        seen = ref["start"][b] if plan.masked_slots else ref["start"][b] + tile * plan.tile_tokens + 1
    scale = ref["scales"][(ref["layer"][0] * 2 + 1) * plan.m + head] if "scales" in ref else None
    walk(plan, ref, outs, rows, part, seen, partial(_step, plan, ref, rows, q, b, head), scale)


def walk(
    plan: Plan,
    ref: dict[str, Any],
    outs: Sequence[Any],
    rows: Rows,
    part: Array,
    seen: Array | None,
    step: Callable[..., tuple],
    scale: Array | None = None,
) -> None:
    """Take one part of the steps that a tile's rows see, and store what it gives.

    `seen`: all rows see the KV slots before it; None: nobody knows. `step(masked, i, carry)`: add the i-th step to
    (sums, maxima, totals). `scale`: of the values.
    """
    begin, end = rows.steps
    if plan.parts > 1:
        each = lax.div(end - begin + (plan.parts - 1), jnp.int32(plan.parts))
        begin, end = begin + part * each, jnp.minimum(begin + (part + 1) * each, end)
        begin = jnp.minimum(begin, end)
    at = rows.index[:, None] * plan.h + jnp.arange(plan.h, dtype=jnp.int32)[None]
    carry = (
        jnp.zeros((plan.rows, plan.h), jnp.float32),
        jnp.full((plan.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((plan.rows,), jnp.float32),
    )
    if seen is not None:
        whole = jnp.clip(steps(seen, plan.step), begin, end)
        carry = lax.fori_loop(begin, whole, partial(step, False), carry)
        begin = whole
    acc, top, total = lax.fori_loop(begin, end, partial(step, True), carry)
    if scale is not None:
        acc = acc * scale
    if plan.parts > 1:
        total_rows = plan.b * plan.t * plan.n
        _store(outs[0].at[part * total_rows * plan.h + at], acc, rows.valid[:, None])
        _store(outs[1].at[part * total_rows + rows.index], top, rows.valid)
        _store(outs[1].at[(plan.parts + part) * total_rows + rows.index], total, rows.valid)
        return
    if "sinks" in ref:
        sink = load(ref["sinks"].at[lax.rem(rows.index, jnp.int32(plan.n))], rows.valid, 0.0)
        total = total + jnp.exp2(sink * LOG2E - top)
    out = acc / jnp.maximum(total, 1e-30)[:, None]
    _store(outs[0].at[at], out.astype(outs[0].dtype), rows.valid[:, None])


def _step(plan, ref, rows, q, b, head, masked, i, carry):
    """Add the i-th step's scores, weights and values. `masked`: some row may not see all of its tokens."""
    per_page, layer = plan.page // plan.step, ref["layer"][0]
    page = ref["table"][b, lax.div(i, jnp.int32(per_page))]
    within = lax.rem(i, jnp.int32(per_page)) * plan.step

    def load(kind):
        of = ((layer * plan.pages + page) * 2 + kind) * plan.m + head
        x = ref["kv"].at[pl.ds(of * plan.page + within, plan.step), :][...]
        return x if x.dtype == q.dtype else fp8.numbers(x, q.dtype)

    scale = plan.h**-0.5 * (LOG2E if plan.cap is None else 1 / plan.cap)
    if "scales" in ref:
        scale = scale * ref["scales"][layer * 2 * plan.m + head]
    scores = lax.dot_general(q, load(0), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale
    scores = scores if plan.cap is None else jnp.tanh(scores) * (plan.cap * LOG2E)
    return add_step(carry, scores, seen(plan, ref, rows, b, i) if masked else None, partial(load, 1), q.dtype)


def add_step(
    carry: tuple[Array, Array, Array],
    scores: Float[Array, "r s"],
    seen: Bool[Array, "r s"] | None,
    values: Callable[[], Float[Array, "s h"]],
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Add a step's scores, in base 2, and its values to the running sums. `seen`: None: every row sees all of them."""
    acc, top, total = carry
    masked = seen is not None
    if masked:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
    weights, shrink = jnp.exp2(scores - safe[:, None]), jnp.exp2(top - safe)
    mix = jnp.dot(weights.astype(dtype), values(), preferred_element_type=jnp.float32)
    return acc * shrink[:, None] + mix, new_top, total * shrink + jnp.sum(weights, axis=1)


def seen(plan: Plan, ref: dict[str, Any], rows: Rows, b: Array, i: Array) -> Bool[Array, "r s"]:
    """Whether each row sees each of a step's tokens."""
    kv_slots = i * plan.step + jnp.arange(plan.step, dtype=jnp.int32)
    old = rows.kv_slots[:, None] >= kv_slots[None] if not plan.masked_slots else (kv_slots < ref["start"][b])[None]
    if rows.first is not None:
        old = old & (kv_slots[None] >= rows.first[:, None])
    if not plan.masked_slots:
        return old
    new = kv_slots - ref["start"][b]
    listed = (new >= 0) & (new < plan.masked_slots)
    at = rows.token[:, None] * plan.masked_slots + jnp.where(listed, new, 0)[None]
    given = load(ref["mask"].at[at], rows.valid[:, None] & listed[None], 0)
    return old | (given != 0)


def _combine(plan: Plan, parts_ref: Any, sums_ref: Any, *refs: Any) -> None:
    """Combine the parts' results of one row."""
    row, out_ref = pl.program_id(0), refs[-1]
    rows, column = plan.b * plan.t * plan.n, jnp.arange(plan.h, dtype=jnp.int32)
    at = jnp.arange(plan.parts, dtype=jnp.int32) * rows + row
    top, total = sums_ref[at], sums_ref[at + plan.parts * rows]
    highest = jnp.max(top, axis=0)
    safe = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp2(top - safe)
    whole = jnp.sum(total * weights, axis=0)
    mix = jnp.sum(parts_ref[at[:, None] * plan.h + column[None]] * weights[:, None], axis=0)
    if len(refs) > 1:
        whole = whole + jnp.exp2(refs[0][lax.rem(row, jnp.int32(plan.n))] * LOG2E - safe)
    out_ref[row * plan.h + column] = (mix / jnp.maximum(whole, 1e-30)).astype(out_ref.dtype)
