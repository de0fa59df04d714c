"""What mixes tokens with those before them: the interface between a layer's equations and whoever keeps a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from jaxspec.decoder.spec import DeltaRule
from jaxspec.pallas.delta_around import Around


@runtime_checkable
class Mixer(Protocol):
    """A forward hands it each layer's rows, and it owns what came before.

    The `cache` is whatever it keeps that in, passed through the forward. `layer` i32[] counts among the layers that mix
    in the same way.
    """

    def only(self, asked: Bool[Array, " b"]) -> Mixer:
        """The same, where nobody reads the attention of other sequences: it may be anything finite."""
        ...

    def attend(
        self,
        cache: Any,
        layer: Int[Array, ""],
        q: Float[Array, "b t n h"],
        k: Float[Array, "b t m h"],
        v: Float[Array, "b t m h"],
        window: int | None,
        sinks: Float[Array, " n"] | None = None,
    ) -> tuple[Float[Array, "b t n h"], Any]:
        """Causal attention, scores scaled by h**-0.5. A row sees `window` positions up to its own; None: all.

        `sinks`: of each head, one more logit of its softmax, float32, given only where a layer has them.
        """
        ...

    def pages(self, cache: Any) -> Float[Array, "l p 2 m s h"] | None:
        """The pages of all layers, as `cache.KV`, if a kernel may write keys and values there: see `PagedMixer`."""
        ...


@runtime_checkable
class LinearMixer(Mixer, Protocol):
    """One that serves linear attention too, over a state of fixed size."""

    def convolve(
        self,
        cache: Any,
        layer: Int[Array, ""],
        x: Float[Array, "b t d"],
        weight: Float[Array, "w c"],
        mix: DeltaRule,
    ) -> tuple[tuple[Float[Array, "b t m k"], Float[Array, "b t m k"], Float[Array, "b t n v"]], Any]:
        """Each channel's causal convolution over its newest w rows, the last tap on the row itself, then SiLU.

        The channels are the first c columns of x: queries, keys and values of `mix`'s heads. They come out by head,
        queries and keys of length one, queries scaled by k**-0.5.
        """
        ...

    def recur(
        self,
        cache: Any,
        layer: Int[Array, ""],
        q: Float[Array, "b t m k"],
        k: Float[Array, "b t m k"],
        v: Float[Array, "b t n v"],
        decay: Float[Array, "b t n"],
        beta: Float[Array, "b t n"],
        filled: int,
    ) -> tuple[Float[Array, "b r n v"], Any]:
        """The gated delta rule, S = decay S + beta (v - decay S k) k', out = S q; key head i serves n/m value heads.

        The result has r = `filled` rows a request, of which those from t on are padding and may hold anything.
        """
        ...


@runtime_checkable
class NormingMixer(LinearMixer, Protocol):
    """One whose rule may come with the gates before it and the norm after it, in one kernel."""

    def unnormed(self, cache: Any, q: Float[Array, "b t m k"], v: Float[Array, "b t n v"]) -> str | None:
        """Why `recur_normed` can't serve, or None if it can."""
        ...

    def recur_normed(
        self,
        cache: Any,
        layer: Int[Array, ""],
        q: Float[Array, "b t m k"],
        k: Float[Array, "b t m k"],
        v: Float[Array, "b t n v"],
        around: Around,
        eps: float,
    ) -> tuple[Float[Array, "b r n v"], Any]:
        """As `recur`, with gates made of `around`, and what is read normed, with this `eps`, and gated."""
        ...


@runtime_checkable
class PagedMixer(Mixer, Protocol):
    """One that keeps keys and values in pages, and lets a kernel of the layer's own write them there."""

    def attend_written(
        self,
        cache: Any,
        layer: Int[Array, ""],
        t: int,
        write: Callable[[Array, Int[Array, "b t"], Array | None], tuple[Float[Array, "b t n h"], Array]],
        window: int | None,
        sinks: Float[Array, " n"] | None = None,
    ) -> tuple[Float[Array, "b t n h"], Any]:
        """As `attend`, of t rows a request whose keys and values `write(pages, kv_slots, inverse_scales)` puts into
        the pages.

        It gives their queries and the pages. KV slots are counted over all pages, and -1 for padding. `inverse_scales`
        f32[l, 2, m]: of pages in FP8, by layer, for keys and values, by head; None if they have no scales.
        """
        ...


@dataclass(frozen=True)
class OnlyAttention:
    """A `Mixer` made of a function that attends. It has no pages."""

    attend: Callable[..., tuple[Array, Any]]  # as `Mixer.attend`

    def only(self, asked: Bool[Array, " b"]) -> OnlyAttention:
        return self

    def pages(self, cache: Any) -> None:
        return None
