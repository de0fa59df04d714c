"""Attention of long prompt blocks over the paged cache, on Hopper's tensor cores (Pallas, Mosaic GPU).

A persistent grid takes tiles from a queue, the longest first. A tile is one block of tokens and two units that share
a kv head; a unit is 64 query rows: 64 tokens of one head or, in shorter blocks, fewer tokens of several heads. In
each CTA a producer warpgroup copies queries and pages into rings of shared memory, and one consumer warpgroup for
each unit computes. The invariant of the rings: a slot is filled only after every consumer has released it. Consumers
begin by releasing what is empty, and the producer ends by seeing all slots released.

A consumer walks the keys backwards from the end of its block, so that only its first steps need a mask. A row that
has seen nothing but masked scores carries a meaningless sum, which the shrinking at its first real score wipes out;
position 0, which every row sees, comes last. The scores of a step and the mix of the step before it are in flight
together: the softmax hides behind the mix, and behind the products of the other consumer.

Interpret mode knows neither weights in registers as an operand of the mix nor an accumulator that starts from a
value. There alone, weights pass through shared memory and the mix is added afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper import MULTIPROCESSORS, WGMMA_ROWS
from jaxspec.pallas.once import lower_once

UNIT = WGMMA_ROWS  # query rows of a consumer
STAGES = 2  # slots of the key and value rings
MASKED = -(2.0**100)  # finite, or rows without a visible score turn NaN; a power of two, so that scaling it is exact
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)


def supported(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any) -> str | None:
    """None if `prompt_attention` takes queries and a cache of these shapes and this cache dtype, else why not."""
    (_, t, n, h), (_, _, _, m, page_size, kv_h) = q_shape, kv_shape
    if h not in HEAD_DIMS or kv_h != h:
        return f"heads of queries and cache are {h} and {kv_h} wide; they must be equal, and one of {HEAD_DIMS}"
    if n % m:
        return f"{n} query heads are not a multiple of {m} kv heads"
    if t % UNIT and t not in (8, 16, 32):
        return f"blocks are {t} tokens; they must be 8, 16, 32 or a multiple of {UNIT}"
    if page_size not in PAGE_SIZES:
        return f"pages are {page_size} tokens; they must be one of {PAGE_SIZES}"
    if dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return f"the cache is {jnp.dtype(dtype).name}; it must be bfloat16 or float8_e4m3fn"
    return None


@lower_once("prompt_attention", "sms")
def prompt_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    *,
    scales: Float[Array, "l 2 m"] | None = None,
    interpret: Any = False,
    sms: int = MULTIPROCESSORS,
) -> Float[Array, "b t n h"]:
    """Causal attention of blocks of t prompt tokens, whose own keys and values are already in `kv`.

    Block i is at positions `start[i] + 0..t-1` (a negative start counts as 0) of the request whose pages `table[i]`
    lists; several blocks may belong to one request. `q` is bfloat16 and unscaled: scores are scaled by h**-0.5. Keys
    and values are multiplied by `scales[layer, 0]` and `scales[layer, 1]`, positive, for each kv head (None: 1).
    Returns the mix of values in bfloat16. Rows past the last page return something finite.

    `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU; `sms` is the number of CTAs that share the work.

    **Raises:** `ValueError` with the reason of `supported`, or if `q` isn't bfloat16.
    """
    if reason := supported(q.shape, kv.shape, kv.dtype):
        raise ValueError(f"prompt_attention: {reason}")
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"prompt_attention: queries are {q.dtype.name}; they must be bfloat16")
    plan = _Plan(q.shape, kv.shape, table.shape[1], kv.dtype == jnp.float8_e4m3fn, sms, bool(interpret))
    if scales is None:
        scales = jnp.ones((kv.shape[0], 2, plan.m), jnp.float32)
    start = jnp.maximum(start, 0)
    longest_first = jnp.argsort(start, descending=True)  # one sort a program: XLA sees that all layers want the same
    queue = jnp.stack([longest_first.astype(jnp.int32), start[longest_first]])
    call = plgpu.kernel(
        partial(_kernel, plan),
        kernel_name="prompt_attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[plan.scratch()],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(q, kv, layer.reshape(1), table, queue, scales)


class _Plan:
    """What is static about one call: its shapes, and the tiling that follows from them."""

    def __init__(self, q_shape, kv_shape, entries: int, fp8: bool, sms: int, interpret: bool):
        self.blocks, self.t, n, self.h = q_shape
        self.m, self.page_size = kv_shape[3:5]
        self.entries, self.fp8, self.interpret = entries, fp8, interpret
        self.group = n // self.m

        self.rows = min(self.t, UNIT)  # tokens of a unit
        self.heads = UNIT // self.rows  # heads of a unit
        self.head_units = -(-self.group // self.heads)  # the last repeats heads that it lacks, to the same result
        self.units = self.t // self.rows * self.head_units  # of one block and kv head, in order of position
        self.consumers = min(2, self.units)
        self.pairs = -(-self.units // self.consumers)  # of an odd number of units, the last is computed twice
        self.tiles = self.blocks * self.pairs * self.m
        self.ctas = min(sms, self.tiles)

        self.keys = 64 if self.h == 256 else 128  # of a step: as many as registers and shared memory hold
        self.copy_rows = min(self.keys, self.page_size)
        self.copies = self.keys // self.copy_rows  # that fill a slot of the key or value ring
        self.q_slots = 1 if self.h == 256 else 2  # two let the next queries come early, if shared memory holds them

    def scratch(self) -> _Scratch:
        def ring(slots: int, shape: tuple[int, ...], arrivals: int) -> _Ring:
            filled = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
            released = plgpu.Barrier(num_arrivals=self.consumers, num_barriers=slots)
            return _Ring(plgpu.SMEM(shape, jnp.bfloat16), filled, released)

        queries = (self.q_slots * self.consumers, UNIT, self.h)
        cached = (STAGES, self.keys, self.h)
        raw = plgpu.SMEM((2, self.keys, self.h), jnp.float8_e4m3fn)
        return _Scratch(
            ring(self.q_slots, queries, self.consumers * self.heads),
            ring(STAGES, cached, 1 if self.fp8 else self.copies),
            ring(STAGES, cached, 1 if self.fp8 else self.copies),
            (raw, plgpu.Barrier(num_arrivals=self.copies, num_barriers=2)) if self.fp8 else None,
            plgpu.SMEM((self.consumers, UNIT, self.keys), jnp.bfloat16) if self.interpret else None,
        )


class _Ring(NamedTuple):
    """Slots of shared memory, and for each slot the barriers that say who may have it."""

    slots: Any
    filled: Any
    released: Any


class _Scratch(NamedTuple):
    q: _Ring  # consumers' units side by side; a unit's output leaves from where its queries were
    k: _Ring
    v: _Ring
    raw: tuple[Any, Any] | None  # an fp8 cache's keys and values on their way, and their barriers
    weights: Any  # in interpret mode


class _Refs(NamedTuple):
    q: Any
    kv: Any
    layer: Any
    table: Any
    queue: Any
    scales: Any
    out: Any


def _kernel(plan: _Plan, *operands) -> None:
    *refs, scratch = operands
    refs = _Refs(*refs)
    me = lax.axis_index("warpgroup")

    @pl.when(me < plan.consumers)
    def _():
        if plan.consumers == 2:  # a lone consumer has registers enough without asking
            plgpu.set_max_registers(216 if plan.fp8 else 232, action="increase")
        _consume(plan, refs, scratch, me)

    @pl.when(me == plan.consumers)
    def _():
        if plan.consumers == 2:
            plgpu.set_max_registers(72 if plan.fp8 else 40, action="decrease")
        _produce(plan, refs, scratch)


def _div(x, y: int):
    return lax.div(x, jnp.int32(y))


def _rem(x, y: int):
    return lax.rem(x, jnp.int32(y))


@dataclass(frozen=True)
class _Tile:
    """Where a tile lies: its block and that block's start, its kv head, its pair of units; and what keys it sees."""

    plan: _Plan
    block: Any
    start: Any
    kv_head: Any
    pair: Any

    @property
    def last(self):
        """The last row's position."""
        return self.first(self.plan.consumers - 1) + self.plan.rows - 1

    @property
    def steps(self):
        return _div(self.last, self.plan.keys) + 1

    @property
    def masked_steps(self):
        """Steps with keys that some row mustn't see: at least one."""
        return self.steps - _div(self.first(0) + 1, self.plan.keys)

    def first(self, consumer):
        """The position of a consumer's first row."""
        return self.start + self.part(consumer) * self.plan.rows

    def unit(self, consumer):
        return jnp.minimum(self.pair * self.plan.consumers + consumer, self.plan.units - 1)

    def part(self, consumer):
        """Which 64 tokens of a long block a consumer's unit has."""
        return _div(self.unit(consumer), self.plan.head_units)

    def slices(self, consumer) -> Iterator[tuple[Any, Any]]:
        """For each head of a consumer's unit: its rows in the unit, and where they are in q and out."""
        plan = self.plan
        for i in range(plan.heads):
            head = jnp.minimum(_rem(self.unit(consumer), plan.head_units) * plan.heads + i, plan.group - 1)
            rows = pl.ds(self.part(consumer) * plan.rows, plan.rows)
            yield pl.ds(i * plan.rows, plan.rows), (self.block, rows, self.kv_head * plan.group + head)


def _walk(plan: _Plan, refs: _Refs, visit: Callable) -> Any:
    """Visit this CTA's tiles: `visit(tile, round, step) -> next step`, steps counted over all tiles. Returns rounds.

    Odd rounds hand out tiles in mirrored order, so that nobody always gets the longest.
    """
    cta = lax.axis_index("cta")
    full, rest = divmod(plan.tiles, plan.ctas)
    rounds = full + jnp.where((plan.ctas - 1 - cta if full % 2 else cta) < rest, 1, 0)

    def go(round_, step):
        index = round_ * plan.ctas + jnp.where(_rem(round_, 2) == 0, cta, plan.ctas - 1 - cta)
        place = _div(index, plan.m * plan.pairs)
        pair = plan.pairs - 1 - _rem(_div(index, plan.m), plan.pairs)
        tile = _Tile(plan, refs.queue[0, place], refs.queue[1, place], _rem(index, plan.m), pair)
        return visit(tile, round_, step)

    lax.fori_loop(0, rounds, go, jnp.int32(0))
    return rounds


def _produce(plan: _Plan, refs: _Refs, scratch: _Scratch) -> None:
    """Fill the rings in the order in which consumers drain them."""
    layer = refs.layer[0]

    def visit(tile: _Tile, round_, step):
        slot = _rem(round_, plan.q_slots)
        plgpu.barrier_wait(scratch.q.released.at[slot])
        for consumer in range(plan.consumers):
            for rows, at in tile.slices(consumer):
                to = scratch.q.slots.at[slot * plan.consumers + consumer, rows]
                plgpu.copy_gmem_to_smem(refs.q.at[at], to, scratch.q.filled.at[slot])
        last_entry = jnp.minimum(_div(tile.last, plan.page_size), plan.entries - 1)

        def fetch(i, step):
            token = (tile.steps - 1 - i) * plan.keys
            part = _rem(_div(token, plan.keys), plan.page_size // plan.copy_rows)  # of a page larger than a step
            rows = pl.ds(part * plan.copy_rows, plan.copy_rows)
            entries = (_div(token + c * plan.copy_rows, plan.page_size) for c in range(plan.copies))
            pages = [refs.table[tile.block, jnp.minimum(entry, last_entry)] for entry in entries]
            for which in (0, 1):
                sources = [refs.kv.at[layer, page, which, tile.kv_head, rows] for page in pages]
                _fill(plan, scratch, which, _rem(step, STAGES), sources)
            return step + 1

        return lax.fori_loop(0, tile.steps, fetch, step)

    _walk(plan, refs, visit)
    for ring in (scratch.q, scratch.k, scratch.v):
        for slot in range(plan.q_slots if ring is scratch.q else STAGES):
            plgpu.barrier_wait(ring.released.at[slot])


def _fill(plan: _Plan, scratch: _Scratch, which: int, slot, sources: list) -> None:
    """Copy pieces of pages into a slot of the key (0) or value (1) ring; those of an fp8 cache by way of registers."""
    ring = (scratch.k, scratch.v)[which]
    plgpu.barrier_wait(ring.released.at[slot])
    to, filled = ring.slots.at[slot], ring.filled.at[slot]
    if plan.fp8:
        to, filled = (x.at[which] for x in scratch.raw)
    for c, source in enumerate(sources):
        plgpu.copy_gmem_to_smem(source, to.at[pl.ds(c * plan.copy_rows, plan.copy_rows)], filled)
    if plan.fp8:
        plgpu.barrier_wait(filled)
        for c in range(plan.keys // UNIT):
            rows = pl.ds(c * UNIT, UNIT)
            raw = plgpu.load(to.at[rows], layout=plgpu.Layout.WGMMA)
            ring.slots[slot, rows] = raw.astype(jnp.float32).astype(jnp.bfloat16)  # hardware knows no direct way
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.filled.at[slot])


def _consume(plan: _Plan, refs: _Refs, scratch: _Scratch, me) -> None:
    layer = refs.layer[0]

    def release_queries(round_):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output that was there has left
        plgpu.barrier_arrive(scratch.q.released.at[_rem(round_, plan.q_slots)])

    def visit(tile: _Tile, round_, step):
        slot = _rem(round_, plan.q_slots)
        q_s = scratch.q.slots.at[slot * plan.consumers + me]
        k_scale, v_scale = (refs.scales[layer, which, tile.kv_head] for which in (0, 1))
        unit = _Unit(plan, scratch, tile, me, q_s, step, k_scale * (plan.h**-0.5 * math.log2(math.e)))
        plgpu.barrier_wait(scratch.q.filled.at[slot])
        # With two slots, the other one's output has all of the first product's time to leave.
        mix, total = unit.attend(partial(release_queries, round_ + 1) if plan.q_slots == 2 else lambda: None)
        q_s[...] = (mix * lax.broadcast_in_dim(v_scale / total, mix.shape, [0])).astype(jnp.bfloat16)
        plgpu.commit_smem()
        for rows, at in tile.slices(me):
            plgpu.copy_smem_to_gmem(q_s.at[rows], refs.out.at[at])
        if plan.q_slots == 1:
            release_queries(round_)
        return step + tile.steps

    for slot in range(STAGES):
        plgpu.barrier_arrive(scratch.k.released.at[slot])
        plgpu.barrier_arrive(scratch.v.released.at[slot])
    plgpu.barrier_arrive(scratch.q.released.at[0])
    rounds = _walk(plan, refs, visit)
    if plan.q_slots == 2:
        release_queries(rounds - 1)


@dataclass(frozen=True)
class _Unit:
    """The attention of one unit, whose first step is step number `step` of the rings. Scores are in base 2."""

    plan: _Plan
    scratch: _Scratch
    tile: _Tile
    me: Any
    q_s: Any
    step: Any
    scale: Any

    def attend(self, meanwhile: Callable):
        """The unnormalised mix of values f32[64, h] and the sums of weights f32[64].

        `meanwhile` is called while the first product is under way.
        """
        plan, tile, layout = self.plan, self.tile, plgpu.Layout.WGMMA
        scores, mix = plgpu.ACC((UNIT, plan.keys), jnp.float32), plgpu.ACC((UNIT, plan.h), jnp.float32)

        def first(scores):
            slot = self._score(scores, 0)
            meanwhile()
            value = scores[...]
            plgpu.barrier_arrive(self.scratch.k.released.at[slot])
            return value

        def middle(i, carry, masked: bool):
            return pl.run_scoped(partial(self._overlapped, i, masked, *carry), scores, mix)

        def final(mix):
            self._start(mix, acc)
            slot = self._mix(mix, tile.steps - 1, weights)
            return self._mixed(mix, slot, acc)

        top = plgpu.layout_cast(jnp.full((UNIT,), MASKED, jnp.float32), layout.reduce(1))
        total = plgpu.layout_cast(jnp.zeros((UNIT,), jnp.float32), layout.reduce(1))
        acc = plgpu.layout_cast(jnp.zeros((UNIT, plan.h), jnp.float32), layout)
        weights, top, total, _ = self._weigh(0, True, pl.run_scoped(first, scores), top, total)
        carry = (acc, weights.astype(jnp.bfloat16), top, total)
        carry = lax.fori_loop(1, tile.masked_steps, partial(middle, masked=True), carry)
        carry = lax.fori_loop(tile.masked_steps, tile.steps, partial(middle, masked=False), carry)
        acc, weights, _, total = carry
        return pl.run_scoped(final, mix), total

    def _overlapped(self, i, masked: bool, acc, weights, top, total, scores, mix):
        """Step i's scores and softmax, and the mix of step i-1, at once."""
        self._start(mix, acc)
        k_slot = self._score(scores, i)
        v_slot = self._mix(mix, i - 1, weights)
        value = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        plgpu.barrier_arrive(self.scratch.k.released.at[k_slot])
        weights, top, total, shrink = self._weigh(i, masked, value, top, total)
        acc = self._mixed(mix, v_slot, acc)
        # Rounded any earlier, while the old weights are still an operand, a step takes half as long again.
        return acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), weights.astype(jnp.bfloat16), top, total

    def _weigh(self, i, masked: bool, scores, top, total):
        """Weights of step i, the new maximum and sum, and what older sums shrink by."""
        if masked:
            layout = plgpu.Layout.WGMMA
            row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout) & (self.plan.rows - 1)
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
            ahead = (self.tile.steps - 1 - i) * self.plan.keys - self.tile.first(self.me)
            scores = jnp.where(key + ahead <= row, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1) * self.scale)
        weights = jnp.exp2(scores * self.scale - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        shrink = jnp.exp2(top - new_top)
        return weights, new_top, total * shrink + weights.sum(axis=1), shrink

    def _score(self, acc, i):
        """Start step i's scores; returns the slot in use."""
        slot = _rem(self.step + i, STAGES)
        plgpu.barrier_wait(self.scratch.k.filled.at[slot])
        plgpu.wgmma(acc, self.q_s, self.scratch.k.slots.at[slot].transpose((1, 0)))
        return slot

    def _start(self, acc, value) -> None:
        if not self.plan.interpret:
            acc[...] = value

    def _mix(self, acc, i, weights):
        """Start adding step i's mix; returns the slot in use."""
        slot = _rem(self.step + i, STAGES)
        plgpu.barrier_wait(self.scratch.v.filled.at[slot])
        if self.plan.interpret:
            self.scratch.weights[self.me] = weights
            plgpu.commit_smem()
            weights = self.scratch.weights.at[self.me]
        plgpu.wgmma(acc, weights, self.scratch.v.slots.at[slot])
        return slot

    def _mixed(self, acc, slot, value):
        """Wait for a mix that started from `value`."""
        mix = acc[...] + value if self.plan.interpret else acc[...]
        plgpu.barrier_arrive(self.scratch.v.released.at[slot])
        return mix
