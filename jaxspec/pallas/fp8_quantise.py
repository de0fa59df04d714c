"""Rows as e4m3 with a scale for each 128 inputs, in one pass over memory: what `fp8_tiles` multiplies, on Hopper.

A block takes 128 inputs of some rows. Sixteen lanes of a warp have a row's 128 inputs, and so find the largest among
themselves. XLA would read rows that a kernel has written twice, once for the largest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec import fp8
from jaxspec.pallas.few_rows.block import by_row
from jaxspec.pallas.once import lower_once

ROWS = 64  # of a block
LANES = 16  # that have a row


def supported(rows: int, dtype: Any, block: int | None) -> str | None:
    """Why the kernel can't quantise so many rows of `dtype`, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows < ROWS:
        return f"{rows} rows; supported: {ROWS} and more"
    if block != fp8.BLOCK:
        return f"scales that aren't for {fp8.BLOCK} inputs each"
    return None


@lower_once("fp8_quantise")
def quantise_rows(x: Float[Array, "r k"], *, interpret: Any = False) -> tuple[Float[Array, "r k"], Float[Array, "r b"]]:
    """`fp8.quantise_rows` in blocks of 128 inputs, but for the last bit of a quotient. `k` is a multiple of 128."""
    rows, inputs = x.shape
    groups = inputs // fp8.BLOCK
    values, scales = plgpu.kernel(
        _block,
        kernel_name="fp8_quantise",
        out_type=(jax.ShapeDtypeStruct(x.shape, fp8.E4M3), jax.ShapeDtypeStruct((groups, rows), jnp.float32)),
        grid=(-(-rows // ROWS), groups),
        grid_names=("rows", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x)
    return values, scales.T


def _block(x_g, values_g, scales_g):
    top, group = lax.axis_index("rows") * ROWS, lax.axis_index("group")
    rows = pl.ds(jnp.minimum(top, x_g.shape[0] - ROWS), ROWS)  # the last block may begin among the rows of another
    here = rows, pl.ds(group * fp8.BLOCK, fp8.BLOCK)
    x = plgpu.load(x_g.at[here], layout=by_row(fp8.BLOCK // LANES), optimized=False).astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=1) / fp8.LARGEST
    scale = jnp.where(scale > 0, scale, 1.0)
    quotient = x * lax.broadcast_in_dim(1 / scale, x.shape, [0])
    values_g[here] = jnp.clip(quotient, -fp8.LARGEST, fp8.LARGEST).astype(fp8.E4M3)
    scales_g[group, rows] = scale
