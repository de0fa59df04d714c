"""Attention: softmax(q k') v of each head, over keys and values of all tokens so far.

Axis letters: b batch, t tokens, n query heads, m KV heads, h head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.fixed_order import in_order, row_norm
from jaxspec.decoder.functions import cos_sin, cos_sin_by_axis, normed, rms_norm, rope, scaled_by_position
from jaxspec.decoder.mixings.kind import Mixing, Weights
from jaxspec.models.description import Attention, Layer, Norm, beyond
from jaxspec.models.rope_scaling import ROPE_SCALINGS, Rope
from jaxspec.pallas import hopper
from jaxspec.pallas.attention import write_heads
from jaxspec.pallas.attention.decode_attention.plan import HEAD_WIDTHS, MAX_GROUP
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.pallas.sliced_rows import SLICE, sliced
from jaxspec.parallel.sharding import devices, total

# What the kernel implements that norms and rotates heads, and writes keys and values into pages.
HEADS_WRITTEN = {
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "bias", "out_bias", "window", "sinks"}),
    Norm: frozenset({"eps"}),
    Rope: frozenset({"theta", "scaling", "sections"}),
    **ROPE_SCALINGS,
}


@jax.named_scope("attention")
def mix(layer, weights, i, made, positions, mixer, cache, dtype=None, table=None):
    """Mix queries, keys and values that stand side by side. `table`: the rope table, if it is made already."""
    (qkv,) = made
    if layer.mixing.bias:
        qkv = qkv + weights["qkv_bias"] if qkv.ndim == 3 else qkv.at[0].add(weights["qkv_bias"])
    call = layer, weights, i, qkv, positions, mixer, cache, dtype or qkv.dtype, table
    return choose("attention of a layer", HEADS, *call).run(*call)


def _mix_in_steps(layer, weights, i, qkv, positions, mixer, cache, dtype, table):
    a = layer.mixing
    if qkv.ndim > 3:
        qkv = qkv.sum(0).astype(dtype)
    if a.shared:
        return _mix_shared(layer, weights, i, qkv, positions, mixer, cache, table)
    q, k, v, gates = split(a, qkv)
    rotated = lambda: (rope(q, positions, a, table), rope(k, positions, a, table))  # noqa: E731
    if a.qk_norm_rotated:
        q, k = rotated()
    if a.qk_norm:
        norm = unit_normed if a.qk_norm_unit else normed_together if a.qk_norm_all else normed
        q, k = (norm(x, weights.get(name), a.qk_norm) for x, name in ((q, "q_norm"), (k, "k_norm")))
    if not a.qk_norm_rotated:
        q, k = rotated()
    if a.v_norm:
        v = unit_normed(v, None, a.v_norm)
    if a.value_scale != 1:
        v = v * jnp.asarray(a.value_scale, v.dtype)
    q = scaled_by_position(q, positions, a.position_scale)
    q, k, v = _scaled(a, q), *(_widened(a, x) for x in (k, v))
    if isinstance(cache, dict):
        cache = {**cache, _kept(a): (k, v)}
    more = sinks(a, weights) | ({} if a.score_cap is None else {"cap": a.score_cap})
    out, cache = mixer.attend(cache, i, q, k, v, a.window, **more)
    return gated(out if a.value_dim is None else out[..., : a.value_dim], cache, gates)


def _widened(a: Attention, x: Float[Array, "b t m h"]) -> Float[Array, "b t m w"]:
    """Heads with zeros behind them, as wide as the memory is."""
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width)]) if (width := a.memory.width - x.shape[-1]) else x


def _scaled(a: Attention, q: Float[Array, "b t n h"]) -> Float[Array, "b t n w"]:
    """Queries as wide as the memory, times what scores are to be multiplied by, beyond the mixer's w**-0.5."""
    if a.scale is None and a.value_dim is None:
        return q
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    return _widened(a, (q.astype(jnp.float32) * (scale * a.memory.width**0.5)).astype(q.dtype))


def _mix_shared(layer, weights, i, q, positions, mixer, cache, table):
    """Mix keys and values that another layer has written; of a mixer without pages, those that the cache has kept."""
    a = layer.mixing
    q = normed(q.reshape(*q.shape[:2], a.heads, a.head_dim), weights["q_norm"], a.qk_norm)
    q = _scaled(a, rope(q, positions, a, table))
    if mixer.pages(cache) is None:
        out, cache = mixer.attend(cache, i, q, *cache[_kept(a)], a.window)
    else:
        out, cache = mixer.attend_shared(cache, i, q, a.window)
    return out.reshape(*out.shape[:2], -1), cache


def _kept(a: Attention) -> str:
    """Key of the newest keys and values of a kind of layer, for those that share them where there are no pages."""
    return f"window {a.window}"


def split(
    a: Attention, qkv: Float[Array, "b t d"]
) -> tuple[Float[Array, "b t n h"], Float[Array, "b t m h"], Float[Array, "b t m v"], Float[Array, "b t n h"] | None]:
    """Queries, keys and values by head, and the gates of gated attention."""
    (b, t, _), n, m, h = qkv.shape, a.heads, a.kv_heads, a.head_dim
    if a.value_dim is not None:
        parts = jnp.split(qkv, [n * h, (n + m) * h], axis=-1)
        return *(x.reshape(b, t, count, -1) for x, count in zip(parts, (n, m, m), strict=True)), None
    queries = 2 * n if a.gated else n
    q, k, *v = jnp.split(qkv.reshape(b, t, -1, h), [queries] if a.k_is_v else [queries, queries + m], axis=2)
    v = k if a.k_is_v else v[0]
    if not a.gated:
        return q, k, v, None
    q, gates = jnp.moveaxis(q.reshape(b, t, n, 2, h), 3, 0)
    return q, k, v, gates


def unit_normed(x: Float[Array, "b t n h"], weight: None, norm: Norm) -> Float[Array, "b t n h"]:
    """A norm of each head that has no weight."""
    return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), norm.eps)


def normed_together(x: Float[Array, "b t n h"], weight: Float[Array, " d"], norm: Norm) -> Float[Array, "b t n h"]:
    """A norm of all heads' columns together, of which each device has a part."""
    x32 = x.astype(jnp.float32)
    mean = total(jnp.mean(x32 * x32, axis=(2, 3), keepdims=True)) / devices()
    return (x32 * jax.lax.rsqrt(mean + norm.eps) * weight.reshape(x.shape[2:])).astype(x.dtype)


def gated(
    out: Float[Array, "b t n h"], cache: Any, gates: Float[Array, "b t n h"] | None
) -> tuple[Float[Array, "b t k"], Any]:
    if gates is not None:
        out = out * jax.nn.sigmoid(gates)
    return out.reshape(*out.shape[:2], -1), cache


def sinks(a: Attention, weights: Weights) -> dict[str, Array]:
    """The argument that a mixer is given for layers with sinks alone, so that one without sinks fails."""
    return {"sinks": weights["sinks"].astype(jnp.float32)} if a.sinks else {}


def _not_written(layer, weights, i, qkv, positions, mixer, cache, dtype, table) -> str | None:
    """Why `write_heads` can't take a projection's rows to what `mixer` keeps, or None if it can."""
    a = layer.mixing
    if reason := beyond(a, HEADS_WRITTEN):
        return reason
    if a.qk_norm not in (None, layer.norm):
        return f"norms of q and k that aren't the layer's, {a.qk_norm}"
    if (pages := mixer.pages(cache)) is None:
        return "no pages to write to"
    norms = [weights[name].dtype for name in ("q_norm", "k_norm") if a.qk_norm]
    return write_heads.supported(a.heads, a.kv_heads, a.head_dim, a.head_dim, pages.dtype, dtype, *norms)


def _mix_written(layer, weights, i, qkv, positions, mixer, cache, dtype, table):
    """Mix with one kernel from the projection's parts to queries, and keys and values in their pages."""
    a, (b, t) = layer.mixing, positions.shape
    cos, sin = (x.reshape(b * t, -1) for x in table or cos_sin(positions, a))
    norms = [weights["q_norm"], weights["k_norm"]] if a.qk_norm else []

    def write(pages, kv_slots, inverse_scales):
        rows, kv_slots = qkv.reshape(-1, b * t, qkv.shape[-1]), kv_slots.reshape(-1)
        of = rows, cos, sin, pages, i, kv_slots, norms, inverse_scales
        q, pages = write_heads.write_heads(*of, eps=layer.norm.eps)
        return q.reshape(b, t, a.heads, a.head_dim), pages

    out, cache = mixer.attend_written(cache, i, t, write, a.window, **sinks(a, weights))
    return out.reshape(b, t, a.heads * a.head_dim), cache


HEADS = (
    Implementation("write_heads", HOPPER, _not_written, _mix_written),
    Implementation("plain", ANY, nothing, _mix_in_steps),
)


def fixed(layer, weights, i, made, positions, mixer, cache, dtype, table, in_parts):
    """Mix with one order of sums. `write_heads` has no gates and not all norms: then each row is normed by itself."""
    a, (qkv,), (b, t) = layer.mixing, made, positions.shape
    if not hopper.multiprocessors():
        return _fixed_by_xla(layer, weights, i, qkv, positions, mixer, cache, table)
    if not beyond(a, HEADS_WRITTEN):
        if in_parts and write_heads.supported(a.heads, a.kv_heads, a.head_dim, a.head_dim, "bfloat16"):
            qkv = in_order(qkv)[None].astype(dtype)  # that kernel adds the parts up itself
        qkv = qkv.reshape(len(qkv), b, t, -1) if in_parts else qkv
        return mix(layer, weights, i, [qkv], positions, mixer, cache, dtype, table)
    if in_parts:
        qkv = in_order(qkv).astype(dtype).reshape(b, t, -1)
    q, k, v, gates = split(a, qkv)
    if a.qk_norm:
        q, k = row_norm(q, weights["q_norm"], a.qk_norm), row_norm(k, weights["k_norm"], a.qk_norm)
    return gated(*mixer.attend(cache, i, rope(q, positions, a, table), rope(k, positions, a, table), v, None), gates)


def _fixed_by_xla(layer, weights, i, qkv, positions, mixer, cache, table):
    """Mix with norms and rope a few tokens at a time: their bits would depend on how many there are."""
    a = layer.mixing
    q, k, v, gates = split(a, qkv + weights["qkv_bias"] if a.bias else qkv)

    def heads(q, k, positions, *table):
        if a.qk_norm:
            q, k = normed(q, weights["q_norm"], a.qk_norm), normed(k, weights["k_norm"], a.qk_norm)
        return rope(q, positions, a, table), rope(k, positions, a, table)

    rows = sliced(heads, SLICE, *(x.reshape(-1, *x.shape[2:]) for x in (q, k, positions, *table)))
    q, k = (x.reshape(*v.shape[:2], *x.shape[1:]) for x in rows)
    return gated(*mixer.attend(cache, i, q, k, v, None), gates)


def _fixed_refuses(layer: Layer, rows: int) -> str | None:
    a = layer.mixing
    if a.head_dim not in HEAD_WIDTHS or a.heads // a.kv_heads > MAX_GROUP:
        return f"{a.heads} query heads of {a.head_dim} over {a.kv_heads} KV heads"
    if beyond(a, HEADS_WRITTEN):
        return "biases of gated attention" if a.bias else None
    if a.qk_norm and (reason := write_heads.supported(a.heads, a.kv_heads, a.head_dim, a.head_dim, "bfloat16")):
        return f"norms of q and k in prompts, with {reason}"
    return None


_HEADS = frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm"})
ATTENTION = Mixing(
    projections=("qkv",),
    mix=mix,
    implements={
        "plain": _HEADS
        | {"qk_norm_all", "qk_norm_rotated", "qk_norm_unit", "gated", "bias", "out_bias", "window", "scale", "sinks"}
        | {"v_norm", "k_is_v", "shared", "value_dim", "value_scale", "pool", "position_scale", "score_cap"},
        "few_rows": _HEADS | {"bias", "out_bias", "window", "sinks"},
        "fused_norms": _HEADS | {"qk_norm_all", "gated", "window", "scale"},
        "post_norms": _HEADS
        | {"qk_norm_all", "qk_norm_rotated", "bias", "out_bias", "window", "scale", "sinks"}
        | {"v_norm", "k_is_v", "shared"},
        "weight_stream": _HEADS | {"bias", "window", "scale"},
        "fp8_stream": _HEADS | {"bias", "window", "scale"},
        **dict.fromkeys(("fp8_rows", "fp8_tiles"), _HEADS | {"qk_norm_all", "gated", "window", "scale"}),
        "deterministic": _HEADS | {"gated", "bias"},
    },
    by_axis=cos_sin_by_axis,
    parts=True,
    fixed=fixed,
    fixed_refuses=_fixed_refuses,
)
