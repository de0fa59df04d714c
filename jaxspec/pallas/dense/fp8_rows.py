"""Products of rows with FP8 weights, dequantised on their way to the tensor cores, on Hopper.

At few rows a product takes as long as reading its weight, which in e4m3 is half of bfloat16's bytes. A block makes 64
outputs, or twice as many, from one part of the inputs. It keeps a ring of pieces of the weight in flight, with the
rows' inputs that belong to them. A piece goes from shared memory to registers and becomes bfloat16 there, which is
exact (`upcast`). The products of each block of 128 inputs are summed by themselves, in float32, and then multiplied by
the block's scale. Scales are prefetched a step early, as reading takes about as long as a step. Several blocks share a
multiprocessor, so that one converts while others wait.

XLA adds the parts' sums, in float32, together with the next operation. Dense layers of few rows have kernels that norm
and add too (`few_rows`).
"""

from __future__ import annotations

import itertools
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
from jaxspec.pallas.dense import upcast
from jaxspec.pallas.hopper import MULTIPROCESSORS, WGMMA_ROWS
from jaxspec.pallas.hopper.export import lower_once

TILE = WGMMA_ROWS  # outputs of a group
GROUP = 8  # rows are padded to a multiple of these
MAX_ROWS = 128
MIN_UNIT = 32  # outputs that share a scale: a tile of gate and up has two of these
ENOUGH = 2 * MULTIPROCESSORS  # blocks, so that each multiprocessor has bytes in flight while one of its blocks ends
RING_BYTES = 60 * 1024  # of a block: three have room at once
WIDE_RING_BYTES = 100 * 1024  # where rows take most of it, and two have
WIDE_ROWS = 32  # with more, two groups of outputs share the rows that are copied
AT_ONCE = 4  # pieces whose products are in flight
SUMS = 128  # rows of all of these together, for which there are registers
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, dtype: Any, block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can.

    `block` inputs and `unit` outputs share a scale.
    """
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; supported: up to {MAX_ROWS}"
    return weight_supported(block, outputs, inputs, unit)


def weight_supported(block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why kernels of few rows can't read such a weight, or None if they can: `block` inputs and `unit` outputs share a
    scale."""
    if block != BLOCK:
        return f"scales that aren't for {BLOCK} inputs each"
    if unit < MIN_UNIT or (unit % TILE and TILE % unit):
        return f"scales for {unit} outputs; supported: {MIN_UNIT}, and multiples of {TILE}"
    if outputs % TILE or inputs % BLOCK:
        return f"a weight of {inputs} x {outputs}, not a multiple of {BLOCK} x {TILE}"
    return None


@dataclass(frozen=True)
class Share:
    """How a product is divided: `tiles` of `groups` of outputs, inputs in `splits` parts of `chunks`.

    A chunk is of `blocks` blocks of inputs. `unit` outputs share a scale.
    """

    rows: int
    unit: int
    tiles: int
    groups: int
    splits: int
    chunks: int
    blocks: int

    @classmethod
    def of(cls, rows: int, outputs: int, inputs: int, unit: int) -> Share:
        """Divide a product into as few parts as give every multiprocessor work."""
        groups = 2 if WIDE_ROWS < rows <= MAX_ROWS // 2 and outputs % (2 * TILE) == 0 else 1
        tiles, whole = outputs // TILE // groups, inputs // BLOCK
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        splits = next((n for n in divisors if tiles * n >= ENOUGH), divisors[-1])
        part = whole // splits
        blocks = 2 if rows <= WIDE_ROWS and part % 2 == 0 else 1
        return cls(rows, unit, tiles, groups, splits, part // blocks, blocks)

    @property
    def slots(self) -> int:
        ring = WIDE_RING_BYTES if self.rows > WIDE_ROWS else RING_BYTES
        return min(self.chunks, max(2, ring // (self.blocks * BLOCK * (TILE * self.groups + 2 * self.rows))))


def product(
    x: Float[Array, "r k"], values: Float[Array, "n k"], scales: Float[Array, "a b"], *, interpret: Any = False
) -> Float[Array, "r n"]:
    """x @ (values * scales)', in float32: `fp8.dequantise` in blocks of 128 inputs, with nothing rounded on the way."""
    return parts(x, values, scales, interpret=interpret).sum(0)[: len(x)]


@lower_once("fp8_rows")
def parts(
    x: Float[Array, "r k"], values: Float[Array, "n k"], scales: Float[Array, "a b"], *, interpret: Any = False
) -> Float[Array, "s p n"]:
    """`product` as s parts of the sum, in float32; rows are padded to a multiple of eight."""
    (r, k), n = x.shape, len(values)
    x = jnp.pad(x, ((0, -r % GROUP), (0, 0)))
    share = Share.of(len(x), n, k, n // len(scales))
    chunk = share.blocks * BLOCK
    return plgpu.kernel(
        partial(_tile, share),
        kernel_name="fp8_rows",
        out_type=jax.ShapeDtypeStruct((share.splits, share.rows, n), _f32),
        grid=(share.tiles, share.splits),
        grid_names=("tile", "split"),
        scratch_types=dict(
            values_s=plgpu.SMEM((share.slots, share.groups, TILE, chunk), jnp.int8),
            rows_s=plgpu.SMEM((share.slots, share.rows, chunk), jnp.bfloat16),
            ready=plgpu.Barrier(num_arrivals=share.groups + 1, num_barriers=share.slots),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((TILE, BLOCK), jnp.bfloat16)} if interpret else {}),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, lax.bitcast_convert_type(values, jnp.int8), scales)


def _tile(share, x_g, values_g, scales_g, out_g, *, values_s, rows_s, ready, staged_s=None):
    """Compute a block's outputs of all rows, from one part of the inputs."""
    tile, split, slots = lax.axis_index("tile"), lax.axis_index("split"), share.slots
    places = [tile * share.groups + g for g in range(share.groups)]  # the groups' numbers among all
    pieces = list(itertools.product(range(share.groups), range(share.blocks)))
    at_once = max(1, min(AT_ONCE, SUMS // share.rows))

    def fetch(i, slot):
        inputs = pl.ds((split * share.chunks + i) * share.blocks * BLOCK, share.blocks * BLOCK)
        for g, place in enumerate(places):
            outputs = pl.ds(place * TILE, TILE)
            plgpu.copy_gmem_to_smem(values_g.at[outputs, inputs], values_s.at[slot, g], ready.at[slot])
        plgpu.copy_gmem_to_smem(x_g.at[:, inputs], rows_s.at[slot], ready.at[slot])

    def multiply(slot, some, *sums):
        for (g, j), sum_of in zip(some, sums, strict=True):
            inputs = pl.ds(j * BLOCK, BLOCK)
            weight = upcast.load(values_s.at[slot, g, :, inputs], staged_s)
            plgpu.wgmma(sum_of, weight, rows_s.at[slot, :, inputs].transpose((1, 0)))
        return [sum_of[...] for sum_of in sums]

    def step(i, carried):
        totals, scales = carried
        slot, following = lax.rem(i, _i32(slots)), scales_of(i + 1)
        plgpu.barrier_wait(ready.at[slot])
        for at in range(0, len(pieces), at_once):
            some = pieces[at : at + at_once]
            made = pl.run_scoped(partial(multiply, slot, some), *[plgpu.ACC((TILE, share.rows), _f32)] * len(some))
            for (g, _), product, scale in zip(some, made, scales[at : at + at_once], strict=True):
                totals = [total + product * spread(scale) if n == g else total for n, total in enumerate(totals)]
        pl.when(i + slots < share.chunks)(lambda: fetch(i + slots, slot))
        return totals, following

    scales_of, spread = _scaling(share, places, pieces, split, scales_g)
    for i in range(slots):
        fetch(_i32(i), i)
    start = plgpu.layout_cast(jnp.zeros((TILE, share.rows), _f32), plgpu.Layout.WGMMA)
    totals = [start] * share.groups
    totals, _ = lax.fori_loop(_i32(0), _i32(share.chunks), step, (totals, scales_of(_i32(0))))
    for place, total in zip(places, totals, strict=True):
        out = out_g.at[split, :, pl.ds(place * TILE, TILE)].transpose((1, 0))
        out[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)


def _scaling(share, places, pieces, split, scales_g):
    """Return two functions: one loads a chunk's scales, [piece][part of a group]; the other spreads a piece's scales
    over its outputs."""
    here = min(share.unit, TILE)
    first = [lax.div(place * TILE, _i32(share.unit)) for place in places]
    if here < TILE:
        outputs = plgpu.broadcasted_iota(_i32, (TILE, share.rows), 0, layout=plgpu.Layout.WGMMA)
        unit = lax.div(outputs, _i32(here))

    def scales_of(i):
        block = (split * share.chunks + jnp.minimum(i, share.chunks - 1)) * share.blocks
        return [[scales_g[first[g] + u, block + j] for u in range(TILE // here)] for g, j in pieces]

    def spread(scales):
        whole = scales[0]
        for u, scale in enumerate(scales[1:], 1):
            whole = jnp.where(unit >= u, scale, whole)
        return whole

    return scales_of, spread
