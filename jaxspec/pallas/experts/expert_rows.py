"""Gathers of many tokens' rows for their experts, and weighted sums of the results, on Hopper.

Mosaic GPU kernels. A warpgroup takes a few rows, or the token whose rows it adds up, and loads all of them before it
uses the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper import THREADS
from jaxspec.pallas.hopper.export import lower_once

FEWEST = 513  # tokens; with fewer XLA's gathers, which fuse with the next operation, take no longer
MOST = 16  # rows of a token, held in registers at once
TOGETHER = 8  # rows that a warpgroup gathers
VECTOR = 8 * THREADS  # numbers that a warpgroup loads at once, 16 bytes a thread


def supported(tokens: int, rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernels shouldn't serve `tokens` tokens of so many `rows` each, or None if they should."""
    if tokens < FEWEST:
        return f"{tokens} tokens"
    if rows > MOST:
        return f"{rows} rows a token, more than {MOST}"
    if dtype != jnp.bfloat16:
        return f"rows are {jnp.dtype(dtype).name}, not bfloat16"
    return None if parts(width) else f"a width of {width} is not a multiple of {THREADS}, nor of 64 and over {VECTOR}"


@lower_once("take_rows")
def take_rows(x: Float[Array, "t d"], token: Int[Array, " r"], *, interpret: Any = False) -> Float[Array, "r d"]:
    """`x[token]`. **Raises:** `ValueError` unless r is a multiple of 8."""
    if len(token) % TOGETHER:
        raise ValueError(f"{len(token)} rows to take; supported: a multiple of {TOGETHER}")
    return plgpu.kernel(
        _take,
        kernel_name="take_rows",
        out_type=jax.ShapeDtypeStruct((len(token), x.shape[1]), x.dtype),
        grid=(len(token) // TOGETHER,),
        grid_names=("group",),
        interpret=interpret,
    )(x, token)


def _take(x_g, token_g, out_g):
    first, width = lax.axis_index("group") * TOGETHER, x_g.shape[1]
    rows = [load(x_g, token_g[first + i]) for i in range(TOGETHER)]
    for i, row in enumerate(rows):
        store(out_g, first + i, row, width)


@lower_once("weighted_rows")
def weighted_rows(
    rows: Float[Array, "r d"], place: Int[Array, "t k"], weights: Float[Array, "t k"], *, interpret: Any = False
) -> Float[Array, "t d"]:
    """The sum over j of `weights[t, j] * rows[place[t, j]]`, in float32 and rounded at last. Row -1 counts as zeros."""
    return plgpu.kernel(
        _add,
        kernel_name="weighted_rows",
        out_type=jax.ShapeDtypeStruct((len(place), rows.shape[1]), rows.dtype),
        grid=(len(place),),
        grid_names=("token",),
        interpret=interpret,
    )(rows, place, weights)


def _add(rows_g, place_g, weights_g, out_g):
    token, width = lax.axis_index("token"), rows_g.shape[1]
    places = [place_g[token, j] for j in range(place_g.shape[1])]
    rows = [load(rows_g, jnp.maximum(place, 0)) for place in places]
    totals = []
    for p, (_, size) in enumerate(parts(width)):
        column = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size))
        total = None
        for j, (place, row) in enumerate(zip(places, rows, strict=True)):
            # Selected, not multiplied by zero: unwritten rows may be NaN.
            wanted = column < jnp.where(place >= 0, jnp.int32(size), jnp.int32(0))
            part = jnp.where(wanted, row[p].astype(jnp.float32) * weights_g[token, j], 0.0)
            total = part if total is None else total + part
        totals.append(total.astype(out_g.dtype))
    store(out_g, token, totals, width)


def parts(width: int) -> list[tuple[int, int]]:
    """First column and width of each part of a row that a warpgroup loads; none if it can't.

    If the width is no multiple of the threads, the last two parts overlap, and their common columns are computed twice.
    """
    if width % THREADS == 0:
        return [(0, width)]
    if width % 64 or width < VECTOR:
        return []
    return [*((first, VECTOR) for first in range(0, width - VECTOR, VECTOR)), (width - VECTOR, VECTOR)]


def load(x_g: Any, row: Any) -> list[Any]:
    """Load a row of `x_g`, in `parts`."""
    loaded = partial(plgpu.load, optimized=False)
    if len(parts(x_g.shape[1])) == 1:
        return [loaded(x_g.at[row], layout=_layout(x_g.shape[1]))]
    return [loaded(x_g.at[row, pl.ds(first, size)], layout=_layout(size)) for first, size in parts(x_g.shape[1])]


def store(out_g: Any, row: Any, values: list[Any], width: int) -> None:
    """Store a row in `parts`, as `load` gives it."""
    if len(values) == 1:
        out_g[row] = values[0]
        return
    for (first, size), part in zip(parts(width), values, strict=True):
        out_g[row, pl.ds(first, size)] = part


def _layout(width: int):
    """The register layout of a part [width]: each thread has up to 16 bytes side by side."""
    return plgpu.Layout.WG_STRIDED((width,), next(n for n in (8, 4, 2, 1) if width % (n * THREADS) == 0))
