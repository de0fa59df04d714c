"""Latent attention: keys and values of all heads are made of one latent a token, which is all that the cache keeps.

No key is ever made. A query is multiplied by its head's key matrix and attends to latents; what it mixes of these is
multiplied by the head's value matrix. Both give what keys and values would, since products are associative.

Axis letters: b batch, t tokens, n query heads, l the latent's columns, k and v those of a head's key and value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.decoder.functions import cos_sin, normed, rope, scaled_by_position
from jaxspec.decoder.matmul import project, valid_count
from jaxspec.decoder.mixings.kind import Mixing


@jax.named_scope("latent_attention")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    a, (latents,), (b, t) = layer.mixing, made, positions.shape
    q, latent, key = jnp.split(latents, [latents.shape[-1] - a.memory.width, latents.shape[-1] - a.rope.columns], -1)
    if a.query_latent:
        q = project(normed(q, weights["query_norm"], a.norm), weights["queries"], valid_count(positions))
    q = scaled_by_position(q.reshape(b, t, a.heads, a.query_dim), positions, a.position_scale)
    q, turned = jnp.split(q, [a.key_dim], axis=-1)
    table = cos_sin(positions, a)
    turned, key = rope(turned, positions, a, table), rope(key[:, :, None], positions, a, table)[:, :, 0]
    keys, values = jnp.split(weights["keys_values"].dequantised(q.dtype), [a.heads * a.key_dim], axis=1)
    q = jnp.einsum("btnk,lnk->btnl", q, keys.reshape(a.latent, a.heads, a.key_dim))
    row = jnp.concatenate([normed(latent, weights["latent_norm"], a.norm), key], axis=-1)
    q = jnp.concatenate([q, turned], axis=-1)
    mixed, cache = mixer.attend_latent(cache, i, q, row, a.latent, a.scale)
    out = jnp.einsum("btnl,lnv->btnv", mixed, values.reshape(a.latent, a.heads, a.value_dim))
    return out.reshape(b, t, -1), cache


_FIELDS = frozenset({"heads", "latent", "key_dim", "value_dim", "rope", "scale", "norm", "query_latent"})
_FIELDS |= {"position_scale"}
LATENT_ATTENTION = Mixing(
    projections=("latents",), mix=mix, implements={"plain": _FIELDS | {"by_request"}, "fused_norms": _FIELDS}
)
