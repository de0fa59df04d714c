"""The small pure functions between a layer's matmuls.

Axis letters: b batch, t tokens, d model width, n query heads, m KV heads, h head width.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.models.description import Attention, LatentAttention, Norm
from jaxspec.models.positions import ScaleByPosition, Window, first_seen
from jaxspec.models.rope_scaling import LinearScaling, LongRope, NoRotation, Proportional, RopeScaling, Yarn


def whole_float32(dtype: Any) -> contextlib.AbstractContextManager:
    """Context to trace layers of this dtype in, whose products of float32 are float32's.

    XLA on a GPU rounds their factors to ten bits (TF32) otherwise, so that drafts change a text of `--dtype float32`.
    What a user asks jax for (`JAX_DEFAULT_MATMUL_PRECISION`) stays.
    """
    if dtype != jnp.float32 or jax.config.jax_default_matmul_precision is not None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")


@jax.named_scope("norm")
def normed(x: Float[Array, "*b d"], weight: Float[Array, "... d"], norm: Norm) -> Float[Array, "*b d"]:
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467), or a layer norm. The weight broadcasts against x."""
    return (layer_norm if norm.mean else centred_rms_norm if norm.centred else rms_norm)(x, weight, norm.eps)


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "... d"], eps: float) -> Float[Array, "*b d"]:
    """In float32 whatever x's dtype, rounded before it is weighted."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32.astype(x.dtype) * weight).astype(x.dtype)


def centred_rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "... d"], eps: float) -> Float[Array, "*b d"]:
    """Norm as `rms_norm`, by a weight that is an offset from one, applied in float32 (Gemma's, and Qwen3-Next's)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def layer_norm(x: Float[Array, "*b d"], weight: Float[Array, "... d"], eps: float) -> Float[Array, "*b d"]:
    """Layer norm without a bias (https://arxiv.org/abs/1607.06450), in float32 until it is weighted."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight.astype(jnp.float32)).astype(x.dtype)


def weighted(
    x: Float[Array, "*b d"], weight: Float[Array, " d"], norm: Norm
) -> tuple[Float[Array, "*b d"], Float[Array, "*b"]]:
    """A norm in two: x times its weight, rounded, and each row's factor, float32, by which products are multiplied."""
    x32 = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1) + norm.eps)
    return (x32 * (weight.astype(jnp.float32) + norm.centred)).astype(x.dtype), factor


def rope_frequencies(attention: Attention | LatentAttention) -> Float[Array, " half"]:
    """Inverse frequencies of the rotary embedding, scaled for long contexts where the description says so."""
    rope = attention.rope
    half = (attention.head_dim if rope.columns is None else rope.columns) // 2
    frequency = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    match rope.scaling:
        case None:
            return frequency
        case LinearScaling(factor):
            return frequency / factor
        case RopeScaling():
            return _llama3(frequency, rope.scaling)
        case Yarn():
            return _yarn(frequency, rope.theta, rope.scaling)
        case LongRope():
            return frequency / jnp.array(rope.scaling.divisors, jnp.float32)
        case NoRotation():
            return jnp.zeros_like(frequency)
        case Proportional(pairs, factor):
            return jnp.where(jnp.arange(half) < pairs, frequency / factor, 0.0)


def _llama3(frequency: Array, scaling: RopeScaling) -> Array:
    """Divide slow frequencies by `factor`, keep fast ones, interpolate between (Llama 3.1 model card). Llama 4 Scout's
    bounds are equal, with nothing between."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((scaling.original_max_position / wavelength - low) / (high - low or 1e-9), 0.0, 1.0)
    return frequency * (smooth + (1 - smooth) / scaling.factor)


def _yarn(frequency: Array, theta: float, scaling: Yarn) -> Array:
    """Divide slow frequencies by `factor`, keep fast ones; the ramp is linear in the number of the pair."""
    half = len(frequency)

    def pair(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return half * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    divided = jnp.clip((jnp.arange(half) - low) / (high - low or 0.001), 0.0, 1.0)
    return frequency * (1 - divided) + frequency / scaling.factor * divided


Table = tuple[Float[Array, "*b half"], Float[Array, "*b half"]]


def cos_sin_by_axis(axes: Int[Array, "3 b t"], attention: Attention) -> Table:
    """Make `cos_sin` of positions that have three axes: a place in the text, and a picture's row and column.

    Each pair turns by one of them, as `Rope.sections` says; without sections, by the first.
    """
    frequency, sections = rope_frequencies(attention), attention.rope.sections
    if sections is None:
        return cos_sin(axes[0], attention)
    pair, (_, rows, columns) = np.arange(len(frequency)), sections
    by_row, by_column = (pair % 3 == 1) & (pair < 3 * rows), (pair % 3 == 2) & (pair < 3 * columns)
    turned = jnp.moveaxis(axes[np.where(by_row, 1, np.where(by_column, 2, 0))], 0, -1)
    return _cos_sin(turned.astype(jnp.float32) * frequency, attention)


def cos_sin(positions: Int[Array, "*b"], attention: Attention | LatentAttention) -> Table:
    """The rope table: cosine and sine of the angles by which each position rotates, float32."""
    return _cos_sin(positions[..., None].astype(jnp.float32) * rope_frequencies(attention), attention)


def cos_sin_apart(positions: Int[Array, "*b"], attention: Attention) -> Table:
    """Make `cos_sin` with the same bits in any program. Otherwise XLA puts angles into one kernel with their cosines,
    and with those of a drafter's layer if there is one, and what it makes of them may depend on that."""
    apart = jax.lax.optimization_barrier
    angle = positions[..., None].astype(jnp.float32) * apart(rope_frequencies(attention))
    return apart(_cos_sin(apart(angle), attention))


def _cos_sin(angle: Float[Array, "*b half"], attention: Attention | LatentAttention) -> Table:
    scaling = attention.rope.scaling
    if isinstance(scaling, Yarn | LongRope):
        return jnp.cos(angle) * scaling.attention_factor, jnp.sin(angle) * scaling.attention_factor
    return jnp.cos(angle), jnp.sin(angle)


@jax.named_scope("rope")
def rope(
    x: Float[Array, "*b n h"],
    positions: Int[Array, "*#b"],
    attention: Attention | LatentAttention,
    table: Table | None = None,
) -> Float[Array, "*b n h"]:
    """Rotary embedding, computed in float32: first half against second half, or neighbours if `interleaved`.

    Where fewer columns than a head has rotate, they are the first, and the others stay. `table`: of the positions.
    """
    cos, sin = cos_sin(positions[..., None], attention) if table is None else (x[..., None, :] for x in table)
    half = cos.shape[-1]
    if attention.rope.interleaved:
        pairs, rest = jnp.split(x.astype(jnp.float32), [2 * half], axis=-1)
        first, second = pairs[..., 0::2], pairs[..., 1::2]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(pairs.shape)
        return jnp.concatenate([rotated, rest], axis=-1).astype(x.dtype)
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def scaled_by_position(
    x: Float[Array, "b t n h"], positions: Int[Array, "b t"], scale: ScaleByPosition | None
) -> Float[Array, "b t n h"]:
    """Queries times their `position_scale`; padding rows, whose positions are negative, stay."""
    if scale is None:
        return x
    periods = jnp.floor((jnp.maximum(positions, 0) + scale.offset).astype(jnp.float32) / scale.period)
    return x * (1 + scale.beta * jnp.log1p(periods)).astype(x.dtype)[..., None, None]


def capped(x: Float[Array, "*b v"], cap: float) -> Float[Array, "*b v"]:
    """Squash logits, or scores, below a cap (https://arxiv.org/abs/2408.00118, section 2)."""
    return jnp.tanh(x / cap) * cap


def causal_attention(
    cache: Any,
    layer: Int[Array, ""],
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    window: Window | None = None,
    sinks: Float[Array, " n"] | None = None,
    cap: float | None = None,
) -> tuple[Float[Array, "b t n h"], Any]:
    """Attention among the given tokens alone, each sequence starting at its row 0; `cache` passes through."""
    b, t, n, h = q.shape
    m = k.shape[2]
    q = q.reshape(b, t, m, n // m, h)
    scores = jnp.einsum("btmgh,bsmh->bmgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = scores if cap is None else capped(scores, cap)
    seen = jnp.tril(jnp.ones((t, t), bool))
    if window is not None:
        seen &= jnp.arange(t) >= first_seen(jnp.arange(t), window)[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:  # a logit more, whose weight nobody takes
        more = jnp.broadcast_to(sinks.reshape(m, n // m, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :t].astype(v.dtype)
    return jnp.einsum("bmgts,bsmh->btmgh", weights, v).reshape(b, t, n, h), cache


def row_of(x: Shaped[Array, "b t ..."], row: Int[Array, " b"] | None) -> Shaped[Array, "b _ ..."]:
    """Take of each sequence the one row named, `[b, 1, ...]`; all of them if none is."""
    return x if row is None else jnp.take_along_axis(x, row.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
