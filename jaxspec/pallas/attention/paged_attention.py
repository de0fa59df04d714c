"""Attention of new rows over a paged cache: decode, verify (chains and trees) and prompt chunks are one operation.

`paged_attention` chooses: on Hopper a kernel for few rows a request or one for blocks of a prompt, on other GPUs the
portable kernel, elsewhere the reference. The reference streams over the pages of the longest request in blocks, keeping
a running maximum and sum (online softmax, https://arxiv.org/abs/2112.05682), so its cost follows the cached tokens and
not the context length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.loops import zeros_after
from jaxspec.models.positions import Window, first_seen
from jaxspec.pallas.attention.decode_attention import HEAD_WIDTHS, MAX_ROWS, decode_attention
from jaxspec.pallas.attention.decode_attention import supported as decode_attention_fits
from jaxspec.pallas.attention.prompt_attention import prompt_attention
from jaxspec.pallas.attention.prompt_attention import supported as prompt_attention_fits
from jaxspec.pallas.hopper import platform
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing
from jaxspec.pallas.portable import attention as portable_attention
from jaxspec.pallas.sliced_rows import SLICE, sliced

DECODE_ROWS = 16  # up to here, rows of one request share a tile of the decode kernel whatever the model's grouping
BLOCK_TOKENS = 128  # cached tokens that one step of the reference reads per request


def paged_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    mask: Bool[Array, "b t w"] | None = None,
    window: Window | None = None,
    depth: Int[Array, "b _"] | None = None,
    sinks: Float[Array, " n"] | None = None,
    scales: Float[Array, "l 2 m"] | None = None,
    last: Int[Array, "b t"] | None = None,
    cap: float | None = None,
    fixed: int = 0,
) -> Float[Array, "b t n h"]:
    """Causal attention of rows at KV slots `start + 0..t-1`, whose keys and values are already in `kv`.

    `table[b]` lists a request's pages in order, and its KV slots are counted along them. With a `mask`, row i sees all
    KV slots before `start`, and `start + j` if `mask[b, i, j]`: the rows of a tree, or of a block whose rows see later
    ones. With a `window`, a row sees no KV slot before `start` that is so many positions or more before its own
    position, or in an earlier chunk. That is `start + i`, or with a mask `start + depth[b, i]` where a tree's rows have
    a `depth`. From `start` on the mask alone decides. Scores are scaled by h**-0.5 and summed in float32. `sinks`: one
    more logit of each head's softmax, which no value belongs to. `scales`: float32, by which the keys (0) and values
    (1) of each layer and head are multiplied. `last`: the last KV slot that each row sees, its own or a later one;
    there is no mask then. `cap`: scores are squashed below it, cap * tanh(score / cap), before the softmax. `fixed`: a
    row's result has the same bits whatever rows and requests are beside it, as in `decode_attention`; calls of up to
    `MAX_ROWS` rows differ from calls of more. There is no mask or window then.

    Returns the mix of values, in q's dtype. Rows that see no KV slot, as those before slot 0, return zeros.
    """
    call = q, kv, layer, table, start, mask, window, depth, sinks, scales, last, cap, fixed
    if mask is not None or q.shape[1] <= (MAX_ROWS if fixed else DECODE_ROWS):
        return choose("paged attention", PAGED_ATTENTION, *call).run(*call)
    return choose("prompt attention", PROMPT_ATTENTION, *call).run(*call)


SEES_LATER, CAPPED = "rows that see later ones", "scores that are squashed below a cap"


def _decode_refuses(q, kv, layer, table, start, mask, window, depth, sinks, scales, last, cap, fixed) -> str | None:
    if last is not None or cap is not None:
        return SEES_LATER if cap is None else CAPPED
    if q.dtype != jnp.bfloat16:
        return f"queries are {q.dtype.name}, not bfloat16"
    return decode_attention_fits(q.shape, kv.shape, kv.dtype, 0 if mask is None else mask.shape[2])


def _decode(q, kv, layer, table, start, mask, window, depth, sinks, scales, last, cap, fixed) -> Array:
    named = dict(mask=mask, window=window, depth=depth, sinks=sinks, scales=scales, fixed=fixed)
    return decode_attention(q, kv, layer, table, start, **named)


def _prompt_refuses(q, kv, layer, table, start, mask, window, depth, sinks, scales, last, cap, fixed) -> str | None:
    if last is not None or cap is not None:
        return SEES_LATER if cap is None else CAPPED
    if q.dtype != jnp.bfloat16:
        return f"queries are {q.dtype.name}, not bfloat16"
    return prompt_attention_fits(q.shape, kv.shape, kv.dtype)


def _prompt(q, kv, layer, table, start, mask, window, depth, sinks, scales, last, cap, fixed) -> Array:
    named = {"window": window, "sinks": sinks, "scales": scales}
    return prompt_attention(q, kv, layer, table, start, **{name: x for name, x in named.items() if x is not None})


def _row_by_row_refuses(*call) -> str | None:
    return None if call[-1] else "rows whose bits may depend on others"


def _row_by_row(q, kv, layer, table, start, *rest) -> Array:
    """The reference of each row as a request of its own, a few at a time: what XLA gives may depend on shapes."""
    if platform() != "cpu":
        reason = (_decode_refuses if q.shape[1] <= MAX_ROWS else _prompt_refuses)(q, kv, layer, table, start, *rest)
        raise NotImplementedError(f"--deterministic has no kernel for attention with {reason or 'this device'}")
    b, t, n, h = q.shape
    kv_slots = (start[:, None] + jnp.arange(t)).reshape(-1)
    pages = BLOCK_TOKENS // kv.shape[4]  # a shorter table would have steps, and so sums, of another shape
    each = jnp.repeat(jnp.pad(table, ((0, 0), (0, max(0, pages - table.shape[1])))), t, axis=0)
    one = lambda q, table, kv_slots: reference(q, kv, layer, table, kv_slots)  # noqa: E731
    return sliced(one, SLICE, q.reshape(b * t, 1, n, h), each, kv_slots).reshape(q.shape)


def reference(
    q,
    kv,
    layer,
    table,
    start,
    mask=None,
    window=None,
    depth=None,
    sinks=None,
    scales=None,
    last=None,
    cap=None,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Array:
    """`paged_attention` in plain jnp, for any shapes and dtypes. Rows of pages with one stream are keys and values.

    A head's scales are the same for all its tokens, so they multiply scores and mixes, in float32.
    """
    kv_slots = start[:, None] + jnp.arange(q.shape[1])
    position = kv_slots if mask is None or depth is None else start[:, None] + depth
    first = jnp.zeros_like(kv_slots) if window is None else first_seen(position, window)
    if mask is not None:
        return _masked_attention(q, kv, layer, table, start, first, mask, sinks, scales, cap, block_tokens)
    seen = first, kv_slots if last is None else last
    return span_attention(q, kv, layer, table, *seen, block_tokens, sinks, scales, cap)


def _portable_refuses(q, kv, *rest) -> str | None:
    if rest[-1]:
        return "rows whose bits don't depend on others"
    return portable_attention.supported(q.shape, kv, q.dtype)


def _portable(*call) -> Array:
    return portable_attention.attention(*call[:-1])


def _portable_on_hopper_refuses(*call) -> str | None:
    *_, last, cap, _ = call
    kernels_take = last is None and cap is None and call[0].shape[3] in HEAD_WIDTHS
    return "rows that Hopper's kernels take" if kernels_take else _portable_refuses(*call)


_OTHERS = (
    Implementation("portable_on_hopper", HOPPER, _portable_on_hopper_refuses, _portable),
    Implementation("portable", PORTABLE, _portable_refuses, _portable),
    Implementation("row_by_row", ANY, _row_by_row_refuses, _row_by_row),
    Implementation("reference", ANY, nothing, lambda *call: reference(*call[:-1]), slow=True),
)
PAGED_ATTENTION = (Implementation("decode_attention", HOPPER, _decode_refuses, _decode), *_OTHERS)
PROMPT_ATTENTION = (Implementation("prompt_attention", HOPPER, _prompt_refuses, _prompt), *_OTHERS)


@partial(jax.jit, static_argnames=("block_tokens", "cap"))
def span_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p k m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    first: Int[Array, "b t"],
    last: Int[Array, "b t"],
    block_tokens: int = BLOCK_TOKENS,
    sinks: Float[Array, " n"] | None = None,
    scales: Float[Array, "l 2 m"] | None = None,
    cap: float | None = None,
) -> Float[Array, "b t n h"]:
    """Attention of rows that each see KV slots `first` to `last`, in plain jnp; otherwise as `paged_attention`.

    Rows that see no KV slot return zeros.
    """

    def seen(kv_slots):
        return (kv_slots >= first[..., None]) & (kv_slots <= last[..., None])

    return _stream(q, kv, layer, table, seen, jnp.min(first), jnp.max(last), block_tokens, sinks, scales, cap)


@partial(jax.jit, static_argnames=("block_tokens", "cap"))
def _masked_attention(q, kv, layer, table, start, first, mask, sinks, scales, cap, block_tokens):
    """Attention of rows that see the KV slots from `first` up to `start`, and from there on those that the mask has."""
    w = mask.shape[2]

    def seen(kv_slots):
        new = kv_slots - start[:, None]
        listed = jnp.take_along_axis(mask, jnp.clip(new, 0, w - 1)[:, None], axis=2)
        old = (new < 0)[:, None] & (kv_slots >= first[..., None])
        return old | (listed & (new < w)[:, None] & (new >= 0)[:, None])

    ends = jnp.min(first), jnp.max(start) + w - 1
    return _stream(q, kv, layer, table, seen, *ends, block_tokens, sinks, scales, cap)


def _stream(
    q: Array,
    kv: Array,
    layer: Array,
    table: Array,
    seen: Callable[[Int[Array, " s"]], Bool[Array, "#b t s"]],
    first: Int[Array, ""],
    last: Int[Array, ""],
    block_tokens: int,
    sinks: Array | None,
    scales: Array | None,
    cap: float | None,
) -> Array:
    """Attention of rows to the KV slots from `first` to `last` for which `seen` is true.

    A sink is the start of a head's running maximum and sum.
    """
    b, t, n, h = q.shape
    m, s = kv.shape[3], kv.shape[4]
    pages = max(1, min(block_tokens // s, table.shape[1]))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    grouped = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype).reshape(b, t, m, n // m, h)
    key_scale, value_scale = (None, None) if scales is None else scales[layer][:, :, None, None, None]

    def step(i, carry):
        acc, top, total = carry
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        rows = kv[layer, ids]
        k, v = rows[:, :, 0], rows[:, :, -1]  # each [b, pages, m, s, h]
        scores = jnp.einsum("btmgh,bpmsh->bmgtps", grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
        scores = scores if key_scale is None else scores * key_scale[..., None]
        scores = scores if cap is None else jnp.tanh(scores / cap) * cap
        scores = scores.reshape(b, m, n // m, t, pages * s)
        scores = jnp.where(seen(i * pages * s + jnp.arange(pages * s))[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe = jnp.where(jnp.isneginf(new_top), 0.0, new_top)  # rows that have seen nothing yet
        weights, shrink = jnp.exp(scores - safe[..., None]), jnp.exp(top - safe)
        mix = jnp.einsum(
            "bmgtps,bpmsh->bmgth",
            weights.reshape(b, m, n // m, t, pages, s).astype(q.dtype),
            v.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )
        return acc * shrink[..., None] + mix, new_top, total * shrink + weights.sum(-1)

    shape = (b, m, n // m, t)
    mix, total = (zeros_after(q, each, jnp.float32) for each in ((*shape, h), shape))
    top = total - jnp.inf
    if sinks is not None:
        top, total = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(m, n // m, 1), shape), jnp.ones(shape)
    begin = jnp.maximum(first // (pages * s), 0)
    end = jnp.clip(last // (pages * s), -1, table.shape[1] // pages - 1) + 1
    acc, _, total = jax.lax.fori_loop(begin, end, step, (mix, top, total))
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    out = out if value_scale is None else out * value_scale
    return jnp.moveaxis(out, 3, 1).reshape(b, t, n, h).astype(q.dtype)
