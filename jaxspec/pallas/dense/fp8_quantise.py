"""Rows as e4m3 with a scale for each 128 inputs, for `fp8_tiles`, in one pass over memory, on Hopper.

Sixteen lanes of a warp have a row's 128 inputs, and so find the largest among themselves. A block takes 128 inputs of
some rows, or, where rows are normed first, one row: 128 inputs are a row of its tile there. XLA would read the rows
twice, once for the largest, and norm them both times.

Results have the rows that `fp8_tiles` copies (`fp8_tiles.padded_rows`); nobody writes the padding, and what a product
makes of it is cut off. XLA would pad values and scales by a kernel each, as long as the product's launch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models import fp8
from jaxspec.pallas.dense.few_rows.block import GROUP, by_row, params
from jaxspec.pallas.dense.fp8_tiles import padded_rows
from jaxspec.pallas.hopper.export import lower_once

ROWS = 64  # of a block at most
FEWEST = 33  # rows; fewer are quantised by the kernels that multiply them
LANES = 16  # that have a row
WIDEST = 8192  # inputs of a row that is normed: for more there are no registers
_f32 = jnp.float32
_LAYOUT = by_row(fp8.BLOCK // LANES)


def supported(rows: int, dtype: Any) -> str | None:
    """Why the kernel can't quantise so many rows of `dtype`, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows < FEWEST:
        return f"{rows} rows; supported: {FEWEST} and more"
    return None


def norm_supported(rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernel can't norm and quantise so many rows of `dtype`, or None if it can."""
    if width % (GROUP * fp8.BLOCK) or width > WIDEST:
        return f"rows of {width}; supported: multiples of {GROUP * fp8.BLOCK} up to {WIDEST}"
    return supported(rows, dtype)


@lower_once("fp8_quantise")
def quantise_rows(x: Float[Array, "r k"], *, interpret: Any = False) -> tuple[Float[Array, "p k"], Float[Array, "p b"]]:
    """Run `fp8.quantise_rows` in blocks of 128 inputs; a quotient's last bit may differ. `k` is a multiple of 128."""
    rows, inputs = x.shape
    groups, block = inputs // fp8.BLOCK, min(ROWS, rows // GROUP * GROUP)
    values, scales = plgpu.kernel(
        partial(_block, block),
        kernel_name="fp8_quantise",
        out_type=_quantised_like(rows, inputs),
        grid=(-(-rows // block), groups),
        grid_names=("rows", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x)
    return values, scales.T


def _quantised_like(rows: int, *inputs: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of values and scales."""
    padded, groups = padded_rows(rows), math.prod(inputs) // fp8.BLOCK
    return [jax.ShapeDtypeStruct((padded, *inputs), fp8.E4M3), jax.ShapeDtypeStruct((groups, padded), _f32)]


def _block(block, x_g, values_g, scales_g):
    top, group = lax.axis_index("rows") * block, lax.axis_index("group")
    rows = pl.ds(jnp.minimum(top, x_g.shape[0] - block), block)  # the last block may begin among the rows of another
    here = rows, pl.ds(group * fp8.BLOCK, fp8.BLOCK)
    x = plgpu.load(x_g.at[here], layout=_LAYOUT, optimized=False).astype(_f32)
    values_g[here], scales_g[group, rows] = _quantised(x)


def _quantised(x):
    """Quantise rows of 128 inputs to e4m3; also returns their scales."""
    scale = jnp.max(jnp.abs(x), axis=1) * (1 / fp8.LARGEST)
    scale = jnp.where(scale > 0, scale, 1.0)
    quotient = x * lax.broadcast_in_dim(1 / scale, x.shape, [0])
    return jnp.clip(quotient, -fp8.LARGEST, fp8.LARGEST).astype(fp8.E4M3), scale


class Normed(NamedTuple):
    """Results of `norm`: the residual stream `x`, its norm's `rows`, and these `quantised`; None where nobody asked."""

    x: Float[Array, "r k"]
    rows: Float[Array, "r k"] | None
    quantised: tuple[Float[Array, "p k"], Float[Array, "p b"]] | None


@lower_once("fp8_norm_quantise", "eps", "centred", "keep", "quantise")
def norm(
    x: Float[Array, "r k"],
    weight: Float[Array, " k"],
    parts: Float[Array, "p s k"] | None = None,
    *,
    eps: float,
    centred: bool = False,
    keep: bool = False,
    quantise: bool = True,
    interpret: Any = False,
) -> Normed:
    """Add the sum of `parts`, rounded first as a product of its own would be, to x, and norm that.

    `quantise`: run `quantise_rows` on the rows times the norm's weight, rounded first; scales are multiplied by its
    factor. `keep`: return the normed rows themselves, too, rounded where plain layers round.
    """
    rows, inputs = x.shape
    groups = inputs // fp8.BLOCK
    shape = groups, fp8.BLOCK
    whole = jax.ShapeDtypeStruct((rows, *shape), x.dtype)
    out = plgpu.kernel(
        partial(_norm_row, eps, centred, parts is not None, keep, quantise),
        kernel_name="fp8_norm_quantise",
        out_type=[whole] * ((parts is not None) + keep) + (_quantised_like(rows, *shape) if quantise else []),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=params(across_warps=True),
        interpret=interpret,
    )(*(a.reshape(*a.shape[:-1], *shape) for a in (x, weight, parts) if a is not None))
    x = x if parts is None else out.pop(0).reshape(x.shape)
    kept = out.pop(0).reshape(x.shape) if keep else None
    return Normed(x, kept, (out[0].reshape(-1, inputs), out[1].T) if quantise else None)


def _norm_row(eps, centred, added, keep, quantise, x_g, weight_g, *refs):
    row, (_, *shape), refs = lax.axis_index("row"), x_g.shape, list(refs)
    load = partial(plgpu.load, layout=_LAYOUT, optimized=False)
    x, weight = load(x_g.at[row]).astype(_f32), load(weight_g).astype(_f32)
    if added:
        parts_g, x_dtype = refs.pop(0), x_g.dtype
        total = load(parts_g.at[row, 0]).astype(_f32)
        for i in range(1, parts_g.shape[1]):
            total = total + load(parts_g.at[row, i]).astype(_f32)
        x = (x + total.astype(x_dtype).astype(_f32)).astype(x_dtype)
        refs.pop(0)[row] = x
        x = x.astype(_f32)
    factor = lax.rsqrt(jnp.sum(jnp.sum(x * x, axis=1)) / math.prod(shape) + eps)
    if keep:
        normed = x * factor
        normed = normed * (1 + weight) if centred else normed.astype(x_g.dtype).astype(_f32) * weight
        refs.pop(0)[row] = normed.astype(x_g.dtype)
    if quantise:
        values_g, scales_g = refs
        weighted = (x * (1 + weight if centred else weight)).astype(x_g.dtype)
        values_g[row], scales = _quantised(weighted.astype(_f32))
        scales_g[:, row] = scales * factor
