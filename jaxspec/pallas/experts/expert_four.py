"""A mixture's experts in four bits on Hopper, from one token to a prompt: bfloat16 rows, float32 sums, biases.

Two stages, `up` (gate and up, and their activation) and `down`, each over work items (`Items`, made by
`pallas.experts`), with the blocks of `expert_tile`. A thread block takes 64 columns of the result, or 128 of `down`
where its width allows, and all rows of an item. An expert's weights are read once for each of its items.

`four_loaders` has a loader for each format: how many inputs are copied together and multiplied at once, and how its
numbers become bfloat16 in registers, in the layout of a left operand. A step is multiplied while the next one is
converted. Since numbers are scaled before the product, the tensor cores add up all inputs.

Prompts are served by the same kernel, 64 rows an item. Conversion takes about as long as the products of 64 rows, and
the blocks that share a multiprocessor do both at once. Dequantised experts would be written and read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.few_rows import cluster
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
from jaxspec.pallas.experts.four_loaders import Loader, loader_of
from jaxspec.pallas.hopper import MULTIPROCESSORS
from jaxspec.pallas.hopper.export import lower_once

TURNS = 2  # sums of each group: one of even turns, one of odd ones
SPLIT_UNITS = 2 * MULTIPROCESSORS  # tiles of items; with so few, some multiprocessors have twice the work of others
_i32, _f32 = jnp.int32, jnp.float32


def supported(dtype: Any, stacks: list[tuple]) -> str | None:
    """Why these experts in four bits, (gate_up, down) each, perhaps with biases, can't be served to rows of `dtype`;
    None if they can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if len({len(stack) for stack in stacks}) > 1:
        return "experts with biases and without in one mixture"
    (d, f), *others = [(down.outputs, down.inputs) for _, down, *_ in stacks]
    if others and others != [(d, f)] * len(others):
        return f"experts of widths {f} and {others[0][1]} in one mixture"
    for part in zip(*(stack[:2] for stack in stacks), strict=True):
        if len({loader_of(weight) for weight in part}) > 1:
            return "experts in several formats of four bits in one mixture"
        if reason := loader_of(part[0]).refuses(part[0]):
            return reason
    return None


def mix(
    rows: Float[Array, "r d"],
    stacks: list[tuple],
    items: Items,
    gating: Callable[[Array, Array], Array] | None = None,
    *,
    interpret: Any = False,
) -> Float[Array, "c d"]:
    """Run each item's rows through its expert, `down @ gating(gate, up)`. Hidden rows and results are rounded to
    bfloat16. Biases are added to sums in float32. No `gating`: `silu(gate) * up`.

    Items have up to `MAX_ROWS` rows. Rows that no item has are arbitrary, NaN included.

    **Raises:** `ValueError` if `supported` has a reason against it, or items have too many rows.
    """
    if reason := supported(rows.dtype, stacks):
        raise ValueError(f"the kernel of experts in four bits can't run: {reason}")
    if items.rows > MAX_ROWS:
        raise ValueError(
            f"the kernel of experts in four bits can't run: items of {items.rows} rows; supported: to {MAX_ROWS}"
        )
    parts = [[(stack[n], *stack[2 + n : 3 + n]) for stack in stacks] for n in range(2)]
    return _mix(rows, parts, items, gating=gating, interpret=interpret)


@lower_once("expert_four", "gating")
def _mix(rows, parts, items, *, gating, interpret):
    stages = [
        FourStage.of(name, source, stacks, items)
        for name, source, stacks in zip(("up", "down"), (SOURCE, TARGET), parts, strict=True)
    ]
    few = items.rows <= TURNS_ROWS and items.most * max(stage.tiles for stage in stages) <= SPLIT_UNITS
    if few and not interpret:  # interpret mode can't send data between blocks
        stages = [replace(stage, split=True) for stage in stages]
    if items.most <= stages[0].loader.one_launch and one_launch(stages, items, interpret):
        return _launch(stages, rows, parts, items, gating, interpret)[-1]
    for stage, stacks in zip(stages, parts, strict=True):
        (rows,) = _launch([stage], rows, [stacks], items, gating, interpret)
    return rows


@dataclass(frozen=True)
class FourStage(Stage):
    """`further`: names of a stack's arrays after values and scales. `split`: the two sums of items of few rows are made
    by the two blocks of a cluster, rather than by two warpgroups of one block."""

    loader: Loader
    further: tuple[str, ...] = ()
    split: bool = False

    @classmethod
    def of(cls, name: str, source: int, stacks: list[tuple[Weight, ...]], items: Items) -> FourStage:
        """The stage of these stacks, a weight and perhaps its bias each."""
        weight, *bias = stacks[0]
        further = ("factors",) * (weight.factors is not None) + ("bias",) * len(bias)
        width, sizes = weight.outputs // (2 if name == "up" else 1), tuple(len(stack[0].values) for stack in stacks)
        return cls(name, source, weight.inputs, width, sizes, items.rows, loader_of(weight), further, alone=items.alone)

    @property
    def piece(self) -> int:
        return self.loader.piece(self.shared)

    @property
    def groups(self) -> int:
        return 2 if self.name == "up" or self.width % (2 * TILE) == 0 else 1

    @property
    def lead(self) -> int:
        """Parts of an expert's outputs, in which a block's groups are neighbours: gate and up, or groups of `down`."""
        return 2 if self.name == "up" else self.width // TILE

    @property
    def sent(self) -> cluster.Sums:
        """Sizes of the sums that the second block of a cluster sends to the first."""
        return cluster.Sums(self.groups, self.rows)

    @property
    def turns(self) -> int:
        return self.inputs // self.loader.turn

    @property
    def shared(self) -> bool:
        """Whether two warpgroups make the two sums, which the first adds up."""
        return self.rows <= TURNS_ROWS

    @property
    def warpgroups(self) -> int:
        return TURNS if self.shared and not self.split else 1

    @property
    def stride(self) -> int:
        """Distance from a piece of a block to its next one."""
        return TURNS if self.split else 1

    @property
    def blocks_per_multiprocessor(self) -> int:
        return 4 if self.split else super().blocks_per_multiprocessor

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of a piece's scales in shared memory."""
        return self.loader.scales(self.piece, self.groups)

    @property
    def slots(self) -> int:
        """Slots of the ring; each warpgroup has an equal number of them."""
        results = 2 * self.parts * self.rows * TILE + self.shared * 4 * self.groups * TILE * self.rows
        scales = math.prod(self.scales) * jnp.dtype(self.loader.dtype).itemsize
        slot = self.groups * TILE * self.piece // 2 + scales + 2 * self.piece * self.rows
        each = (self.room - results) // slot // self.warpgroups
        most = -(-self.steps // (TURNS if self.shared else 1))
        return self.warpgroups * min(most, max(2, each))

    def operands(self, stack: tuple[Weight, ...]) -> list[Array]:
        """A stack's values and scales, outputs in parts (`lead`) so that one copy loads those of all groups; factors
        and biases if there are any."""
        weight, *bias = stack
        factors = [] if weight.factors is None else [weight.factors]
        values = weight.raw.reshape(len(weight.values) * self.lead, weight.outputs // self.lead, -1)
        return [values, self.loader.by_lead(weight.scales, self.lead), *factors, *bias]


def _launch(stages, rows, parts, items, gating, interpret):
    """Launch one stage, or `up` and then `down`, whose blocks read `up`'s results. Returns each stage's result,
    [capacity, width]."""
    first = stages[0]
    arrays = [array for stage, stacks in zip(stages, parts, strict=True) for s in stacks for array in stage.operands(s)]
    stage_s = [_scratch(stage, rows.dtype) for stage in stages]
    step = max(stage.loader.step for stage in stages)
    return plgpu.kernel(
        partial(_block, stages, gating),
        kernel_name="_".join(["expert_four", *[stage.name for stage in stages]]),
        out_type=[jax.ShapeDtypeStruct((items.capacity, stage.width), rows.dtype) for stage in stages],
        grid=(items.most * sum(stage.tiles for stage in stages),),
        grid_names=("unit",),
        **({"cluster": (TURNS,), "cluster_names": ("half",)} if first.split else {}),
        num_threads=first.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            stage_s=plgpu.RefUnion(*stage_s) if len(stages) > 1 else stage_s,  # a block has one of them
            out_s=plgpu.SMEM((max(stage.parts for stage in stages), first.rows, TILE), rows.dtype),
            ready=plgpu.Barrier(num_arrivals=3, num_barriers=max(stage.slots for stage in stages)),
            **({"sent_s": cluster.scratch(first.sent)["sent_s"]} if first.split else {"summed": plgpu.Barrier()}),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((first.warpgroups, TILE, step), rows.dtype)} if interpret else {}),
        ),
        # Safe here: `refill`, `_store` and barriers order all that two threads do to the same memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(rows, items.table, *arrays)


def _scratch(stage, dtype):
    """Shared memory of a stage: its ring, and room for one of two sums on its way to the other."""
    sums = {"sums_s": plgpu.SMEM((stage.groups, TILE, stage.rows), _f32)} if stage.shared else {}
    if stage.split:
        sums = {"parts_s": cluster.scratch(stage.sent)["parts_s"]}
    return sums | dict(
        weight_s=plgpu.SMEM((stage.slots, stage.groups, TILE, stage.piece // 2), jnp.int8),
        scales_s=plgpu.SMEM((stage.slots, *stage.scales), stage.loader.dtype),
        rows_s=plgpu.SMEM((stage.slots, stage.rows, stage.piece), dtype),
    )


def _block(stages, gating, rows_g, items_g, *refs, stage_s, **scratch):
    arrays, outs = iter(refs[: -len(stages)]), refs[-len(stages) :]
    weights = [
        [{name: next(arrays) for name in ("values", "scales", *stage.further)} for _ in stage.stacks]
        for stage in stages
    ]

    def run(n, unit, done):
        own = scratch | stage_s[n]
        tile = _Tile(stages[n], unit, outs[n - 1] if n else rows_g, items_g, weights[n], outs[n], own)
        tile.done, tile.awaited, tile.gating = done, stages[0].tiles if n else 0, gating
        if stages[n].split:
            tile.turn = lax.axis_index("half")
        tile.run()

    each_stage(stages, items_g, run)


class _Tile(Tile):
    """Weights are arrays by name."""

    gating: Callable[[Array, Array], Array] | None

    def sums(self, height):
        """Each group's sums, f32[TILE, height]. Even and odd turns are summed apart, in two warpgroups or in one: so a
        row's result doesn't depend on how many rows an item may have."""
        stage, expert = self.stage, self.expert
        apart, pieces = 1 if stage.shared else TURNS, stage.loader.turn // stage.piece
        self.fetch_first(height, expert)

        def accumulate(*sums):
            def add(turn, sums):
                @pl.loop(_i32(0), _i32(pieces))
                def _(piece):
                    i = turn * pieces + piece
                    slot = lax.rem(lax.div(i, _i32(stage.stride)), _i32(stage.slots))
                    self.multiply(height, slot, sums)
                    following = i + stage.slots * stage.stride
                    pl.when(following < stage.steps)(partial(self.refill, height, expert, following, slot))

            of = lambda n: sums[n * stage.groups : (n + 1) * stage.groups]  # noqa: E731
            odd = stage.turns % TURNS
            own = _i32(stage.turns // TURNS) + (odd * (1 - self.turn) if stage.shared else 0)

            @pl.loop(_i32(0), own)
            def _(turn):
                for n in range(apart):
                    add(turn * TURNS + self.turn + n, of(n))

            if odd and not stage.shared:
                add(_i32(stage.turns - 1), of(0))
            each = [sum_of[...] for sum_of in sums]
            return [sum(each[g + stage.groups :: stage.groups], each[g]) for g in range(stage.groups)]

        return pl.run_scoped(accumulate, *[plgpu.ACC((TILE, height), _f32)] * (apart * stage.groups))

    def multiply(self, height, slot, sums):
        """Add the products of a slot's piece to each group's sum."""
        loader = self.stage.loader
        plgpu.barrier_wait(self.scratch["ready"].at[slot])
        for step in range(self.stage.piece // loader.step):
            inputs = pl.ds(step * loader.step, loader.step)
            rows = self.scratch["rows_s"].at[slot, pl.ds(0, height), inputs].transpose((1, 0))
            for g, total in enumerate(sums):
                plgpu.wgmma(total, loader.left(self.scratch, self.turn, slot, g, step), rows)
                plgpu.wgmma_wait(1)  # frees the registers of the numbers before, since two blocks share all registers
        plgpu.wgmma_wait(0)

    def fetch_first(self, height, expert):
        if not self.stage.split:
            return super().fetch_first(height, expert)
        self.fetch_all(height, expert, [(slot * TURNS + self.turn, slot) for slot in range(self.stage.slots)])

    def _run(self, height):
        if not self.stage.split:
            return super()._run(height)
        sent, parts_s, sent_s = self.stage.sent, self.scratch["parts_s"], self.scratch["sent_s"]
        cluster.expect(sent, sent_s)
        totals = self.sums(height)
        cluster.meet()
        pl.when(self.turn == 1)(lambda: cluster.send(sent, _i32(0), totals, parts_s, sent_s))

        @pl.when(self.turn == 0)
        def _():
            others = cluster.receive(sent, parts_s, sent_s)
            self._store(height, self.finished([a + b for a, b in zip(totals, others, strict=True)]))

    def fetch_weights(self, i, slot, full, stack, expert):
        stage, loader, scratch = self.stage, self.stage.loader, self.scratch
        first, tile = (0, self.tile) if stage.name == "up" else (self.tile * stage.groups, 0)
        size, lead = stage.piece // 2, pl.ds(first, stage.groups)
        of_values = pl.ds(expert * stage.lead + first, stage.groups)
        values = stack["values"].at[of_values, pl.ds(tile * TILE, TILE), pl.ds(i * size, size)]
        plgpu.copy_gmem_to_smem(values, scratch["weight_s"].at[slot], full)
        scales = loader.copied(stack["scales"], expert, stage.piece, i, lead, tile, scratch["scales_s"].at[slot])
        plgpu.copy_gmem_to_smem(*scales, full)

    def finished(self, totals):
        totals = [self.scaled(total, group) for total, group in zip(totals, self.groups, strict=True)]
        if self.stage.name == "down":
            return totals
        return [(self.gating or silu_gated)(*totals)]

    def scaled(self, total, group):
        """The sums times the outputs' factors, with the expert's bias of each."""
        less = self.stage.loader.less
        total = total * less if less != 1 else total
        if "factors" in self.stage.further:
            total = total * lax.broadcast_in_dim(self.of_outputs("factors", group), total.shape, [0])
        if "bias" in self.stage.further:
            total = total + lax.broadcast_in_dim(self.of_outputs("bias", group), total.shape, [0])
        return total

    def of_outputs(self, name, group):
        return of_outputs([stack[name] for stack in self.weights], self.stage.stacks, self.expert, group)
