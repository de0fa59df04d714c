"""A mixture's FP8 experts on Hopper, from one token to a prompt: e4m3 weights, bfloat16 rows, float32 sums.

Two stages, `up` (gate and up, and silu(gate) * up of them) and `down`, each over work items (`Items`, made by
`pallas.experts`). They are one launch, in which blocks of `down` follow those of `up` and await their item's hidden
rows, or two for prompts. A thread block takes 128 rows of an expert's weights, in two groups of 64, and all rows of an
item. An expert's weights are read once for each of its items, and blocks that no item needs end at once.

The loop is that of `fp8_rows`. A ring holds pieces of the weights, 128 inputs each, and the rows' inputs that belong to
them. A piece becomes bfloat16 on its way to the tensor cores (`upcast`). Where scales are of blocks, a piece's products
are summed by themselves before they are multiplied by its scale. Where each output has one scale, the tensor cores add
up all pieces, and the scales come last. Two or three blocks share a multiprocessor, so that one converts while others
wait. At few rows there may be fewer blocks than multiprocessors, so two warpgroups of a block alternate between its
pieces. Rows are the narrow side of the products. A block multiplies as many of them as the next power of two, and
stores the item's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense import upcast
from jaxspec.pallas.experts.expert_stream import SOURCE, TARGET, Items, silu_gated
from jaxspec.pallas.experts.expert_tile import (
    MAX_ROWS,
    TILE,
    TURNS_ROWS,
    Stage,
    Tile,
    each_stage,
    of_outputs,
    one_launch,
)
from jaxspec.pallas.hopper.export import lower_once

GROUPS = 2  # of a block: gate's and up's, or neighbours of `down`
TURNS = 2  # sums of each group where tensor cores add up all pieces: one of even pieces, one of odd ones
_i32, _f32 = jnp.int32, jnp.float32


def supported(dtype: Any, stacks: list[tuple[Weight, ...]]) -> str | None:
    """Why these FP8 experts, (gate_up, down) each, can't be served to rows of `dtype`; None if they can."""
    weights = [weight for stack in stacks for weight in stack[:2]]
    for weight in weights:
        if weight.format.activations:
            return "FP8 weights whose activations are quantised, too"
        block, unit = weight.format.block, weight.outputs // weight.scales.shape[1]
        if block not in (None, BLOCK):
            return f"scales for {block} inputs each; supported: {BLOCK}, and all of them"
        if block is None and unit > 1:
            return f"scales for {unit} outputs and all inputs; supported: one for each output"
        if block and unit % TILE:
            return f"scales for {unit} outputs; supported: multiples of {TILE}"
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    (d, f), *others = [stack[1].values.shape[1:] for stack in stacks]
    if others and others != [(d, f)] * len(others):
        return f"experts of widths {f} and {others[0][1]} in one mixture"
    if bad := [width for width in (d, f) if width % BLOCK]:
        return f"width {bad[0]} is not a multiple of {BLOCK}"
    for part in zip(*(stack[:2] for stack in stacks), strict=True):
        if len(units := {weight.outputs // weight.scales.shape[1] for weight in part}) > 1:
            return f"scales for {min(units)} outputs and for {max(units)} in one mixture"
    return None


def mix(
    rows: Float[Array, "r d"], stacks: list[tuple[Weight, Weight]], items: Items, *, interpret: Any = False
) -> Float[Array, "c d"]:
    """Run each item's rows through its expert, `down @ (silu(gate) * up)`. Hidden rows and results are rounded to
    bfloat16, dequantised weights are not.

    Items have up to `MAX_ROWS` rows. Rows that no item has are arbitrary, NaN included.

    **Raises:** `ValueError` if `supported` has a reason against it, or items have too many rows.
    """
    parts = operands(rows.dtype, stacks)
    if items.rows > MAX_ROWS:
        raise ValueError(f"the FP8 experts' kernel can't run: items of {items.rows} rows; supported: up to {MAX_ROWS}")
    return _mix(rows, parts, items, interpret=interpret)


def operands(dtype: Any, stacks: list[tuple[Weight, Weight]]) -> list[list[tuple[Array, Array]]]:
    """Each stack's values and scales, first those of gate and up. Scales of outputs are [experts, outputs].

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    if reason := supported(dtype, stacks):
        raise ValueError(f"the FP8 experts' kernel can't run: {reason}")

    def of(weight: Weight) -> tuple[Array, Array]:
        return weight.values, weight.scales if weight.format.block else weight.scales.reshape(len(weight.scales), -1)

    return [[of(weight) for weight in part] for part in zip(*stacks, strict=True)]


@lower_once("expert_fp8")
def _mix(rows, parts, items, *, interpret):
    stages = []
    for name, source, weights in zip(("up", "down"), (SOURCE, TARGET), parts, strict=True):
        shapes = [values.shape for values, _ in weights]
        stages.append(Fp8Stage.of(name, source, shapes, weights[0][1].shape, items.rows, items.alone))
    if one_launch(stages, items, interpret):
        return _launch(stages, rows, parts, items, interpret)[-1]
    for stage, weights in zip(stages, parts, strict=True):
        (rows,) = _launch([stage], rows, [weights], items, interpret)
    return rows


@dataclass(frozen=True)
class Fp8Stage(Stage):
    """`unit`: outputs that share a scale of a piece's inputs; None: each has one for all inputs."""

    unit: int | None
    piece = BLOCK
    groups = GROUPS

    @classmethod
    def of(cls, name: str, source: int, shapes: list[tuple], scales: tuple, rows: int, alone: int = 0) -> Fp8Stage:
        _, outputs, inputs = shapes[0]
        width = outputs // GROUPS if name == "up" else outputs
        unit = outputs // scales[1] if len(scales) > 2 else None
        stacks = tuple(shape[0] for shape in shapes)
        return cls(name, source, inputs, width, stacks, rows, unit, alone=alone)

    @property
    def warpgroups(self) -> int:
        return 2 if self.rows <= TURNS_ROWS else 1

    @property
    def slots(self) -> int:
        """Slots of the ring; each warpgroup has an equal number of them."""
        results = 2 * GROUPS * self.rows * TILE + (self.warpgroups - 1) * 4 * GROUPS * TILE * self.rows
        each = (self.room - results) // (BLOCK * (GROUPS * TILE + 2 * self.rows)) // self.warpgroups
        return self.warpgroups * min(-(-self.steps // self.warpgroups), max(2, each))


def _launch(stages, rows, weights, items, interpret):
    """Launch one stage, or `up` and then `down`, whose blocks read `up`'s results. Returns each stage's result,
    [capacity, width]."""
    most = max(stages, key=lambda stage: stage.slots)
    slots, height, parts = most.slots, most.rows, max(stage.parts for stage in stages)
    arrays = [(lax.bitcast_convert_type(values, jnp.int8), scales) for part in weights for values, scales in part]
    sums = {"sums_s": plgpu.SMEM((GROUPS, TILE, height), _f32), "summed": plgpu.Barrier()}
    return plgpu.kernel(
        partial(_block, stages),
        kernel_name="_".join(["expert_fp8", *[stage.name for stage in stages]]),
        out_type=[jax.ShapeDtypeStruct((items.capacity, stage.width), rows.dtype) for stage in stages],
        grid=(items.most * sum(stage.tiles for stage in stages),),
        grid_names=("unit",),
        num_threads=most.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            weight_s=plgpu.SMEM((slots, GROUPS, TILE, BLOCK), jnp.int8),
            rows_s=plgpu.SMEM((slots, height, BLOCK), rows.dtype),
            out_s=plgpu.SMEM((parts, height, TILE), rows.dtype),
            ready=plgpu.Barrier(num_arrivals=GROUPS + 1, num_barriers=slots),
            **(sums if most.warpgroups > 1 else {}),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((most.warpgroups, TILE, BLOCK), rows.dtype)} if interpret else {}),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, items.table, *[array for pair in arrays for array in pair])


def _block(stages, rows_g, items_g, *refs, **scratch):
    arrays, outs = refs[: -len(stages)], refs[-len(stages) :]
    weights, count = list(zip(arrays[::2], arrays[1::2], strict=True)), len(stages[0].stacks)

    def run(n, unit, done):
        mine = weights[n * count : (n + 1) * count]
        tile = _Tile(stages[n], unit, outs[n - 1] if n else rows_g, items_g, mine, outs[n], scratch)
        tile.done, tile.awaited = done, stages[0].tiles if n else 0
        tile.run()

    each_stage(stages, items_g, run)


class _Tile(Tile):
    """Weights are (values, scales)."""

    def sums(self, height):
        return self.sums_of_blocks(height) if self.stage.unit else self.sums_of_outputs(height)

    def sums_of_outputs(self, height):
        """Sum even pieces and odd ones apart, in two warpgroups or in one: so a row's result doesn't depend on how many
        rows an item may have. `by_output` then has each group's scales."""
        stage, scratch, own = self.stage, self.scratch, TURNS // self.stage.warpgroups
        staged_s = scratch["staged_s"].at[self.turn] if "staged_s" in scratch else None
        self.fetch_first(height, self.expert)
        scales = [scales for _, scales in self.weights]
        self.by_output = [of_outputs(scales, stage.stacks, self.expert, group) for group in self.groups]

        def add(i, sums):
            slot = lax.rem(i, _i32(stage.slots))
            plgpu.barrier_wait(scratch["ready"].at[slot])
            rows = scratch["rows_s"].at[slot, pl.ds(0, height)].transpose((1, 0))
            for g, total in enumerate(sums):
                plgpu.wgmma(total, upcast.load(scratch["weight_s"].at[slot, g], staged_s), rows)
                plgpu.wgmma_wait(1)  # frees the registers of the numbers before
            plgpu.wgmma_wait(0)
            following = i + stage.slots
            pl.when(following < stage.steps)(lambda: self.fetch(height, self.expert, following, slot))

        def accumulate(*sums):
            of = lambda n: sums[n * GROUPS : (n + 1) * GROUPS]  # noqa: E731
            odd = stage.steps % TURNS

            @pl.loop(_i32(0), self.turns if own == 1 else _i32(stage.steps // TURNS))
            def _(turn):
                for n in range(own):
                    add(turn * TURNS + self.turn + n, of(n))

            if odd and own > 1:
                add(_i32(stage.steps - 1), of(0))
            each = [sum_of[...] for sum_of in sums]
            return [sum(each[g + GROUPS :: GROUPS], each[g]) for g in range(GROUPS)]

        return pl.run_scoped(accumulate, *[plgpu.ACC((TILE, height), _f32)] * (own * GROUPS))

    def sums_of_blocks(self, height):
        """Sum each piece's products by themselves, and add these times the piece's scale."""
        stage, scratch, turn, apart = self.stage, self.scratch, self.turn, self.stage.warpgroups
        expert = self.expert
        staged_s = scratch["staged_s"].at[turn] if "staged_s" in scratch else None

        def multiply(slot, *sums):
            rows = scratch["rows_s"].at[slot, pl.ds(0, height)].transpose((1, 0))
            for g, sum_of in enumerate(sums):
                plgpu.wgmma(sum_of, upcast.load(scratch["weight_s"].at[slot, g], staged_s), rows)
            return [sum_of[...] for sum_of in sums]

        def step(i, carried):
            i = i * apart + turn
            totals, scales = carried
            slot, following = lax.rem(i, _i32(stage.slots)), self.scales_of(expert, i + apart)
            plgpu.barrier_wait(scratch["ready"].at[slot])
            products = pl.run_scoped(partial(multiply, slot), *[plgpu.ACC((TILE, height), _f32)] * GROUPS)
            more = [product * scale for product, scale in zip(products, scales, strict=True)]
            pl.when(i + stage.slots < stage.steps)(lambda: self.fetch(height, expert, i + stage.slots, slot))
            return [total + each for total, each in zip(totals, more, strict=True)], following

        self.fetch_first(height, expert)
        start = plgpu.layout_cast(jnp.zeros((TILE, height), _f32), plgpu.Layout.WGMMA)
        carried = [start] * GROUPS, self.scales_of(expert, turn)
        return lax.fori_loop(_i32(0), self.turns, step, carried)[0]

    def finished(self, totals):
        if not self.stage.unit:
            across = [lax.broadcast_in_dim(scale, totals[0].shape, [0]) for scale in self.by_output]
            totals = [total * scale for total, scale in zip(totals, across, strict=True)]
        if self.stage.name == "down":
            return totals
        return [silu_gated(*totals)]

    def fetch_weights(self, i, slot, full, stack, expert):
        for g, group in enumerate(self.groups):
            piece = stack[0].at[expert, pl.ds(group * TILE, TILE), pl.ds(i * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(piece, self.scratch["weight_s"].at[slot, g], full)

    def scales_of(self, expert, i):
        """The i-th piece's scale of each group; past the last piece, the last one's."""
        i = jnp.minimum(i, self.stage.steps - 1)

        def scale(group):
            unit = lax.div(group * TILE, _i32(self.stage.unit))
            found, first = None, 0
            for (_, scales), size in zip(self.weights, self.stage.stacks, strict=True):
                own = scales[jnp.clip(expert - first, 0, size - 1), unit, i]
                found = own if found is None else jnp.where(expert >= first, own, found)
                first += size
            return found

        return [scale(group) for group in self.groups]
