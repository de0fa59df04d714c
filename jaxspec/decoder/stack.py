"""The loop over a decoder's layers: `run`, and `run_one` for a layer by itself.

    x = x + out(mix(norm(x)))
    x = x + feed(norm(x))

Its steps are a path's `Ops`. Paths differ in the steps that share a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import row_of
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.models.description import Absent, Decoder, Layer

Inputs = Sequence[tuple[Float[Array, "b _ _"], Float[Array, " _"] | None]]  # rows, and the scale of their norm if any


@dataclass(frozen=True, eq=False)
class Ops:
    """The steps of a layer, as one path computes them, of rows at `positions`.

    The residual stream `x` stands as the path likes its rows. Beside it goes `given`: what the next step takes of a
    step before it, for example rows that are normed already. Steps that share a kernel override `mix` or `finish`.
    """

    positions: Int[Array, "b t"]
    mixer: Mixer
    axes: Int[Array, "3 b t"] | None = field(default=None, kw_only=True)  # positions by axis, where they have three

    compacts: ClassVar[bool] = False  # whether requested rows alone go on after the last layer's mixing

    @classmethod
    def of(cls, decoder: Decoder, layers: Sequence[Weights], positions: Int[Array, "b t"], mixer: Mixer) -> Ops:
        """The steps for such a call, with what all layers share, as a rope table."""
        return cls(positions, mixer)

    def first(self, layer: Layer, weights: Weights, x: Float[Array, "b r d"], inputs: Inputs | None) -> tuple[Any, Any]:
        """The residual stream, and what is given to the first layer. `inputs`: as of `run_one`; None: there is `x`."""
        raise NotImplementedError

    def after(self, decoder: Decoder, layers: Sequence[Weights]) -> Sequence[Any]:
        """For each layer, what `feed` or `finish` takes of the next one's weights."""
        return [None] * len(layers)

    def project(self, layer: Layer, weights: Weights, x: Any, given: Any) -> list[Array]:
        """The products that the layer mixes."""
        raise NotImplementedError

    def add(self, layer: Layer, weights: Weights, x: Any, mixed: Any) -> tuple[Any, Any]:
        """x + out(mixed), and what is given to `feed`."""
        raise NotImplementedError

    def feed(self, layer: Layer, weights: Weights, after: Any, x: Any, given: Any) -> tuple[Any, Any]:
        """x + feed(norm(x)), and what is given to the next layer."""
        raise NotImplementedError

    def batched(self, x: Any) -> Float[Array, "b r d"]:
        """The residual stream by request, whose rows from t on are padding. It may stand flat, without that axis."""
        return x.reshape(len(self.positions), -1, x.shape[-1])

    def mix(self, layer: Layer, weights: Weights, i: Int[Array, ""], x: Any, given: Any, cache: Any) -> tuple[Any, Any]:
        """From what is given to the layer to the input of its output projection, and the cache."""
        made, table = self.project(layer, weights, x, given), self.table_by_axis(layer)
        of = layer, weights, i, made, self.positions, self.mixer, cache, self.batched(x).dtype
        return mixing_of(layer).mix(*of, **({} if table is None else {"table": table}))

    def table_by_axis(self, layer: Layer) -> Any:
        """The layer's rope table where positions have three axes; None: its mixing makes its own, or has none."""
        by_axis = mixing_of(layer).by_axis
        return None if self.axes is None or by_axis is None else by_axis(self.axes, layer.mixing)

    def finish(self, layer: Layer, weights: Weights, after: Any, x: Any, mixed: Any) -> tuple[Any, Any]:
        """The layer after its mixing: the residual stream, and what is given to the next layer."""
        added = (x, mixed) if layer.mixing.memory is None else self.add(layer, weights, x, mixed)
        return added if isinstance(layer.feed, Absent) else self.feed(layer, weights, after, *added)


@flax.struct.dataclass
class Chosen:
    """Given to nobody: the experts that a layer's mixture chose."""

    experts: Int[Array, "b t k"]


class Stack(NamedTuple):
    """Results of a stack of layers: the residual stream after each, without padding rows, and the cache.

    Where one row of each sequence was requested, the last output may have that row alone. `experts`: those that each
    mixture chose, if the decoder reports them.
    """

    outputs: list[Float[Array, "b _ d"]]
    cache: Any
    experts: Int[Array, "b t l k"] | None


def run(
    ops: Ops,
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    cache: Any,
    requested: Int[Array, " b"] | None = None,
    added: Sequence[Float[Array, "b t d"]] = (),
) -> Stack:
    """All layers, one after the other. `requested`: as in `forward.forward`. `added`: to the residual stream behind
    each of the first layers, of which none is the last."""
    t, outputs, experts = x.shape[1], [], []

    # One trace and one lowering of each half for all layers alike: the index is data.
    @partial(jax.jit, static_argnums=(0, 1))
    def mix(layer, group, *of):
        return mixed_of(ops, layer, group, *of)

    @partial(jax.jit, static_argnums=0)
    def finish(layer, *of):
        return finished(ops, layer, *of)

    x, given = ops.first(decoder.layers[0], layers[0], x, None)
    each = zip(decoder.layers, layers, decoder.memory_index, ops.after(decoder, layers), strict=True)
    for layer, weights, (group, i), after in each:
        row = requested if ops.compacts and weights is layers[-1] else None
        mixed, cache = mix(layer, group, weights, jnp.int32(i), x, given, cache, row)
        x, given = finish(layer, weights, after, x, mixed, row)
        outputs.append(ops.batched(x)[:, :t])
        if isinstance(given, Chosen):
            experts.append(given.experts)
            given = None
        if (done := len(outputs)) <= len(added):
            outputs[-1] = outputs[-1] + added[done - 1]
            x, given = ops.first(decoder.layers[done], layers[done], outputs[-1], None)
    return Stack(outputs, cache, jnp.stack(experts, axis=2) if experts else None)


def run_one(
    ops: Ops,
    decoder: Decoder,
    weights: Weights,
    inputs: Inputs | None,
    x: Float[Array, "b r d"],
    cache: Any,
    requested: Int[Array, " b"] | None,
) -> tuple[Float[Array, "b _ d"], Any]:
    """The layer of a decoder of one, as `forward.run_layer`. A path that keeps padding rows gives them too: the next
    call takes them as they are."""
    layer, row = decoder.layers[0], requested if ops.compacts else None
    x, given = ops.first(layer, weights, x, inputs)
    mixed, cache = mixed_of(ops, layer, 0, weights, jnp.int32(0), x, given, cache, row)
    x, _ = finished(ops, layer, weights, None, x, mixed, row)
    return ops.batched(x), cache


def mixed_of(
    ops: Ops, layer: Layer, group: int, weights: Weights, i: Int[Array, ""], x: Any, given: Any, cache: Any, row: Any
) -> tuple[Any, Any]:
    """Mix in the i-th layer of this group, as `Ops.mix`.

    `row`: i32[b], of each sequence the one row that goes on after the mixing, -1 where nobody reads any; None: all.
    A layer that mixes nothing passes on what it is given.
    """
    if layer.mixing.memory is None:
        return given, cache
    mixer = ops.mixer.group(group) if group else ops.mixer
    ops = dataclasses.replace(ops, mixer=mixer if row is None else mixer.only(row >= 0))
    return ops.mix(layer, weights, i, x, given, cache)


def finished(
    ops: Ops, layer: Layer, weights: Weights, after: Any, x: Any, mixed: Any, row: Int[Array, " b"] | None
) -> tuple[Any, Any]:
    """Finish these rows, as `Ops.finish`."""
    if row is not None:
        x, mixed, after = (None if each is None else row_of(each, row) for each in (x, mixed, after))
        ops = dataclasses.replace(ops, positions=row_of(ops.positions, row))
    return ops.finish(layer, weights, after, x, mixed)
