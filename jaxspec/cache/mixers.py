"""The target's cache, and the three ways in which its forward mixes tokens: over whole texts, prompt blocks, rounds.

`Cache` holds pages of keys and values for the layers of full attention. For models with linear attention it also holds
a state of fixed size for each state slot: 0 to n - 1 are those of the n request slots, n is the dummy's, and those from
n + 1 on hold snapshots, states behind prefixes in the prefix tree.

Invariant: of a running request with N known tokens, pages hold positions 0 .. N-2. So does its state, once
`programs.State.replay` rows of its last round are replayed into it (see `pallas.gated_delta`).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.paged import KV, PageLayout, Rows, Scales
from jaxspec.decoder.functions import causal_attention
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas import hopper
from jaxspec.pallas.recurrence import causal_conv, gated_delta, sequential
from jaxspec.pallas.recurrence.causal_conv import Windows, conv_chunk, empty_windows, split_heads
from jaxspec.pallas.recurrence.gated_delta import DeltaPool

NOTHING = -1  # as a state slot to start from: the state before any token; to keep a snapshot in: none is kept
BLOCK = 32  # tokens of a whole text that linear attention takes at once


@flax.struct.dataclass
class States:
    """The state of linear layers after the tokens so far, by slot: states of the delta rule, inputs of the
    convolution."""

    delta: DeltaPool
    windows: Windows


@flax.struct.dataclass
class Cache:
    """The target's cache of all tokens so far. `states` is None for a model without linear attention.

    `scales`: what the pages' keys and values are to be multiplied by; None: nothing.
    """

    kv: KV
    states: States | None = None
    scales: Scales | None = None


def empty_cache(
    config: ModelConfig,
    layout: PageLayout,
    slots: int,
    rows: int,
    dtype: str,
    state_dtype: str = "float32",
    scales: Scales | None = None,
) -> Cache:
    """A cache with `slots` state slots, for rounds of at most `rows` rows, activations in `dtype`."""
    states = empty_states(config, slots, rows, dtype, state_dtype) if config.linear else None
    return Cache(layout.kv(config), states, scales)


def empty_states(config: ModelConfig, slots: int, rows: int, dtype: str, state_dtype: str) -> States:
    """States before any token, those of the delta rule in `state_dtype`; the convolution's are inputs, in `dtype`."""
    mix, layers = config.linear, config.num_linear_layers
    delta = gated_delta.empty(
        layers,
        slots,
        rows,
        key_heads=mix.key_heads,
        value_heads=mix.value_heads,
        key_width=mix.key_dim,
        value_width=mix.value_dim,
        dtype=state_dtype,
        key_dtype=dtype,
    )
    return States(delta, empty_windows(layers, slots, rows, mix.channels, mix.taps, dtype))


def state_bytes(config: ModelConfig, rows: int, dtype: str, state_dtype: str = "float32") -> tuple[int, int]:
    """Bytes of one state slot, and of the states in it alone, without the records of a round of `rows` rows."""
    if config.linear is None:
        return 0, 0
    slot = jax.eval_shape(lambda: empty_states(config, 1, rows, dtype, state_dtype))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    return size(slot), size(slot.delta.state)


class WholeTexts:
    """A `Mixer` of whole texts that begin at row 0; the cache passes through."""

    def only(self, asked):
        return self

    def attend(self, cache, layer, q, k, v, window, sinks=None):
        return causal_attention(cache, layer, q, k, v, window, sinks)

    def pages(self, cache):
        return None

    def convolve(self, cache, layer, x, weight, mix):
        b, t, _ = x.shape
        nothing = jnp.full((b,), NOTHING, jnp.int32)
        windows = empty_windows(1, b, 0, mix.channels, mix.taps, x.dtype)
        slots = jnp.arange(b, dtype=jnp.int32), nothing, nothing, jnp.full((b,), t, jnp.int32)
        out, _ = conv_chunk(windows, jnp.int32(0), *slots, x[..., : mix.channels], weight.T)
        return split_heads(out, mix), cache

    def recur(self, cache, layer, q, k, v, decay, beta, filled):
        """In blocks, since the interactions within a block grow with the square of its length."""
        b, t = q.shape[:2]
        count = -(-t // BLOCK)
        pad = count * BLOCK - t
        cut = lambda x: jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2))).reshape(-1, BLOCK, *x.shape[2:])  # noqa: E731
        text, block = jnp.divmod(jnp.arange(b * count, dtype=jnp.int32), count)
        nothing = jnp.full((b * count,), NOTHING, jnp.int32)
        slots = text, jnp.where(block == 0, NOTHING, text), nothing, jnp.minimum(t - block * BLOCK, BLOCK)
        widths = {
            "key_heads": k.shape[2],
            "value_heads": v.shape[2],
            "key_width": k.shape[3],
            "value_width": v.shape[3],
        }
        pool = gated_delta.empty(1, b, 1, **widths, dtype=jnp.float32, key_dtype=k.dtype)
        out, _ = gated_delta.chunk(pool, jnp.int32(0), *slots, *map(cut, (q, k, v, decay, beta)))
        return _filled(out.reshape(b, -1, *out.shape[2:])[:, :t], filled), cache


class _OverPages:
    """Attention of a `PagedMixer` over a `Cache`, of requests that stand at `rows`."""

    rows: Rows

    def only(self, asked):
        return self.replace(rows=self.rows.only(asked))

    def attend(self, cache, layer, q, k, v, window, sinks=None):
        out, kv = self.rows.attend(cache.kv, layer, q, k, v, window, sinks, cache.scales)
        return out, cache.replace(kv=kv)

    def pages(self, cache):
        return cache.kv

    def attend_written(self, cache, layer, t, write, window, sinks=None):
        out, kv = self.rows.attend_written(cache.kv, layer, t, write, window, sinks, cache.scales)
        return out, cache.replace(kv=kv)


@flax.struct.dataclass
class PromptBlocks(_OverPages):
    """A `PagedMixer` of prompt blocks over a `Cache`: block i stands at `rows`, in request slot `slots[i]`.

    Its state continues from slot `source[i]`, and is left in its own slot and, as a snapshot, in `keep[i]`; both can be
    `NOTHING`. Blocks of one request are in order, and a source may be a snapshot that an earlier block of any request
    keeps.
    """

    rows: Rows
    slots: Int[Array, " b"]
    source: Int[Array, " b"]
    keep: Int[Array, " b"]

    def convolve(self, cache, layer, x, weight, mix):
        slots = self.slots, self.source, self.keep, self.rows.count
        fixed = self.rows.fixed > 0
        out, windows = causal_conv.chunk(cache.states.windows, layer, *slots, x, weight, mix, fixed)
        return out, cache.replace(states=cache.states.replace(windows=windows))

    def recur(self, cache, layer, q, k, v, decay, beta, filled):
        chunk = sequential.chunk if self.rows.fixed and not hopper.multiprocessors() else gated_delta.chunk
        out, delta = chunk(
            cache.states.delta, layer, self.slots, self.source, self.keep, self.rows.count, q, k, v, decay, beta
        )
        return _filled(out, filled), cache.replace(states=cache.states.replace(delta=delta))


@flax.struct.dataclass
class RoundRows(_OverPages):
    """A `PagedMixer` of a round's rows over a `Cache`: request i, in slot `slots[i]`, stands at `rows`.

    `replay[i]` rows of its last round were accepted.
    """

    rows: Rows
    slots: Int[Array, " b"]
    replay: Int[Array, " b"]

    def convolve(self, cache, layer, x, weight, mix):
        slots, fixed = (self.slots, self.replay), self.rows.fixed > 0
        out, windows = causal_conv.step(cache.states.windows, layer, *slots, x, weight, mix, fixed)
        return out, cache.replace(states=cache.states.replace(windows=windows))

    def recur(self, cache, layer, q, k, v, decay, beta, filled):
        of = cache.states.delta, layer, self.slots, self.replay, q, k, v, decay, beta
        if self.rows.fixed:
            out, delta = sequential.step(*of)
            return _filled(out, filled), cache.replace(states=cache.states.replace(delta=delta))
        out, delta = gated_delta.step(*of, filled)
        return out, cache.replace(states=cache.states.replace(delta=delta))

    def unnormed(self, cache, q, v):
        return gated_delta.unnormed(cache.states.delta, q.shape, v.shape, q.dtype, v.dtype)

    def recur_normed(self, cache, layer, q, k, v, around, eps):
        slots, fixed = (self.slots, self.replay), self.rows.fixed > 0
        out, delta = gated_delta.normed_step(cache.states.delta, layer, *slots, q, k, v, around, eps, fixed)
        return out, cache.replace(states=cache.states.replace(delta=delta))


def _filled(x: Array, rows: int) -> Array:
    """[b, t, ...] with zeros up to so many rows a request."""
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
