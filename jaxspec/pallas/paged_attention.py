"""Attention of new rows over a paged cache: decode, verify and prompt chunks are one operation.

`paged_attention` chooses: on Hopper a kernel for few rows a request or one for blocks of a prompt, elsewhere the
reference. That one streams over the pages of the longest request in blocks, keeping a running maximum and sum (online
softmax, https://arxiv.org/abs/2112.05682), so its cost follows the tokens that are there and not the context length.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.decode_attention import decode_attention
from jaxspec.pallas.decode_attention import supported as decode_attention_fits
from jaxspec.pallas.prompt_attention import prompt_attention
from jaxspec.pallas.prompt_attention import supported as prompt_attention_fits
from jaxspec.pallas.target import chosen, tell

DECODE_ROWS = 16  # up to here, rows of one request share a tile of the decode kernel whatever the model's grouping
BLOCK_TOKENS = 128  # cached tokens that one step of the reference reads per request


def paged_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
) -> Float[Array, "b t n h"]:
    """Causal attention of rows at positions `start + 0..t-1`, whose keys and values are already in `kv`.

    `table[b]` lists a request's pages in order of position; scores are scaled by h**-0.5 and summed in float32.
    Returns the mix of values, in q's dtype. Rows whose position is negative return zeros.
    """
    few = q.shape[1] <= DECODE_ROWS
    kernel = decode_attention if few else prompt_attention
    fits = (decode_attention_fits if few else prompt_attention_fits)(q.shape, kv.shape, kv.dtype)
    if q.dtype != jnp.bfloat16:
        fits = f"queries are {q.dtype.name}, not bfloat16"
    if fits is not None:
        tell(kernel.__name__, fits)
    run = kernel if chosen(kernel.__name__, fits) else reference
    return run(q, kv, layer, table, start)


def reference(q: Array, kv: Array, layer: Array, table: Array, start: Array, block_tokens: int = BLOCK_TOKENS) -> Array:
    """`paged_attention` in plain jnp, for any shapes and dtypes."""
    position = start[:, None] + jnp.arange(q.shape[1])
    return span_attention(q, kv, layer, table, jnp.zeros_like(position), position, block_tokens)


@partial(jax.jit, static_argnames="block_tokens")
def span_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    first: Int[Array, "b t"],
    last: Int[Array, "b t"],
    block_tokens: int = BLOCK_TOKENS,
) -> Float[Array, "b t n h"]:
    """Attention of rows that each see positions `first` to `last`, in plain jnp; otherwise as `paged_attention`.

    A causal row ends at its own position, a row of a block that sees all of itself at the block's end, and a window
    moves the beginning. Rows that see no position return zeros.
    """
    b, t, n, h = q.shape
    m, s = kv.shape[3], kv.shape[4]
    pages = max(1, min(block_tokens // s, table.shape[1]))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    grouped = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype).reshape(b, t, m, n // m, h)

    def step(i, carry):
        acc, top, total = carry
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = jnp.moveaxis(kv[layer, ids], 2, 0)  # each [b, pages, m, s, h]
        scores = jnp.einsum("btmgh,bpmsh->bmgtps", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
        scores = scores.reshape(b, m, n // m, t, pages * s)
        position = i * pages * s + jnp.arange(pages * s)
        seen = (position >= first[..., None]) & (position <= last[..., None])
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
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
    begin = jnp.maximum(jnp.min(first) // (pages * s), 0)
    end = jnp.clip(jnp.max(last) // (pages * s), -1, table.shape[1] // pages - 1) + 1
    acc, _, total = jax.lax.fori_loop(begin, end, step, empty)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(b, t, n, h).astype(q.dtype)
