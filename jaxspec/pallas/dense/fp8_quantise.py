"""Rows as e4m3 with a scale for each 128 inputs, for `fp8_tiles`, in one pass over memory, on Hopper.

Sixteen lanes of a warp have a row's 128 inputs, and so find the largest among themselves. A block takes 128 inputs of
some rows, or, where rows are normed first, one row: 128 inputs are a row of its tile there. XLA would read the rows
twice, once for the largest, and norm them both times.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models import fp8
from jaxspec.pallas.dense.few_rows.block import GROUP, by_row, params
from jaxspec.pallas.hopper.export import lower_once

ROWS = 64  # of a block
LANES = 16  # that have a row
WIDEST = 8192  # inputs of a row that is normed: for more there are no registers
_f32 = jnp.float32
_LAYOUT = by_row(fp8.BLOCK // LANES)


def supported(rows: int, dtype: Any) -> str | None:
    """Why the kernel can't quantise so many rows of `dtype`, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows < ROWS:
        return f"{rows} rows; supported: {ROWS} and more"
    return None


def norm_supported(rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernel can't norm and quantise so many rows of `dtype`, or None if it can."""
    if width % (GROUP * fp8.BLOCK) or width > WIDEST:
        return f"rows of {width}; supported: multiples of {GROUP * fp8.BLOCK} up to {WIDEST}"
    return supported(rows, dtype)


@lower_once("fp8_quantise")
def quantise_rows(x: Float[Array, "r k"], *, interpret: Any = False) -> tuple[Float[Array, "r k"], Float[Array, "r b"]]:
    """Run `fp8.quantise_rows` in blocks of 128 inputs; a quotient's last bit may differ. `k` is a multiple of 128."""
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
    x = plgpu.load(x_g.at[here], layout=_LAYOUT, optimized=False).astype(_f32)
    values_g[here], scales_g[group, rows] = _quantised(x)


def _quantised(x):
    """Quantise rows of 128 inputs to e4m3; also returns their scales."""
    scale = jnp.max(jnp.abs(x), axis=1) * (1 / fp8.LARGEST)
    scale = jnp.where(scale > 0, scale, 1.0)
    quotient = x * lax.broadcast_in_dim(1 / scale, x.shape, [0])
    return jnp.clip(quotient, -fp8.LARGEST, fp8.LARGEST).astype(fp8.E4M3), scale


@lower_once("fp8_norm_quantise", "eps", "centred")
def norm_and_quantise(
    x: Float[Array, "r k"], weight: Float[Array, " k"], *, eps: float, centred: bool = False, interpret: Any = False
) -> tuple[Float[Array, "r k"], Float[Array, "r b"]]:
    """Run `quantise_rows` on the rows times the norm's weight, rounded first; scales are multiplied by its factor."""
    rows, inputs = x.shape
    groups = inputs // fp8.BLOCK
    values, scales = plgpu.kernel(
        partial(_norm_row, eps, centred),
        kernel_name="fp8_norm_quantise",
        out_type=(
            jax.ShapeDtypeStruct((rows, groups, fp8.BLOCK), fp8.E4M3),
            jax.ShapeDtypeStruct((groups, rows), _f32),
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=params(across_warps=True),
        interpret=interpret,
    )(x.reshape(rows, groups, fp8.BLOCK), weight.reshape(groups, fp8.BLOCK))
    return values.reshape(x.shape), scales.T


def _norm_row(eps, centred, x_g, weight_g, values_g, scales_g):
    row, (_, *shape) = lax.axis_index("row"), x_g.shape
    load = partial(plgpu.load, layout=_LAYOUT, optimized=False)
    x, weight = load(x_g.at[row]).astype(_f32), load(weight_g).astype(_f32)
    factor = lax.rsqrt(jnp.sum(jnp.sum(x * x, axis=1)) / math.prod(shape) + eps)
    weighted = (x * (1 + weight if centred else weight)).astype(jnp.bfloat16)
    values_g[row], scales = _quantised(weighted.astype(_f32))
    scales_g[:, row] = scales * factor
