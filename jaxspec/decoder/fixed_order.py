"""Norms and products of rows with one order of sums, in kernels or in slices of rows, for `--deterministic`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.functions import normed
from jaxspec.decoder.low_rank import low_rank, reading
from jaxspec.models.description import Norm
from jaxspec.models.weights import Weight, matmul
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import tile_matmul, weight_stream
from jaxspec.pallas.dense.add_norm import UNIT, add_norm
from jaxspec.pallas.sliced_rows import SLICE, sliced


def row_norm(x: Float[Array, "*b d"], scale: Float[Array, " d"], norm: Norm) -> Float[Array, "*b d"]:
    """`decoder.functions.normed`, of each row by itself."""
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    if not hopper.multiprocessors():
        return sliced(lambda rows: normed(rows, scale, norm), SLICE, rows).reshape(x.shape)
    unit = UNIT // 2 if width <= UNIT // 2 else UNIT
    wide = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -width % unit)])  # noqa: E731
    named = {"eps": norm.eps, "centred": norm.centred, "columns": width}
    return add_norm(wide(rows), None, wide(scale), **named)[1][: len(rows), :width].reshape(x.shape)


def exact_product(x: Float[Array, "*b d"], weight: Weight) -> Float[Array, "*b n"]:
    """x @ weight in float32, of any number of rows, and what the rows' adapters add."""
    if weight.adapters is not None:
        change = change_of(x, weight).astype(jnp.float32)
        return exact_product(x, weight.replace(adapters=None)) + change
    rows = x.reshape(-1, x.shape[-1])
    if not hopper.multiprocessors():
        out = sliced(lambda rows: matmul(rows, weight, jnp.float32), SLICE, rows)
    elif len(rows) <= weight_stream.MAX_ROWS:
        out = in_order(weight_stream.product_fixed(rows, weight.unquantised))
    else:
        out = sliced(
            lambda rows: in_order(weight_stream.product_fixed(rows, weight.unquantised)), weight_stream.MAX_ROWS, rows
        )
    return out.reshape(*x.shape[:-1], -1)


def in_order(partials: Float[Array, "s r n"]) -> Float[Array, "r n"]:
    """Their sum, one after the other."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


def change_of(
    x: Float[Array, "*b k"], weight: Weight, residual: Float[Array, "*b n"] | None = None
) -> Float[Array, "*b n"]:
    """Compute what rows' adapters add, as `low_rank.low_rank`, or its sum with a residual stream. A row's bits depend
    neither on other rows nor on its adapter's place."""
    adapters, layout = weight.adapters, weight.layout
    (k, projections, places, rank), n = adapters.a.shape, adapters.b.shape[-1]
    rows = x.reshape(-1, k)
    place = jnp.repeat(adapters.place, len(rows) // len(adapters.place))
    if hopper.multiprocessors():
        valid, b = jnp.array([len(place)], jnp.int32), adapters.b.reshape(-1, n)
        inner = tile_matmul.matmul(rows, adapters.a.reshape(k, -1), valid).reshape(len(rows), projections, -1)
        # The products of other places' columns, whose factors are zeros, add nothing to a sum.
        inner = jnp.where((place[:, None] == jnp.repeat(jnp.arange(places), rank))[:, None], inner, 0)
        outs = jnp.stack([tile_matmul.matmul(inner[:, i], b, valid) for i in range(projections)])
        change = jnp.where(reading(layout, projections, n)[:, None], outs, 0).sum(0)
    else:
        one = lambda x, place: low_rank(x, adapters.replace(place=place), layout, by_block=True)  # noqa: E731
        change = sliced(one, SLICE, rows, place)
    change = change.reshape(*x.shape[:-1], n)
    return change if residual is None else residual + change
