"""Adapters (LoRA): what each row's own adapter adds to the product of rows with a weight.

One batch has rows of many adapters. All adapters' arrays stand side by side, so neither loading one nor mixing them
compiles anything. Axis letters: r rows, k inputs, n outputs, i projections of a weight, s places of adapters, p ranks,
b requests or blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.weights import Layout, LowRank

BY_BLOCK = 16  # rows of one request from which on its adapter is gathered, not picked out of the products of all


def attached(
    layers: Sequence[Mapping[str, Any]], adapters: Sequence[Mapping[str, LowRank]], place: Int[Array, " b"] | None
) -> list[dict[str, Any]]:
    """The layers' weights with their adapters. `place`: as of `LowRank`."""
    with_place = lambda weight, change: weight.replace(adapters=change.replace(place=place))  # noqa: E731
    return [
        {**weights, **{name: with_place(weights[name], change) for name, change in changes.items()}}
        for weights, changes in zip(layers, adapters, strict=True)
    ]


def own_places(
    place: Int[Array, " b"], rows: int, places: int, rank: int, run: int
) -> tuple[Int[Array, " r"], Int[Array, "1"]]:
    """The place of each of `rows` rows a request; and a bit for each run of `run` columns of all places in which one
    has its own."""
    runs = jnp.arange(places * rank // run)[:, None] * run
    found = (place * rank < runs + run) & ((place + 1) * rank > runs) & (place >= 0)
    bits = jnp.sum(found.any(1).astype(jnp.int32) << jnp.arange(len(runs)), dtype=jnp.int32)
    return jnp.repeat(place, rows).astype(jnp.int32), bits[None]


@jax.named_scope("adapters")
def low_rank(x: Float[Array, "*b k"], change: LowRank, layout: Layout, by_block: bool = False) -> Float[Array, "*b n"]:
    """Compute what adapters add for rows x, in their dtype: zeros for rows without one. Sums are float32. `layout`: of
    the weight that they change.

    Few rows a request are multiplied by all adapters, and each row's own is picked out: reading them all costs less
    than gathering one a request. A prompt's blocks gather theirs, and so do all `by_block`.
    """
    (k, i, s, p), n = change.a.shape, change.b.shape[-1]
    rows, requests = x.reshape(-1, k), len(change.place)
    each, reads = len(rows) // requests, reading(layout, i, n)
    of = {"preferred_element_type": jnp.float32}
    if by_block or each >= BY_BLOCK:
        place = jnp.maximum(change.place, 0)
        inner = jnp.einsum("btk,kibp->btip", rows.reshape(requests, each, k), change.a[:, :, place], **of)
        inner = jnp.where(change.place[:, None, None, None] >= 0, inner, 0).astype(x.dtype)
        b = jnp.where(reads[:, None], change.b[place][:, None], 0)
        out = jnp.einsum("btip,bipn->btn", inner, b, **of)
    else:
        inner = jnp.matmul(rows, change.a.reshape(k, -1), **of).reshape(-1, i, s, p)
        own = jnp.repeat(change.place, each)[:, None] == jnp.arange(s)
        inner = jnp.where(own[:, None, :, None], inner, 0).astype(x.dtype).reshape(-1, s * p)
        out = jnp.matmul(inner, change.b.reshape(s * p, n), **of).reshape(-1, i, n)
        out = jnp.where(reads, out, 0).sum(1)
    return out.astype(x.dtype).reshape(*x.shape[:-1], n)


def reading(layout: Layout, projections: int, outputs: int) -> Bool[Array, "i n"]:
    """Whether each of a weight's outputs is of each projection; those that make it wider (`Param.least`) are of all."""
    if projections == 1:
        return jnp.ones((1, outputs), bool)
    each = jnp.pad(layout.projection, (0, outputs - sum(layout.splits)))
    return each == jnp.arange(projections)[:, None]
