"""A way to run layers, and when it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixings import MIXINGS
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Decoder, Layer, Mlp, Norm, Table, beyond
from jaxspec.models.memory import PagedRows
from jaxspec.models.rope_scaling import ROPE_SCALINGS, Rope
from jaxspec.models.weights import formats
from jaxspec.pallas import hopper
from jaxspec.parallel.sharding import devices

# What the plainest transformer has, and so what every path computes; and the fields of a mixture of silu's experts.
PLAINEST: Table = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale", "logit_scale", "logit_cap"}),
    Layer: frozenset({"mixing", "feed", "norm"}),
    Mlp: frozenset({"width"}),
    Norm: frozenset({"eps"}),
    Rope: frozenset({"theta", "scaling", "sections"}),
    **ROPE_SCALINGS,
}
MIXTURE = frozenset({"experts", "per_token", "width", "renormalised", "shared", "weighs_inputs"})
SIGMOID_SCORES = frozenset({"groups", "top_groups", "scale", "function", "corrected"})


def implementing(more: Mapping[type, Set[str]]) -> Table:
    """Fields that a path computes which has `more` of them, or of kinds, than the plainest."""
    return {kind: PLAINEST.get(kind, frozenset()) | more.get(kind, set()) for kind in {**PLAINEST, **more}}


def layers_differ(decoder: Decoder) -> str | None:
    """Why kernels from one layer to the next can't serve; None if they can."""
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"
    paged = [layer.mixing for layer in decoder.layers if isinstance(layer.mixing.memory, PagedRows)]
    if len({(mixing.memory, mixing.columns) for mixing in paged}) > 1:
        return "layers whose attention differs in its heads"
    return None


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
    - `axes`: whether positions have three axes, as a prompt's with pictures do.
    - `adapters`: whether rows may have some.
    """

    requests: int
    rows: int
    pages: str | None
    processors: int
    inputs: tuple[int, ...] | None = None
    devices: int = 1
    axes: bool = False
    adapters: bool = False

    @classmethod
    def of(
        cls, positions: Array, mixer: Mixer, cache: Any, inputs: tuple[int, ...] | None = None, adapters: bool = False
    ) -> Call:
        pages = mixer.pages(cache)
        dtype = None if pages is None else jnp.dtype(pages.dtype).name
        where = hopper.multiprocessors(), inputs, devices(), positions.ndim == 3
        return cls(*positions.shape[-2:], dtype, *where, adapters)


@dataclass(frozen=True)
class Path:
    """One way to run a stack of layers.

    - `describes`: by kind of description, the fields that it computes; all others must be at their defaults. Kinds of
      mixing and formats of weights say themselves which paths compute what (`implements`).
    - `processors`: multiprocessors that it needs at once.
    - `fits(decoder, layers, call)`: why these sizes and dtypes don't, or None; `layers` are their weights.
    - `ops(decoder, layers, positions, mixer)`: the steps that `stack.run` takes.
    - `one`: whether it runs a layer by itself.
    - `sums`: whether it sums what several devices compute of a layer.
    - `axes`: whether it takes positions of three axes: its layers mix as `Ops.mix` does.
    - `adapters`: whether its products add what rows' adapters do.
    """

    name: str
    describes: Table
    processors: int
    fits: Callable[[Decoder, Sequence[Weights], Call], str | None]
    ops: Callable[[Decoder, Sequence[Weights], Int[Array, "b t"], Mixer], Ops]
    one: bool = False
    sums: bool = False
    axes: bool = True
    adapters: bool = False

    @property
    def implements(self) -> Table:
        """The fields that it computes, by kind of description."""
        own = {kind: mixing.implements.get(self.name) for kind, mixing in MIXINGS.items()}
        return {**self.describes, **{kind: fields for kind, fields in own.items() if fields is not None}}

    def refuses(self, decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
        """Why this path doesn't run such a call, or None if it does."""
        if call.inputs is not None and not self.one:
            return "a layer by itself"
        if call.axes and not self.axes:
            return "positions of three axes"
        if call.devices > 1 and not self.sums:
            return f"weights divided among {call.devices} devices"
        if self.processors and not call.processors:
            return NO_HOPPER
        if call.processors < self.processors:
            return f"{call.processors} Hopper multiprocessors; {self.processors} are needed"
        if call.adapters and not self.adapters:
            return "rows with adapters"
        return self.lacks(decoder, layers) or self.fits(decoder, layers, call)

    def lacks(self, decoder: Decoder, weights: Any) -> str | None:
        """Name what this path lacks for a decoder, or for the formats of a pytree's weights; None if nothing."""
        if reason := beyond(decoder, self.implements):
            return reason
        found = tuple(each for each in formats(weights) if each.quantised)
        own = {type(each): each.implements[self.name] for each in found if self.name in each.implements}
        reason = beyond(found, own)
        return reason and f"weights in {reason}"
