"""One warpgroup of the decode kernel: it streams its part's keys and values in, and keeps a running softmax.

`_Stream` is its producer's half: which steps are the part's, and the ring of shared memory that they pass through.
`_Rows` is its consumer's: scores, weights and sums of the tile's rows. Both halves run in turn in the same warps, while
later steps are prefetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.positions import Chunks, first_seen
from jaxspec.pallas.attention.decode_attention import e4m3
from jaxspec.pallas.attention.decode_attention.plan import MAX_MASKED_SLOTS, Plan
from jaxspec.pallas.attention.decode_attention.results import combine, combine_segments, write_part, write_rows
from jaxspec.pallas.attention.decode_attention.tiles import (
    add_product,
    by_row,
    over_tokens,
    product,
    put,
    row_a_warp,
    spread,
    transposed,
)

FLOOR = -1e30  # a running maximum that nothing has raised; finite, so that differences of maxima are numbers


class _Refs(NamedTuple):
    """References to operands and results in the GPU's memory."""

    q: Any
    kv: Any
    table: Any
    start: Any
    layer: Any
    scales: Any  # None if there are none, as are the next three
    bits: Any
    depths: Any
    sinks: Any
    results: list[Any]

    @classmethod
    def of(cls, plan: Plan, scaled: bool, refs: tuple) -> _Refs:
        *given, rest = *refs[:5], list(refs[5:])
        optional = [rest.pop(0) if there else None for there in (scaled, plan.masked_slots, plan.depths, plan.sinks)]
        return cls(*given, *optional, rest)


def warpgroup(
    plan: Plan, scaled: bool, *refs, ring, q_s, staging, ready, q_ready, wide_s=None, staged=None, sums_s=None,
    part_s=None,
):  # fmt: skip
    """Run one warpgroup of one block: attend a tile of query rows to its part of a request's tokens.

    If there are several parts, wait for the others, then combine a share of the rows.
    """
    refs = _Refs.of(plan, scaled, refs)
    b, head, tile, split, w = (lax.axis_index(name) for name in ("b", "m", "tile", "split", "warpgroup"))
    part = split * plan.warpgroups + w
    if plan.segment:
        part_s = part_s.at[w]
    elif plan.parts > 1:
        ring, part_s = ring[0], ring[1].at[w, 0]
    rows_s = staging[0]

    # Loads from memory are issued together, or each would wait for the one before.
    layer, start = refs.layer[0], refs.start[b]
    wide_s = None if wide_s is None else wide_s.at[w]
    skipped = _skipped(plan, start, tile)
    stream = _Stream(plan, refs, b, head, part, layer, skipped, w, ring.at[w], ready, wide_s)
    first_ids = [stream.pages(i) for i in range(plan.stages)]
    next_ids = stream.pages(plan.stages)
    _fetch_queries(plan, refs.q, b, tile, head, rows_s, q_ready.at[w])

    first = start + tile * plan.tile_tokens
    end = start + plan.masked_slots if plan.masked_slots else first + plan.tile_tokens
    end = jnp.clip(end, 0, plan.entries * plan.page)
    count = stream.share(lax.div(end + (plan.step - 1), jnp.int32(plan.step)))
    for i, ids in enumerate(first_ids):

        @pl.when(i < count)
        def _(i=i, ids=ids):
            stream.fetch(i, ids, 0, i)
            stream.fetch(i, ids, 1, i)

    plgpu.barrier_wait(q_ready.at[w])
    q_s[...] = _queries(plan, plgpu.load(rows_s, layout=row_a_warp(plan.h), optimized=False))
    plgpu.commit_smem()
    if plan.warpgroups > 1:
        # All warpgroups write the same rows to the same memory. None may write weights there before all have read them.
        plgpu.barrier_arrive(staged)
        plgpu.barrier_wait(staged)

    key_scale, value_scale = (refs.scales[layer, i, head] for i in (0, 1)) if scaled else (None, None)
    factor = plan.h**-0.5 * math.log2(math.e)
    factor = factor * key_scale if scaled else jnp.float32(factor)
    by_rows = partial(plgpu.load, layout=by_row(plan), optimized=False)
    bits, depths = (None if ref is None else by_rows(ref.at[b, tile]) for ref in (refs.bits, refs.depths))
    rows = _Rows(plan, stream, start, first, bits, depths, factor, count, q_s, *(ref.at[w] for ref in staging[1]))
    if plan.segment:
        _segments(
            plan, rows, next_ids, part, part_s, sums_s.at[w], *(ref.at[b, head, tile] for ref in refs.results[:2])
        )
        if not plan.interpret:
            _see_all_parts(plan, b, head, tile)
            combine_segments(plan, refs.start, *refs.results, staging=staging)
        return
    acc, top, total, _ = rows.attend(next_ids)
    if plan.in_registers:
        acc = e4m3.restored(acc)
    if scaled:
        acc = acc * value_scale

    if plan.parts == 1:
        if plan.sinks:
            total = total + jnp.exp2(by_rows(refs.sinks.at[head]) - top)  # infinite where nothing was seen
        write_rows(plan, acc, total, rows_s, refs.results[0].at[b], tile, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return
    mine = (ref.at[b, head, tile, part] for ref in refs.results[:2])
    write_part(plan, acc, top, total, part_s, sums_s.at[w], *mine)
    if not plan.interpret:
        _see_all_parts(plan, b, head, tile)
        combine(plan, refs.sinks, *refs.results, staging=staging)


def _see_all_parts(plan: Plan, b, head, tile) -> None:
    """Wait until all parts of a tile have written their results."""
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.b, plan.m, plan.tiles))).at[b, head, tile]
    plgpu.semaphore_signal(done, memory_scope="gpu")
    plgpu.semaphore_wait(done, plan.parts, decrement=False, memory_scope="gpu")


def _segments(plan: Plan, rows: _Rows, ids, part, part_s, sums_s, parts_g, sums_g) -> None:
    """Sum each of a part's segments by itself, and write it."""

    def one(j, ids):
        end = jnp.minimum((j + 1) * plan.segment, rows.count)
        acc, top, total, ids = rows.attend(ids, j * plan.segment, end)
        at = part + j * plan.parts
        write_part(plan, acc, top, total, part_s, sums_s, parts_g.at[at], sums_g.at[at])
        return ids

    lax.fori_loop(jnp.int32(0), lax.div(rows.count + (plan.segment - 1), jnp.int32(plan.segment)), one, ids)


def _fetch_queries(plan: Plan, q_g, b, tile, head, rows_s, ready) -> None:
    """Begin to copy a tile's rows; padding rows repeat the last token's."""
    for i in range(plan.tile_tokens):
        token = jnp.minimum(tile * plan.tile_tokens + i, plan.t - 1)
        source = q_g.at[b, token, pl.ds(head * plan.group, plan.group)]
        plgpu.copy_gmem_to_smem(source, rows_s.at[pl.ds(i * plan.group, plan.group)], ready)


def _queries(plan: Plan, rows):
    """Convert rows to the tensor cores' dtype and order of columns."""
    if not plan.fp8:
        return rows
    rows = jnp.clip(rows.astype(jnp.float32), -e4m3.LARGEST, e4m3.LARGEST).astype(plan.dtype)
    return e4m3.permuted(rows, row_a_warp(plan.h)) if plan.in_registers else rows


def _sight(plan: Plan, start, tile):
    """The first KV slots that a tile's rows see: the row that sees furthest back, and the row that sees least."""
    if plan.masked_slots:
        first, rows = start, plan.masked_slots
    else:
        first, rows = start + tile * plan.tile_tokens, plan.tile_tokens
    return first_seen(first, plan.window), first_seen(first + (rows - 1), plan.window)


def _in_window(plan: Plan, kv_slots, position):
    """Whether KV slots aren't before the windows of rows at these positions."""
    if isinstance(plan.window, Chunks):
        return kv_slots >= first_seen(position, plan.window)
    return kv_slots > position - plan.window


def _skipped(plan: Plan, start, tile):
    """How many of the request's steps lie before the window of all rows."""
    if plan.window is None:
        return 0
    return lax.div(jnp.maximum(_sight(plan, start, tile)[0], 0), jnp.int32(plan.step))


@dataclass(frozen=True)
class _Stream:
    """A part's keys and values, as they pass through its ring."""

    plan: Plan
    refs: _Refs
    b: Any
    head: Any
    part: Any
    layer: Any
    skipped: Any
    w: Any
    ring: Any
    ready: Any  # barriers of all warpgroups' rings
    wide_s: Any  # shared memory for an fp8 cache's keys or values in a wider dtype

    def step(self, i):
        """The request's step that is the i-th of this part."""
        if size := self.plan.segment:
            return (self.part + lax.div(i, jnp.int32(size)) * self.plan.parts) * size + lax.rem(i, jnp.int32(size))
        step = self.part + i * self.plan.parts
        return step if self.plan.window is None else self.skipped + step

    def share(self, steps):
        """How many of the request's first `steps` are this part's."""
        if size := self.plan.segment:  # whole segments, and the beginning of one
            whole, parts = lax.div(steps, jnp.int32(size)), self.plan.parts
            mine = lax.div(jnp.maximum(whole - self.part, 0) + (parts - 1), jnp.int32(parts))
            return mine * size + jnp.where(lax.rem(whole, jnp.int32(parts)) == self.part, steps - whole * size, 0)
        if self.plan.window is not None:
            steps = steps - self.skipped
        return lax.div(jnp.maximum(steps - self.part, 0) + (self.plan.parts - 1), jnp.int32(self.plan.parts))

    def pages(self, i):
        """The pages that hold the i-th step's tokens. Past the table's end its last page stands in, and is masked."""
        plan, step = self.plan, self.step(i)
        first = lax.div(step, jnp.int32(plan.page // plan.step)) if plan.page > plan.step else step * plan.copies
        return [self.refs.table[self.b, jnp.minimum(first + i, plan.entries - 1)] for i in range(plan.copies)]

    def fetch(self, i, ids, kind, stage):
        """Begin to copy the keys (kind 0) or values (1) of the i-th step, on pages `ids`, into a slot of the ring."""
        plan, step, slot = self.plan, self.step(i), self.ring.at[stage, kind]
        for i, page in enumerate(ids):
            source, target = self.refs.kv.at[self.layer].at[page, kind, self.head], slot
            if plan.page > plan.step:
                source = source.at[pl.ds(lax.rem(step, jnp.int32(plan.page // plan.step)) * plan.step, plan.step)]
            if plan.page < plan.step:
                target = slot.at[pl.ds(i * plan.page, plan.page)]
            plgpu.copy_gmem_to_smem(source, target, self.ready.at[self.w, stage, kind])

    def operand(self, stage, kind):
        """Wait for the keys (kind 0) or values (1) of a stage: [step, h] in shared memory, in the products' dtype."""
        plgpu.barrier_wait(self.ready.at[self.w, stage, kind])
        if not self.plan.fp8:
            return self.ring.at[stage, kind]
        self.wide_s[...] = self.ring[stage, kind].astype(self.plan.dtype)
        plgpu.commit_smem()
        return self.wide_s

    def left(self, stage, kind):
        """Wait for a stage's keys [step, h], or values transposed [h, step]: the left operand where rows are narrow."""
        if not self.plan.in_registers:
            operand = self.operand(stage, kind)
            return transposed(operand) if kind else operand
        plgpu.barrier_wait(self.ready.at[self.w, stage, kind])
        return (e4m3.keys, e4m3.values)[kind](self.ring.at[stage, kind])


@dataclass(frozen=True)
class _Rows:
    """The online softmax of a tile's rows over a part's `count` steps. Scores are in base 2."""

    plan: Plan
    stream: _Stream
    start: Any
    first: Any  # the KV slot of the tile's first row
    bits: Any
    depths: Any
    factor: Any
    count: Any
    q_s: Any
    p_s: Any
    exchange_s: Any = None

    def attend(self, ids, begin=0, count=None):
        """Each row's sum of weighted values, largest score and sum of weights, over the part's steps from `begin` up to
        `count`. `ids`: the pages of the first step that isn't fetched yet; those at the end are returned."""
        plan, stream, count = self.plan, self.stream, self.count if count is None else count
        # Steps with tokens that some row doesn't see need a mask. The others, if any, do without.
        whole = jnp.maximum(self.start if plan.masked_slots else self.first + 1, 0)
        whole = jnp.minimum(stream.share(lax.div(whole, jnp.int32(plan.step))), count)
        entered, carry = jnp.int32(begin), (*self._nothing(), ids)
        whole = whole if plan.segment == 0 else jnp.maximum(whole, entered)
        if plan.window is not None:  # it begins within the first steps
            _, last = _sight(plan, self.start, lax.axis_index("tile"))
            entered = lax.div(jnp.maximum(last, 0) + (plan.step - 1), jnp.int32(plan.step))
            entered = jnp.minimum(stream.share(entered), count)
            whole = jnp.maximum(whole, entered)
            carry = lax.fori_loop(jnp.int32(0), entered, partial(self._step, True), carry)
        carry = lax.fori_loop(entered, whole, partial(self._step, False), carry)
        acc, top, total, ids = lax.fori_loop(whole, count, partial(self._step, True), carry)
        if plan.narrow:
            total = over_tokens(plan, "add", total, self.exchange_s)
        return acc, top, total, ids

    def _nothing(self):
        """The weighted sum of values, the largest score and the sum of weights of rows that have seen no token yet."""
        plan, layout = self.plan, plgpu.Layout.WGMMA
        acc, scores = ((width, plan.rows) if plan.narrow else (plan.rows, width) for width in (plan.h, plan.step))
        total = jnp.zeros(scores if plan.narrow else plan.rows, jnp.float32)
        return (
            plgpu.layout_cast(jnp.zeros(acc, jnp.float32), layout),
            plgpu.layout_cast(jnp.full((plan.rows,), FLOOR, jnp.float32), by_row(plan)),
            plgpu.layout_cast(total, layout if plan.narrow else by_row(plan)),
        )

    def _step(self, masked, i, carry):
        """Add the i-th step's scores, weights and values, and refill its stage once they are read."""
        acc, top, total, ids = carry
        plan, stream, narrow = self.plan, self.stream, self.plan.narrow
        stage = lax.rem(i, jnp.int32(plan.stages))
        prefetch = i + plan.stages
        next_ids = stream.pages(prefetch + 1)  # a step before they are needed, since they come from memory
        if narrow:
            scores = product(stream.left(stage, 0), transposed(self.q_s))
        else:
            scores = product(self.q_s, transposed(stream.operand(stage, 0)))
        if masked:
            scores = jnp.where(self._seen(stream.step(i) * plan.step), scores, -jnp.inf)
        new_top = jnp.maximum(top, over_tokens(plan, "max", scores, self.exchange_s) * self.factor)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * self.factor - spread(plan, new_top, scores))
        if narrow:  # each thread for itself, until the end
            total = total * spread(plan, shrink, total) + weights
        else:
            total = total * shrink + over_tokens(plan, "add", weights)
        put(plan, self.p_s, weights)
        plgpu.commit_smem()  # all warps are done with the keys, too
        pl.when(prefetch < self.count)(lambda: stream.fetch(prefetch, ids, 0, stage))
        acc = acc * spread(plan, shrink, acc)
        if narrow:
            acc = add_product(plan, acc, stream.left(stage, 1), transposed(self.p_s))
        else:
            acc = add_product(plan, acc, self.p_s, stream.operand(stage, 1))
        plgpu.commit_smem()  # all warps are done with the values and the weights
        pl.when(prefetch < self.count)(lambda: stream.fetch(prefetch, ids, 1, stage))
        return acc, new_top, total, next_ids

    def _seen(self, first):
        """Whether each row sees each token of the step that begins at KV slot `first`, a bool for each score."""
        plan, layout = self.plan, plgpu.Layout.WGMMA
        shape = (plan.step, plan.rows) if plan.narrow else (plan.rows, plan.step)
        tokens, rows = (0, 1) if plan.narrow else (1, 0)
        kv_slots = plgpu.broadcasted_iota(jnp.int32, shape, tokens, layout=layout) + first
        if not plan.masked_slots or (plan.window is not None and self.depths is None):
            row = plgpu.broadcasted_iota(jnp.int32, shape, rows, layout=layout)
            position = self.first + lax.div(row, jnp.int32(plan.group))
        elif plan.window is not None:
            position = self.start + spread(plan, self.depths, kv_slots)
        if not plan.masked_slots:
            seen = kv_slots <= position
            return seen if plan.window is None else seen & _in_window(plan, kv_slots, position)
        new = kv_slots - self.start
        bit = lax.shift_right_logical(spread(plan, self.bits, kv_slots), jnp.clip(new, 0, MAX_MASKED_SLOTS - 1)) & 1
        if plan.window is None:
            return (new < 0) | ((new < plan.masked_slots) & (bit == 1))
        return jnp.where(new < 0, _in_window(plan, kv_slots, position), (new < plan.masked_slots) & (bit == 1))
