"""Attention of vision towers: each patch to all of its picture.

Patches of several pictures stand one behind the other, and padding, which no picture has, at the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing
from jaxspec.pallas.portable import pictures

QUERIES = 512  # that attend at a time in plain jnp, so that all scores of a large picture needn't be there at once


def picture_attention(
    q: Float[Array, "p n h"],
    k: Float[Array, "p n h"],
    v: Float[Array, "p n h"],
    begin: Int[Array, " p"],
    end: Int[Array, " p"],
) -> Float[Array, "p n h"]:
    """Attend each patch to patches `begin` to `end - 1`, without an order. Patches that see none return zeros.

    Scores are multiplied by h ** -0.5 and summed in float32.
    """
    call = q, k, v, begin, end
    return choose("pictures' attention", PICTURE_ATTENTION, *call).run(*call)


def reference(q, k, v, begin, end) -> Array:
    """`picture_attention` in plain jnp."""
    p, n, h = q.shape
    patch = jnp.arange(p, dtype=jnp.int32)

    def some(of):
        q, begin, end = of
        scores = jnp.einsum("qnh,pnh->nqp", q, k, preferred_element_type=jnp.float32) * h**-0.5
        seen = (begin[:, None] <= patch) & (patch < end[:, None])
        shares = jax.nn.softmax(scores, axis=-1, where=seen)
        return jnp.einsum("nqp,pnh->qnh", shares.astype(v.dtype), v)

    size = min(p, QUERIES)
    return jax.lax.map(some, (q.reshape(-1, size, n, h), begin.reshape(-1, size), end.reshape(-1, size))).reshape(
        q.shape
    )


def _portable_refuses(q, k, v, begin, end) -> str | None:
    return pictures.supported(q.shape, q.dtype)


_PORTABLE = _portable_refuses, pictures.picture_attention
PICTURE_ATTENTION = (
    Implementation("portable_pictures", HOPPER, *_PORTABLE),  # Hopper has no kernel of its own
    Implementation("portable", PORTABLE, *_PORTABLE),
    Implementation("reference", ANY, nothing, reference, slow=True),
)
