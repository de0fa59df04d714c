"""Indexed attention: attention to the blocks of tokens that an indexer selects.

`pallas.attention.indexed_attention` has what follows the projections.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.decoder.functions import normed, rope
from jaxspec.decoder.mixings.attention import gated, split
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.pallas.attention.indexed_attention import Index


@jax.named_scope("indexed_attention")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    """Mix queries, keys and values that stand side by side; and the indexer's queries, which its key follows."""
    a, (qkv, index) = layer.mixing, made
    q, k, v, gates = split(a, qkv)
    q, k = (rope(normed(x, weights[f"{n}_norm"], a.qk_norm), positions, a) for n, x in (("q", q), ("k", k)))
    *queries, rows = jnp.split(index, a.index_heads + 1, axis=-1)
    queries = rope(normed(jnp.stack(queries, axis=2), weights["index_q_norm"], a.qk_norm), positions, a)

    def blocks(keys):
        keys = keys.astype(jnp.float32).mean(axis=2).astype(keys.dtype)
        starts = jnp.arange(keys.shape[1])[None] * a.ratio
        return rope(normed(keys, weights["index_k_norm"], a.qk_norm)[:, :, None], starts, a)[:, :, 0]

    out, cache = mixer.attend_indexed(cache, i, q, k, v, Index(queries, rows, blocks, a.ratio, a.budget // a.ratio))
    return gated(out, cache, gates)


_FIELDS = {"heads", "kv_heads", "head_dim", "rope", "qk_norm", "gated", "index_heads", "index_width", "budget", "ratio"}
INDEXED_ATTENTION = Mixing(projections=("qkv", "index"), mix=mix, implements={"plain": frozenset(_FIELDS)})
