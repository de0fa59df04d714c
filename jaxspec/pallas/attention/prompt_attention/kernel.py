"""The warpgroups of one CTA of the prompt kernel: one fills rings of shared memory, the others compute.

The invariant of the rings: a slot is filled only after every consumer has released it. Consumers begin by releasing
the empty slots, and the producer ends by waiting until all slots are released.

A consumer walks the keys backwards from the end of its block, so that only its first steps need a mask, and with a
window its last. A row that has seen nothing but masked scores carries a meaningless sum. The shrinking at its first
unmasked score wipes that out; each row sees its own key. The scores of a step and the mix of the step before it are in
flight together: the softmax hides behind the mix, and behind the products of the other consumer.

Interpret mode supports neither weights in registers as an operand of the mix nor an accumulator that starts from a
value. There alone, weights pass through shared memory and the mix is added afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention.prompt_attention.plan import STAGES, UNIT, Plan, Refs, Scratch, Tile, div, rem, walk

LARGEST = 65504.0  # of float16
MASKED = -(2.0**100)  # finite, or rows without a visible score turn NaN; a power of two, so that scaling it is exact


def kernel(plan: Plan, *operands) -> None:
    """Run one CTA: consumer warpgroups multiply, the last one copies. `operands`: those of `Refs`, then the scratch."""
    *refs, scratch = operands
    refs = Refs.of(plan, refs)
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


def _produce(plan: Plan, refs: Refs, scratch: Scratch) -> None:
    """Fill the rings in the order in which consumers drain them."""
    layer = refs.layer[0]

    def visit(tile: Tile, round_, step):
        slot = rem(round_, plan.q_slots)
        plgpu.barrier_wait(scratch.q.released.at[slot])
        for consumer in range(plan.consumers):
            for rows, at in tile.slices(consumer):
                to = (scratch.q.slots[0] if plan.fp8 else scratch.q.slots).at[slot * plan.consumers + consumer, rows]
                plgpu.copy_gmem_to_smem(refs.q.at[at], to, scratch.q.filled.at[slot])
        last_entry = jnp.minimum(div(tile.last, plan.page_size), plan.entries - 1)

        def sources(i):
            """References to step i's keys (0) and values (1) in memory, in pieces."""
            token = tile.key(i)
            part = rem(div(token, plan.keys), plan.page_size // plan.copy_rows)  # of a page larger than a step
            rows = pl.ds(part * plan.copy_rows, plan.copy_rows)
            entries = (div(token + c * plan.copy_rows, plan.page_size) for c in range(plan.copies))
            pages = [refs.table[tile.block, jnp.minimum(entry, last_entry)] for entry in entries]
            return [[refs.kv.at[layer, page, which, tile.kv_head, rows] for page in pages] for which in (0, 1)]

        if plan.fp8:
            return _convert_steps(plan, scratch, sources, tile.steps, step)

        def fetch(i, step):
            for which, pieces in enumerate(sources(i)):
                ring, slot = (scratch.k, scratch.v)[which], rem(step, STAGES)
                plgpu.barrier_wait(ring.released.at[slot])
                _copy(plan, pieces, ring.slots.at[slot], ring.filled.at[slot])
            return step + 1

        return lax.fori_loop(0, tile.steps, fetch, step)

    walk(plan, refs, visit)
    for ring in (scratch.q, scratch.k, scratch.v):
        for slot in range(plan.q_slots if ring is scratch.q else STAGES):
            plgpu.barrier_wait(ring.released.at[slot])


def _copy(plan: Plan, pieces: list, to, filled) -> None:
    for c, piece in enumerate(pieces):
        plgpu.copy_gmem_to_smem(piece, to.at[pl.ds(c * plan.copy_rows, plan.copy_rows)], filled)


def _convert_steps(plan: Plan, scratch: Scratch, sources: Callable, steps, step):
    """Fill the rings from an fp8 cache, by way of registers. While a copy is converted, the next one is prefetched."""
    raw, arrived = scratch.raw
    at_once, layout = plan.converted()

    def start(i):
        for which, pieces in enumerate(sources(i)):
            _copy(plan, pieces, raw.at[which], arrived.at[which])

    def convert(i, step):
        following = sources(jnp.minimum(i + 1, steps - 1))  # read early, since the table is in memory
        for which, ring in enumerate((scratch.k, scratch.v)):
            slot = rem(step, STAGES)
            plgpu.barrier_wait(arrived.at[which])
            plgpu.barrier_wait(ring.released.at[slot])
            for c in range(plan.keys // at_once):
                rows = pl.ds(c * at_once, at_once)
                ring.slots[slot, rows] = plgpu.load(raw.at[which, rows], layout=layout).astype(plan.dtype)
            plgpu.commit_smem()  # and all warps have read the copy
            plgpu.barrier_arrive(ring.filled.at[slot])
            pl.when(i + 1 < steps)(partial(_copy, plan, following[which], raw.at[which], arrived.at[which]))
        return step + 1

    start(0)
    return lax.fori_loop(0, steps, convert, step)


def _consume(plan: Plan, refs: Refs, scratch: Scratch, me) -> None:
    layer = refs.layer[0]

    def release_queries(round_):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output that was there has left
        plgpu.barrier_arrive(scratch.q.released.at[rem(round_, plan.q_slots)])

    def visit(tile: Tile, round_, step):
        slot = rem(round_, plan.q_slots)
        buffer = slot * plan.consumers + me
        out_s, q_s = (slots.at[buffer] for slots in (scratch.q.slots if plan.fp8 else 2 * [scratch.q.slots]))
        k_scale, v_scale = (refs.scales[layer, which, tile.kv_head] for which in (0, 1))
        unit = _Unit(plan, scratch, tile, me, q_s, step, k_scale * (plan.h**-0.5 * math.log2(math.e)))
        plgpu.barrier_wait(scratch.q.filled.at[slot])
        if plan.fp8:  # in place
            rows = plgpu.load(out_s, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            q_s[...] = jnp.clip(rows, -LARGEST, LARGEST).astype(plan.dtype)
            plgpu.commit_smem()
        # With two slots, the other one's output has all of the first product's time to leave.
        mix, top, total = unit.attend(partial(release_queries, round_ + 1) if plan.q_slots == 2 else lambda: None)
        if plan.sinks:
            sinks = refs.sinks.at[tile.kv_head, rem(tile.unit(me), plan.head_units)]
            total = total + jnp.exp2(plgpu.load(sinks, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) - top)
        out_s[...] = (mix * lax.broadcast_in_dim(v_scale / total, mix.shape, [0])).astype(jnp.bfloat16)
        plgpu.commit_smem()
        for rows, at in tile.slices(me):
            plgpu.copy_smem_to_gmem(out_s.at[rows], refs.out.at[at])
        if plan.q_slots == 1:
            release_queries(round_)
        return step + tile.steps

    for slot in range(STAGES):
        plgpu.barrier_arrive(scratch.k.released.at[slot])
        plgpu.barrier_arrive(scratch.v.released.at[slot])
    plgpu.barrier_arrive(scratch.q.released.at[0])
    rounds = walk(plan, refs, visit)
    if plan.q_slots == 2:
        release_queries(rounds - 1)


@dataclass(frozen=True)
class _Unit:
    """The attention of one unit, whose first step is step number `step` of the rings. Scores are in base 2."""

    plan: Plan
    scratch: Scratch
    tile: Tile
    me: Any
    q_s: Any
    step: Any
    scale: Any

    def attend(self, meanwhile: Callable):
        """The unnormalised mix of values f32[64, h], the largest scores and the sums of weights, f32[64] each.

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
        carry = (acc, weights.astype(plan.dtype), top, total)
        carry = lax.fori_loop(1, tile.masked_steps, partial(middle, masked=True), carry)
        if plan.window is None:
            carry = lax.fori_loop(tile.masked_steps, tile.steps, partial(middle, masked=False), carry)
        else:
            carry = lax.fori_loop(tile.masked_steps, tile.whole_steps, partial(middle, masked=False), carry)
            carry = lax.fori_loop(tile.whole_steps, tile.steps, partial(middle, masked=True), carry)
        acc, weights, top, total = carry
        return pl.run_scoped(final, mix), top, total

    def _overlapped(self, i, masked: bool, acc, weights, top, total, scores, mix):
        """Step i's scores and softmax, and the mix of step i-1, at once."""
        self._start(mix, acc)
        k_slot = self._score(scores, i)
        v_slot = self._mix(mix, i - 1, weights)
        value = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        plgpu.barrier_arrive(self.scratch.k.released.at[k_slot])
        weights, top, total, shrink = self._weigh(i, masked, value, top, total)
        acc = self._mixed(mix, v_slot, acc)
        # Rounding earlier, while the old weights are still an operand, makes a step take half as long again.
        return acc * lax.broadcast_in_dim(shrink, acc.shape, [0]), weights.astype(self.plan.dtype), top, total

    def _weigh(self, i, masked: bool, scores, top, total):
        """Weights of step i, the new maximum and sum, and the factor by which older sums shrink."""
        if masked:
            layout = plgpu.Layout.WGMMA
            row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout) & (self.plan.rows - 1)
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
            key = key + (self.tile.key(i) - self.tile.first(self.me))
            seen = key <= row
            if self.plan.window is not None:
                seen &= self.tile.in_window(key, row, self.me)
            scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1) * self.scale)
        weights = jnp.exp2(scores * self.scale - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        shrink = jnp.exp2(top - new_top)
        return weights, new_top, total * shrink + weights.sum(axis=1), shrink

    def _score(self, acc, i):
        """Start step i's scores; returns the slot in use."""
        slot = rem(self.step + i, STAGES)
        plgpu.barrier_wait(self.scratch.k.filled.at[slot])
        plgpu.wgmma(acc, self.q_s, self.scratch.k.slots.at[slot].transpose((1, 0)))
        return slot

    def _start(self, acc, value) -> None:
        if not self.plan.interpret:
            acc[...] = value

    def _mix(self, acc, i, weights):
        """Start adding step i's mix; returns the slot in use."""
        slot = rem(self.step + i, STAGES)
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
