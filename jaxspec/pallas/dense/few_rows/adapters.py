"""Add x @ A @ B of rows' adapters (LoRA) to a product, in its own kernel.

A kernel of its own for x @ A would wait for the one before and then for memory, and so would the base's after it: some
microseconds four times a layer, for little to read. Here all blocks share out x @ A: each multiplies some inputs by
some runs of `TILE` columns, and writes its part of the sums. Then they share out the adding up, in which each row keeps
the columns of its own adapter (`inner`). After its chunks of the base's weight, a block takes `inner` and B as further
chunks. Meanwhile its ring keeps on loading, so the blocks wait for one another while memory is busy. Runs of columns in
which no row has an adapter aren't read.

Counters in memory say how many blocks have done either. All blocks run at once (`share_out`), so none waits for one
that hasn't begun. Zeros for each kernel would take a kernel of their own, so all of a forward's are one array, which
goes from one to the next. Jax's interpreter has no counters: there `inner` is an operand, computed in plain jnp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.weights import HALF
from jaxspec.pallas.dense.few_rows.block import by_row
from jaxspec.pallas.dense.few_rows.share import GROUP, TILE, Share, column_of, share_out, split_of

EARLY = 1  # chunks of the base's weight before those of A, under way while `present` is read
AT_ONCE = 8  # parts of a sum whose loads are issued before the first is added
MOST_RUNS = 32  # of a projection's columns: the bits of `Adapters.present`
_i32, _f32 = jnp.int32, jnp.float32


class Adapters(NamedTuple):
    """Operands by which adapters add `((rows @ a) * own) @ b` to a product of unquantised weights, before the norm's
    factor and all that is made of the product.

    `a`: A of all places side by side, of each of the weight's projections after the other. Columns of a projection read
    its own. `own`: 1 in the columns of a row's own adapter, 0 elsewhere. `present`: a bit for each run of `TILE` of
    these columns in which a row has its own. `counters`: zeros in the row `turn`, which no other kernel uses.
    """

    a: Float[Array, "k q"]
    b: Float[Array, "c n"]
    own: Float[Array, "r c"]
    present: Int[Array, "1"]
    counters: Int[Array, "m 2"]
    turn: Int[Array, "1"]

    @property
    def projections(self) -> int:
        return self.a.shape[1] // len(self.b)


def adapters_supported(
    rows: int, shape: tuple[int, int], groups: int | None, ranks: int, projections: int, dtype: Any
) -> str | None:
    """Why a product of so many rows with a weight of this shape can't add what adapters do, or None if it can.

    `groups`: of a block's columns, as of `share_out`; None: it is gated. `ranks`: of all places together.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"adapters in {jnp.dtype(dtype).name}; supported: bfloat16"
    if ranks % TILE or ranks > MOST_RUNS * TILE:
        return f"{ranks} ranks of all adapters' places; supported: multiples of {TILE} up to {MOST_RUNS * TILE}"
    if projections not in ((1, 2) if groups is None else (1, 3)):
        return f"adapters of {projections} projections in one weight"
    of = dict(normed=False, adapters=projections * ranks // TILE, reads=projections if groups is None else 1)
    fits = share_out(-(-rows // GROUP) * GROUP, [shape[0]], shape[1], groups, **of).fits
    return None if fits else f"{ranks} ranks of adapters beside {rows} rows and a weight of {shape[0]} by {shape[1]}"


def inner(rows: Float[Array, "r k"], adapters: Adapters) -> Float[Array, "r q"]:
    """`rows @ a`, each row's own columns; of each run of columns all projections side by side."""
    count, c = len(rows), len(adapters.b)
    product = jnp.matmul(rows, adapters.a, preferred_element_type=_f32).reshape(count, -1, c)
    product = (product * adapters.own[:, None].astype(_f32)).astype(rows.dtype)
    return jnp.swapaxes(product.reshape(count, -1, c // TILE, TILE), 1, 2).reshape(count, -1)


def options(adapters: Adapters | tuple[()], reads: int = 1) -> dict[str, int]:
    """How `share_out` is told of a product's adapters. `reads`: projections that one tile's columns may be of."""
    if not adapters:
        return {}
    return {"adapters": adapters.a.shape[1] // TILE, "reads": min(reads, adapters.projections)}


def operands(adapters: Adapters | tuple[()], rows: Float[Array, "r k"], interpret: Any) -> list[Any]:
    """Give a kernel its operands for them: arrays, and a reference to the counters."""
    if not adapters:
        return []
    a, b, own, present, counters, turn = adapters
    return [inner(rows, adapters) if interpret else a, b, own, present, jax.new_ref(counters), turn]


def left(given: Sequence[Any]) -> list[Array]:
    """The counters after a kernel that was given these `operands`, for the next; nothing without adapters."""
    return [jax.freeze(given[Adapters._fields.index("counters")])] if given else []


def results(share: Share, interpret: Any) -> list[jax.ShapeDtypeStruct]:
    """Arrays in memory through which blocks hand on what they have: `inner`, and the parts of its sums."""
    if not share.adapters or interpret:
        return []
    shapes = (share.rows, share.adapters * TILE), (share.pieces, share.adapters, share.rows, TILE)
    return [jax.ShapeDtypeStruct(*each) for each in zip(shapes, (jnp.bfloat16, _f32), strict=True)]


def taken(share: Share, refs: list[Any], between: int, projection: Callable[[], Any] = lambda: 0) -> Added | None:
    """Take what `operands` and `results` gave from a kernel's references, the first ones and the last `between`; None
    if rows have no adapters. `projection`: the one of this tile's columns, unless they are of two."""
    if not share.adapters:
        return None
    given = [refs.pop(0) for _ in range(len(Adapters._fields))]
    made = [refs.pop() for _ in range(between)][::-1]
    return Added(share, given, made, projection)


class Added:
    """The adapters of a kernel's rows, in one block.

    Its steps are `early` chunks of the base's weight, `shrinks` chunks of A if it has a part of x @ A, the rest of the
    base's, and `expands` chunks of B. The early ones are under way before `present` is known.
    """

    def __init__(self, share: Share, given: Sequence[Any], made: Sequence[Any], projection: Callable[[], Any]):
        self.share, self.fused = share, bool(made)
        a_or_inner, self.b, self.own, self.present_g, self.counters, self.turn_g = given
        self.a, (self.inner, self.parts) = (a_or_inner, made) if self.fused else (None, (a_or_inner, None))
        self.projections = share.adapters * TILE // self.b.shape[0]
        self.projection = 0 if self.projections == 1 or share.reads > 1 else projection()
        self.split, self.block = split_of(share), lax.axis_index("tile") * share.splits + split_of(share)
        self.early = min(EARLY, max(share.slots - share.shrinks, 0)) if self.fused else share.slots

    def read(self) -> None:
        """Learn which runs of columns are present, and this block's part of x @ A."""
        share = self.share
        self.present, self.turn = self.present_g[0], self.turn_g[0]
        self.count = sum(map(self._has, range(share.adapters // self.projections)))
        self.expands = lax.div(self.count + (share.splits - 1) - self.split, _i32(share.splits))
        self.shrinks = _i32(0)
        if self.fused:
            unit, self.piece = (f(self.block, _i32(share.pieces)) for f in (lax.div, lax.rem))
            self.first = unit * share.groups
            self.shrinks = self._any(self.first) * (self.first < share.adapters) * share.shrinks
        self.end = self.shrinks + share.chunks + self.expands

    def _has(self, run: Any) -> Any:
        """1 if a row has an adapter in this run of columns, else 0."""
        return lax.shift_right_logical(self.present, _i32(run)) & 1

    def _any(self, first: Any) -> Any:
        """1 if one of a unit's runs, counted over all projections, is present."""
        return functools.reduce(jnp.bitwise_or, (self._has(self._run(first + g)) for g in range(self.share.groups)))

    def _run(self, i: Any) -> Any:
        """The run of columns of the i-th over all projections, which alternate; past the last, that of the last."""
        return lax.div(jnp.minimum(_i32(i), self.share.adapters - 1), _i32(self.projections))

    def _expanded(self, which: Any) -> Any:
        """The run of this block's chunk of B. The blocks of a cluster take those that are present in turn."""
        nth, run, before = self.split + which * self.share.splits, _i32(0), _i32(0)
        for each in range(self.share.adapters // self.projections):
            run = jnp.where((before == nth) & (self._has(each) == 1), _i32(each), run)
            before = before + self._has(each)
        return run

    def begin(self, base: Callable, row_g: Any, **ring) -> Callable:
        """Begin to fill the ring. Returns the function that copies the chunk of step i to a slot; `base(i, slot)` does
        so for the i-th of the base's."""
        for i in range(min(self.early, self.share.slots)):
            base(i, i)
        self.read()
        fetch = partial(self._fetch, base, row_g, **ring)

        def one(i, _):
            fetch(i, i, last=False)
            return _

        lax.fori_loop(_i32(self.early), _i32(self.share.slots), one, _i32(0))
        return fetch

    def _fetch(self, base, row_g, i, slot, last=True, *, weight_s, rows_s, ready, inner_s):
        share, early, after = self.share, self.early, self.early + self.shrinks
        copy = partial(plgpu.copy_gmem_to_smem, barrier=ready.at[slot])

        def shrink():
            inputs = pl.ds((self.piece * share.shrinks + i - early) * share.chunk, share.chunk)
            for g in range(share.groups):
                at = jnp.minimum(self.first + g, share.adapters - 1)
                column = lax.rem(at, _i32(self.projections)) * self.b.shape[0] + self._run(at) * TILE
                copy(self.a.at[inputs, pl.ds(column, TILE)], weight_s.at[slot, g])
            copy(row_g.at[:, inputs], rows_s.at[slot])

        def expand():
            which = i - (self.shrinks + share.chunks)
            if self.fused:
                items = self.count * (self.projections * (share.rows // GROUP))
                pl.when(which == 0)(partial(_wait, self.counters.at[self.turn, 1], items))
            run = self._expanded(which)
            for g in range(share.groups):
                columns = pl.ds(column_of(share, share.columns, lax.axis_index("tile"), g), TILE)
                copy(self.b.at[pl.ds(run * TILE, TILE), columns], weight_s.at[slot, g, pl.ds(0, TILE)])
            column = (run * self.projections + self.projection) * TILE
            copy(self.inner.at[:, pl.ds(column, share.reads * TILE)], inner_s.at[slot])

        if self.fused:
            pl.when((i >= early) & (i < after))(shrink)
        pl.when((i >= after) & (i < self.shrinks + share.chunks))(lambda: base(i - self.shrinks, slot))
        if last:
            pl.when(i >= self.shrinks + share.chunks)(expand)

    def sums(self, fetch: Callable, *, weight_s, rows_s, ready, inner_s, reduced_s) -> tuple[Any, ...]:
        """f32[TILE, rows] of each group, over the block's inputs, and over what adapters add to them."""
        share, first, based = self.share, self.early + self.shrinks, self.shrinks + self.share.chunks
        acc = [plgpu.ACC((TILE, share.rows), _f32)] * share.groups

        def steps(begin, stop, multiply, end):
            def step(i, _):
                slot = lax.rem(i, _i32(share.slots))
                plgpu.barrier_wait(ready.at[slot])
                multiply(slot)
                plgpu.wgmma_wait(0)
                pl.when(i + share.slots < end)(lambda: fetch(i + share.slots, slot))
                return _

            lax.fori_loop(_i32(begin), _i32(stop), step, _i32(0))

        def times_rows(totals, slot):
            for g, total in enumerate(totals):
                plgpu.wgmma(total, weight_s.at[slot, g].transpose((1, 0)), rows_s.at[slot].transpose((1, 0)))

        def times_inner(totals, slot):
            for at, total in enumerate(totals):
                which, g = divmod(at, share.groups)
                rows = inner_s.at[slot, :, pl.ds(which * TILE, TILE)].transpose((1, 0))
                plgpu.wgmma(total, weight_s.at[slot, g, pl.ds(0, TILE)].transpose((1, 0)), rows)

        def refill(i, _):
            fetch(i, lax.rem(i, _i32(share.slots)))
            return _

        def shrink(*totals):
            steps(self.early, first, partial(times_rows, totals), based)
            return tuple(total[...] for total in totals)

        def base(*totals):
            # Chunks of B wait for all blocks' sums, so none is fetched before this block has added up its own.
            steps(0, self.early, partial(times_rows, totals), based)
            if self.fused:
                pl.when(self.shrinks > 0)(lambda: self._write(pl.run_scoped(shrink, *acc)))
                self._reduce(reduced_s)
            missed = jnp.minimum(first + share.slots, self.end)
            lax.fori_loop(_i32(based), _i32(missed), refill, _i32(0))
            steps(first, based, partial(times_rows, totals), self.end)
            if share.reads == 1:
                steps(based, self.end, partial(times_inner, totals), self.end)
            return tuple(total[...] for total in totals)

        def terms(*totals):
            steps(based, self.end, partial(times_inner, totals), self.end)
            return tuple(total[...] for total in totals)

        totals = pl.run_scoped(base, *acc)
        if share.reads == 1:
            return totals
        more = pl.run_scoped(terms, *acc * share.reads)  # a group has `HALF` columns of either projection
        of_first = plgpu.broadcasted_iota(_i32, (TILE, share.rows), 0, layout=plgpu.Layout.WGMMA) < HALF
        halves = zip(totals, more[: share.groups], more[share.groups :], strict=True)
        return tuple(total + jnp.where(of_first, one, two) for total, one, two in halves)

    def _write(self, totals: Sequence[Any]) -> None:
        """Write this block's part of x @ A, and count it."""
        for g, total in enumerate(totals):
            at = jnp.minimum(self.first + g, self.share.adapters - 1)
            part = self.parts.at[self.piece, at].transpose((1, 0))
            part[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        _signal(self.counters.at[self.turn, 0])

    def _reduce(self, reduced_s: Any) -> None:
        """Add up this block's share of the parts, once all are there."""
        share, eights = self.share, self.share.rows // GROUP
        items, blocks = share.adapters * eights, share.tiles * share.splits
        units = [self._any(first) for first in range(0, share.adapters, share.groups)]
        load = partial(plgpu.load, layout=by_row(4), optimized=False)

        def add_up(item):
            at, rows = lax.div(item, _i32(eights)), pl.ds(lax.rem(item, _i32(eights)) * GROUP, GROUP)
            _wait(self.counters.at[self.turn, 0], sum(units[1:], units[0]) * share.pieces)
            total = None
            for first in range(0, share.pieces, AT_ONCE):
                pieces = range(first, min(first + AT_ONCE, share.pieces))
                for part in [load(self.parts.at[piece, at, rows]) for piece in pieces]:
                    total = part if total is None else total + part
            own = load(self.own.at[rows, pl.ds(self._run(at) * TILE, TILE)])
            reduced_s[...] = (total * own.astype(_f32)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(reduced_s, self.inner.at[rows, pl.ds(at * TILE, TILE)])
            plgpu.wait_smem_to_gmem(0)
            _signal(self.counters.at[self.turn, 1])

        def one(j, _):
            item = self.block + j * blocks
            has = self._has(self._run(lax.div(item, _i32(eights))))
            pl.when((item < items) & (has == 1))(lambda: add_up(item))
            return _

        lax.fori_loop(_i32(0), _i32(-(-items // blocks)), one, _i32(0))


def _signal(counter: Any) -> None:
    """Count one more, once all threads have written what they say is there."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=None)
    def signal(_, ref):
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    signal(counter)


def _wait(counter: Any, count: Any) -> None:
    """Wait until a counter has reached `count`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=None)
    def wait(_, ref, count):
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref))
        semaphore.wait(count.registers.flat[0], decrement=False, memory_scope="gpu")

    wait(counter, count)
