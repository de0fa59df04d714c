"""Attention over latents in pages, with queries projected into them: decode, verify and prompt blocks alike.

Pages have one row a token for all query heads. All of it is the key, and its first columns are the value. So the bytes
of a token are read once, whatever the number of heads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.attention import latent_decode, paged_attention
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing
from jaxspec.pallas.portable import latent as portable_latent


def latent_attention(
    q: Float[Array, "b t n w"],
    kv: Float[Array, "l p 1 1 s w"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    latent: int,
    scale: float,
    mask: Bool[Array, "b t w"] | None = None,
) -> Float[Array, "b t n l"]:
    """Causal attention of rows at KV slots `start + 0..t-1`, whose latents are already in `kv`.

    `table`, `start` and `mask` are as in `paged_attention`. The first `latent` columns of a row are its value. Scores
    are multiplied by `scale` and summed in float32. Rows that see no KV slot return zeros.
    """
    call = q, kv, layer, table, start, latent, scale, mask
    return choose("latent attention", LATENT_ATTENTION, *call).run(*call)


def reference(q, kv, layer, table, start, latent, scale, mask) -> Array:
    """`latent_attention` in plain jnp: that of keys and values which are the same rows."""
    q = (q.astype(jnp.float32) * (scale * q.shape[-1] ** 0.5)).astype(q.dtype)
    return paged_attention.reference(q, kv, layer, table, start, mask)[..., :latent]


def _portable_refuses(q, kv, layer, table, start, latent, scale, mask) -> str | None:
    return portable_latent.supported(q.shape, kv, q.dtype, latent)


def _decode_refuses(q, kv, layer, table, start, latent, scale, mask) -> str | None:
    return latent_decode.supported(q.shape, kv, q.dtype, latent, 0 if mask is None else mask.shape[2])


def _decode(q, kv, layer, table, start, latent, scale, mask) -> Array:
    return latent_decode.latent_decode(q, kv, layer, table, start, mask, scale=scale)


_PORTABLE = _portable_refuses, portable_latent.latent_attention
LATENT_ATTENTION = (
    Implementation("latent_decode", HOPPER, _decode_refuses, _decode),
    Implementation("portable_latent", HOPPER, *_PORTABLE),
    Implementation("portable", PORTABLE, *_PORTABLE),
    Implementation("reference", ANY, nothing, reference, slow=True),
)
