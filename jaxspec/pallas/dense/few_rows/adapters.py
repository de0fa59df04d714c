"""Add x @ A @ B of rows' adapters (LoRA) to a product, in its own kernel.

A kernel of its own for x @ A would wait for the one before and then for memory, and so would the base's after it: some
microseconds four times a layer, for little to read. Here each block has a second warpgroup for adapters, so the base's
weights keep on coming. All blocks share out x @ A: each multiplies some inputs by a run of `TILE` columns, and writes
its part of the sums. Once all have, each adds up the parts that its columns need, of each row's own adapter alone
(`inner`), and multiplies them by B. The first warpgroup adds these sums to the base's in the end. Runs of columns in
which no row has an adapter aren't read.

A counter in memory says how many blocks have written a part. All blocks run at once (`share_out`), so none waits for
one that hasn't begun. Zeros for each kernel would take a kernel of their own, so all of a forward's counters are one
array, which goes from one to the next. Jax's interpreter has no counters: there `inner` is an operand, computed in
plain jnp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float, Int

from jaxspec.models.weights import HALF
from jaxspec.pallas.dense.few_rows import cluster
from jaxspec.pallas.dense.few_rows.block import add_sums, by_row, eights
from jaxspec.pallas.dense.few_rows.share import GROUP, TILE, Share, column_of, share_out, split_of

MOST_RUNS = 32  # of a projection's columns: the bits of `Adapters.present`
AT_ONCE = 2  # groups of rows whose parts are loaded before the first is added up
LOAD = "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];"
_i32, _f32 = jnp.int32, jnp.float32


class Adapters(NamedTuple):
    """Operands by which adapters add `x @ a @ b` to a product of unquantised weights, each row its own, before the
    norm's factor and all that is made of the product. Axis letters as in `decoder.low_rank`.

    `place`: of each row's adapter, negative without one. `present`: a bit for each run of `TILE` of a projection's
    columns of A, places side by side, in which a row has its own. `counters`: zeros at `turn`, which no other kernel
    uses.
    """

    a: Float[Array, "k i s p"]
    b: Float[Array, "s p n"]
    place: Int[Array, " r"]
    present: Int[Array, "1"]
    counters: Int[Array, " m"]
    turn: Int[Array, "1"]


def adapters_supported(
    rows: int, shape: tuple[int, int], groups: int | None, places: int, rank: int, projections: int, dtype: Any
) -> str | None:
    """Why a product of so many rows with a weight of this shape can't add what adapters do, or None if it can.

    `groups`: of a block's columns, as of `share_out`; None: it is gated.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"adapters in {jnp.dtype(dtype).name}; supported: bfloat16"
    if TILE % rank or places * rank % TILE or places * rank > MOST_RUNS * TILE:
        return f"adapters of rank {rank} in {places} places"
    if projections not in ((1, 2) if groups is None else (1, 3)):
        return f"adapters of {projections} projections in one weight"
    of = dict(normed=False, rank=rank, adapters=projections * places * rank // TILE)
    of["reads"] = projections if groups is None else 1
    fits = share_out(-(-rows // GROUP) * GROUP, [shape[0]], shape[1], groups, **of).fits
    return None if fits else f"{places * rank} ranks beside {rows} rows and a weight of {shape[0]} by {shape[1]}"


def inner(rows: Float[Array, "r k"], adapters: Adapters) -> Float[Array, "r q"]:
    """`rows @ a`, each row's own columns; of each run of columns all projections side by side."""
    k, _, places, rank = adapters.a.shape
    product = jnp.matmul(rows, adapters.a.reshape(k, -1), preferred_element_type=_f32)
    own = adapters.place[:, None] == jnp.repeat(jnp.arange(places), rank)
    product = jnp.where(own[:, None], product.reshape(len(rows), -1, places * rank), 0).astype(rows.dtype)
    return jnp.swapaxes(product.reshape(len(rows), -1, places * rank // TILE, TILE), 1, 2).reshape(len(rows), -1)


def options(adapters: Adapters | tuple[()], reads: int = 1) -> dict[str, int]:
    """How `share_out` is told of a product's adapters. `reads`: projections that one tile's columns may be of."""
    if not adapters:
        return {}
    _, projections, places, rank = adapters.a.shape
    return {"adapters": projections * places * rank // TILE, "reads": min(reads, projections), "rank": rank}


def operands(adapters: Adapters | tuple[()], rows: Float[Array, "r k"], interpret: Any) -> list[Any]:
    """Give a kernel its operands for them: arrays, and a reference to the counters."""
    if not adapters:
        return []
    first = inner(rows, adapters) if interpret else adapters.a.reshape(len(adapters.a), -1)
    b, counters = adapters.b.reshape(-1, adapters.b.shape[2]), jax.new_ref(adapters.counters)
    return [first, b, adapters.place, adapters.present, counters, adapters.turn]


def left(given: Sequence[Any]) -> list[Array]:
    """The counters after a kernel that was given these `operands`, for the next; nothing without adapters."""
    return [jax.freeze(given[Adapters._fields.index("counters")])] if given else []


def results(share: Share, interpret: Any) -> list[jax.ShapeDtypeStruct]:
    """The array in memory through which blocks hand on their parts of the sums."""
    if not share.adapters or interpret:
        return []
    return [jax.ShapeDtypeStruct((share.pieces, share.adapters, share.rows, TILE), _f32)]


def scratch(share: Share) -> dict[str, Any]:
    """Shared memory and barriers of the second warpgroup; none without adapters."""
    if not share.adapters:
        return {}
    bf16, runs = jnp.bfloat16, share.runs
    a_s = plgpu.SMEM((share.a_slots, TILE, TILE), bf16)
    sums_s = plgpu.SMEM((share.groups * share.rows // GROUP, TILE, GROUP), _f32)
    return {"adapters_s": plgpu.RefUnion(a_s, sums_s)} | dict(
        a_rows_s=plgpu.SMEM((share.a_slots, share.rows, TILE), bf16),
        a_ready=plgpu.Barrier(num_arrivals=2, num_barriers=share.a_slots),
        b_s=plgpu.SMEM((runs, share.groups, TILE, TILE), bf16),
        b_ready=plgpu.Barrier(num_arrivals=share.groups, num_barriers=runs),
        inner_s=plgpu.SMEM((share.reads, share.rows, TILE), bf16),
        fetched=plgpu.Barrier(num_arrivals=1),
        added=plgpu.Barrier(num_arrivals=1),
    )


def in_turn(share: Share, added: Added | None, row_g: Any, base: Callable[[], None]) -> None:
    """Run a block's product, and in its second warpgroup, if rows have adapters, what they add."""
    if added is None:
        base()
        return
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(base)
    pl.when(warpgroup == 1)(partial(added.run, row_g))


def taken(
    share: Share, refs: list[Any], between: int, own: dict[str, Any], projection: Callable[[], Any] = lambda: 0
) -> Added | None:
    """Take what `operands`, `results` and `scratch` gave from a kernel's references; None if rows have no adapters.
    `projection`: the one of this tile's columns, unless they are of two."""
    if not share.adapters:
        return None
    given = [refs.pop(0) for _ in range(len(Adapters._fields))]
    made = [refs.pop() for _ in range(between)]
    return Added(share, given, made, {name: own.pop(name) for name in scratch(share)}, projection, own.get("sent_s"))


class Added:
    """The adapters of a kernel's rows, in one block."""

    def __init__(self, share, given, made, own, projection, sent_s):
        self.share, self.own, self.sent_s = share, own, sent_s
        self.a_or_inner, self.b, self.place_g, self.present_g, self.counters, self.turn_g = given
        self.parts = made[0] if made else None  # none when interpreted
        self.projections = share.adapters * TILE // self.b.shape[0]
        self.projection = 0 if self.projections == 1 or share.reads > 1 else projection()
        self.a_s, self.sums_s = own["adapters_s"]
        self.split, self.block = split_of(share), lax.axis_index("tile") * share.splits + split_of(share)

    def wait_for_fetches(self) -> None:
        """Wait, in the first warpgroup, until the second has asked for what it needs: it needs it sooner."""
        plgpu.barrier_wait(self.own["fetched"])

    def to(self, totals: Sequence[Any]) -> Sequence[Any]:
        """Add, in the first warpgroup, the second's sums to the base's."""
        plgpu.barrier_wait(self.own["added"])
        return add_sums(self.share, [self.sums_s], totals)

    def run(self, row_g: Any) -> None:
        """Compute, in the second warpgroup, what adapters add to this block's columns."""
        share, runs = self.share, self.share.runs
        if share.splits > 1:
            cluster.expect(share, self.sent_s)
        present, turn = self.present_g[0], self.turn_g[0]
        has = [lax.shift_right_logical(present, _i32(run)) & 1 for run in range(share.adapters // self.projections)]
        count, shrinks = sum(has[1:], has[0]), _i32(0)
        expands = lax.div(count + (share.splits - 1) - self.split, _i32(share.splits))
        unit, piece = (f(self.block, _i32(share.pieces)) for f in (lax.div, lax.rem))
        if self.parts is not None:
            of_unit = (
                lax.shift_right_logical(present, jnp.minimum(lax.div(unit, _i32(self.projections)), MOST_RUNS - 1)) & 1
            )
            shrinks = (unit < share.adapters) * of_unit * share.shrinks
        for i in range(share.a_slots if self.parts is not None else 0):
            pl.when(i < shrinks)(partial(self._fetch_a, row_g, unit, piece, i, i))
        for i in range(runs):
            pl.when(i < expands)(partial(self._fetch_b, has, i, i))
        plgpu.barrier_arrive(self.own["fetched"])
        values = []
        if self.parts is not None:
            places = [self._places(at) for at in range(0, share.rows, GROUP)]
            pl.when(shrinks > 0)(partial(self._shrink, row_g, unit, piece, turn))
            # Blocks without a run wait, too: none ends while others still need its part, and reading waits for nothing.
            _wait(self.counters.at[turn], count * (self.projections * share.pieces))
            values = self._add_up(places)
            values = [(place, at, values[n :: len(places)]) for n, (place, at) in enumerate(places)]
        totals = self._expand(has, expands, values)
        for i, eight in enumerate(eights(totals)):
            self.sums_s[i] = eight
        plgpu.commit_smem()  # all threads have written when one of them signals
        plgpu.barrier_arrive(self.own["added"])
        if share.splits > 1:
            cluster.meet()

    def _fetch_a(self, row_g, unit, piece, i, slot):
        inputs, ready = pl.ds((piece * self.share.shrinks + i) * TILE, TILE), self.own["a_ready"].at[slot]
        run, projection = (f(unit, _i32(self.projections)) for f in (lax.div, lax.rem))
        columns = pl.ds(projection * self.b.shape[0] + run * TILE, TILE)
        plgpu.copy_gmem_to_smem(self.a_or_inner.at[inputs, columns], self.a_s.at[slot], ready)
        plgpu.copy_gmem_to_smem(row_g.at[:, inputs], self.own["a_rows_s"].at[slot], ready)

    def _fetch_b(self, has, i, slot):
        run, tile = self._run(has, i), lax.axis_index("tile")
        for g in range(self.share.groups):
            columns = pl.ds(column_of(self.share, self.share.columns, tile, g), TILE)
            part = self.b.at[pl.ds(run * TILE, TILE), columns]
            plgpu.copy_gmem_to_smem(part, self.own["b_s"].at[slot, g], self.own["b_ready"].at[slot])

    def _run(self, has, i):
        """The i-th of this block's runs of columns: the blocks of a cluster take those that are present in turn."""
        nth, run, before = self.split + i * self.share.splits, _i32(0), _i32(0)
        for each, there in enumerate(has):
            run = jnp.where((before == nth) & (there == 1), _i32(each), run)
            before = before + there
        return run

    def _shrink(self, row_g, unit, piece, turn):
        """Multiply this block's inputs by its run of columns of A, write these sums, and count them."""
        share, own = self.share, self.own

        def sums(total):
            def step(i, _):
                slot = lax.rem(i, _i32(share.a_slots))
                plgpu.barrier_wait(own["a_ready"].at[slot])
                plgpu.wgmma(total, self.a_s.at[slot].transpose((1, 0)), own["a_rows_s"].at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                more = i + share.a_slots
                pl.when(more < share.shrinks)(lambda: self._fetch_a(row_g, unit, piece, more, slot))
                return _

            lax.fori_loop(_i32(0), _i32(share.shrinks), step, _i32(0))
            return total[...]

        total = pl.run_scoped(sums, plgpu.ACC((TILE, share.rows), _f32))
        self.parts.at[piece, unit].transpose((1, 0))[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        _signal(self.counters.at[turn])

    def _places(self, first):
        """The places of eight rows' adapters, and where in `parts` four numbers of theirs begin: of each row's own
        columns, over and over as they lie in a run."""
        share, layout, shape = self.share, by_row(4), (GROUP, TILE)
        iota = partial(plgpu.broadcasted_iota, _i32, shape, layout=layout)
        place = plgpu.load(self.place_g.at[pl.ds(first, GROUP)], layout=layout.reduce(1), optimized=False)
        place, column = lax.broadcast_in_dim(place, shape, [0]), iota(1)
        own = jnp.maximum(place, 0) * share.rank + (column - lax.div(column, _i32(share.rank)) * share.rank)
        run = lax.div(own, _i32(TILE))
        unit = run * self.projections + self.projection
        return place, (unit * share.rows + (iota(0) + first)) * TILE + (own - run * TILE)

    def _add_up(self, places):
        """Add up the parts of each row's own columns: of each projection that is read, of each eight rows."""
        share, made = self.share, []
        wanted = [at + which * share.rows * TILE for which in range(share.reads) for _, at in places]
        for i in range(0, len(wanted), AT_ONCE):
            some = wanted[i : i + AT_ONCE]
            one = plgpu.ShapeDtypeStruct((GROUP, TILE), _f32, layout=by_row(4))
            types = plgpu.RefType(), *[by_row(4)] * len(some)
            gather = plgpu.inline_mgpu(arg_types=types, return_type=[one] * len(some))(partial(_gather, share))
            made += gather(self.parts, *some)
        return [each.astype(jnp.bfloat16).astype(_f32) for each in made]

    def _expand(self, has, expands, values):
        """f32[TILE, rows] of each group: `inner` times B, over this block's runs."""
        share, own = self.share, self.own

        def put(run):
            """Write `inner` of a run of columns to shared memory."""
            for n, (place, _, of_rows) in enumerate(values):
                column = plgpu.broadcasted_iota(_i32, (GROUP, TILE), 1, layout=by_row(4)) + run * TILE
                mine = lax.div(column, _i32(share.rank)) == place
                for which, value in enumerate(of_rows):
                    own["inner_s"][which, pl.ds(n * GROUP, GROUP)] = jnp.where(mine, value, 0.0).astype(jnp.bfloat16)
            for which in range(0 if values else share.reads):
                columns = pl.ds((run * self.projections + self.projection + which) * TILE, TILE)
                own["inner_s"][which] = self.a_or_inner[:, columns]

        def sums(*totals):
            def step(i, _):
                slot, run = lax.rem(i, _i32(share.runs)), self._run(has, i)
                plgpu.commit_smem()  # all warps have read the last run's
                put(run)
                plgpu.commit_smem()
                plgpu.barrier_wait(own["b_ready"].at[slot])
                for at, total in enumerate(totals):
                    which, g = divmod(at, share.groups)
                    of_rows = own["inner_s"].at[which].transpose((1, 0))
                    plgpu.wgmma(total, own["b_s"].at[slot, g].transpose((1, 0)), of_rows)
                plgpu.wgmma_wait(0)
                pl.when(i + share.runs < expands)(lambda: self._fetch_b(has, i + share.runs, slot))
                return _

            lax.fori_loop(_i32(0), expands, step, _i32(0))
            return tuple(total[...] for total in totals)

        totals = pl.run_scoped(sums, *[plgpu.ACC((TILE, share.rows), _f32)] * (share.groups * share.reads))
        if share.reads == 1:
            return totals
        of_first = plgpu.broadcasted_iota(_i32, (TILE, share.rows), 0, layout=plgpu.Layout.WGMMA) < HALF
        pairs = zip(totals[: share.groups], totals[share.groups :], strict=True)
        return [jnp.where(of_first, one, two) for one, two in pairs]  # a group has `HALF` columns of either


def _gather(share, _, parts, *places):
    """Load four numbers of each piece from each place on, and add them up."""
    f32, i8, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    number = lambda x: mgpu.c(x, i32)  # noqa: E731
    base, size, made = mgpu.utils.memref_ptr(parts), 4 * share.adapters * share.rows * TILE, []
    for place in places:
        (vector,) = place.registers.flat
        first = mgpu.utils.getelementptr(base, [arith.muli(llvm.extractelement(vector, number(0)), number(4))], i8)
        pointers = [mgpu.utils.getelementptr(first, [piece * size], i8) for piece in range(share.pieces)]
        made.append([mgpu.utils.inline_ptx(LOAD, at, result_types=[f32] * 4, has_side_effects=True) for at in pointers])
    arrays = []
    for place, parts in zip(places, made, strict=True):
        total = functools.reduce(lambda a, b: [arith.addf(*pair) for pair in zip(a, b, strict=True)], parts)
        whole = llvm.mlir_undef(ir.VectorType.get((4,), f32))
        for i, value in enumerate(total):
            whole = llvm.insertelement(whole, value, position=number(i))
        registers = np.empty_like(place.registers)
        registers[...] = whole
        arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=place.layout, _is_signed=None))
    return arrays


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
