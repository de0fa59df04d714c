"""Mixers of tokens with those before them: the interface between a layer's equations and whoever keeps a cache.

Axis letters: b requests, t tokens, n query or value heads, m KV or key heads, h, k and v their widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool


@runtime_checkable
class Mixer(Protocol):
    """A forward hands it each layer's rows, and it owns what came before.

    The `cache` is whatever it keeps that in, passed through the forward. `layer` i32[] counts among the layers of a
    group, whose memory has one shape. As it stands a mixer is for the first group of either sort; one for models with
    several has `group(number)`, the same for another (`Decoder.groups`).
    """

    def only(self, asked: Bool[Array, " b"]) -> Mixer:
        """Drop what nobody reads, the attention of other sequences: it may be anything finite."""
        ...

    def attend(self, cache, layer, q, k, v, window, sinks=None, cap=None) -> tuple[Array, Any]:
        """Causal attention of q [b t n h] over k and v [b t m h], scores scaled by h**-0.5: [b t n h], and the cache.

        A row sees `window` positions up to its own, or its chunk's; None: all. `sinks` [n], float32: of each head, one
        more logit of its softmax. `cap`: scores are squashed below it. Both are given only where a layer has them.
        """
        ...

    def pages(self, cache) -> Array | None:
        """The pages of a group's layers, as `paged.KV`, if a kernel may write rows there: see `PagedMixer`."""
        ...


@runtime_checkable
class RecurrentMixer(Mixer, Protocol):
    """One that serves recurrent layers too, over a state of fixed size."""

    def convolve(self, cache, layer, x, weight, mix, bias=None) -> tuple[Any, Any]:
        """Each channel's causal convolution over its newest w rows, the last tap on the row itself, then SiLU.

        `weight` is [w c]. The channels are the first c columns of x [b t d], and come out as queries and keys [b t m k]
        and values [b t n v] of `mix`, a `Recurrence`: queries and keys of length one, queries scaled by k**-0.5. Or
        `mix` is `causal_conv.Channels`, which says where they stand: then `bias` [c] is added before SiLU, and its
        parts are given.
        """
        ...

    def recur(self, cache, layer, q, k, v, decay, beta, padded_rows) -> tuple[Array, Any]:
        """The gated delta rule, S = decay S + beta (v - decay S k) k', out = S q; key head i serves n/m value heads.

        q and k are [b t m k], v [b t n v], decay and beta [b t n]; or decays are [b t n k], by key channel. The result
        has r = `padded_rows` rows a request; those from t on are padding and may hold anything.
        """
        ...

    def accumulate(self, cache, layer, q, k, u, decay) -> tuple[Array, Any]:
        """S = decay S + u k', out = S q, of updates u [b t n v] that don't depend on the state; else as `recur`."""
        ...


@runtime_checkable
class NGramMixer(RecurrentMixer, Protocol):
    """One that gives what a group of layers was given by the rows before these, and keeps theirs."""

    def before(self, cache, layer, x, back) -> tuple[Array, Any]:
        """The `back` inputs before the rows' own, x [b t c] in the dtype that they are kept in: [b back c]. Zeros stand
        for those before the text."""
        ...


@runtime_checkable
class IndexedMixer(Mixer, Protocol):
    """One that serves indexed attention too."""

    def attend_indexed(self, cache, layer, q, k, v, index) -> tuple[Array, Any]:
        """Attend as `Mixer.attend`, to the blocks that an `indexed_attention.Index` selects."""
        ...


@runtime_checkable
class NormingMixer(RecurrentMixer, Protocol):
    """One whose rule may come with the gates before it and the norm after it, in one kernel."""

    def unnormed(self, cache, q, v) -> str | None:
        """Why `recur_normed` can't serve, or None if it can."""
        ...

    def recur_normed(self, cache, layer, q, k, v, around, eps) -> tuple[Array, Any]:
        """Recur with gates made of `around`, and what is read normed, with this `eps`, and gated."""
        ...


@runtime_checkable
class SteppingMixer(RecurrentMixer, Protocol):
    """One whose recurrence of a state space may come with the steps before it, in one kernel."""

    def unstepped(self, cache, q, x) -> str | None:
        """Why `accumulate_stepped` can't serve, or None if it can."""
        ...

    def accumulate_stepped(self, cache, layer, q, k, x, steps, limits) -> tuple[Array, Any]:
        """Accumulate the updates that `steps` make of x [b t n v], and add skip x; see
        `pallas.recurrence.accumulate.stepped`."""
        ...


@runtime_checkable
class LatentMixer(Mixer, Protocol):
    """One that serves latent attention too."""

    def attend_latent(self, cache, layer, q, rows, latent, scale) -> tuple[Array, Any]:
        """Causal attention of q [b t n w] over one row [b t w] a token: its key, whose first columns are its value.

        Scores are multiplied by `scale`. The result is [b t n l] for `latent` columns, and the cache.
        """
        ...


@runtime_checkable
class DividedMixer(LatentMixer, Protocol):
    """One whose requests are divided among devices, each of which keeps what came before its own.

    `uneven`: more than a device's share of them may be one's.
    """

    uneven: bool

    def here(self, cache) -> Bool[Array, " b"]:
        """Whether this device has a request, and the request has rows."""
        ...

    def taken(self, cache, at, valid) -> DividedMixer:
        """The mixer for the requests `at`, i32[r], which this device has where they are `valid`."""
        ...


@runtime_checkable
class PagedMixer(Mixer, Protocol):
    """One that keeps keys and values in pages, and lets a kernel of the layer's own write them there."""

    def attend_written(self, cache, layer, t, write, window, sinks=None) -> tuple[Array, Any]:
        """Attend by t rows a request, whose keys and values `write(pages, kv_slots, inverse_scales)` puts into pages.

        It gives their queries and the pages. `kv_slots` i32[b t] count over all pages, and are -1 for padding.
        `inverse_scales` f32[l, 2, m]: of pages in FP8, by layer, for keys and values, by head; None if they have none.
        """
        ...


@runtime_checkable
class SharingMixer(PagedMixer, Protocol):
    """One whose layers may read the keys and values of another layer, whose number and group they have."""

    def attend_shared(self, cache, layer, q, window) -> tuple[Array, Any]:
        """Attend as `Mixer.attend`, by the rows that `layer` has written in this forward already."""
        ...


@dataclass(frozen=True)
class OnlyAttention:
    """A `Mixer` made of a function that attends. It has no pages."""

    attend: Callable[..., tuple[Array, Any]]  # as `Mixer.attend`

    def only(self, asked: Bool[Array, " b"]) -> OnlyAttention:
        return self

    def pages(self, cache: Any) -> None:
        return None
