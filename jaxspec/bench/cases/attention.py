"""Attention over pages, and the operations that fill pages: rounds and prompts, with Qwen3-8B's heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import BLOCK, PAGE, Case
from jaxspec.cache.paged import Rows
from jaxspec.decoder.mixer import OnlyAttention
from jaxspec.decoder.mixings import attention
from jaxspec.models.description import Attention, Layer, Mlp, Norm
from jaxspec.models.rope_scaling import Rope
from jaxspec.pallas.attention.paged_attention import paged_attention, reference

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def decode_attention(
    b: int, context: int, t: int, layers: int, dtype: str, window: int | None = None, kv: str | None = None
) -> Case:
    """`t` rows for each of `b` requests with `context` tokens, of which each sees `window` (None: all).

    `kv`: the pages' dtype, an FP8 one; None: `dtype`.
    """
    item, kept, pages = *_items(dtype, kv), -(-context // PAGE)
    rows = b * t * HEADS * HEAD_DIM
    seen = context if window is None else min(context, window + t - 1)
    return Case(
        name=f"decode attention {b} x {context}, {t} row{'s' * (t > 1)}{_named(window, kv)}",
        group="decode attention",
        layers=layers,
        build=partial(_paged, np.full(b, context - t), t, np.arange(b * pages).reshape(b, pages), layers, dtype, kv),
        op=partial(_attend, window=window),
        plain=partial(_attend_plain, window=window),
        size=kept * 2 * b * seen * KV_HEADS * HEAD_DIM + item * 2 * rows,
        flops=4 * rows * (seen - (t - 1) / 2),
    )


def prompt_attention(
    count: int, length: int, layers: int, dtype: str, window: int | None = None, kv: str | None = None
) -> Case:
    """`count` whole prompts of `length` tokens, in blocks as a prefill has them; each sees `window` (None: all)."""
    item, kept, blocks, pages = *_items(dtype, kv), -(-length // BLOCK), -(-length // PAGE)
    start = np.tile(np.arange(blocks) * BLOCK, count)
    table = np.repeat(np.arange(count * pages).reshape(count, pages), blocks, axis=0)
    tokens, near = count * blocks * BLOCK, min(length, window or length)
    return Case(
        name=f"prompt attention {count} x {length}{_named(window, kv)}",
        group="prompt attention",
        layers=layers,
        build=partial(_paged, start, BLOCK, table, layers, dtype, kv),
        op=partial(_attend, window=window),
        plain=partial(_attend_plain, window=window),
        size=tokens * HEAD_DIM * (kept * 2 * KV_HEADS + item * 2 * HEADS),
        flops=4 * HEADS * HEAD_DIM * count * near * (length - (near - 1) / 2),
    )


def _named(window: int | None, kv: str | None) -> str:
    return ("" if window is None else f", window {window}") + ("" if kv is None else ", FP8 KV")


def _items(dtype: str, kv: str | None) -> tuple[int, int]:
    """Bytes of a number, and of one in pages."""
    return jnp.dtype(dtype).itemsize, jnp.dtype(kv or dtype).itemsize


def cache_write(count: int, length: int, layers: int, dtype: str, kv: str | None = None) -> Case:
    """Keys and values of `count` whole prompts of `length` tokens, in a prefill's blocks, into their pages."""
    rows, item = _prompts(count, length), sum(_items(dtype, kv))
    blocks = len(rows.start)

    def build(key):
        new = jax.random.normal(key, (2, blocks, BLOCK, KV_HEADS, HEAD_DIM), dtype)
        return tuple(new), _empty(rows, layers, kv or dtype)

    def write(layer, new, kv, scatter=False):
        kv = _scatter(rows, kv, layer, *new) if scatter else rows.write(kv, jnp.int32(layer), *new)
        return kv[layer, -1, :, 0, 0], kv

    return Case(
        name=f"cache write {count} x {length}{_named(None, kv)}",
        group="cache write",
        layers=layers,
        build=build,
        op=write,
        plain=partial(write, scatter=True),
        in_place=True,
        size=item * 2 * blocks * BLOCK * KV_HEADS * HEAD_DIM,
        flops=0,
    )


def prompt_heads(count: int, length: int, layers: int, dtype: str, kv: str | None = None) -> Case:
    """From what a projection makes of `count` whole prompts of `length` tokens to their queries and pages."""
    return _heads(f"prompt heads {count} x {length}", _prompts(count, length), BLOCK, 1, layers, dtype, kv)


def round_heads(b: int, context: int, t: int, layers: int, dtype: str, kv: str | None = None) -> Case:
    """From a projection in four parts to queries and pages: `t` rows for each of `b` requests at `context` tokens."""
    start = jnp.full((b,), context - t, jnp.int32)
    pages = -(-context // PAGE)
    rows = Rows(start, jnp.full_like(start, t), 1 + jnp.arange(b * pages, dtype=jnp.int32).reshape(b, pages))
    return _heads(f"heads {b} x {context}, {t} row{'s' * (t > 1)}", rows, t, 4, layers, dtype, kv)


def _heads(name: str, rows: Rows, t: int, parts: int, layers: int, dtype: str, kept: str | None) -> Case:
    total, blocks = HEADS + 2 * KV_HEADS, len(rows.start)
    norm = Norm(1e-6)
    described = Layer(Attention(HEADS, KV_HEADS, HEAD_DIM, Rope(1e6), qk_norm=norm), Mlp(0), norm)
    made = jnp.float32 if parts > 1 else dtype

    def build(key):
        qkv_key, *norm_keys = jax.random.split(key, 3)
        weights = {
            name: 1 + 0.1 * jax.random.normal(key, (layers, HEAD_DIM), dtype)
            for name, key in zip(("q_norm", "k_norm"), norm_keys, strict=True)
        }
        shape = parts, blocks, t, total * HEAD_DIM
        qkv = [jax.random.normal(key, shape, made) for key in jax.random.split(qkv_key, layers)]
        return qkv, (weights, _empty(rows, layers, kept or dtype))

    def mix(mixer, layer, qkv, own):
        weights, kv = own
        mine = {name: each[layer] for name, each in weights.items()}
        q, kv = attention.mix(described, mine, jnp.int32(layer), [qkv[layer]], rows.positions(t), mixer, kv, dtype)
        return q, (weights, kv)

    plain = OnlyAttention(lambda kv, layer, q, k, v, window: (q, _scatter(rows, kv, layer, k, v)))
    elements, (item, page_item) = blocks * t * HEAD_DIM, _items(dtype, kept)
    written = item * HEADS + page_item * 2 * KV_HEADS
    return Case(
        name=f"{name}{_named(None, kept)}",
        group="heads",
        layers=layers,
        build=build,
        op=partial(mix, _Queries(rows)),
        plain=partial(mix, plain),
        in_place=True,
        size=(parts * jnp.dtype(made).itemsize * total + written + 4) * elements,
        flops=0,
    )


@dataclass(frozen=True)
class _Queries:
    """A `PagedMixer` that gives queries back where it should attend."""

    rows: Rows

    def only(self, asked):
        return self

    def attend(self, kv, layer, q, k, v, window):
        return q, self.rows.write(kv, layer, k, v)

    def pages(self, kv):
        return kv

    def attend_written(self, kv, layer, t, write, window):
        return write(kv, self.rows.written(kv, t), None)


def _prompts(count: int, length: int) -> Rows:
    """Blocks of `count` whole prompts of `length` tokens; page 0 is the dummy."""
    blocks, pages = -(-length // BLOCK), -(-length // PAGE)
    start = jnp.tile(jnp.arange(blocks, dtype=jnp.int32) * BLOCK, count)
    table = jnp.repeat(1 + jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages), blocks, axis=0)
    return Rows(start, jnp.full_like(start, BLOCK), table)


def _empty(rows: Rows, layers: int, dtype: str) -> jax.Array:
    return jnp.zeros((layers, 1 + np.asarray(rows.table).max(), 2, KV_HEADS, PAGE, HEAD_DIM), dtype)


def _scatter(rows: Rows, kv: jax.Array, layer: Any, k: jax.Array, v: jax.Array) -> jax.Array:
    return rows.write(kv, jnp.full((1, 1, 1), layer), k[None], v[None])  # several layers at once are a scatter's


def _paged(
    start: np.ndarray, t: int, table: np.ndarray, layers: int, dtype: str, kv: str | None, key: jax.Array
) -> tuple[Any, Any]:
    """Queries and tables, the same for all layers, and a random cache; page 0 is the dummy."""
    query_key, cache_key = jax.random.split(key)
    q = jax.random.normal(query_key, (len(start), t, HEADS, HEAD_DIM), dtype)
    shape = (int(table.max()) + 2, 2, KV_HEADS, PAGE, HEAD_DIM)
    # layer by layer: random bits for all at once would take several times the memory of the cache
    made = lambda k: jax.random.normal(k, shape, dtype).astype(kv or dtype)  # noqa: E731
    cache = jax.lax.map(made, jax.random.split(cache_key, layers))
    return (q, jnp.int32(table + 1), jnp.int32(start)), cache


def _attend(layer: int, shared: Any, kv: jax.Array, window: int | None) -> jax.Array:
    q, table, start = shared
    return paged_attention(q, kv, jnp.int32(layer), table, start, window=window)


def _attend_plain(layer: int, shared: Any, kv: jax.Array, window: int | None) -> jax.Array:
    q, table, start = shared
    return reference(q, kv, jnp.int32(layer), table, start, window=window)
