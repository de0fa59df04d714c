"""Norms behind a sub-layer on Hopper: its output normed, added to the residual stream, and normed for what follows.

XLA makes a reduction of each norm, and a kernel of each sum and scaling between them. At a few rows each takes little
longer than its start: a layer of Gemma 4's 26B has eleven norms. Here a layer has two such kernels. A block takes a
row, which its threads hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.pallas.hopper import THREADS
from jaxspec.pallas.hopper.export import lower_once

WIDEST = 64 * THREADS  # the widest row for which there are registers
VECTORS = 4, 2, 1  # neighbours that a thread may read at once
_f32 = jnp.float32


def supported(width: int, *dtypes: Any) -> str | None:
    """Why the kernel can't norm rows of this width, or None if it can. `dtypes`: of rows and norms."""
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"rows or norms in {wrong[0]}; supported: bfloat16"
    if width % THREADS or width > WIDEST:
        return f"rows of {width}; supported: multiples of {THREADS} up to {WIDEST}"
    return None


@lower_once("post_norm", "eps", "centred", "factors")
def post_norm(
    x: Float[Array, "r d"],
    parts: Sequence[Float[Array, "_ d"]],
    own_scales: Sequence[Float[Array, " d"]],
    scale: Float[Array, " d"],
    next_scales: Sequence[Float[Array, " d"]] = (),
    output_scale: Float[Array, "1"] | None = None,
    *,
    eps: float,
    centred: bool = False,
    factors: tuple[float, ...] = (),
    interpret: Any = False,
) -> tuple[Float[Array, "r d"], list[Float[Array, "r d"]]]:
    """(x + norm(the sum of `parts`)) * output_scale, and its norm by each of `next_scales`.

    All in bfloat16, rounded where plain layers round (`decoder.functions.normed`), with norms in float32. Several parts
    are normed by `own_scales` before they are added up; one has none. A part may have fewer rows than x: those behind
    its last are padding, and take that one. `factors`: what each of the next norms is multiplied by, 1 by default.
    """
    rows, width = x.shape
    given = [*parts, *own_scales, scale, *next_scales, *([] if output_scale is None else [output_scale])]
    counts = len(parts), len(own_scales), len(next_scales)
    x, *normed = plgpu.kernel(
        partial(_row, eps, centred, factors or (1.0,) * len(next_scales), counts, output_scale is not None),
        kernel_name="post_norm",
        out_type=[jax.ShapeDtypeStruct((rows, width), x.dtype)] * (1 + len(next_scales)),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, *given)
    return x, normed


def _row(eps, centred, factors, counts, output_scaled, x_g, *refs):
    refs, row, width = list(refs), lax.axis_index("row"), x_g.shape[1]
    parts_g, own_g, (scale_g,), next_g = ([refs.pop(0) for _ in range(n)] for n in (*counts[:2], 1, counts[2]))
    output_g, (out_g, *normed_g) = [refs.pop(0) for _ in range(output_scaled)], refs
    vector = next(n for n in VECTORS if width % (n * THREADS) == 0)
    load = partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((width,), vector), optimized=False)
    rounded = lambda x: x.astype(jnp.bfloat16).astype(_f32)  # noqa: E731

    def scaled(x, scale_g):
        """Weight a row of length one, in float32, as rounded."""
        scale = load(scale_g).astype(_f32)
        return rounded(x * (1 + scale) if centred else rounded(x) * scale)

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x) / width + eps)

    x = load(x_g.at[row]).astype(_f32)  # before any sum is waited for
    parts = [load(part_g.at[jnp.minimum(row, part_g.shape[0] - 1)]).astype(_f32) for part_g in parts_g]
    if own_g:
        parts = [scaled(unit(part), own) for part, own in zip(parts, own_g, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = rounded(total + part)
    x = rounded(x + scaled(unit(total), scale_g))
    for each in output_g:
        x = rounded(x * each[0].astype(_f32))
    out_g[row] = x.astype(jnp.bfloat16)
    if next_g:
        x = unit(x)
    for each_g, scale_g, factor in zip(normed_g, next_g, factors, strict=True):
        normed = scaled(x, scale_g)
        if factor != 1:
            normed = rounded(normed * float(np.asarray(factor, jnp.bfloat16)))
        each_g[row] = normed.astype(jnp.bfloat16)
