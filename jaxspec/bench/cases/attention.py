"""Attention over pages, and writing them: of rounds and of prompts, at Qwen3-8B's heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import BLOCK, PAGE, Case
from jaxspec.cache import Rows
from jaxspec.pallas.paged_attention import paged_attention, reference

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def decode_attention(b: int, context: int, t: int, layers: int, dtype: str) -> Case:
    """`t` rows for each of `b` requests with `context` tokens."""
    item, pages = jnp.dtype(dtype).itemsize, -(-context // PAGE)
    rows = b * t * HEADS * HEAD_DIM
    return Case(
        name=f"decode attention {b} x {context}, {t} row{'s' * (t > 1)}",
        group="decode attention",
        layers=layers,
        build=partial(_paged, np.full(b, context - t), t, np.arange(b * pages).reshape(b, pages), layers, dtype),
        op=_attend,
        plain=_attend_plain,
        size=item * (2 * b * context * KV_HEADS * HEAD_DIM + 2 * rows),
        flops=4 * rows * (context - (t - 1) / 2),
    )


def prompt_attention(count: int, length: int, layers: int, dtype: str) -> Case:
    """`count` whole prompts of `length` tokens, in blocks as a prefill has them."""
    item, blocks, pages = jnp.dtype(dtype).itemsize, -(-length // BLOCK), -(-length // PAGE)
    start = np.tile(np.arange(blocks) * BLOCK, count)
    table = np.repeat(np.arange(count * pages).reshape(count, pages), blocks, axis=0)
    tokens = count * blocks * BLOCK
    return Case(
        name=f"prompt attention {count} x {length}",
        group="prompt attention",
        layers=layers,
        build=partial(_paged, start, BLOCK, table, layers, dtype),
        op=_attend,
        plain=_attend_plain,
        size=item * tokens * HEAD_DIM * (2 * KV_HEADS + 2 * HEADS),
        flops=4 * HEADS * HEAD_DIM * count * length * (length + 1) / 2,
    )


def cache_write(count: int, length: int, layers: int, dtype: str) -> Case:
    """Keys and values of `count` whole prompts of `length` tokens, in a prefill's blocks, into their pages."""
    blocks, pages = -(-length // BLOCK), -(-length // PAGE)
    start = jnp.tile(jnp.arange(blocks, dtype=jnp.int32) * BLOCK, count)
    table = jnp.repeat(1 + jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages), blocks, axis=0)
    rows = Rows(start, jnp.full_like(start, BLOCK), table)

    def build(key):
        new = jax.random.normal(key, (2, len(start), BLOCK, KV_HEADS, HEAD_DIM), dtype)
        return tuple(new), jnp.zeros((layers, 1 + count * pages, 2, KV_HEADS, PAGE, HEAD_DIM), dtype)

    def write(layer, new, kv, scatter=False):
        which = jnp.full((1, 1, 1), layer) if scatter else jnp.int32(layer)  # several layers at once are a scatter's
        kv = rows.write(kv, which, *(x[None] for x in new)) if scatter else rows.write(kv, which, *new)
        return kv[layer, -1, :, 0, 0], kv

    return Case(
        name=f"cache write {count} x {length}",
        group="cache write",
        layers=layers,
        build=build,
        op=write,
        plain=partial(write, scatter=True),
        in_place=True,
        size=2 * jnp.dtype(dtype).itemsize * 2 * len(start) * BLOCK * KV_HEADS * HEAD_DIM,
        flops=0,
    )


def _paged(start: np.ndarray, t: int, table: np.ndarray, layers: int, dtype: str, key: jax.Array) -> tuple[Any, Any]:
    """Queries and tables, the same for all layers, and a random cache; page 0 is the dummy."""
    query_key, cache_key = jax.random.split(key)
    q = jax.random.normal(query_key, (len(start), t, HEADS, HEAD_DIM), dtype)
    shape = (int(table.max()) + 2, 2, KV_HEADS, PAGE, HEAD_DIM)
    # layer by layer: random bits for all at once would take several times the memory of the cache
    cache = jax.lax.map(lambda k: jax.random.normal(k, shape, dtype), jax.random.split(cache_key, layers))
    return (q, jnp.int32(table + 1), jnp.int32(start)), cache


def _attend(layer: int, shared: Any, kv: jax.Array) -> jax.Array:
    q, table, start = shared
    return paged_attention(q, kv, jnp.int32(layer), table, start)


def _attend_plain(layer: int, shared: Any, kv: jax.Array) -> jax.Array:
    q, table, start = shared
    return reference(q, kv, jnp.int32(layer), table, start)
