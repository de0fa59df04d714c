"""Kimi Delta Attention: norm(S q) * sigmoid(z). Each token decays the state S by key channel, and corrects it by beta.

`pallas.recurrence.gated_delta` has the rule itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.decoder.functions import rms_norm
from jaxspec.decoder.matmul import project, valid_count
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.models.description import KimiDelta


@jax.named_scope("kimi_delta")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    """Mix channels; and decays' and gates' narrow projections, then beta of each head, which are one product. Rows from
    t on are padding that a kernel left."""
    m, (qkv, gates), (b, t) = layer.mixing, made, positions.shape
    (q, k, v), cache = mixer.convolve(cache, i, qkv[:, :t], weights["conv"], m.memory)
    wide, valid = (b, t, m.heads, m.width), valid_count(positions)
    steps, z, beta = jnp.split(gates[:, :t], [m.width, 2 * m.width], axis=-1)
    steps = project(steps, weights["steps"], valid).astype(jnp.float32) + weights["decay_bias"]
    decay = jnp.exp(-jnp.exp(weights["decay_log"])[:, None] * jax.nn.softplus(steps).reshape(wide))
    read, cache = mixer.recur(cache, i, q, k, v, decay, jax.nn.sigmoid(beta.astype(jnp.float32)), t)
    z = project(z, weights["output_gates"], valid).reshape(wide)
    read = rms_norm(read.astype(jnp.float32), weights["read_norm"].astype(jnp.float32), layer.norm.eps)
    out = (read * jax.nn.sigmoid(z.astype(jnp.float32))).astype(z.dtype).reshape(b, t, -1)
    return jnp.pad(out, ((0, 0), (0, qkv.shape[1] - t), (0, 0))), cache


_FIELDS = frozenset(KimiDelta.__dataclass_fields__)
KIMI_DELTA = Mixing(
    projections=("qkv", "gates"), mix=mix, implements={"plain": _FIELDS, "fused_norms": _FIELDS}, padding=True
)
