"""Drafts chosen among each row's likeliest tokens, in order: by DFlash 2's selector, and by LiLiCorr's lattice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafters.base import DraftBatch, Proposal
from jaxspec.parallel.sharding import my_requests

CHUNK = 128  # tokens whose largest logit stands for all of them


def walk(batch: DraftBatch, ids: Int[Array, "b n k"], score: Callable[..., Float[Array, "b k"]], size: int) -> Proposal:
    """Draw a draft of each row's candidates `ids`, in order; the vocabulary has `size` tokens.

    `score(step, token, place)` gives a row's scores, if the draft before it is `token`, which stood at `place` i32[b]
    among its row's candidates. Before the first row these are the newest token and None. A draft's probabilities are
    those among its row's candidates, zero elsewhere, and rejection sampling takes them as they are.
    """
    token, place, each = batch.tokens(-1, 1)[:, 0], None, jnp.arange(len(ids))
    tokens, probs, scores = [], [], []
    for step in range(ids.shape[1]):
        scores.append(score(step, token, place))
        place, p = batch.choose(scores[-1], step)
        token = ids[each, step, place]
        tokens.append(token)
        probs.append(p)
    spread = partial(_spread, size=size)
    q = None if batch.greedy else spread(jnp.stack(probs, axis=1), my_requests(ids), fill=0.0)
    logits = spread(jnp.stack(scores, axis=1), ids, fill=-jnp.inf)
    return Proposal(jnp.stack(tokens, axis=1), jnp.where(batch.live, ids.shape[1], 0), q, logits)


def largest(x: Float[Array, "b n v"], k: int) -> tuple[Float[Array, "b n k"], Int[Array, "b n k"]]:
    """Find the k largest like `jax.lax.top_k`, but sort far fewer: they are in the k chunks with the largest maxima."""
    b, n, v = x.shape
    if v < 4 * k * CHUNK:
        return jax.lax.top_k(x, k)
    chunks = jnp.pad(x, ((0, 0), (0, 0), (0, -v % CHUNK)), constant_values=-jnp.inf).reshape(b, n, -1, CHUNK)
    which = jnp.sort(jax.lax.top_k(chunks.max(-1), k)[1], axis=-1)
    near = jnp.take_along_axis(chunks, which[..., None], axis=2).reshape(b, n, k * CHUNK)
    values, at = jax.lax.top_k(near, k)
    return values, jnp.take_along_axis(which, at // CHUNK, axis=-1) * CHUNK + at % CHUNK


def _spread(values: Float[Array, "b n k"], ids: Int[Array, "b n k"], size: int, fill: float) -> Float[Array, "b n v"]:
    """The values at their ids, `fill` elsewhere."""
    b, n, _ = values.shape
    at = jnp.arange(b)[:, None, None], jnp.arange(n)[:, None], ids
    return jnp.full((b, n, size), fill, values.dtype).at[at].set(values)
