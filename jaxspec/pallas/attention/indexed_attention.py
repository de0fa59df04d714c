"""Attention to the blocks of tokens that an indexer selects, and to the tokens behind the last whole block.

There is no kernel yet: plain jnp scores all blocks, and gathers the keys and values of those that are selected. A row
sees the same ones whichever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NUMBERS = 2**24  # of gathered keys, about, at a time


class Index(NamedTuple):
    """Selection of blocks: rows' queries, their own keys, and `blocks`, which makes a key of each block of
    `ratio` tokens' keys [b s r w], [b s w]. A row takes the `most` best blocks."""

    queries: Float[Array, "b t n w"]
    rows: Float[Array, "b t w"]
    blocks: Callable[[Array], Array]
    ratio: int
    most: int


Read = Callable[[Int[Array, "b t s"]], tuple[Float[Array, "b t s m h"], Float[Array, "b t s m h"]]]


def indexed_attention(
    q: Float[Array, "b t n h"],
    index: Index,
    rows: Float[Array, "b c w"],
    positions: Int[Array, "b t"],
    read: Read,
) -> Float[Array, "b t n h"]:
    """Attention of rows at `positions` of their texts. `rows`: the index keys of c tokens from the texts' beginning on.
    `read`: the keys and values at places in the texts; what it gives beyond their ends is ignored."""
    b, t = q.shape[:2]
    if lacking := -rows.shape[1] % index.ratio:
        rows = jnp.pad(rows, ((0, 0), (0, lacking), (0, 0)))
    keys = index.blocks(rows.reshape(b, -1, index.ratio, rows.shape[2])).astype(jnp.float32)
    most = min(index.most, keys.shape[1])
    slots = (most + 1) * index.ratio
    each = max(NUMBERS // (b * slots * q.shape[3]), 1)  # rows at a time

    def some(of: tuple[Array, Array, Array]) -> Array:
        q, queries, positions = of  # each [b, r, ...]
        at, seen = selected(queries, keys, positions, index.ratio, most)
        return attention(q, *read(at), seen)

    given = q, index.queries, positions
    if t <= each:
        return some(given)
    lacking = -t % each
    cut = lambda x: jnp.pad(x, ((0, 0), (0, lacking), *[(0, 0)] * (x.ndim - 2))).reshape(b, -1, each, *x.shape[2:])  # noqa: E731
    out = jax.lax.map(some, tuple(jnp.moveaxis(cut(x), 1, 0) for x in given))
    return jnp.moveaxis(out, 0, 1).reshape(b, -1, *out.shape[3:])[:, :t]


def selected(
    queries: Float[Array, "b t n w"], keys: Float[Array, "b s w"], positions: Int[Array, "b t"], ratio: int, most: int
) -> tuple[Int[Array, "b t x"], Bool[Array, "b t x"]]:
    """The places that each row attends to, and which of them count: its best blocks, of equals the first, in the
    text's order, then its tokens behind the last whole block."""
    whole = ((positions + 1) // ratio)[..., None]
    scores = jnp.einsum("btnw,bsw->btns", queries.astype(jnp.float32), keys, precision="highest")
    scores = jax.nn.relu(scores).sum(axis=2) * keys.shape[-1] ** -0.5
    number = jnp.arange(keys.shape[1])
    best, blocks = jax.lax.top_k(jnp.where(number < whole, scores, -jnp.inf), most)
    blocks = jnp.sort(jnp.where(best > -jnp.inf, blocks, len(number)), axis=-1)
    blocks = jnp.concatenate([blocks, jnp.minimum(whole, len(number))], axis=-1)
    counts = jnp.concatenate([blocks[..., :-1] < len(number), jnp.ones_like(whole, bool)], axis=-1)
    at = blocks[..., None] * ratio + jnp.arange(ratio)
    seen = counts[..., None] & (at <= positions[..., None, None])
    return at.reshape(*positions.shape, -1), seen.reshape(*positions.shape, -1)


def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t s m h"],
    v: Float[Array, "b t s m h"],
    seen: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Attention of each row to keys and values of its own, of which it sees some."""
    (b, t, n, h), m = q.shape, k.shape[3]
    q = q.reshape(b, t, m, n // m, h)
    scores = jnp.einsum("btmgh,btsmh->btmgs", q, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(seen[:, :, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("btmgs,btsmh->btmgh", weights, v).reshape(b, t, n, h)
