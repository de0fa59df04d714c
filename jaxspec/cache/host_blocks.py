"""A page of all layers and pools as one block of words, and a state slot likewise: what the host's memory keeps.

The target's pages and the drafter's travel together, so a block that comes back is all that a page was. Each block has
a checksum, which is computed on the device when the block leaves and again when it comes back.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from jaxspec.cache.mixers import Cache

Blocks = tuple[UInt[Array, " w"], ...]
PAGES, STATES = "pages", "states"


def paged(cache: Cache, draft: Any, counts: Collection[int] = ()) -> list[Array]:
    """The arrays that have a row for each page: the target's, then those of the drafter that are laid out like them.
    `counts`: how many pages they may have; none: as many as the target's."""
    (first, *_), counts = cache.kv, counts or (cache.kv[0].shape[1],)
    return [x for x in jax.tree.leaves((cache.kv, draft)) if x.ndim == first.ndim and x.shape[1] in counts]


def with_paged(cache: Cache, draft: Any, arrays: list[Array], counts: Collection[int] = ()) -> tuple[Cache, Any]:
    """Cache and drafter's state with others in place of `paged`."""
    of, new = {id(x) for x in paged(cache, draft, counts)}, iter(arrays)
    kv, draft = jax.tree.map(lambda x: next(new) if id(x) in of else x, (cache.kv, draft))
    return cache.replace(kv=kv), draft


def stateful(cache: Cache) -> list[Array]:
    """The arrays that have a row for each state slot; the records of a round aren't part of a snapshot."""
    return jax.tree.leaves([(group.delta and group.delta.state, group.windows) for group in cache.states])


def with_stateful(cache: Cache, arrays: list[Array]) -> Cache:
    """The cache with others in place of `stateful`."""
    new, states = iter(arrays), []
    for group in cache.states:
        delta = group.delta and group.delta.replace(state=next(new))
        states.append(group.replace(delta=delta, windows=None if group.windows is None else next(new)))
    return cache.replace(states=tuple(states))


def take(arrays: list[Array], rows: Int[Array, " n"]) -> tuple[Blocks, UInt[Array, "n 1"]]:
    """The blocks of these rows of all arrays, axis 1 of each, and their checksums."""
    words = jnp.concatenate([_words(jnp.moveaxis(x[:, rows], 1, 0)) for x in arrays], axis=1)
    return tuple(words[i] for i in range(len(rows))), _checksums(words)


def put(arrays: list[Array], rows: Int[Array, " n"], blocks: Blocks) -> tuple[list[Array], UInt[Array, "n 1"]]:
    """The arrays with these blocks in these rows, and the blocks' checksums."""
    words, written, start = jnp.stack(blocks), [], 0
    for x in arrays:
        shape = len(rows), x.shape[0], *x.shape[2:]
        size = jax.eval_shape(_words, jax.ShapeDtypeStruct(shape, x.dtype)).shape[1]
        values = _values(words[:, start : start + size], shape, x.dtype)
        written.append(x.at[:, rows].set(jnp.moveaxis(values, 0, 1)))
        start += size
    return written, _checksums(words)


def _words(x: Array) -> UInt[Array, "n w"]:
    """Each row's bits, padded to whole words."""
    x, each = x.reshape(len(x), -1), 4 // x.dtype.itemsize
    if each > 1:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % each))).reshape(len(x), -1, each)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _values(words: UInt[Array, "n w"], shape: tuple[int, ...], dtype: Any) -> Array:
    """Undo `_words`."""
    values = jax.lax.bitcast_convert_type(words, dtype).reshape(len(words), -1)
    size = 1
    for axis in shape[1:]:
        size *= axis
    return values[:, :size].reshape(shape)


def _checksums(words: UInt[Array, "n w"]) -> UInt[Array, "n 1"]:
    """A weighted sum of each block's words, modulo 2**32. A changed or moved word changes it: weights are odd."""
    weights = 2 * jnp.arange(words.shape[1], dtype=jnp.uint32) + 1
    return jnp.sum(words * weights, axis=1, keepdims=True, dtype=jnp.uint32)
