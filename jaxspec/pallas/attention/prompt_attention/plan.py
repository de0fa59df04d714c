"""Static sizes of a call of the prompt kernel, the tiles that follow from them, and which CTA takes which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.positions import Chunks, Window, first_seen
from jaxspec.pallas.hopper import WARPS, WGMMA_ROWS

UNIT = WGMMA_ROWS  # query rows of a consumer
STAGES = 2  # slots of the key and value rings
LANES = 32  # of a warp
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)


class Plan:
    """Static sizes of one call: its shapes, and the tiling that follows from them."""

    def __init__(
        self, q_shape, kv_shape, entries: int, fp8: bool, window: Window | None, sinks: bool, sms: int, interpret: bool
    ):
        self.blocks, self.t, n, self.h = q_shape
        self.m, self.page_size = kv_shape[3:5]
        self.entries, self.fp8, self.interpret = entries, fp8, interpret
        self.window = window  # positions that a row sees, its own included, or chunks; None: all so far
        self.sinks = sinks  # whether heads have one
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
        # Of both operands of the products. Float16 holds every e4m3 number, and one instruction converts two of them.
        self.dtype = jnp.dtype(jnp.float16 if fp8 else jnp.bfloat16)
        self.q_slots = 1 if self.h == 256 else 2  # with two the next queries are prefetched, if shared memory has room

    def by_unit(self, sinks: Array) -> Array:
        """The sink of each row of each unit of heads, in base 2: f32[m, head_units, UNIT]."""
        sinks = (sinks.astype(jnp.float32) * math.log2(math.e)).reshape(self.m, self.group)
        head = jnp.arange(self.head_units)[:, None] * self.heads + jnp.arange(UNIT) // self.rows
        return jnp.take(sinks, jnp.minimum(head, self.group - 1), axis=1)

    def scratch(self) -> Scratch:
        def ring(slots: int, memory: Any, arrivals: int) -> Ring:
            filled = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
            released = plgpu.Barrier(num_arrivals=self.consumers, num_barriers=slots)
            return Ring(memory, filled, released)

        queries = (self.q_slots * self.consumers, UNIT, self.h)
        cached = plgpu.SMEM((STAGES, self.keys, self.h), self.dtype)
        raw = plgpu.SMEM((2, self.keys, self.h), jnp.float8_e4m3fn)
        as_they_come = plgpu.SMEM(queries, jnp.bfloat16)
        return Scratch(
            ring(
                self.q_slots,
                plgpu.RefUnion(as_they_come, plgpu.SMEM(queries, self.dtype)) if self.fp8 else as_they_come,
                self.consumers * self.heads,
            ),
            ring(STAGES, cached, 1 if self.fp8 else self.copies),
            ring(STAGES, cached, 1 if self.fp8 else self.copies),
            (raw, plgpu.Barrier(num_arrivals=self.copies, num_barriers=2)) if self.fp8 else None,
            plgpu.SMEM((self.consumers, UNIT, self.keys), self.dtype) if self.interpret else None,
        )

    def converted(self) -> tuple[int, Any]:
        """Tokens of an fp8 cache that are converted to `dtype` at a time, and their register layout.

        A thread has eight neighbours; one instruction reads all of them, and another writes all.
        """
        warp = LANES * 8 // self.h  # its tokens
        if warp == 1:
            tiling, dims = plgpu.Tiling(((WARPS, self.h), (8,))), ((-3,), (-2,))
        else:
            tiling, dims = plgpu.Tiling(((WARPS * warp, self.h), (warp, self.h), (8,))), ((-5,), (-3, -2))
        return UNIT, plgpu.Layout.TILED(tiling, warp_dims=dims[0], lane_dims=dims[1], vector_dim=-1)


class Ring(NamedTuple):
    """Slots of shared memory, and each slot's barriers: one for consumers, one for the producer."""

    slots: Any
    filled: Any
    released: Any


class Scratch(NamedTuple):
    q: Ring  # consumers' units side by side; a unit's output overwrites its queries
    k: Ring
    v: Ring
    raw: tuple[Any, Any] | None  # an fp8 cache's keys and values before they are converted, and their barriers
    weights: Any  # in interpret mode


class Refs(NamedTuple):
    q: Any
    kv: Any
    layer: Any
    table: Any
    queue: Any
    scales: Any
    sinks: Any  # None if there are none
    out: Any

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Any]) -> Refs:
        *given, out = refs
        return cls(*given, *([] if plan.sinks else [None]), out)


def div(x, y: int):
    return lax.div(x, jnp.int32(y))


def rem(x, y: int):
    return lax.rem(x, jnp.int32(y))


@dataclass(frozen=True)
class Tile:
    """A tile's block and that block's start, its kv head, its pair of units; and the keys that it sees."""

    plan: Plan
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
        steps = div(self.last, self.plan.keys) + 1
        return steps if self.plan.window is None else steps - self.skipped

    @property
    def skipped(self):
        """Steps' worth of keys that lie before the window of all rows."""
        return div(jnp.maximum(first_seen(self.first(0), self.plan.window), 0), self.plan.keys)

    @property
    def masked_steps(self):
        """How many first steps have keys after some row's own position: at least one."""
        steps, whole = self.steps, div(self.first(0) + 1, self.plan.keys)
        return steps - (whole if self.plan.window is None else jnp.maximum(whole - self.skipped, 0))

    @property
    def whole_steps(self):
        """How many steps come before the last ones, whose keys lie before some row's window."""
        before = jnp.maximum(first_seen(self.last, self.plan.window), 0) + (self.plan.keys - 1)
        return jnp.maximum(self.steps - (div(before, self.plan.keys) - self.skipped), self.masked_steps)

    def key(self, i):
        """The position of the first key of step i: steps go backwards."""
        step = self.steps - 1 - i
        return (step if self.plan.window is None else self.skipped + step) * self.plan.keys

    def in_window(self, key, row, consumer):
        """Whether keys lie within rows' windows, both counted from the consumer's first row."""
        if isinstance(window := self.plan.window, Chunks):
            return key >= first_seen(row + self.first(consumer), window) - self.first(consumer)
        return key > row - window

    def first(self, consumer):
        """The position of a consumer's first row."""
        return self.start + self.part(consumer) * self.plan.rows

    def unit(self, consumer):
        return jnp.minimum(self.pair * self.plan.consumers + consumer, self.plan.units - 1)

    def part(self, consumer):
        """Which 64 tokens of a long block a consumer's unit has."""
        return div(self.unit(consumer), self.plan.head_units)

    def slices(self, consumer) -> Iterator[tuple[Any, Any]]:
        """For each head of a consumer's unit: its rows in the unit, and where they are in q and out."""
        plan = self.plan
        for i in range(plan.heads):
            head = jnp.minimum(rem(self.unit(consumer), plan.head_units) * plan.heads + i, plan.group - 1)
            rows = pl.ds(self.part(consumer) * plan.rows, plan.rows)
            yield pl.ds(i * plan.rows, plan.rows), (self.block, rows, self.kv_head * plan.group + head)


def walk(plan: Plan, refs: Refs, visit: Callable) -> Any:
    """Visit this CTA's tiles: `visit(tile, round, step) -> next step`, steps counted over all tiles. Returns rounds.

    Odd rounds hand out tiles in mirrored order, so that no CTA always gets the longest.
    """
    cta = lax.axis_index("cta")
    full, rest = divmod(plan.tiles, plan.ctas)
    rounds = full + jnp.where((plan.ctas - 1 - cta if full % 2 else cta) < rest, 1, 0)

    def go(round_, step):
        index = round_ * plan.ctas + jnp.where(rem(round_, 2) == 0, cta, plan.ctas - 1 - cta)
        entry = div(index, plan.m * plan.pairs)
        pair = plan.pairs - 1 - rem(div(index, plan.m), plan.pairs)
        tile = Tile(plan, refs.queue[0, entry], refs.queue[1, entry], rem(index, plan.m), pair)
        return visit(tile, round_, step)

    lax.fori_loop(0, rounds, go, jnp.int32(0))
    return rounds
