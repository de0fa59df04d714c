"""What a way to run layers is, and when it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.mixer import Mixer
from jaxspec.models.description import Decoder, Layer, Table, beyond
from jaxspec.models.weights import Weight, formats
from jaxspec.pallas import hopper
from jaxspec.parallel.sharding import devices

Weights = dict[str, Array | jax.ShapeDtypeStruct | Weight]  # of a layer, or their shapes
NO_HOPPER = "Hopper's kernels don't serve here"  # the log's line about kernels says why


@dataclass(frozen=True)
class Call:
    """All that a choice of path depends on beside the decoder and its weights.

    - `rows` for each of `requests`.
    - `pages`: the dtype of the pages that a kernel may write to, None if there are none.
    - `processors`: multiprocessors that run kernels.
    - `inputs`: None for a stack. Of a layer by itself, the widths of the inputs side by side that queries, keys and
      values are made of, each with a norm of its own; empty if they are normed already.
    - `devices`: how many the weights are divided among.
    """

    requests: int
    rows: int
    pages: str | None
    processors: int
    inputs: tuple[int, ...] | None = None
    devices: int = 1

    @classmethod
    def of(cls, positions: Int[Array, "b t"], mixer: Mixer, cache: Any, inputs: tuple[int, ...] | None = None) -> Call:
        pages = mixer.pages(cache)
        dtype = None if pages is None else jnp.dtype(pages.dtype).name
        return cls(*positions.shape, dtype, hopper.multiprocessors(), inputs, devices())


def numbered(decoder: Decoder, layers: Sequence[Weights]) -> Iterator[tuple[Layer, Weights, Int[Array, ""]]]:
    """Each layer, its weights, and its index among the layers that mix as it does, by which caches have it."""
    counts: Counter[type] = Counter()
    for layer, weights in zip(decoder.layers, layers, strict=True):
        kind = type(layer.mixing)
        yield layer, weights, jnp.int32(counts[kind])
        counts[kind] += 1


class Stack(NamedTuple):
    """What a path makes of a stack of layers: the residual stream after each, without padding rows, and the cache.

    Where one row of each sequence was requested, the last output may have that row alone.
    """

    outputs: list[Float[Array, "b _ d"]]
    cache: Any


@dataclass(frozen=True)
class Path:
    """One way to run a stack of layers.

    - `implements`: by kind of description or of a weight's format, the fields that it computes; all others must be at
      their defaults.
    - `processors`: multiprocessors that it needs at once.
    - `fits(decoder, layers, call)`: why these sizes and dtypes don't, or None; `layers` are their weights.
    - `run(decoder, layers, x, positions, mixer, cache, requested)`: the stack. `requested`: as in `forward`; ignored by
      paths that compute whole layers.
    - `run_layer(decoder, weights, inputs, x, positions, mixer, cache, requested)`: one layer by itself, as
      `forward.run_layer`; `requested` may be ignored here, too.
    - `sums`: whether it sums what several devices compute of a layer.
    """

    name: str
    implements: Table
    processors: int
    fits: Callable[[Decoder, Sequence[Weights], Call], str | None]
    run: Callable[..., Stack]
    run_layer: Callable[..., tuple[Array, Any]] | None = None
    sums: bool = False

    def refuses(self, decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
        """Why this path doesn't run such a call, or None if it does."""
        if call.inputs is not None and self.run_layer is None:
            return "a layer by itself"
        if call.devices > 1 and not self.sums:
            return f"weights divided among {call.devices} devices"
        if self.processors and not call.processors:
            return NO_HOPPER
        if call.processors < self.processors:
            return f"{call.processors} Hopper multiprocessors; {self.processors} are needed"
        return self.lacks(decoder, layers) or self.fits(decoder, layers, call)

    def lacks(self, decoder: Decoder, weights: Any) -> str | None:
        """What of a decoder, or of the formats of a pytree's weights, this path doesn't implement; None if nothing."""
        if reason := beyond(decoder, self.implements):
            return reason
        reason = beyond(formats(weights), self.implements)
        return reason and f"weights in {reason}"
