"""Attention over packed rows: several texts side by side in one row, each position seeing a span of its own text.

No array of all scores exists: queries are taken in blocks, and a block's scores are computed again in the backward
pass instead of being kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.mixers import WholeTexts
from jaxspec.decoder.functions import capped
from jaxspec.decoder.mixer import OnlyAttention
from jaxspec.models.positions import first_seen

BLOCK = 256  # query rows whose scores exist at once
_UNSEEN = -1e30  # finite, so that no gradient is the difference of infinities

Pair = tuple[Array, Array]  # keys and values


def span_attention(
    q: Float[Array, "b a r n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m h"],
    first: Int[Array, "b a"],
    last: Int[Array, "b a"],
    own: Pair | None = None,
    *,
    causal: bool = False,
    sinks: Float[Array, " n"] | None = None,
    cap: float | None = None,
) -> Float[Array, "b a r n h"]:
    """Attention of `a` groups of `r` rows: each group sees positions `first` to `last` of k and v, and its own.

    **Arguments:**

    - `own`: keys and values `[b, a, o, m, h]` that only the group's rows see.
    - `causal`: group i sees nothing behind position i, so what lies behind a block of groups isn't looked at.
    - `sinks`: of each head, one more logit of its softmax, which no value belongs to.
    - `cap`: scores are squashed below it.

    A group must see something. Scores are scaled by h**-0.5 and summed in float32; the result has q's dtype.
    """
    a, r = q.shape[1], q.shape[2]
    block = max(BLOCK // r, 1)
    parts = []
    for start in range(0, a, block):
        end = min(start + block, a)
        keys = end if causal else k.shape[1]
        cut = lambda x, start=start, end=end: x[:, start:end]  # noqa: E731
        mine = None if own is None else tuple(map(cut, own))
        parts.append(_mix(cut(q), k[:, :keys], v[:, :keys], cut(first), cut(last), mine, sinks, cap))
    return jnp.concatenate(parts, axis=1)


@jax.checkpoint
def _mix(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    last: Array,
    own: Pair | None,
    sinks: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Heads come first and scores stay as they are multiplied, so that only what is small is ever transposed."""
    b, a, r, n, h = q.shape
    s, m = k.shape[1:3]
    g = n // m
    q = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype).reshape(b, a, r, m, g, h)
    q = q.transpose(0, 3, 4, 1, 2, 5).reshape(b, m, g * a * r, h)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    scores = jnp.einsum("bmqh,bmsh->bmqs", q, k, preferred_element_type=jnp.float32).reshape(b, m, g, a, r, s)
    scores = scores if cap is None else capped(scores, cap)
    seen = (jnp.arange(s) >= first[..., None]) & (jnp.arange(s) <= last[..., None])
    scores = jnp.where(seen[:, None, None, :, None], scores, _UNSEEN)
    if own is not None:
        grouped = q.reshape(b, m, g, a, r, h)
        mine = jnp.einsum("bmgarh,baomh->bmgaro", grouped, own[0], preferred_element_type=jnp.float32)
        scores = jnp.concatenate([scores, mine], axis=-1)
    if sinks is not None:
        more = jnp.broadcast_to(sinks.reshape(m, g, 1, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bmqs,bmsh->bmqh", weights[..., :s].reshape(b, m, g * a * r, s), v).reshape(b, m, g, a, r, h)
    if own is not None:
        out = out + jnp.einsum("bmgaro,baomh->bmgarh", weights[..., s : s + own[1].shape[2]], own[1])
    return out.transpose(0, 3, 4, 1, 2, 5).reshape(b, a, r, n, h)


def packed_attention(first: Int[Array, "b t"]) -> OnlyAttention:
    """Causal attention within texts, of which `first` is the row that each row's text begins at. No cache."""

    def attention(cache, layer, q, k, v, window, sinks=None, cap=None):
        rows = jnp.arange(q.shape[1])
        near = first if window is None else first + jnp.maximum(first_seen(rows - first, window), 0)
        return causal_attention(q, k, v, near, sinks=sinks, cap=cap), cache

    return OnlyAttention(attention)


class OneText(WholeTexts):
    """A `Mixer` of rows with one text each, from row 0 on: for linear attention, whose state takes in all before it."""

    def __init__(self, first: Int[Array, "b t"]):
        self.attend = packed_attention(first).attend


def causal_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    first: Int[Array, "b t"],
    own: Pair | None = None,
    sinks: Float[Array, " n"] | None = None,
    cap: float | None = None,
) -> Float[Array, "b t n h"]:
    """Each row sees its text up to itself, and its own `own` [b, t, o, m, h]."""
    last = jnp.broadcast_to(jnp.arange(q.shape[1]), first.shape)
    return span_attention(q[:, :, None], k, v, first, last, own, causal=True, sinks=sinks, cap=cap)[:, :, 0]
