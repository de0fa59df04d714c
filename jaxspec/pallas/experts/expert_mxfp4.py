"""A mixture's MXFP4 experts on Hopper, from one token to a prompt: bfloat16 rows, float32 sums, biases.

Two stages, `up` (gate and up, and their activation) and `down`, each over work items (`Items`, made by
`pallas.experts`), with the blocks of `expert_tile`. A thread block takes 64 columns of the result and all rows of an
item. An expert's weights are read once for each of its items.

A piece has 288 inputs, or 96 for items of many rows: rows of 144 bytes, or 48, lie in shared memory so that no two of a
warp's words share a bank. 96 inputs are multiplied at once, while the next ones are converted. Numbers become bfloat16
in registers, in the layout of a left operand: two of them take a shift, a mask and a product with the block's scale
(`mxfp4` has the order of bits). Since numbers are scaled before the product, the tensor cores add up all inputs. Sums
are scaled by 2^-64, which keeps scales within bfloat16's exponents.

Prompts are served by the same kernel, 64 rows an item. Conversion takes about as long as the products of 64 rows, and
the blocks that share a multiprocessor do both at once. Dequantised experts would be written and read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxtyping import Array, Float

from jaxspec.models import mxfp4
from jaxspec.models.mxfp4 import BLOCK, MASK
from jaxspec.pallas.dense.few_rows import cluster
from jaxspec.pallas.experts.expert_stream import SOURCE, TARGET, Items
from jaxspec.pallas.experts.expert_tile import TILE, Tile, each_stage, one_launch
from jaxspec.pallas.hopper import MULTIPROCESSORS
from jaxspec.pallas.hopper.export import lower_once

BLOCKS = 3  # of 32 inputs, that are multiplied at once
UNIT = BLOCKS * BLOCK  # inputs
TURN = 3 * UNIT  # inputs; even turns go to one sum, odd ones to the other
MAX_ROWS = 64  # of an item
HEIGHTS = (8, 16, 32, 64)  # rows that a block multiplies
TURNS = 2  # sums of each group
TURNS_ROWS = 8  # of items whose blocks have two warpgroups, and the larger pieces
ONE_LAUNCH = 32  # items; for so many, one launch of both products took no longer on an H200, for more it did
FEW_ROWS = 32  # up to these, three blocks of one warpgroup share a multiprocessor; else two do
SHARED_BYTES = 228 * 1024  # of a multiprocessor
RESERVED = 2 * 1024  # of a block, for its barriers and the driver
SPLIT_UNITS = 2 * MULTIPROCESSORS  # tiles of items; with so few, some multiprocessors have twice the work of others
LESS = 64  # sums are divided by 2 to the power of this
# Twice: a scale s times the first, plus the second, is 2^(s - 127 - LESS) times 2^126, which E2M1's bits lack.
SCALE, BIAS = 0x00800080, 0x1F001F00
# Of a word, the bits of each of its pairs of numbers; see `mxfp4.unpacked`.
PAIRS = (
    f"and.b32 a, $1, {MASK};",
    f"shf.l.wrap.b32 a, $1, $1, 10; and.b32 a, a, {MASK};",
    f"shr.u32 a, $1, 4; shl.b32 b, $1, 4; lop3.b32 a, a, b, {MASK}, 0x28;",  # (a ^ b) & MASK
    f"shl.b32 a, $1, 6; and.b32 a, a, {MASK};",
)
_i32, _f32 = jnp.int32, jnp.float32
Stack = tuple[Array, ...]  # gate and up's values and scales, down's, and both biases if they have some


def supported(dtype: Any, stacks: list[tuple]) -> str | None:
    """Why these MXFP4 experts, (gate_up, down) each, perhaps with biases, can't be served to rows of `dtype`; None if
    they can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if len({len(stack) for stack in stacks}) > 1:
        return "experts with biases and without in one mixture"
    (d, f), *others = [(down.outputs, down.inputs) for _, down, *_ in stacks]
    if others and others != [(d, f)] * len(others):
        return f"experts of widths {f} and {others[0][1]} in one mixture"
    if bad := [width for width in (d, f) if width % (TURNS * TURN) or width % TILE]:
        return f"MXFP4 experts of width {bad[0]}; supported: multiples of {np.lcm(TURNS * TURN, TILE)}"
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
        raise ValueError(f"the MXFP4 experts' kernel can't run: {reason}")
    if items.rows > MAX_ROWS:
        raise ValueError(f"the MXFP4 experts' kernel can't run: items of {items.rows} rows; supported: to {MAX_ROWS}")
    up = [(gate_up.values, gate_up.scales, *biases[:1]) for gate_up, _, *biases in stacks]
    down = [(down.values, down.scales, *biases[1:]) for _, down, *biases in stacks]
    return _mix(rows, up, down, items, gating=gating, interpret=interpret)


@lower_once("expert_mxfp4", "gating")
def _mix(rows, up, down, items, *, gating, interpret):
    widths, stages = (up[0][0].shape[1] // 2, down[0][0].shape[1]), []
    few = items.rows <= TURNS_ROWS and items.most * (max(widths) // TILE) <= SPLIT_UNITS
    split = few and not interpret  # interpret mode can't send data between blocks
    for name, source, width, stacks in zip(("up", "down"), (SOURCE, TARGET), widths, (up, down), strict=True):
        sizes = 2 * stacks[0][0].shape[2], width, tuple(len(stack[0]) for stack in stacks), items.rows
        stages.append(Stage(name, source, *sizes, split, items.alone))
    if items.most <= ONE_LAUNCH and one_launch(stages, items, interpret):
        return _launch(stages, rows, [up, down], items, gating, interpret)[-1]
    for stage, stacks in zip(stages, (up, down), strict=True):
        (rows,) = _launch([stage], rows, [stacks], items, gating, interpret)
    return rows


@dataclass(frozen=True)
class Stage:
    """One of the two stages. Column `source` of the items has the first of their rows.

    `width`: columns of its result. `stacks`: how many experts each stack has. `rows`: of an item, at most. `split`: the
    two sums of items of few rows are made by the two blocks of a cluster, rather than by two warpgroups of one block.
    `alone`: as in `Items`.
    """

    name: str
    source: int
    inputs: int
    width: int
    stacks: tuple[int, ...]
    rows: int
    split: bool = False
    alone: int = 0

    @property
    def piece(self) -> int:
        """Inputs that are copied together. Copies are few and large: all threads of a warpgroup announce each."""
        return TURN if self.rows <= TURNS_ROWS else UNIT

    @property
    def scales(self) -> int:
        """Rows of a piece's scales in shared memory, where each piece's begin at a multiple of 128 bytes."""
        blocks = self.piece // BLOCK
        return blocks + blocks % 2

    @property
    def groups(self) -> int:
        """Groups of `TILE` rows of weights that a block multiplies: gate's and up's, or one of `down`."""
        return 2 if self.name == "up" else 1

    @property
    def sent(self) -> cluster.Sums:
        """Sizes of the sums that the second block of a cluster sends to the first."""
        return cluster.Sums(self.groups, self.rows)

    @property
    def tiles(self) -> int:
        return self.width // TILE

    @property
    def steps(self) -> int:
        return self.inputs // self.piece

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
        """Thread blocks that share a multiprocessor."""
        if self.split:
            return 4
        return 3 if self.warpgroups == 1 and self.rows <= FEW_ROWS else 2

    @property
    def slots(self) -> int:
        """Slots of the ring; each warpgroup has an equal number of them."""
        results = 2 * self.rows * TILE + self.shared * 4 * self.groups * TILE * self.rows
        room = SHARED_BYTES // self.blocks_per_multiprocessor - RESERVED - results
        slot = self.groups * TILE * (self.piece // 2 + self.scales) + 2 * self.piece * self.rows
        each = room // slot // self.warpgroups
        most = -(-self.steps // (TURNS if self.shared else 1))
        return self.warpgroups * min(most, max(2, each))

    @property
    def heights(self) -> list[int]:
        """Row counts that blocks multiply, each in a loop of its own. Few items have less than a fourth of `rows`."""
        return [height for height in HEIGHTS if self.rows // 4 <= height <= self.rows]

    def group(self, tile: Array, group: int) -> Array:
        """The group of the expert's weight rows that is a block's first or second."""
        return tile + group * self.tiles

    def by_group(self, stack: tuple[Array, ...]) -> list[Array]:
        """A stack's values and scales as bytes, gate's rows apart from up's so that one copy loads both; its biases."""
        values, scales, *biases = stack
        values, scales = (lax.bitcast_convert_type(array, jnp.int8) for array in (values, scales))
        values = values.reshape(len(values), self.groups, self.width, -1)
        return [values, scales.reshape(*scales.shape[:2], self.groups, self.width), *biases]


def _launch(stages, rows, parts, items, gating, interpret):
    """Launch one stage, or `up` and then `down`, whose blocks read `up`'s results. Returns each stage's result,
    [capacity, width]."""
    first = stages[0]
    arrays = [array for stage, stacks in zip(stages, parts, strict=True) for s in stacks for array in stage.by_group(s)]
    stage_s = [_scratch(stage, rows.dtype) for stage in stages]
    return plgpu.kernel(
        partial(_block, stages, gating),
        kernel_name="_".join(["expert_mxfp4", *[stage.name for stage in stages]]),
        out_type=[jax.ShapeDtypeStruct((items.capacity, stage.width), rows.dtype) for stage in stages],
        grid=(items.most * sum(stage.tiles for stage in stages),),
        grid_names=("unit",),
        **({"cluster": (TURNS,), "cluster_names": ("half",)} if first.split else {}),
        num_threads=first.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            stage_s=plgpu.RefUnion(*stage_s) if len(stages) > 1 else stage_s,  # a block has one of them
            out_s=plgpu.SMEM((1, first.rows, TILE), rows.dtype),
            ready=plgpu.Barrier(num_arrivals=3, num_barriers=max(stage.slots for stage in stages)),
            **({"sent_s": cluster.scratch(first.sent)["sent_s"]} if first.split else {"summed": plgpu.Barrier()}),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((first.warpgroups, TILE, UNIT), rows.dtype)} if interpret else {}),
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
        scales_s=plgpu.SMEM((stage.slots, stage.scales, stage.groups, TILE), jnp.int8),
        rows_s=plgpu.SMEM((stage.slots, stage.rows, stage.piece), dtype),
    )


def _block(stages, gating, rows_g, items_g, *refs, stage_s, **scratch):
    arrays, outs = refs[: -len(stages)], refs[-len(stages) :]
    each = len(arrays) // (len(stages) * len(stages[0].stacks))
    weights = [tuple(arrays[i : i + each]) for i in range(0, len(arrays), each)]

    def run(n, unit, done):
        own, count = scratch | stage_s[n], len(stages[n].stacks)
        mine = weights[n * count : (n + 1) * count]
        tile = _Tile(stages[n], unit, outs[n - 1] if n else rows_g, items_g, mine, outs[n], own)
        tile.done, tile.awaited, tile.gating = done, stages[0].tiles if n else 0, gating
        if stages[n].split:
            tile.turn = lax.axis_index("half")
        tile.run()

    each_stage(stages, items_g, run)


class _Tile(Tile):
    """Weights are (values, scales) or (values, scales, bias)."""

    gating: Callable[[Array, Array], Array] | None

    def sums(self, height):
        """Each group's sums, f32[TILE, height]. Even and odd turns are summed apart, in two warpgroups or in one: so a
        row's result doesn't depend on how many rows an item may have."""
        stage, expert = self.stage, self.expert
        apart, pieces = 1 if stage.shared else TURNS, TURN // stage.piece
        self.fetch_first(height, expert)

        def accumulate(*sums):
            @pl.loop(_i32(0), _i32(stage.inputs // (TURNS * TURN)))
            def _(turn):
                for n in range(apart):

                    @pl.loop(_i32(0), _i32(pieces))
                    def _(piece, n=n):
                        i = (turn * TURNS + self.turn + n) * pieces + piece
                        slot = lax.rem(lax.div(i, _i32(stage.stride)), _i32(stage.slots))
                        self.multiply(height, slot, sums[n * stage.groups : (n + 1) * stage.groups])
                        following = i + stage.slots * stage.stride
                        pl.when(following < stage.steps)(partial(self.refill, height, expert, following, slot))

            each = [sum_of[...] for sum_of in sums]
            return [sum(each[g + stage.groups :: stage.groups], each[g]) for g in range(stage.groups)]

        return pl.run_scoped(accumulate, *[plgpu.ACC((TILE, height), _f32)] * (apart * stage.groups))

    def multiply(self, height, slot, sums):
        """Add the products of a slot's piece to each group's sum."""
        plgpu.barrier_wait(self.scratch["ready"].at[slot])
        for unit in range(self.stage.piece // UNIT):
            rows = self.scratch["rows_s"].at[slot, pl.ds(0, height), pl.ds(unit * UNIT, UNIT)].transpose((1, 0))
            for g, total in enumerate(sums):
                plgpu.wgmma(total, self.numbers(slot, g, unit), rows)
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

    def numbers(self, slot, g, unit):
        """A unit of a group's piece in bfloat16, [TILE, UNIT], times 2^-LESS."""
        weight_s = self.scratch["weight_s"].at[slot, g, :, pl.ds(unit * UNIT // 2, UNIT // 2)]
        scales_s = self.scratch["scales_s"].at[slot, pl.ds(unit * BLOCKS, BLOCKS), g]
        if "staged_s" in self.scratch:
            return _staged(weight_s, scales_s, self.scratch["staged_s"].at[self.turn])
        layout, of_row = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA.reduce(1)
        words = plgpu.load(weight_s, layout=layout, optimized=False)
        scales = [plgpu.load(scales_s.at[b], layout=of_row, optimized=False) for b in range(BLOCKS)]
        result = plgpu.ShapeDtypeStruct((TILE, UNIT), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        convert = plgpu.inline_mgpu(arg_types=(layout, *[of_row] * BLOCKS), return_type=result)(_convert)
        return convert(words, *scales)

    def fetch_weights(self, i, slot, full, stack, expert):
        (values, scales, *_), outputs = stack, pl.ds(self.tile * TILE, TILE)
        size, blocks = self.stage.piece // 2, self.stage.piece // BLOCK
        piece = values.at[expert, :, outputs, pl.ds(i * size, size)]
        plgpu.copy_gmem_to_smem(piece, self.scratch["weight_s"].at[slot], full)
        piece = scales.at[expert, pl.ds(i * blocks, blocks), :, outputs]
        plgpu.copy_gmem_to_smem(piece, self.scratch["scales_s"].at[slot, pl.ds(0, blocks)], full)

    def finished(self, totals):
        totals = [self.biased(total * 2.0**LESS, group) for total, group in zip(totals, self.groups, strict=True)]
        if self.stage.name == "down":
            return totals
        gate, up = totals
        return [self.gating(gate, up) if self.gating else gate / (1 + jnp.exp(-gate)) * up]

    def biased(self, total, group):
        """Add the expert's bias of each output, if it has one."""
        found, first = None, 0
        for (_, _, *biases), size in zip(self.weights, self.stage.stacks, strict=True):
            for bias in biases:
                expert = jnp.clip(self.expert - first, 0, size - 1)
                of_outputs = bias.at[expert, pl.ds(group * TILE, TILE)]
                own = plgpu.load(of_outputs, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(_f32)
                found = own if found is None else jnp.where(self.expert >= first, own, found)
            first += size
        return total if found is None else total + lax.broadcast_in_dim(found, total.shape, [0])


def _staged(weight_s, scales_s, staged_s):
    """Convert a unit by `mxfp4.dequantise`, through shared memory: `_Tile.numbers` of interpret mode."""
    values, scales = (lax.bitcast_convert_type(ref[...], jnp.uint8) for ref in (weight_s, scales_s))
    staged_s[...] = (mxfp4.dequantise(values, scales) * 2.0**-LESS).astype(staged_s.dtype)
    plgpu.commit_smem()
    return staged_s


def _convert(_, words, *scales):
    """Convert E2M1 to bfloat16 times its scale: a thread makes four pairs of each word that it has."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    i8 = ir.IntegerType.get_signless(8)
    programs = [f"{{ .reg .b32 a, b; {pair} mul.bf16x2 $0, a, $2; }}" for pair in PAIRS]
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, UNIT)), dtype=object)
    for at, vector in np.ndenumerate(words.registers):
        word = mgpu.utils.bitcast(vector, i32)
        scale = scales[at[1]].registers[0, 0, at[4], 0, 0]
        scale = arith.extui(i32, scale if scale.type == i8 else mgpu.utils.bitcast(scale, i8))
        factor = arith.addi(arith.muli(scale, mgpu.c(SCALE, i32)), mgpu.c(BIAS, i32))
        for i, program in enumerate(programs):
            out = mgpu.utils.inline_ptx(program, word, factor, result_types=i32)
            registers[(at[0], at[1] * 4 + i, *at[2:])] = mgpu.utils.bitcast(out, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
