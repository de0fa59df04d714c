"""A matmul of many bfloat16 rows with FP8 weights, which become bfloat16 on their way to the tensor cores.

`tiles` says which block makes which tile, and how results are written. The producer brings rows into a ring, and pieces
of the weight, as e4m3, into one of their own. It converts those (`upcast`), times their scale where scales are for 128
inputs, into the first ring: what `Weight.dequantised` gives, with the same rounding. So the warpgroups that multiply
find what they have in `tile_matmul`. Scales for all inputs multiply sums.

At the full rate of products, a step of 256 x 192 takes 1,536 cycles, and its conversion some 600 instructions of the
producer. Shared memory reads and writes 136 bytes in each of these cycles, where it can 128.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec import fp8
from jaxspec.pallas import fp8_rows, fp8_tiles, tiles, upcast
from jaxspec.pallas.once import lower_once
from jaxspec.pallas.tiles import STEP, UNIT, WARPGROUPS, Block, Hands, Results, Tile, Tiling
from jaxspec.weights import HALF

RING_BYTES = 192 * 1024  # of both rings
FIRST_BYTES = 24 * 1024  # of that which has e4m3
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, dtype: Any, block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can.

    `block` inputs, None being all, and `unit` outputs share a scale.
    """
    if rows <= fp8_rows.MAX_ROWS:
        return f"{rows} rows: reading the weights takes longer than multiplying"
    return fp8_tiles.supported(dtype, block, outputs, inputs, unit)


def tiling_of(rows: int, outputs: int, added: bool = False) -> Tiling:
    """The tiles that should take the least time. `added`: to a residual, for which the largest lack registers.

    Tall ones are best: a piece of the weight is converted for each tile that takes it.
    """
    sizes = [(128, 128), (128, 64)]
    if rows > 128:
        sizes += [(256, 128), (256, 64)] + [(256, 192)] * (not added)
    return Tiling.quickest(rows, outputs, sizes)


@lower_once("upcast_tiles", "block", "gated", "tiling")
def matmul(
    x: Float[Array, "r k"],
    values: Float[Array, "n k"],
    scales: Float[Array, "a b"],
    real: Int[Array, "1"],
    residual: Float[Array, "r n"] | None = None,
    *,
    block: int | None,
    gated: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Float[Array, "r o"]:
    """`x @ Weight.dequantised` of the first `real` rows, rounded to x's dtype; of others that or zeros.

    `residual`, which a gated one can't have: what that is added to, rounded before as the plain layers do. `gated`:
    silu(gate) * up of it, half as wide, rounded once. `tiling` overrides its choice.
    """
    n, unit = len(values), len(values) // len(scales)
    tiling = tiling or tiling_of(len(x), n, residual is not None)
    filled = [tiles.filled(a, tiling.rows) for a in (x, residual) if a is not None]
    scale = scales if block else jnp.repeat(scales[:, 0], unit)
    first_slots = max(2, FIRST_BYTES // (STEP * tiling.columns))
    first_bytes, slot_bytes = first_slots * STEP * tiling.columns, 2 * STEP * (tiling.rows + tiling.columns)
    slots = (RING_BYTES - first_bytes) // slot_bytes
    out = plgpu.kernel(
        partial(_kernel, tiling, gated, block),
        kernel_name="upcast_tiles",
        out_type=jax.ShapeDtypeStruct((len(filled[0]), n // 2 if gated else n), x.dtype),
        grid=(tiles.BLOCKS,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            rows_s=plgpu.SMEM((slots, tiling.rows, STEP), x.dtype),
            weight_s=plgpu.SMEM((slots, tiling.columns, STEP), x.dtype),
            values_s=plgpu.SMEM((first_slots, tiling.columns, STEP), jnp.int8),
            out_s=tiling.results(HALF if gated else STEP, slots * slot_bytes + first_bytes),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
            come=plgpu.Barrier(num_arrivals=1, num_barriers=first_slots),
            # What interpret mode needs of `upcast.load`.
            **({"staged_s": plgpu.SMEM((UNIT, STEP), x.dtype)} if interpret else {}),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(filled[0], lax.bitcast_convert_type(values, jnp.int8), scale, real, *filled[1:])
    return out[: len(x)]


class _Ring(NamedTuple):
    """Pieces of rows and of the weight in shared memory, and their barriers; pieces of e4m3, and when they have come.

    `staged_s`: see `upcast.load`.
    """

    rows_s: Any
    weight_s: Any
    hands: Hands
    values_s: Any
    come: Any
    staged_s: Any


def _kernel(
    tiling, gated, in_blocks, x, values, scales, real, *results,
    rows_s, weight_s, values_s, out_s, full, empty, come, staged_s=None,
):  # fmt: skip
    *added, out = results
    index, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    (rows, inputs), outputs = x.shape, values.shape[0]
    block = Block.of(tiling, rows, outputs, inputs // STEP, real[0], index)
    ring = _Ring(rows_s, weight_s, Hands(full, empty, len(rows_s)), values_s, come, staged_s)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(56, action="decrease")
        _produce(block, ring, x, values, scales if in_blocks else None)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(224, action="increase")
        multiply = partial(_multiply, block, ring, None if in_blocks else scales)
        tiles.consume(block, ring.hands, warpgroup, Results(gated, added, out, out_s), multiply)


def _produce(block: Block, ring: _Ring, x: Any, values: Any, scales: Any) -> None:
    """The warpgroup that copies and converts."""
    tiling, hands, first_slots = block.tiling, ring.hands, len(ring.values_s)
    steps = block.mine(block.tiles) * block.steps

    def fetch(step):
        """Begin to copy a step's piece of the weight."""
        _, _, c = block.place(lax.div(step, _i32(block.steps)))
        outputs, inputs = (
            pl.ds(c * tiling.columns, tiling.columns),
            pl.ds(lax.rem(step, _i32(block.steps)) * STEP, STEP),
        )
        slot = lax.rem(step, _i32(first_slots))
        plgpu.copy_gmem_to_smem(values.at[outputs, inputs], ring.values_s.at[slot], ring.come.at[slot])

    def tile(j, step):
        top, _, c = block.place(j)
        scales_of = partial(_scales, block, scales, c)

        def each(k, carried):
            step, scale = carried
            slot, first = lax.rem(step, _i32(hands.slots)), lax.rem(step, _i32(first_slots))
            following = scales_of(k + 1)
            pl.when(step >= hands.slots)(lambda: plgpu.barrier_wait(hands.empty.at[slot]))
            rows, inputs = pl.ds(top, tiling.rows), pl.ds(k * STEP, STEP)
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], ring.rows_s.at[slot], hands.full.at[slot])
            plgpu.barrier_wait(ring.come.at[first])
            _convert(ring, first, slot, scale)
            plgpu.commit_smem()  # the tensor cores may read it, and a copy overwrite what it was made of
            plgpu.barrier_arrive(hands.full.at[slot])
            pl.when(step + first_slots < steps)(lambda: fetch(step + first_slots))
            return step + 1, following

        return lax.fori_loop(_i32(0), _i32(block.steps), each, (step, scales_of(_i32(0))))[0]

    for step in range(first_slots):
        pl.when(step < steps)(partial(fetch, _i32(step)))
    hands.observe(lax.fori_loop(_i32(0), block.mine(block.tiles), tile, _i32(0)))


def _scales(block: Block, scales: Any, c: Any, k: Any) -> list[list[Any]]:
    """The scales of a step's inputs: of each `UNIT` outputs, one for them all or for each part of them.

    They are read a step ahead, as reading takes about as long as one.
    """
    if scales is None:
        return []
    columns = block.tiling.columns
    unit = columns * block.across // scales.shape[0]
    group = lax.div(jnp.minimum(k, block.steps - 1), _i32(fp8.BLOCK // STEP))
    parts = range(0, UNIT, min(unit, UNIT))
    return [
        [scales[lax.div(c * columns + first + part, _i32(unit)), group] for part in parts]
        for first in range(0, columns, UNIT)
    ]


def _convert(ring: _Ring, first: Any, slot: Any, scales: list[list[Any]]) -> None:
    """A piece of the weight as bfloat16. Each part is stored after the next one is made, which hides its latency."""
    parts = range(0, ring.weight_s.shape[1], UNIT)

    def make(i):
        outputs = pl.ds(parts[i], UNIT)
        exact = upcast.load(ring.values_s.at[first, outputs], ring.staged_s)
        part = exact[...] if ring.staged_s is not None else exact
        if scales:
            part = (part.astype(_f32) * _spread(scales[i])).astype(part.dtype)
        return ring.weight_s.at[slot, outputs], part

    before = make(0)
    for i in range(1, len(parts)):
        made = make(i)
        before[0][...] = before[1]
        before = made
    before[0][...] = before[1]


def _spread(scales: list[Any]) -> Any:
    """A scale for each output, of those that share the part evenly."""
    if len(scales) == 1:
        return scales[0]
    output = plgpu.broadcasted_iota(_i32, (UNIT, STEP), 0, layout=plgpu.Layout.WGMMA)
    which = lax.div(output, _i32(UNIT // len(scales)))
    whole = scales[0]
    for i, scale in enumerate(scales[1:], 1):
        whole = jnp.where(which >= i, scale, whole)
    return whole


def _multiply(block: Block, ring: _Ring, scales: Any, tile: Tile, write: Any) -> None:
    """The products of a tile's steps as they arrive; `scales` of outputs, if those aren't in the weight."""
    units, hands, width = tile.units, ring.hands, block.tiling.columns

    def accumulate(*totals):
        def multiply(k, step):
            slot = lax.rem(step, _i32(hands.slots))
            plgpu.barrier_wait(hands.full.at[slot])
            weight = ring.weight_s.at[slot].transpose((1, 0))
            for row, total in zip(units, totals, strict=True):
                plgpu.wgmma(total, ring.rows_s.at[slot, pl.ds(row, UNIT)], weight)
            plgpu.wgmma_wait(len(units))  # this step's may go on: those of the step before are done
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(hands.empty.at[lax.rem(step - 1, _i32(hands.slots))]))
            return step + 1

        def columns(unit, first, count):
            if unit not in made:  # the next unit's last products go on while this one is written
                made[unit] = plgpu.wgmma_accumulator_load(totals[unit], wait_n=len(units) - 1 - unit)
            part = made[unit][:, first : first + count]
            if scales is None:
                return part
            outputs = pl.ds(tile.c * width + first, count)
            by_column = plgpu.load(scales.at[outputs], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return part * lax.broadcast_in_dim(by_column, part.shape, (1,))

        made = {}
        last = lax.fori_loop(_i32(0), tile.needed, multiply, tile.step)
        write(columns)
        pl.when(tile.needed > 0)(lambda: plgpu.barrier_arrive(hands.empty.at[lax.rem(last - 1, _i32(hands.slots))]))

    pl.run_scoped(accumulate, *[plgpu.ACC((UNIT, width), _f32)] * len(units))
