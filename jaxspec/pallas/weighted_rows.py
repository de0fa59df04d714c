"""Weighted sums of rows from all over an array, on Hopper: what a prompt's tokens get back from their experts.

A Mosaic GPU kernel. A warpgroup takes one token, and asks for all of its rows before it adds up the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.once import lower_once

LANES = 128  # threads of a warpgroup
FEWEST = 513  # tokens; with fewer XLA's sum, which fuses with what comes after, takes no longer
MOST = 16  # rows of a token, held in registers at once


def supported(tokens: int, rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernel shouldn't add up so many `rows` for each token, or None if it should."""
    if tokens < FEWEST:
        return f"{tokens} tokens"
    if rows > MOST:
        return f"{rows} rows a token, more than {MOST}"
    if dtype != jnp.bfloat16:
        return f"rows are {jnp.dtype(dtype).name}, not bfloat16"
    return f"a width of {width} is not a multiple of {LANES}" if width % LANES else None


@lower_once()
def weighted_rows(
    rows: Float[Array, "r d"], place: Int[Array, "t k"], weights: Float[Array, "t k"], *, interpret: Any = False
) -> Float[Array, "t d"]:
    """The sum over j of `weights[t, j] * rows[place[t, j]]`, in float32 and rounded at last. Row -1 counts as zeros."""
    return plgpu.kernel(
        _token,
        kernel_name="weighted_rows",
        out_type=jax.ShapeDtypeStruct((len(place), rows.shape[1]), rows.dtype),
        grid=(len(place),),
        grid_names=("token",),
        interpret=interpret,
    )(rows, place, weights)


def _token(rows_g, place_g, weights_g, out_g):
    token, width, k = lax.axis_index("token"), rows_g.shape[1], place_g.shape[1]
    together = next(n for n in (8, 4, 2, 1) if width % (n * LANES) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), together)
    places = [place_g[token, j] for j in range(k)]
    bring = partial(plgpu.load, layout=layout, optimized=False)
    column = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    rows = [bring(rows_g.at[jnp.maximum(place, 0)]) for place in places]
    total = None
    for j, (place, row) in enumerate(zip(places, rows, strict=True)):
        # Chosen, not multiplied by zero: what nobody wrote may not be a number.
        wanted = column < jnp.where(place >= 0, jnp.int32(width), jnp.int32(0))
        part = jnp.where(wanted, row.astype(jnp.float32) * weights_g[token, j], 0.0)
        total = part if total is None else total + part
    out_g[token] = total.astype(out_g.dtype)
