"""State-space layers (Mamba 2): norm((S C + D x) * silu(z)), with S = decay S + dt x B' of each head.

`pallas.recurrence.accumulate` has the recurrence: its updates dt x don't depend on the state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.mixer import SteppingMixer
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.models.description import Mamba2
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.pallas.recurrence.accumulate import by_steps
from jaxspec.pallas.recurrence.causal_conv import Channels
from jaxspec.pallas.recurrence.gated_norm import grouped_norm, grouped_supported
from jaxspec.pallas.recurrence.gates_and_norm import Steps
from jaxspec.parallel.sharding import neighbours_total


@jax.named_scope("mamba2")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    """Mix z, the convolution's channels and dt, which are one product. Rows from t on are padding that a kernel
    left."""
    m, (b, t) = layer.mixing, positions.shape
    made = made[0] + weights["in_bias"] if m.bias else made[0]
    channels = Channels(m.inner, (m.inner, m.groups * m.state, m.groups * m.state), t)
    (x, k, q), cache = mixer.convolve(cache, i, made, weights["conv"], channels, weights.get("conv_bias"))
    q, k = (part.reshape(b, t, m.groups, m.state) for part in (q, k))
    steps = Steps(made, weights["decay_log"], weights["step_bias"], weights["skip"])
    call = m, i, (q, k, x.reshape(b, t, m.heads, m.width)), steps, mixer, cache
    read, cache = choose("a state space", SPACE, *call).run(*call)
    call = m, read.reshape(b, t, -1), made, weights["read_norm"], layer.norm.eps
    return choose("a state space's norm", NORM, *call).run(*call), cache


def _not_in_one(m, i, qkx, steps, mixer, cache) -> str | None:
    """Why no kernel has the recurrence with the steps before it, or None if one does."""
    q, _, x = qkx
    return mixer.unstepped(cache, q, x) if isinstance(mixer, SteppingMixer) else "a mixer without"


def _in_one(m, i, qkx, steps, mixer, cache):
    return mixer.accumulate_stepped(cache, i, *qkx, steps, (m.least_step, m.most_step))


def _in_steps(m, i, qkx, steps, mixer, cache):
    (q, k, x), limits = qkx, (m.least_step, m.most_step)
    updates, decay, skipped = by_steps(x, steps, limits)
    read, cache = mixer.accumulate(cache, i, q, k, updates, decay)
    return read + skipped, cache


SPACE = Implementation("delta_step", HOPPER, _not_in_one, _in_one), Implementation("plain", ANY, nothing, _in_steps)


def _norm_refused(m: Mamba2, read, made, scale, eps) -> str | None:
    if m.group_devices > 1:
        return f"a group's norm over {m.group_devices} devices"
    return grouped_supported(*read.shape, m.groups, read.dtype, made.dtype, scale.dtype)


def _grouped(m: Mamba2, read, made, scale, eps) -> Float[Array, "b r c"]:
    return grouped_norm(read, made, scale, groups=m.groups, eps=eps)


def _normed(
    m: Mamba2, read: Float[Array, "b t c"], made: Float[Array, "b r w"], scale: Float[Array, " c"], eps: float
) -> Float[Array, "b r c"]:
    """norm(read * silu(z)) by group, in the dtype of z, the first columns of what was made, with its padding rows.

    Devices that share a group have equally many of its columns each.
    """
    groups = lambda x: x.astype(jnp.float32).reshape(*x.shape[:-1], m.groups, -1)  # noqa: E731
    t = read.shape[1]
    z = made[:, :t, : m.inner]
    gated = groups(read) * jax.nn.silu(groups(z))
    mean = neighbours_total(jnp.mean(gated * gated, -1, keepdims=True), m.group_devices) / m.group_devices
    out = (gated * jax.lax.rsqrt(mean + eps) * groups(scale)).reshape(z.shape).astype(z.dtype)
    return jnp.pad(out, ((0, 0), (0, made.shape[1] - t), (0, 0)))


NORM = Implementation("grouped_norm", HOPPER, _norm_refused, _grouped), Implementation("plain", ANY, nothing, _normed)


_FIELDS = frozenset(Mamba2.__dataclass_fields__)
MAMBA2 = Mixing(
    projections=("in",), mix=mix, implements={"plain": _FIELDS, "fused_norms": _FIELDS - {"bias"}}, padding=True
)
