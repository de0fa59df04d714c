"""Adapters (LoRA): what each row's own adapter adds to the product of rows with a weight.

One batch has rows of many adapters. All adapters' arrays stand side by side, so neither loading one nor mixing them
compiles anything. Axis letters: r rows, k inputs, n outputs, s places of adapters, p ranks, b requests or blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.weights import LowRank

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


def own_columns(
    place: Int[Array, " b"], rows: int, places: int, rank: int, run: int
) -> tuple[Float[Array, "r q"], Int[Array, " c"]]:
    """For each of `rows` rows a request, 1 in the columns of its own adapter among those of all, 0 elsewhere; and how
    many runs of `run` columns have any, and then which."""
    each, all_places = jnp.repeat(place, rows)[:, None], jnp.repeat(jnp.arange(places), rank)
    own = each == all_places
    found = own.reshape(len(own), -1, run).any((0, 2))
    runs = jnp.nonzero(found, size=len(found), fill_value=0)[0]
    return own.astype(jnp.bfloat16), jnp.concatenate([found.sum(keepdims=True), runs]).astype(jnp.int32)


@jax.named_scope("adapters")
def low_rank(x: Float[Array, "*b k"], change: LowRank, by_block: bool = False) -> Float[Array, "*b n"]:
    """Compute what adapters add for rows x, in their dtype: zeros for rows without one. Sums are float32.

    Few rows a request are multiplied by all adapters, and each row's own is picked out: reading them all costs less
    than gathering one a request. A prompt's blocks gather theirs, and so do all `by_block`.
    """
    (k, s, p), n = change.a.shape, change.b.shape[-1]
    rows, requests = x.reshape(-1, k), len(change.place)
    each = len(rows) // requests
    of = {"preferred_element_type": jnp.float32}
    if by_block or each >= BY_BLOCK:
        place = jnp.maximum(change.place, 0)
        inner = jnp.einsum("btk,kbp->btp", rows.reshape(requests, each, k), change.a[:, place], **of)
        inner = jnp.where(change.place[:, None, None] >= 0, inner, 0).astype(x.dtype)
        out = jnp.einsum("btp,bpn->btn", inner, change.b[place], **of)
    else:
        inner = jnp.matmul(rows, change.a.reshape(k, s * p), **of).reshape(-1, s, p)
        own = jnp.repeat(change.place, each)[:, None] == jnp.arange(s)
        inner = jnp.where(own[..., None], inner, 0).astype(x.dtype).reshape(-1, s * p)
        out = jnp.matmul(inner, change.b.reshape(s * p, n), **of)
    return out.astype(x.dtype).reshape(*x.shape[:-1], n)
