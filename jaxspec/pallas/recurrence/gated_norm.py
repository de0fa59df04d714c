"""Norms and gates behind linear attention, on Hopper: norm(read) silu(z) of the gated delta rule's prompts, a head at a
time; norm(read silu(z)) of a state space's rounds, a group of heads at a time.

The first is the norm that `delta_step` has after its rule (`gates_and_norm`), as a kernel of its own: a row's bits
don't depend on how many rows there are. A warpgroup takes `ROWS` rows of a head, each in the lanes of one warp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.pallas.hopper import WARPS
from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.recurrence import gates_and_norm

ROWS = 16
WARPGROUP = WARPS * 32  # threads


@lower_once("gated_norm", "eps")
def gated_norm(
    read: Float[Array, "b t n v"],
    rows: Float[Array, "b t w"],
    scale: Float[Array, " v"],
    *,
    eps: float,
    interpret: Any = False,
) -> Float[Array, "b t n v"]:
    """Compute norm(read) silu(z) of each head, all in bfloat16.

    `rows` end in z, one head after the other. `t` is a multiple of `ROWS`, heads are 128 wide.
    """
    shape = read.shape
    read, rows = read.reshape(-1, ROWS, *shape[2:]), rows.reshape(-1, ROWS, rows.shape[2])
    out = plgpu.kernel(
        partial(_head, eps),
        kernel_name="gated_norm",
        out_type=jax.ShapeDtypeStruct(read.shape, read.dtype),
        grid=(len(read), shape[2]),
        grid_names=("b", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(read, rows, scale)
    return out.reshape(shape)


def _head(eps, read_g, rows_g, scale_g, out_g):
    b, head = lax.axis_index("b"), lax.axis_index("head")
    z, scale = gates_and_norm.load_z((rows_g, scale_g), b, ROWS, 1, head, read_g.shape[2])
    gates_and_norm.write_normed(read_g.at[b, :, pl.ds(head, 1)], out_g.at[b], z, scale, head, eps)


MOST_ROWS = 512  # of a state space's: with more it wasn't measured
WIDEST = 64 * WARPGROUP  # the widest group for which there are registers


def grouped_supported(b: int, t: int, columns: int, groups: int, *dtypes: Any) -> str | None:
    """Why `grouped_norm` can't serve t rows of b requests, so many columns wide; None if it can. `dtypes`: all
    operands'."""
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"rows or scales in {wrong[0]}; supported: bfloat16"
    if b * t > MOST_ROWS:
        return f"{b * t} rows; supported: up to {MOST_ROWS}"
    width = columns // groups
    if width % WARPGROUP or width > WIDEST:
        return f"groups of {width} columns; supported: multiples of {WARPGROUP} up to {WIDEST}"
    return None


@lower_once("grouped_norm", "groups", "eps")
def grouped_norm(
    read: Float[Array, "b t c"],
    rows: Float[Array, "b r w"],
    scale: Float[Array, " c"],
    *,
    groups: int,
    eps: float,
    interpret: Any = False,
) -> Float[Array, "b r c"]:
    """Compute norm(read silu(z)) by group, all in bfloat16. `rows` begin with z; of the result, those from t on are
    padding and may hold anything. A warpgroup takes a group of a row."""
    b, t, columns = read.shape
    return plgpu.kernel(
        partial(_group, columns // groups, eps),
        kernel_name="grouped_norm",
        out_type=jax.ShapeDtypeStruct((*rows.shape[:2], columns), read.dtype),
        grid=(b, t, groups),
        grid_names=("b", "row", "group"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(read, rows, scale)


def _group(width, eps, read_g, rows_g, scale_g, out_g):
    row = lax.axis_index("b"), lax.axis_index("row")
    cut = pl.ds(lax.axis_index("group") * width, width)
    vector = next(n for n in (8, 4, 2, 1) if width % (n * WARPGROUP) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vector)
    load = lambda x_g: plgpu.load(x_g, layout=layout, optimized=False).astype(jnp.float32)  # noqa: E731
    read, z, scale = load(read_g.at[*row, cut]), load(rows_g.at[*row, cut]), load(scale_g.at[cut])
    gated = read * (z / (1 + jnp.exp(-z)))
    out_g[*row, cut] = (gated * lax.rsqrt(jnp.sum(gated * gated) / width + eps) * scale).astype(out_g.dtype)
