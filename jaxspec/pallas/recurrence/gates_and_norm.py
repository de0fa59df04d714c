"""Gates before the gated delta rule and the norm after it, and a state space's steps, computed inside `delta_step`.

    beta = sigmoid(b);  alpha = exp(-exp(decay_log) softplus(a + decay_bias));  out = norm(read) silu(z)
    step = softplus(dt + step_bias);  decay = exp(-exp(decay_log) step);  out = read + skip x

XLA makes three or four kernels of this, each of which takes little longer than its launch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.pallas.hopper import WARPS

WIDTH = 128  # of a head
_f32 = jnp.float32


class Around(NamedTuple):
    """Operands of the gates and of the norm, for rows of n heads.

    `ba`: each head's b, then each head's a, float32, and maybe columns of zeros. `decay_log` and `decay_bias`: float32.
    `rows` end in z, one head after the other. `scale`: of the norm.
    """

    ba: Float[Array, "b r w2"]
    decay_log: Float[Array, " n"]
    decay_bias: Float[Array, " n"]
    rows: Float[Array, "b r w"]
    scale: Float[Array, " v"]


class AroundChannels(NamedTuple):
    """Operands of gates and norm where each key channel has a decay: alpha of a head's channels is made of `steps` as
    of a, and the norm's gate is sigmoid(z).

    `steps`: of n heads' channels, one head after the other. `gates` end in each head's b. `decay_log` and `decay_bias`:
    float32. `rows` and `scale` as in `Around`.
    """

    steps: Float[Array, "b t nk"]
    gates: Float[Array, "b r g"]
    decay_log: Float[Array, " n"]
    decay_bias: Float[Array, " nk"]
    rows: Float[Array, "b t nv"]
    scale: Float[Array, " v"]


class Steps(NamedTuple):
    """Operands of a state space's steps and skip, for rows of n heads.

    `rows` end in each head's dt; padding rows may follow. `decay_log`, `step_bias` and `skip`: float32.
    """

    rows: Float[Array, "b r w"]
    decay_log: Float[Array, " n"]
    step_bias: Float[Array, " n"]
    skip: Float[Array, " n"]


def plain(around: Around, t: int) -> tuple[Float[Array, "b t n"], Float[Array, "b t n"], Float[Array, "b r nv"]]:
    """Decays, betas and silu(z) in plain jnp, all float32: the kernel's reference."""
    heads = len(around.decay_log)
    beta, a, _ = jnp.split(around.ba[:, :t], (heads, 2 * heads), axis=-1)
    softplus = jnp.logaddexp(a + around.decay_bias, 0.0)
    decay = jnp.exp(-jnp.exp(around.decay_log) * softplus)
    z = around.rows[..., around.rows.shape[2] - len(around.decay_log) * len(around.scale) :].astype(_f32)
    return decay, 1 / (1 + jnp.exp(-beta)), z / (1 + jnp.exp(-z))


def plain_channels(
    around: AroundChannels, t: int
) -> tuple[Float[Array, "b t n k"], Float[Array, "b t n"], Float[Array, "b t nv"]]:
    """Decays, betas and sigmoid(z) in plain jnp, all float32: the kernel's reference."""
    heads = len(around.decay_log)
    softplus = jnp.logaddexp(around.steps[:, :t].astype(_f32) + around.decay_bias, 0.0)
    decay = jnp.exp(-jnp.exp(around.decay_log)[:, None] * softplus.reshape(*softplus.shape[:2], heads, -1))
    sigmoid = lambda x: 1 / (1 + jnp.exp(-x.astype(_f32)))  # noqa: E731
    return decay, sigmoid(around.gates[:, :t, -heads:]), sigmoid(around.rows[:, :t])


def gates(ba_g: Any, log_g: Any, bias_g: Any, t: Any, head: Any) -> tuple[Any, Any]:
    """The decay and the beta of a row and head: two numbers."""
    heads = log_g.shape[0]
    beta, a = ba_g[t, head], ba_g[t, heads + head] + bias_g[head].astype(_f32)
    return jnp.exp(-jnp.exp(log_g[head].astype(_f32)) * softplus(a)), 1 / (1 + jnp.exp(-beta))


def channel_gates(steps_g: Any, gates_g: Any, log_g: Any, bias_g: Any, t: Any, head: Any) -> tuple[Any, Any]:
    """The decays [WIDTH] and the beta of a row and head: a thread has a channel's."""
    channels, layout = pl.ds(head * WIDTH, WIDTH), plgpu.Layout.WG_STRIDED((WIDTH,), 1)
    load = partial(plgpu.load, layout=layout, optimized=False)
    a = load(steps_g.at[t, channels]).astype(_f32) + load(bias_g.at[channels]).astype(_f32)
    beta = gates_g[t, gates_g.shape[1] - log_g.shape[0] + head].astype(_f32)
    return jnp.exp(-jnp.exp(log_g[head].astype(_f32)) * softplus(a)), 1 / (1 + jnp.exp(-beta))


def steps(rows_g: Any, log_g: Any, bias_g: Any, t: Any, head: Any, limits: tuple[float, float]) -> tuple[Any, Any]:
    """The decay and the step of a row and head, the step between these limits: two numbers."""
    heads = log_g.shape[0]
    dt = rows_g[t, rows_g.shape[1] - heads + head].astype(_f32) + bias_g[head]
    step = jnp.minimum(jnp.maximum(softplus(dt), limits[0]), limits[1])
    return jnp.exp(-jnp.exp(log_g[head]) * step), step


def softplus(x: Any) -> Any:
    """log(1 + exp(x)) in float32, to 3e-6 of itself. A sum with 1 would round it to 0 from -17 on."""
    small = jnp.exp(-jnp.abs(x))
    series = small * (1 - small * (1 / 2 - small * (1 / 3 - small / 4)))  # of log(1 + small)
    return jnp.maximum(x, 0.0) + jnp.where(small < 2**-5, series, jnp.log(1 + small))


def _layout(rows: int) -> Any:
    """Registers of [rows, WIDTH]: each warp has one of every four rows, or all rows if they are no multiple of four."""
    if rows % WARPS == 0:
        return plgpu.Layout.TILED(plgpu.Tiling(((WARPS, WIDTH), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, WIDTH), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
    )


def load_z(around_g: Any, b: Any, t: int, heads: int, head: Any, of: int) -> tuple[list[Any], Any]:
    """Load z [t, WIDTH] of request b for `heads` heads from `head` on, `of` in all; and the norm's scale, float32."""
    *_, rows_g, scale_g = around_g
    layout, load, rows_g = _layout(t), partial(plgpu.load, optimized=False), rows_g.at[b]
    begin = rows_g.shape[1] - of * WIDTH
    each = [rows_g.at[pl.ds(0, t), pl.ds(begin + (head + h) * WIDTH, WIDTH)] for h in range(heads)]
    return [load(z, layout=layout) for z in each], load(scale_g, layout=layout.reduce(0)).astype(_f32)


def write_normed(
    values_s: Any, out_g: Any, z: list[Any], scale: Any, head: Any, eps: float, sigmoid: bool = False
) -> None:
    """Write norm(read) silu(z) of each head to `out_g`, from `head` on; `values_s` [t, heads, WIDTH] was read.
    `sigmoid`: norm(read) sigmoid(z)."""
    t = values_s.shape[0]
    for h, gate in enumerate(z):
        read = plgpu.load(values_s.at[:, h], layout=_layout(t), optimized=False).astype(_f32)
        factor = lax.rsqrt(jnp.sum(read * read, axis=1) / WIDTH + eps)
        read = read * lax.broadcast_in_dim(factor, read.shape, [0]) * lax.broadcast_in_dim(scale, read.shape, [1])
        gate = gate.astype(_f32)
        out_g[pl.ds(0, t), head + h] = (read * ((1 if sigmoid else gate) / (1 + jnp.exp(-gate)))).astype(out_g.dtype)
