"""A product's parts, added to the residual stream, and the norm that follows, as one kernel, on Hopper.

XLA makes three or four kernels of it: the sum, the sum of squares, the scaling, and the padding that `fp8_rows` needs.
At a few rows each of them takes little longer than its launch. Here a block takes a row, which its threads hold.
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

from jaxspec.pallas.hopper.export import lower_once

GROUP = 8  # rows of the norm are padded to a multiple of these
VECTOR = 4  # numbers that a thread reads at once
UNIT = 128 * VECTOR  # numbers that a warpgroup reads at once
WIDEST = 16 * UNIT  # the widest row for which there are registers
_f32 = jnp.float32


def supported(width: int, dtype: Any) -> str | None:
    """Why the kernel can't norm rows of this width, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if width % UNIT or width > WIDEST:
        return f"rows of {width}; supported: multiples of {UNIT} up to {WIDEST}"
    return None


@lower_once("add_norm", "eps", "centred", "columns")
def add_norm(
    x: Float[Array, "r d"],
    parts: Float[Array, "s p d"] | None,
    scale: Float[Array, " d"],
    *,
    eps: float,
    centred: bool = False,
    columns: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "r d"], Float[Array, "p d"]]:
    """Add the sum of `parts`, rounded first as a product of its own would be, to x; returns that and its norm.

    Both in bfloat16, rounded where plain layers round (`decoder.functions.normed`). The norm's rows are padded to a
    multiple of eight, as those of `parts` are; padding rows repeat the last row. Without parts x is normed as it is.
    `columns`: a row's own columns, if padding zeros make it wider.
    """
    rows, width = x.shape
    padded = -(-rows // GROUP) * GROUP
    given = [] if parts is None else [parts]
    shapes = [jax.ShapeDtypeStruct((padded, width), x.dtype)]
    if parts is not None:
        shapes.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
    normed, *added = plgpu.kernel(
        partial(_row, eps, centred, rows, columns or width, len(given)),
        kernel_name="add_norm",
        out_type=shapes,
        grid=(padded,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, scale, *given)
    return (added[0] if added else x), normed


def _row(eps, centred, rows, columns, given, x_g, scale_g, *refs):
    parts_g, normed_g, added_g = refs[:given], refs[given], refs[given + 1 :]
    row, width = lax.axis_index("row"), x_g.shape[1]
    here = jnp.minimum(row, rows - 1)
    vector = VECTOR if width % UNIT == 0 else VECTOR // 2
    load = partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((width,), vector), optimized=False)
    x, scale = load(x_g.at[here]), load(scale_g).astype(_f32)
    for part_g in parts_g:
        total = load(part_g.at[0, here])
        for i in range(1, part_g.shape[0]):  # eight parts of 4,096 at once would take 256 registers of a thread
            total = total + load(part_g.at[i, here])
        x = (x.astype(_f32) + total.astype(x.dtype).astype(_f32)).astype(x.dtype)
    for out_g in added_g:

        @pl.when(row < rows)
        def _(out_g=out_g):
            out_g[row] = x

    wide = x.astype(_f32)
    wide = wide * lax.rsqrt(jnp.sum(wide * wide) / columns + eps)
    wide = wide * (1 + scale) if centred else wide.astype(x.dtype).astype(_f32) * scale
    normed_g[row] = wide.astype(x.dtype)
