"""The warpgroups of a block of the latent decode kernel: one copies pages into shared memory, and two compute.

Tokens pass through in pairs of steps. Warpgroup 0 makes the scores and weights of the even steps, warpgroup 1 of the
odd ones. Each adds up its half of the values' columns with the weights of both. A step's weights overwrite the columns
of its keys that no value has, so they need no room of their own. The largest scores so far go from step to step, hence
from one warpgroup to the other and back, and while one computes a softmax, the other's products are under way.

A step's latents are in three pieces, each released by itself as soon as its last product is done: the next pair's copy
begins then. Its latents have been prefetched into the level 2 cache, unless memory binds anyway. Two tiles of a request
that are neighbours form a cluster, and a copy is for both.

Sums are scaled where the running maximum has risen, which it does by 2^8 at least at a time, so rarely.

Up to 32 rows are the narrow side of the products (`Plan.narrow`), which would be padded to 64 on the other. So are all
tiles over FP8 latents, which become float16 in registers (`decode_attention.e4m3`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jaxspec.pallas.attention.decode_attention import e4m3
from jaxspec.pallas.attention.decode_attention.tiles import by_row, over_tokens, put, row_a_warp, spread, transposed
from jaxspec.pallas.attention.latent_decode.plan import (
    HALF,
    MAX_MASKED_SLOTS,
    PAIR,
    PIECES,
    REST,
    STEP,
    Plan,
)

FLOOR = -1e30  # a running maximum that nothing has raised; finite, so that differences of maxima are numbers
SLACK = 8.0  # the running maximum rises by more at a time, in base 2: sums rarely need another scale
ANY_BELOW_ONE = """{
.reg .pred below;
setp.lt.f32 below, $1, 0f3F800000;
vote.sync.any.pred below, below, 0xffffffff;
selp.b32 $0, 1, 0, below;
}"""
TILE = plgpu.Layout.WGMMA
COMPUTING, COPYING = 232, 40  # registers of a thread
EVEN, ODD = 0, 1


class _Refs(NamedTuple):
    """References to operands and results in the GPU's memory."""

    q: Any
    kv: Any
    table: Any
    start: Any
    layer: Any
    bits: Any  # None without a mask
    results: tuple[Any, ...]

    @classmethod
    def of(cls, plan: Plan, refs: tuple) -> _Refs:
        given = 6 if plan.masked_slots else 5
        return cls(*refs[:5], refs[5] if plan.masked_slots else None, refs[given:])


class _Scratch(NamedTuple):
    q_s: list[Any]  # a piece each, as the next
    ring: list[Any]
    tops_s: Any  # the largest scores after an even and after an odd step
    totals_s: Any  # each warpgroup's sums of weights
    sums_s: Any  # at the end: largest scores, and sums of weights of both
    q_ready: Any
    filled: Any
    released: list[Any]
    weighed: Any  # a step's weights are written
    summed: Any
    weights_s: Any = None  # None: they overwrite the last piece
    rows_s: Any = None  # None: they overwrite the warpgroup's own piece
    exchange_s: Any = None  # of narrow products


def warpgroup(plan: Plan, *refs, **scratch) -> None:
    """Run one warpgroup of one block: attend a tile of rows to its part of a request's tokens.

    If there are several parts, wait for the others, then combine a share of the rows.
    """
    refs, scratch = _Refs.of(plan, refs), _Scratch(**scratch)
    w = lax.axis_index("warpgroup")
    done = None  # counts the warpgroups that have written a part, for both: each call here would make others
    if plan.splits > 1 and not plan.interpret:
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.b, plan.tiles)))

    @pl.when(w == 2)
    def _():
        plgpu.set_max_registers(COPYING, action="decrease")
        # Loads from memory are issued together, or each would wait for the one before.
        layer, ids = refs.layer[0], _pages(plan, refs.table, 0)
        _Part.here(plan, refs, scratch).copy(layer, ids)

    for me in (EVEN, ODD):

        @pl.when(w == me)
        def _(me=me):
            plgpu.set_max_registers(COMPUTING, action="increase")
            _Part.here(plan, refs, scratch).compute(me, done)


def combine(plan: Plan, start_g, *refs, **scratch) -> None:
    """Combine the parts of a tile in a launch of its own."""
    *parts, out = refs
    w = lax.axis_index("warpgroup")
    nothing = (None,) * 3
    part = _Part.here(plan, _Refs(*nothing, start_g, None, None, (*parts, out)), _Scratch(**scratch))
    for me in (EVEN, ODD):
        pl.when((w == me) & (part.split < part.parts))(partial(part.combine, me))


def _div(x, y: int):
    return lax.div(x, jnp.int32(y))


def _first(plan: Plan, i, stage):
    """The first token of a step of the i-th pair of this part."""
    return (lax.axis_index("split") + i * plan.splits) * PAIR + stage * STEP


def _pages(plan: Plan, table, i) -> list[list[Any]]:
    """The pages of both steps of a pair. Past the table's end its last page stands in, and is masked."""
    b = lax.axis_index("b")
    entry = lambda stage, c: _div(_first(plan, i, stage) + c * plan.page, plan.page)  # noqa: E731
    return [
        [table[b, jnp.minimum(entry(stage, c), plan.entries - 1)] for c in range(plan.copies)] for stage in (EVEN, ODD)
    ]


@dataclass(frozen=True)
class _Part:
    """A tile's rows, and the pairs of steps that are this block's: every `splits`-th."""

    plan: Plan
    refs: _Refs
    scratch: _Scratch
    b: Any
    tile: Any
    split: Any
    start: Any
    row: Any  # the tile's first
    pairs: Any  # of the request, that some row of the tile or of its neighbours sees
    whole: Any  # those in which each row sees each token

    @classmethod
    def here(cls, plan: Plan, refs: _Refs, scratch: _Scratch) -> _Part:
        b, tiles, side, split = (lax.axis_index(name) for name in ("b", "tiles", "neighbour", "split"))
        start = refs.start[b]
        tile = tiles * plan.neighbours + side
        row = jnp.minimum(tile * plan.tallest, plan.all_rows - plan.rows)  # the last tile may repeat rows
        last = (tiles + 1) * (plan.neighbours * plan.tallest) - 1  # of the neighbours, or of a last tile more
        last = jnp.minimum(_div(last, plan.n), plan.t - 1)
        seen = plan.masked_slots or last + 1
        pairs = _div(jnp.clip(start + seen, 0, plan.entries * plan.page) + (PAIR - 1), PAIR)
        whole = start if plan.masked_slots else start + _div(row, plan.n) + 1
        whole = jnp.minimum(_div(jnp.maximum(whole, 0), PAIR), pairs)
        return cls(plan, refs, scratch, b, tile, split, start, row, pairs, whole)

    @property
    def parts(self):
        """How many blocks have some of the request's tokens; at least one, which writes zeros."""
        return jnp.clip(self.pairs, 1, self.plan.splits)

    def share(self, pairs):
        """How many of the request's first `pairs` are this part's."""
        return _div(jnp.maximum(pairs - self.split, 0) + (self.plan.splits - 1), self.plan.splits)

    # One warpgroup copies.

    def copy(self, layer, ids) -> None:
        """Copy queries and then steps, each piece as soon as its slot is released. `ids`: the first pair's pages."""
        plan, refs, scratch = self.plan, self.refs, self.scratch
        rows = pl.ds(0, plan.rows)
        for q_s, (first, width) in zip(scratch.q_s, PIECES, strict=True):
            source = refs.q.at[self.b, pl.ds(self.row, plan.rows), pl.ds(first, width)]
            plgpu.copy_gmem_to_smem(source, q_s.at[0, rows], scratch.q_ready)

        count = self.share(self.pairs)

        def pair(i, ids):
            following = _pages(plan, refs.table, i + 1)  # early, since they come from memory
            for stage in (EVEN, ODD):
                for piece, released in enumerate(scratch.released):
                    plgpu.barrier_wait(released.at[stage])
                    self._copy(layer, ids[stage], i, stage, piece)
            self._prefetch(layer, following, i + 1, i + 1 < count)
            return following

        lax.fori_loop(0, count, pair, ids)
        for stage in (EVEN, ODD):
            for released in scratch.released:
                plgpu.barrier_wait(released.at[stage])

    def _copy(self, layer, ids, i, stage, piece) -> None:
        for c, source in enumerate(self._sources(layer, ids, i, stage, piece)):
            target = self.scratch.ring[piece].at[stage, pl.ds(c * source.shape[0], source.shape[0])]
            filled = self.scratch.filled.at[stage, piece]
            plgpu.copy_gmem_to_smem(source, target, filled, collective_axes=self._neighbours)

    def _prefetch(self, layer, ids, i, there) -> None:
        """Have the level 2 cache read a pair before its slots are free, if it is `there`. Narrow tiles keep memory busy
        without it."""
        for stage in () if self.plan.interpret or self.plan.narrow else (EVEN, ODD):
            for piece in range(len(PIECES)):
                for source in self._sources(layer, ids[stage], i, stage, piece):
                    plgpu.async_prefetch(source, collective_axes=self._neighbours, predicate=there)

    def _sources(self, layer, ids, i, stage, piece) -> list[Any]:
        """A piece of a step in each of its pages."""
        plan = self.plan
        within = lax.rem(_first(plan, i, stage), jnp.int32(plan.page)) if plan.page > STEP else 0
        part = pl.ds(within, min(plan.page, STEP)), pl.ds(*PIECES[piece])
        return [self.refs.kv.at[layer, page, 0, 0, *part] for page in ids]

    @property
    def _neighbours(self) -> str | None:
        return "neighbour" if self.plan.neighbours > 1 else None

    # Two warpgroups compute.

    def compute(self, me: int, done: Any) -> None:
        """Add up this warpgroup's half of the values, and write it."""
        scratch = self.scratch
        for stage in (EVEN, ODD):
            for released in (scratch.released[me], scratch.released[2]):
                plgpu.barrier_arrive(released.at[stage])
        plgpu.barrier_wait(scratch.q_ready)
        step, row, narrow, rows = (self._even, self._odd)[me], by_row(self.plan), self.plan.narrow, (self.plan.height,)
        carry = (
            plgpu.layout_cast(jnp.zeros(self._across(HALF), jnp.float32), TILE),
            plgpu.layout_cast(jnp.full(rows, FLOOR, jnp.float32), row),
            plgpu.layout_cast(jnp.zeros(self._across(STEP) if narrow else rows, jnp.float32), TILE if narrow else row),
        )
        whole, count = self.share(self.whole), self.share(self.pairs)
        carry = lax.fori_loop(0, whole, partial(step, False), carry)
        acc, top, total = lax.fori_loop(whole, count, partial(step, True), carry)
        if narrow:
            total = over_tokens(self.plan, "add", total, self._exchange(me))
        self._write(me, e4m3.restored(acc) if self.plan.in_registers else acc, top, total, done)

    def _across(self, width: int) -> tuple[int, int]:
        """The shape of numbers for `width` tokens or columns of each row."""
        return (width, self.plan.height) if self.plan.narrow else (self.plan.height, width)

    def _exchange(self, me: int):
        return self.scratch.exchange_s.at[me] if self.plan.narrow else None

    def _total(self, weights):
        """The sums of a step's weights. In narrow products each thread keeps its own until the end."""
        return weights if self.plan.narrow else weights.sum(axis=1)

    def _weights(self, stage: int):
        """A step's weights in shared memory, [rows, STEP]."""
        own = self.scratch.weights_s
        ref = (self.scratch.ring[2] if own is None else own).at[stage]
        return ref.at[pl.ds(0, self.plan.height)] if self.plan.narrow and own is None else ref

    def _even(self, masked: bool, i, carry):
        acc, top, total = carry
        scratch = self.scratch
        left = scratch.ring[EVEN]
        scores = self._scores(EVEN)
        new_top, weights = self._weigh(masked, i, EVEN, scores, top)
        self._publish(EVEN, new_top, weights)
        shrink = jnp.exp2(top - new_top)
        total = self._scaled(total, shrink) + self._total(weights)
        acc = self._add_values(self._scaled(acc, shrink), left, EVEN, own=weights)
        self._release(EVEN, EVEN)
        top, shrink = self._published(ODD, new_top)
        plgpu.barrier_wait(scratch.filled.at[ODD, EVEN])
        acc = self._add_values(self._scaled(acc, shrink), left, ODD)
        self._release(EVEN, ODD)
        return acc, top, self._scaled(total, shrink)

    def _odd(self, masked: bool, i, carry):
        acc, top, total = carry
        scratch, right = self.scratch, self.scratch.ring[ODD]
        scores = self._scores(ODD)
        top, shrink = self._published(EVEN, top)
        acc, total = self._scaled(acc, shrink), self._scaled(total, shrink)
        plgpu.barrier_wait(scratch.filled.at[EVEN, ODD])

        def meanwhile():
            new_top, weights = self._weigh(masked, i, ODD, scores, top)
            self._publish(ODD, new_top, weights)
            return new_top, self._total(weights), weights

        acc, (new_top, added, weights) = self._add_values(acc, right, EVEN, meanwhile)
        self._release(ODD, EVEN)
        shrink = jnp.exp2(top - new_top)
        acc = self._add_values(self._scaled(acc, shrink), right, ODD, own=weights)
        self._release(ODD, ODD)
        return acc, new_top, self._scaled(total, shrink) + added

    def _scores(self, stage: int):
        """A step's scores, f32[rows, STEP] or narrow, once its keys are there."""
        plan, zero = self.plan, _opaque_zero(self.plan)

        def run(acc):
            for piece, (q_s, keys) in enumerate(zip(self.scratch.q_s, self.scratch.ring, strict=True)):
                plgpu.barrier_wait(self.scratch.filled.at[stage, piece])
                q_s, keys = q_s.at[zero], keys.at[zero + stage]
                keys = e4m3.keys(keys) if plan.in_registers else keys
                plgpu.wgmma(acc, *((keys, transposed(q_s)) if plan.narrow else (q_s, transposed(keys))))
                if plan.in_registers:
                    plgpu.wgmma_wait(0)  # the next piece takes the same registers
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC(self._across(STEP), jnp.float32))

    def _add_values(self, acc, values, stage: int, meanwhile=None, own=None):
        """Add a step's values, by its weights, to this warpgroup's sums. `meanwhile`: as in `_add_product`. `own`: the
        weights, if this warpgroup has made them."""
        plan, weights_s, values = self.plan, self._weights(stage), values.at[stage]
        if not plan.narrow:
            in_registers = own is not None and plan.own_in_registers
            return _add_product(plan, acc, own.astype(plan.dtype) if in_registers else weights_s, values, meanwhile)
        if not plan.in_registers:
            return _add_product(plan, acc, transposed(values), transposed(weights_s), meanwhile)
        made = meanwhile() if meanwhile else None  # before the product, which reads registers
        values = e4m3.values(values, swizzle=REST)  # which divides the columns of all pieces
        acc = _add_product(plan, acc, values, transposed(weights_s))
        return (acc, made) if meanwhile else acc

    def _scaled(self, x, factors):
        if x.ndim == 1 or self.plan.narrow or self.plan.interpret:
            return x * (factors if x.ndim == 1 else spread(self.plan, factors, x))
        return _scaled_if_needed(x, factors)

    def _weigh(self, masked: bool, i, stage: int, scores, top):
        """The largest scores up to this step within `SLACK`, in base 2, and its weights."""
        if masked:
            scores = jnp.where(self._seen(_first(self.plan, i, stage)), scores, -jnp.inf)
        factor = jnp.float32(self.plan.scale * math.log2(math.e))
        highest = over_tokens(self.plan, "max", scores, self._exchange(stage))
        new_top = jnp.where(highest * factor > top + SLACK, highest * factor, top)
        return new_top, jnp.exp2(scores * factor - spread(self.plan, new_top, scores))

    def _seen(self, first):
        """Whether each row sees each token of the step that begins at KV slot `first`."""
        plan, shape = self.plan, self._across(STEP)
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 0 if plan.narrow else 1, layout=TILE) + first
        if not plan.masked_slots:
            row = plgpu.broadcasted_iota(jnp.int32, shape, 1 if plan.narrow else 0, layout=TILE) + self.row
            return slots <= self.start + _div(row, plan.n)
        bits = self.refs.bits.at[self.b, pl.ds(self.row, plan.height)]
        bits = spread(plan, plgpu.load(bits, layout=by_row(plan), optimized=False), slots)
        new = slots - self.start
        bit = lax.shift_right_logical(bits, jnp.clip(new, 0, MAX_MASKED_SLOTS - 1)) & 1
        return (new < 0) | ((new < plan.masked_slots) & (bit == 1))

    def _publish(self, stage: int, top, weights) -> None:
        """Hand a step's weights and the largest scores up to it to both warpgroups."""
        put(self.plan, self._weights(stage), weights)
        self.scratch.tops_s[stage] = top
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch.weighed.at[stage])

    def _published(self, stage: int, top):
        """Wait for the other warpgroup's weights: the largest scores, and what sums under `top` are multiplied by."""
        plgpu.barrier_wait(self.scratch.weighed.at[stage])
        new_top = plgpu.load(self.scratch.tops_s.at[stage], layout=by_row(self.plan), optimized=False)
        return new_top, jnp.exp2(top - new_top)

    def _release(self, me: int, stage: int) -> None:
        for released in (self.scratch.released[me], self.scratch.released[2]):
            plgpu.barrier_arrive(released.at[stage])

    def _write(self, me: int, acc, top, total, done) -> None:
        """Write this warpgroup's half of the tile, or of its part of it, which is then combined with the others."""
        plan, scratch, results = self.plan, self.scratch, self.refs.results
        scratch.totals_s[me] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.summed)
        plgpu.barrier_wait(scratch.summed)
        total = total + plgpu.load(scratch.totals_s.at[1 - me], layout=by_row(plan), optimized=False)
        rows_s = self._rows(me, plan.height)
        put(plan, rows_s, self._scaled(acc, 1 / jnp.maximum(total, 1e-30)))
        rows, columns = pl.ds(0, plan.rows), pl.ds(*PIECES[me])
        if plan.splits == 1:
            plgpu.commit_smem()
            target = results[0].at[self.b, pl.ds(self.row, plan.rows), columns]
            plgpu.copy_smem_to_gmem(rows_s.at[rows], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return
        if me == EVEN:
            scratch.sums_s[0], scratch.sums_s[1] = top, total
        plgpu.commit_smem()
        parts_g, sums_g = (ref.at[self.b, self.tile, self.split] for ref in results[:2])

        @pl.when(self.split < self.parts)
        def _():
            plgpu.copy_smem_to_gmem(rows_s.at[rows], parts_g.at[:, columns])
            if me == EVEN:
                plgpu.copy_smem_to_gmem(scratch.sums_s, sums_g)
            plgpu.wait_smem_to_gmem(0)
            if done is not None:
                both = done.at[self.b, self.tile]
                plgpu.semaphore_signal(both, memory_scope="gpu")
                plgpu.semaphore_wait(both, 2 * self.parts, decrement=False, memory_scope="gpu")
                self.combine(me)

    def _rows(self, me: int, count: int):
        """So many rows of this warpgroup's columns on their way to memory. At the end nobody else reads there, and
        nothing is copied there any more."""
        own = self.scratch.rows_s
        return (self.scratch.ring[me].at[me] if own is None else own.at[me]).at[pl.ds(0, count)]

    def combine(self, me: int) -> None:
        """Combine a share of the tile: packs of rows, and some of this warpgroup's columns."""
        plan, parts = self.plan, self.parts
        layout, shape = row_a_warp(plan.combined), (plan.pack, plan.combined)
        parts_g, sums_g = (ref.at[self.b, self.tile] for ref in self.refs.results[:2])
        mixed_s = self._rows(me, plan.pack).at[:, pl.ds(0, plan.combined)]
        across = HALF // plan.combined
        load = partial(plgpu.load, optimized=False)
        over = lambda x: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731
        cast = plgpu.layout_cast

        def pack(j, _):
            which = self.split + j * parts
            first = _div(which, across) * plan.pack
            rows = pl.ds(first, plan.pack)
            columns = pl.ds(PIECES[me][0] + lax.rem(which, jnp.int32(across)) * plan.combined, plan.combined)

            def some(k, carry):
                mix, top, total = carry
                each = [k * plan.together + x for x in range(plan.together)]
                there = [jnp.minimum(s, parts - 1) for s in each]
                tops, totals = (
                    [load(sums_g.at[s, kind, rows], layout=layout.reduce(1)) for s in there] for kind in (0, 1)
                )
                mixes = [load(parts_g.at[s, rows, columns], layout=layout) for s in there]
                new_top = functools.reduce(jnp.maximum, tops, top)
                shrink = jnp.exp2(top - new_top)
                total, mix = total * shrink, mix * over(shrink)
                for s, one_top, one_total, one_mix in zip(each, tops, totals, mixes, strict=True):
                    weight = jnp.exp2(one_top - new_top) * one_total * (s < parts).astype(jnp.float32)
                    total, mix = total + weight, mix + one_mix.astype(jnp.float32) * over(weight)
                return mix, new_top, total

            nothing = (
                cast(jnp.zeros(shape, jnp.float32), layout),
                cast(jnp.full((plan.pack,), FLOOR, jnp.float32), layout.reduce(1)),
                cast(jnp.zeros((plan.pack,), jnp.float32), layout.reduce(1)),
            )
            rounds = _div(parts + (plan.together - 1), plan.together)
            mix, _top, total = lax.fori_loop(0, rounds, some, nothing)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mixed_s[...] = (mix * over(1 / jnp.maximum(total, 1e-30))).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                mixed_s, self.refs.results[-1].at[self.b, pl.ds(self.row + first, plan.pack), columns]
            )
            return _

        mine = lax.div(jnp.maximum(plan.rows // plan.pack * across - self.split, 0) + (parts - 1), parts)
        lax.fori_loop(0, mine, pack, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _opaque_zero(plan: Plan):
    """A zero that the compiler takes for any number. Otherwise it would make the addresses of all products before the
    loop, and keep more of them than registers hold."""
    if plan.interpret:
        return 0
    i32 = ir.IntegerType.get_signless
    asm = lambda: llvm.inline_asm(i32(32), [], "mov.b32 $0, 0;", "=r", has_side_effects=True)  # noqa: E731
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(return_type=result)(lambda _: mgpu.FragmentedArray.splat(asm(), (), is_signed=True))()


def _scaled_if_needed(x, factors):
    """x [rows, columns] times a factor at most one for each row. A warp whose factors are all one does nothing.

    Factors of padding may be no numbers, which must not hide those of rows."""

    def scale(_, x, factors):
        i32 = ir.IntegerType.get_signless(32)
        number = lambda value: arith.constant(i32, value)  # noqa: E731
        own = (llvm.extractelement(one, number(0)) for one in factors.registers.flat)
        least = functools.reduce(arith.minnumf, own)
        below = mgpu.utils.inline_ptx(ANY_BELOW_ONE, least, result_types=i32, has_side_effects=True, convergent=True)
        needed = arith.cmpi(arith.CmpIPredicate.ne, below, number(0))
        branch = scf.IfOp(needed, [one.type for one in x.registers.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = x * factors.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(x.registers.flat))
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    types = TILE, TILE.reduce(1)
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(scale)(x, factors)


def _add_product(plan: Plan, value, a_s, b_s, meanwhile=None):
    """Add the product of two tiles in shared memory to `value`, in the same registers. With `meanwhile`, call it while
    the product is under way, and return its result, too."""

    def run(acc):
        if not plan.interpret:
            acc[...] = value
        plgpu.wgmma(acc, a_s, b_s)
        made = meanwhile() if meanwhile else None
        total = acc[...] + value if plan.interpret else acc[...]
        return (total, made) if meanwhile else total

    return pl.run_scoped(run, plgpu.ACC(value.shape, jnp.float32))
