"""The target's cache, and the three ways in which its forward mixes tokens: over whole texts, prompt blocks, rounds.

Invariant: of a running request with N known tokens, pages hold positions 0 .. N-2. So does its state, once
`programs.State.replay` rows of its last round are replayed into it (see `pallas.recurrence.gated_delta`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.paged import KV, PageLayout, Rows, Scales
from jaxspec.cache.recurrent import NOTHING, States, empty_states
from jaxspec.decoder.functions import causal_attention
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas import hopper
from jaxspec.pallas.attention.indexed_attention import indexed_attention
from jaxspec.pallas.recurrence import accumulate, causal_conv, delta_pool, gated_delta, sequential
from jaxspec.pallas.recurrence.causal_conv import empty_windows

BLOCK = 32  # tokens of a whole text that recurrent layers take at once


@flax.struct.dataclass
class Cache:
    """The target's cache of all tokens so far, by group of layers: pages, and recurrent states.

    `scales`: what the pages' keys and values are to be multiplied by; None: nothing.
    """

    kv: tuple[KV, ...]
    states: tuple[States, ...] = ()
    scales: tuple[Scales, ...] | None = None


def empty_cache(
    config: ModelConfig,
    layout: PageLayout,
    slots: int,
    rows: int,
    dtype: str,
    state_dtype: str = "float32",
    scales: tuple[Scales, ...] | None = None,
) -> Cache:
    """A cache with `slots` state slots, for rounds of at most `rows` rows, activations in `dtype`."""
    return Cache(layout.groups(config), empty_states(config, slots, rows, dtype, state_dtype), scales)


class WholeTexts:
    """A `Mixer` of whole texts that begin at row 0; the cache passes through."""

    def only(self, asked):
        return self

    def attend(self, cache, layer, q, k, v, window, sinks=None, cap=None):
        return causal_attention(cache, layer, q, k, v, window, sinks, cap)

    def attend_latent(self, cache, layer, q, rows, latent, scale):
        q = (q.astype(jnp.float32) * (scale * q.shape[-1] ** 0.5)).astype(q.dtype)
        out, cache = causal_attention(cache, layer, q, rows[:, :, None], rows[:, :, None])
        return out[..., :latent], cache

    def pages(self, cache):
        return None

    def group(self, number):
        return self

    def convolve(self, cache, layer, x, weight, mix, bias=None):
        (b, t, _), (taps, channels) = x.shape, weight.shape
        nothing = jnp.full((b,), NOTHING, jnp.int32)
        windows = empty_windows(1, b, 0, channels, taps, x.dtype)
        slots = jnp.arange(b, dtype=jnp.int32), nothing, nothing, jnp.full((b,), t, jnp.int32)
        return causal_conv.reference_chunk(windows, jnp.int32(0), *slots, x, weight, mix, bias=bias)[0], cache

    def before(self, cache, layer, x, back):
        return jnp.zeros((len(x), back, x.shape[2]), x.dtype), cache

    def attend_indexed(self, cache, layer, q, k, v, index):
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        return indexed_attention(q, index, index.rows, positions, lambda at: (_rows(k, at), _rows(v, at))), cache

    def recur(self, cache, layer, q, k, v, decay, beta, padded_rows):
        return _padded(_in_blocks(gated_delta.chunk, q, k, v, decay, beta), padded_rows), cache

    def accumulate(self, cache, layer, q, k, u, decay):
        return _in_blocks(accumulate.chunk, q, k, u, decay), cache


def _rows(x: Array, at: Int[Array, "b t s"]) -> Array:
    """The rows of a whole text that each of its rows names, [b, t, s, ...]."""
    return jax.vmap(lambda x, at: jnp.take(x, at, axis=0, mode="clip"))(x, at)


def _in_blocks(chunk: Callable[..., tuple[Array, Any]], q: Array, k: Array, v: Array, *gates: Array) -> Array:
    """Reads of whole texts' rows, by a `chunk` of `pallas.recurrence`. In blocks, since the interactions within
    a block grow with the square of its length."""
    b, t = q.shape[:2]
    count = -(-t // BLOCK)
    pad = count * BLOCK - t
    cut = lambda x: jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2))).reshape(-1, BLOCK, *x.shape[2:])  # noqa: E731
    text, block = jnp.divmod(jnp.arange(b * count, dtype=jnp.int32), count)
    nothing = jnp.full((b * count,), NOTHING, jnp.int32)
    slots = text, jnp.where(block == 0, NOTHING, text), nothing, jnp.minimum(t - block * BLOCK, BLOCK)
    widths = {"key_heads": k.shape[2], "value_heads": v.shape[2], "key_width": k.shape[3], "value_width": v.shape[3]}
    widths["channel_decay"] = gates[0].ndim > 3
    pool = delta_pool.empty(1, b, 1, **widths, dtype=jnp.float32, key_dtype=k.dtype)
    out, _ = chunk(pool, jnp.int32(0), *slots, *map(cut, (q, k, v, *gates)))
    return out.reshape(b, -1, *out.shape[2:])[:, :t]


class _OverCache:
    """A `PagedMixer` over the layers of a `Cache` in one `number`ed group, of requests that stand at `rows`."""

    rows: Rows
    number: int

    def group(self, number):
        return self.replace(number=number)

    def only(self, asked):
        return self.replace(rows=self.rows.only(asked))

    @property
    def uneven(self):
        return self.rows.uneven

    def here(self, cache):
        return self.rows.here(cache.kv[self.number])

    def taken(self, cache, at, valid):
        return self.replace(rows=self.rows.taken(cache.kv[self.number], at, valid))

    def attend(self, cache, layer, q, k, v, window, sinks=None, cap=None):
        out, kv = self.rows.attend(cache.kv[self.number], layer, q, k, v, window, sinks, self._scales(cache), cap)
        return out, cache.replace(kv=self._put(cache.kv, kv))

    def attend_latent(self, cache, layer, q, rows, latent, scale):
        out, kv = self.rows.attend_latent(cache.kv[self.number], layer, q, rows, latent, scale)
        return out, cache.replace(kv=self._put(cache.kv, kv))

    def attend_indexed(self, cache, layer, q, k, v, index):
        kv, keys = cache.kv[self.number : self.number + 2]
        out, *both = self.rows.attend_indexed(kv, keys, layer, q, k, v, index)
        return out, cache.replace(kv=(*cache.kv[: self.number], *both, *cache.kv[self.number + 2 :]))

    def pages(self, cache):
        return cache.kv[self.number] if cache.kv else None

    def attend_written(self, cache, layer, t, write, window, sinks=None):
        out, kv = self.rows.attend_written(cache.kv[self.number], layer, t, write, window, sinks, self._scales(cache))
        return out, cache.replace(kv=self._put(cache.kv, kv))

    def attend_shared(self, cache, layer, q, window):
        out, _ = self.rows.look_back(cache.kv[self.number], layer, q, window, None, self._scales(cache))
        return out, cache

    def _scales(self, cache):
        return None if cache.scales is None else cache.scales[self.number]

    def _put(self, groups, one):
        return (*groups[: self.number], one, *groups[self.number + 1 :])

    def _with(self, cache, **changed):
        """The cache with other states, or windows, of this group."""
        return cache.replace(states=self._put(cache.states, cache.states[self.number].replace(**changed)))


@flax.struct.dataclass
class AttentionRows(_OverCache):
    """Rows of a model without recurrent layers, a draft model for example."""

    rows: Rows
    number: int = flax.struct.field(pytree_node=False, default=0, kw_only=True)


@flax.struct.dataclass
class PromptBlocks(_OverCache):
    """Prompt blocks: block i stands at `rows`, in request slot `slots[i]`.

    Its state continues from slot `source[i]`, and is left in its own slot and, as a snapshot, in `keep[i]`; both can be
    `NOTHING`. Blocks of one request are in order, and a source may be a snapshot that an earlier block of any request
    keeps.
    """

    rows: Rows
    slots: Int[Array, " b"]
    source: Int[Array, " b"]
    keep: Int[Array, " b"]
    number: int = flax.struct.field(pytree_node=False, default=0, kw_only=True)

    @property
    def _blocks(self):
        return self.slots, self.source, self.keep, self.rows.count

    def convolve(self, cache, layer, x, weight, mix, bias=None):
        of = cache.states[self.number].windows, layer, *self._blocks
        out, windows = causal_conv.chunk(*of, x, weight, mix, self.rows.fixed > 0, bias)
        return out, self._with(cache, windows=windows)

    def before(self, cache, layer, x, back):
        of = cache.states[self.number].windows, layer, *self._blocks
        out, windows = causal_conv.chunk_before(*of, x, back)
        return out, self._with(cache, windows=windows)

    def recur(self, cache, layer, q, k, v, decay, beta, padded_rows):
        chunk = sequential.chunk if self.rows.fixed and not hopper.multiprocessors() else gated_delta.chunk
        out, delta = chunk(cache.states[self.number].delta, layer, *self._blocks, q, k, v, decay, beta)
        return _padded(out, padded_rows), self._with(cache, delta=delta)

    def accumulate(self, cache, layer, q, k, u, decay):
        out, delta = accumulate.chunk(cache.states[self.number].delta, layer, *self._blocks, q, k, u, decay)
        return out, self._with(cache, delta=delta)


@flax.struct.dataclass
class RoundRows(_OverCache):
    """A round's rows: request i, in slot `slots[i]`, stands at `rows`. `replay[i]` rows of its last round were
    accepted."""

    rows: Rows
    slots: Int[Array, " b"]
    replay: Int[Array, " b"]
    number: int = flax.struct.field(pytree_node=False, default=0, kw_only=True)

    def convolve(self, cache, layer, x, weight, mix, bias=None):
        of = cache.states[self.number].windows, layer, self.slots, self.replay
        out, windows = causal_conv.step(*of, x, weight, mix, self.rows.fixed > 0, bias)
        return out, self._with(cache, windows=windows)

    def before(self, cache, layer, x, back):
        of = cache.states[self.number].windows, layer, self.slots, self.replay
        out, windows = causal_conv.step_before(*of, x, back)
        return out, self._with(cache, windows=windows)

    def recur(self, cache, layer, q, k, v, decay, beta, padded_rows):
        of = cache.states[self.number].delta, layer, self.slots, self.replay, q, k, v, decay, beta
        if self.rows.fixed:
            out, delta = sequential.step(*of)
            return _padded(out, padded_rows), self._with(cache, delta=delta)
        out, delta = gated_delta.step(*of, padded_rows)
        return out, self._with(cache, delta=delta)

    def accumulate(self, cache, layer, q, k, u, decay):
        of = cache.states[self.number].delta, layer, self.slots, self.replay
        out, delta = accumulate.step(*of, q, k, u, decay)
        return out, self._with(cache, delta=delta)

    def unstepped(self, cache, q, x):
        return accumulate.unstepped(cache.states[self.number].delta, q.shape, x.shape, q.dtype, x.dtype)

    def accumulate_stepped(self, cache, layer, q, k, x, steps, limits):
        of = cache.states[self.number].delta, layer, self.slots, self.replay
        out, delta = accumulate.stepped(*of, q, k, x, steps, limits)
        return out, self._with(cache, delta=delta)

    def unnormed(self, cache, q, v):
        return gated_delta.unnormed(cache.states[self.number].delta, q.shape, v.shape, q.dtype, v.dtype)

    def recur_normed(self, cache, layer, q, k, v, around, eps):
        of = cache.states[self.number].delta, layer, self.slots, self.replay
        out, delta = gated_delta.normed_step(*of, q, k, v, around, eps, self.rows.fixed > 0)
        return out, self._with(cache, delta=delta)


def _padded(x: Array, rows: int) -> Array:
    """[b, t, ...] with zeros up to so many rows a request."""
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
