"""A mixture's FP8 experts for prompts, on Hopper: weights become bfloat16 in registers, times their scales.

It computes what `expert_fp8` does, for experts that have many rows, with the inner loop of `pallas.dense.fp8_wide`: the
tensor cores accumulate from an item's first inputs to its last without being drained, and the next weights are
converted meanwhile. A weight times its block's scale is rounded to bfloat16 once; an output's scale for all inputs
multiplies its sums.

A multiprocessor takes one tile after the other: an item's rows, up to `MAX_ROWS`, times four groups of 64 of its
expert's weight rows, two for each of two warpgroups: gate's and up's, or neighbours of `down`. A third warpgroup fills
a ring with pieces of weights and rows, and so begins the next tile while the last one's results are written.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense import scaled, tiles
from jaxspec.pallas.dense.tiles import STEP, UNIT, Hands
from jaxspec.pallas.experts.expert_fp8 import GROUPS, Fp8Stage, operands
from jaxspec.pallas.experts.expert_stream import ALIGN, COUNT, EXPERT, ROW_BLOCKS, SOURCE, TARGET, Items
from jaxspec.pallas.experts.expert_tile import PROMPT_ROWS, of_outputs
from jaxspec.pallas.hopper.export import lower_once

MAX_ROWS = 128  # of an item
HEIGHTS = (64, 128)  # rows that a tile multiplies
WARPGROUPS = 2  # that multiply
SLOTS = 6
_i32, _f32 = jnp.int32, jnp.float32


def supported(tokens: int, each: int, stacks: list[tuple[Weight, ...]]) -> str | None:
    """Why FP8 experts that `expert_fp8` takes can't, or shouldn't, be served to so many tokens; None if they should."""
    experts, width = sum(len(stack[1].values) for stack in stacks), stacks[0][1].outputs
    if tokens * each <= PROMPT_ROWS * experts:  # then reading weights is most of the work
        return f"{tokens * each} rows for {experts} experts; supported: more than {PROMPT_ROWS} each"
    across = WARPGROUPS * GROUPS * UNIT
    return f"rows of {width}; supported: multiples of {across}" if width % across else None


def mix(
    rows: Float[Array, "r d"], stacks: list[tuple[Weight, Weight]], items: Items, *, interpret: Any = False
) -> Float[Array, "c d"]:
    """Run each item's rows through its expert, as `expert_fp8.mix`, but with weights times their blocks' scales rounded
    to bfloat16.

    **Raises:** `ValueError` if `expert_fp8.supported` has a reason against it.
    """
    return _mix(rows, operands(rows.dtype, stacks), items, interpret=interpret)


@lower_once("expert_wide")
def _mix(rows, parts, items, *, interpret):
    for name, source, weights in zip(("up", "down"), (SOURCE, TARGET), parts, strict=True):
        shapes = [values.shape for values, _ in weights]
        stage = Fp8Stage.of(name, source, shapes, weights[0][1].shape, items.rows)
        rows = _launch(stage, rows, weights, items, interpret)
    return rows


def _launch(stage: Fp8Stage, rows, weights, items: Items, interpret) -> Float[Array, "c n"]:
    arrays = [each for values, scales in weights for each in (lax.bitcast_convert_type(values, jnp.int8), scales)]
    scratch = dict(
        rows_s=plgpu.SMEM((SLOTS, MAX_ROWS, STEP), jnp.bfloat16),
        weight_s=plgpu.SMEM((SLOTS, WARPGROUPS, GROUPS, UNIT, STEP), jnp.int8),
        out_s=plgpu.SMEM((WARPGROUPS, UNIT, UNIT), jnp.bfloat16),
        full=plgpu.Barrier(num_arrivals=1 + WARPGROUPS * GROUPS, num_barriers=SLOTS),
        empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
    )
    if interpret:  # which takes a matmul's left operand from shared memory alone
        scratch["staged_s"] = plgpu.SMEM((WARPGROUPS, UNIT, STEP), jnp.bfloat16)
    shape = jax.ShapeDtypeStruct((items.capacity, stage.width), rows.dtype)
    operands, name = [rows, items.table, *arrays], f"expert_wide_{stage.name}"
    return tiles.launch(partial(_block, stage), name, operands, shape, WARPGROUPS, scratch, interpret)


class _Unit(NamedTuple):
    """An item and a tile of its expert's weight rows. `blocks`: of `ALIGN` rows, none if there is nothing to do."""

    expert: Any
    source: Any
    target: Any
    blocks: Any
    tile: Any

    @classmethod
    def of(cls, stage: Fp8Stage, items_g: Any, unit: Any) -> _Unit:
        across = stage.tiles // WARPGROUPS
        item = items_g.at[lax.div(unit, _i32(across))]
        columns = EXPERT, stage.source, TARGET, ROW_BLOCKS
        return cls(*(item[column] for column in columns), lax.rem(unit, _i32(across)))

    def groups(self, stage: Fp8Stage, warpgroup: Any) -> list[Any]:
        """A warpgroup's groups of `UNIT` weight rows."""
        return [stage.group(self.tile * WARPGROUPS + warpgroup, g) for g in range(GROUPS)]

    def each_height(self, run: Any) -> None:
        """Call `run(height)` for the height that the item needs, if it has rows."""
        for fewer, height in zip((0, *HEIGHTS), HEIGHTS, strict=False):
            pl.when((self.blocks * ALIGN > fewer) & (self.blocks * ALIGN <= height))(partial(run, height))


def _block(stage, rows_g, items_g, *refs, rows_s, weight_s, out_s, full, empty, staged_s=None):
    *arrays, out_g = refs
    stacks, hands = list(zip(arrays[::2], arrays[1::2], strict=True)), Hands(full, empty, SLOTS)
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    units = items_g[0, COUNT] * (stage.tiles // WARPGROUPS)
    mine = lax.div(units + tiles.BLOCKS - 1 - index, _i32(tiles.BLOCKS))
    steps = stage.inputs // STEP

    def each(run: Any) -> Any:
        """Run all of this block's units; `run(unit, step)` begins at the step of the ring. Returns the steps."""

        def one(j, step):
            unit = _Unit.of(stage, items_g, index + j * tiles.BLOCKS)
            run(unit, step)
            return step + jnp.where(unit.blocks > 0, _i32(steps), 0)

        return lax.fori_loop(_i32(0), mine, one, _i32(0))

    def copy(unit, step):
        def fetch(height, k, step):
            slot, inputs = hands.slot(step), pl.ds(k * STEP, STEP)
            pl.when(step >= SLOTS)(lambda: plgpu.barrier_wait(empty.at[slot]))
            source = rows_g.at[pl.ds(unit.source * ALIGN, height), inputs]
            plgpu.copy_gmem_to_smem(source, rows_s.at[slot, pl.ds(0, height)], full.at[slot])
            first = 0
            for (values, _), size in zip(stacks, stage.stacks, strict=True):

                @pl.when((unit.expert >= first) & (unit.expert < first + size))
                def _(values=values, first=first):
                    for w in range(WARPGROUPS):
                        for g, group in enumerate(unit.groups(stage, w)):
                            piece = values.at[unit.expert - first, pl.ds(group * UNIT, UNIT), inputs]
                            plgpu.copy_gmem_to_smem(piece, weight_s.at[slot, w, g], full.at[slot])

                first += size
            return step + 1

        def fetch_all(height):
            lax.fori_loop(_i32(0), _i32(steps), partial(fetch, height), step)

        unit.each_height(fetch_all)

    def multiply(unit, step):
        weight = _Weight(stage, stacks, unit, warpgroup, weight_s, hands, staged_s)

        def tile(height):
            _finish(stage, unit, warpgroup, _sums(weight, rows_s, height, step), out_s, out_g)

        unit.each_height(tile)

    def produce():
        hands.observe(each(copy))

    def consume():
        each(multiply)
        plgpu.wait_smem_to_gmem(0)

    tiles.divide(warpgroup, WARPGROUPS, produce, consume)


class _Weight(NamedTuple):
    """A warpgroup's weights in the ring, as left operands."""

    stage: Fp8Stage
    stacks: list[Any]
    unit: _Unit
    warpgroup: Any
    weight_s: Any
    hands: Hands
    staged_s: Any

    def scales_at(self, k: Any) -> list[Any]:
        """Each group's scale of the k-th block of inputs, in a list; an empty one where outputs have scales."""
        if not self.stage.unit:
            return [[]] * GROUPS

        def scale(group):
            unit, found, first = lax.div(group * UNIT, _i32(self.stage.unit)), None, 0
            for (_, scales), size in zip(self.stacks, self.stage.stacks, strict=True):
                own = scales[jnp.clip(self.unit.expert - first, 0, size - 1), unit, k]
                found = own if found is None else jnp.where(self.unit.expert >= first, own, found)
                first += size
            return [found]

        return [scale(group) for group in self.unit.groups(self.stage, self.warpgroup)]

    @property
    def by_output(self) -> list[Any]:
        """Each group's scales of outputs, f32[UNIT]; none where scales are of blocks."""
        if self.stage.unit:
            return []
        scales, stacks = [scales for _, scales in self.stacks], self.stage.stacks
        groups = self.unit.groups(self.stage, self.warpgroup)
        return [of_outputs(scales, stacks, self.unit.expert, group) for group in groups]

    def at(self, step: Any, g: int, scales: list[Any]) -> Any:
        """A step's weights of a group [UNIT, STEP] times their scale over `scaled.LEFT`, in bfloat16."""
        bytes_s = self.weight_s.at[self.hands.slot(step), self.warpgroup, g]
        return scaled.load(bytes_s, scales[g], None if self.staged_s is None else self.staged_s.at[self.warpgroup])

    def wait(self, step: Any) -> None:
        plgpu.barrier_wait(self.hands.full.at[self.hands.slot(step)])

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.hands.empty.at[self.hands.slot(step)])


def _sums(weight: _Weight, rows_s: Any, height: int, step: Any) -> list[Any]:
    """Multiply an item's steps as they arrive: each group's outputs, f32[UNIT, height]."""
    shape, pairs, each = (UNIT, height), weight.stage.inputs // BLOCK, BLOCK // STEP
    by_output = [lax.broadcast_in_dim(scales, shape, [0]) for scales in weight.by_output]
    rows = lambda step: rows_s.at[weight.hands.slot(step), pl.ds(0, height)].transpose((1, 0))  # noqa: E731

    def staged(k, carried):
        """For interpret mode, which can neither begin with a sum nor take a left operand from registers."""
        totals, step = carried
        for at in range(each):
            weight.wait(step + at)
            for g in range(GROUPS):

                def product(acc, g=g, step=step + at):
                    plgpu.wgmma(acc, weight.at(step, g, weight.scales_at(k)), rows(step))
                    return acc[...]

                totals[g] += pl.run_scoped(product, plgpu.ACC(shape, _f32))
            weight.release(step + at)
        return totals, step + each

    def pipelined(*sums):
        def pair(k, carried):
            left, scales, step = carried
            following = weight.scales_at(jnp.minimum(k + 1, pairs - 1))  # reading takes about as long as a step
            for at in range(each):
                now, last = step + at, at == each - 1
                plgpu.wgmma(sums[0], left, rows(now))
                plgpu.wgmma_wait(1)  # the step before is done, and its slot free
                pl.when((k > 0) | (at > 0))(partial(weight.release, now - 1))
                plgpu.wgmma(sums[1], weight.at(now, 1, scales), rows(now))
                more = (k + 1 < pairs) | (not last)
                pl.when(more)(partial(weight.wait, now + 1))
                plgpu.wgmma_wait(1)
                left = weight.at(jnp.where(more, now + 1, now), 0, following if last else scales)
            return left, following, step + each

        weight.wait(step)
        scales = weight.scales_at(_i32(0))
        lax.fori_loop(_i32(0), _i32(pairs), pair, (weight.at(step, 0, scales), scales, step))
        totals = [each[...] for each in sums]
        weight.release(step + pairs * each - 1)
        return totals

    if weight.staged_s is None:
        totals = pl.run_scoped(pipelined, *[plgpu.ACC(shape, _f32)] * GROUPS)
    else:
        start = plgpu.layout_cast(jnp.zeros(shape, _f32), plgpu.Layout.WGMMA)
        totals = lax.fori_loop(_i32(0), _i32(pairs), staged, ([start] * GROUPS, step))[0]
    totals = [total * scaled.LEFT for total in totals]
    return [total * scales for total, scales in zip(totals, by_output, strict=True)] if by_output else totals


def _finish(stage: Fp8Stage, unit: _Unit, warpgroup: Any, totals: list[Any], out_s: Any, out_g: Any) -> None:
    """Write the columns of the item's own rows, by way of shared memory, where they are transposed."""
    if stage.name == "up":
        gate, up = totals
        totals = [gate / (1 + jnp.exp(-gate)) * up]
    own_s = out_s.at[warpgroup]
    for part, total in enumerate(totals):
        columns = pl.ds(((unit.tile * WARPGROUPS + warpgroup) * len(totals) + part) * UNIT, UNIT)
        for at in range(0, total.shape[1], UNIT):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            place = own_s.transpose((1, 0))
            place[...] = plgpu.layout_cast(total[:, at : at + UNIT].astype(own_s.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            first, whole = at // ALIGN, UNIT // ALIGN

            def copy(block, count, columns=columns, first=first):
                rows = pl.ds((unit.target + first + block) * ALIGN, count)
                plgpu.copy_smem_to_gmem(own_s.at[pl.ds(block * ALIGN, count)], out_g.at[rows, columns])

            left = unit.blocks - first
            pl.when(left >= whole)(partial(copy, 0, UNIT))
            for block in range(whole - 1):
                pl.when((left < whole) & (block < left))(partial(copy, block, ALIGN))
