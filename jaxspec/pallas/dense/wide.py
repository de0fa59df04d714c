"""Matmuls of many bfloat16 rows with a weight that becomes bfloat16 in registers, on Hopper: `fp8_wide`, `four_wide`.

The weight's outputs are the left operand (M), which tensor cores take from registers, 64 of them a warpgroup; the rows
are N. So each weight is converted once for a tile's rows. `tiles` divides the tiles among blocks. Here a tile's columns
are the left operand, so each warpgroup has 64 of the columns, of all of the tile's rows.

A format has its rings in shared memory, the copies that fill them, and the sums of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import tiles
from jaxspec.pallas.dense.few_rows.block import by_row
from jaxspec.pallas.dense.tiles import STEP, UNIT, Block, Tiling

MOST = 2048  # rows: with some 3,900, dequantising first takes no longer
_ROOM = tiles.ROOM - 1024  # for rings and results
_i32, _f32 = jnp.int32, jnp.float32


def part_of(tiling: Tiling) -> int:
    """Rows that a warpgroup writes at once."""
    return UNIT if tiling.rows % UNIT == 0 else UNIT // 2


def ring_bytes(tiling: Tiling, gated: bool) -> int:
    """Shared memory for rings, beside results."""
    return _ROOM - 2 * tiling.columns // UNIT * part_of(tiling) * (UNIT + HALF * gated)


def launch(
    kernel: Callable,
    name: str,
    operands: Sequence[jax.Array],
    outputs: int,
    tiling: Tiling,
    gated: bool,
    rings: dict[str, Any],
    interpret: Any,
) -> jax.Array:
    """Run a format's kernel, whose first operand are the padded rows, with memory for its `rings` and for results."""
    groups, part = tiling.columns // UNIT, part_of(tiling)
    results = {"products_s": plgpu.SMEM((groups, part, UNIT), jnp.bfloat16)}
    if gated:
        results["gated_s"] = plgpu.SMEM((groups, part, HALF), jnp.bfloat16)
    if interpret:  # which takes a matmul's left operand from shared memory alone
        results["staged_s"] = plgpu.SMEM((groups, UNIT, STEP), jnp.bfloat16)
    shape = jax.ShapeDtypeStruct((len(operands[0]), outputs // 2 if gated else outputs), jnp.bfloat16)
    return tiles.launch(kernel, name, operands, shape, groups, rings | results, interpret)


def run(block: Block, warpgroup: Any, copy: Callable, sums: Callable, results: list[Any], buffers: list[Any]) -> None:
    """Run a warpgroup of a block: the last one fills the rings by `copy()`, the others multiply and write.

    - `sums(group, step, steps)`: f32[UNIT, rows] of a group of outputs, of the block's steps from `step` on; zeros if
      there are none.
    - `results`: the residual stream if there is one, and where the sums go, by way of `buffers`.
    """
    groups = block.tiling.columns // UNIT

    def multiply():
        own = [None if each is None else each.at[warpgroup] for each in buffers]

        def tile(j, step):
            top, _, c = block.place(j)
            group = c * groups + warpgroup
            steps = jnp.where(j < block.mine(block.tiles), _i32(block.steps), 0)
            write(sums(group, step, steps), top, group, results, *own)
            return step + steps

        lax.fori_loop(_i32(0), block.mine(_i32(block.all_high * block.across)), tile, _i32(0))
        plgpu.wait_smem_to_gmem(0)

    tiles.divide(warpgroup, groups, copy, multiply)


def write(total: Any, top: Any, group: Any, results: list[Any], products_s: Any, gated_s: Any) -> None:
    """Send one group of outputs to memory by way of shared memory, where they are transposed.

    Gate and up of a row are in different warps, and so meet there too.
    """
    *added, out = results
    width, count = UNIT if gated_s is None else HALF, products_s.shape[0]
    load = partial(plgpu.load, optimized=False)
    for at in range(0, total.shape[1], count):
        part = total[:, at : at + count].astype(out.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        products_s.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        target, source_s = (pl.ds(top + at, count), pl.ds(group * width, width)), products_s
        if gated_s is not None:
            gate, up = (
                load(products_s.at[:, pl.ds(first, HALF)], layout=by_row(HALF // 16)).astype(_f32)
                for first in (0, HALF)
            )
            gated_s[...] = ((gate / (1 + jnp.exp(-gate))).astype(out.dtype).astype(_f32) * up).astype(out.dtype)
            plgpu.commit_smem()
            source_s = gated_s
        for residual in added:
            before = load(residual.at[target], layout=by_row(UNIT // 16)).astype(_f32)
            value = load(products_s, layout=by_row(UNIT // 16)).astype(_f32) + before
            products_s[...] = value.astype(out.dtype)
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source_s, out.at[target])
