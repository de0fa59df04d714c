"""State-space layers (Mamba 2): norm((S C + D x) * silu(z)), with S = decay S + dt x B' of each head.

`pallas.recurrence.accumulate` has the recurrence: its updates dt x don't depend on the state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.functions import rms_norm
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.models.description import Mamba2


@jax.named_scope("mamba2")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    """Mix z, the convolution's channels and dt, which are one product."""
    m, (b, t) = layer.mixing, positions.shape
    made = made[0] + weights["in_bias"] if m.bias else made[0]
    z, channels, step = jnp.split(made, [m.inner, m.inner + m.channels], axis=-1)
    channels, cache = mixer.convolve(cache, i, channels, weights["conv"], bias=weights.get("conv_bias"))
    x, keys, queries = jnp.split(channels, [m.inner, m.inner + m.groups * m.state], axis=-1)
    keys, queries = (part.reshape(b, t, m.groups, m.state) for part in (keys, queries))
    x = x.reshape(b, t, m.heads, m.width).astype(jnp.float32)
    step = jax.nn.softplus(step.astype(jnp.float32) + weights["step_bias"]).clip(m.least_step, m.most_step)
    decay = jnp.exp(-jnp.exp(weights["decay_log"]) * step)
    read, cache = mixer.accumulate(cache, i, queries, keys, x * step[..., None], decay)
    read = read + weights["skip"][:, None] * x
    return _normed(m, read.reshape(b, t, -1), z, weights["read_norm"], layer.norm.eps), cache


def _normed(
    m: Mamba2, read: Float[Array, "b t c"], z: Float[Array, "b t c"], scale: Float[Array, " c"], eps: float
) -> Float[Array, "b t c"]:
    """norm(read * silu(z)) by group, in z's dtype."""
    groups = lambda x: x.astype(jnp.float32).reshape(*x.shape[:-1], m.groups, -1)  # noqa: E731
    return rms_norm(groups(read) * jax.nn.silu(groups(z)), groups(scale), eps).reshape(z.shape).astype(z.dtype)


_FIELDS = frozenset(Mamba2.__dataclass_fields__)
MAMBA2 = Mixing(projections=("in",), mix=mix, implements={"plain": _FIELDS})
