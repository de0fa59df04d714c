"""Attention of new rows over a paged cache: decode, verify and prompt chunks are one operation.

The reference streams over the pages of the longest request in blocks, keeping a running maximum and sum (online
softmax, https://arxiv.org/abs/2112.05682), so its cost follows the tokens that are there and not the context length.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK_TOKENS = 128  # cached tokens that one step of the reference reads per request


@partial(jax.jit, static_argnames="block_tokens")
def paged_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    block_tokens: int = BLOCK_TOKENS,
) -> Float[Array, "b t n h"]:
    """Causal attention of rows at positions `start + 0..t-1`, whose keys and values are already in `kv`.

    `table[b]` lists a request's pages in order of position; scores are scaled by h**-0.5 and summed in float32.
    Returns the mix of values, in q's dtype. Rows whose position is negative return zeros.
    """
    b, t, n, h = q.shape
    m, s = kv.shape[3], kv.shape[4]
    pages = max(1, min(block_tokens // s, table.shape[1]))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    position = start[:, None] + jnp.arange(t)
    grouped = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype).reshape(b, t, m, n // m, h)

    def step(i, carry):
        acc, top, total = carry
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = jnp.moveaxis(kv[layer, ids], 2, 0)  # each [b, pages, m, s, h]
        scores = jnp.einsum("btmgh,bpmsh->bmgtps", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
        scores = scores.reshape(b, m, n // m, t, pages * s)
        seen = i * pages * s + jnp.arange(pages * s) <= position[:, None, None, :, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe = jnp.where(jnp.isneginf(new_top), 0.0, new_top)  # rows that have seen nothing yet
        weights, shrink = jnp.exp(scores - safe[..., None]), jnp.exp(top - safe)
        mix = jnp.einsum(
            "bmgtps,bpmsh->bmgth",
            weights.reshape(b, m, n // m, t, pages, s).astype(q.dtype),
            v.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )
        return acc * shrink[..., None] + mix, new_top, total * shrink + weights.sum(-1)

    shape = (b, m, n // m, t)
    empty = (jnp.zeros((*shape, h)), jnp.full(shape, -jnp.inf), jnp.zeros(shape))
    last = jnp.clip((jnp.max(start) + t - 1) // (pages * s), -1, table.shape[1] // pages - 1)
    acc, _, total = jax.lax.fori_loop(0, last + 1, step, empty)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(b, t, n, h).astype(q.dtype)
