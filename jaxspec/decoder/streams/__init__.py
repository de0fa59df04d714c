"""The equations with several residual streams, side by side: sub-layers take a gated mean, and add to each stream.

x = x + gate * out(mix(mean(x)))
x = x + gate * feed(mean(x))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxspec.decoder.feed import add_product, mixture, mlp
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import project, valid_count
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.plain import IMPLEMENTS, PLAIN, Plain, products
from jaxspec.decoder.stack import Chosen
from jaxspec.decoder.streams.ngrams import ngrams_of
from jaxspec.models.description import Decoder, Layer, LayerInputs, Mixture, NGrams, Norm, Streams
from jaxspec.models.memory import Recurrence
from jaxspec.parallel.sharding import total

FIRST, SECOND = "attn", "mlp"  # the sub-layers' names in those of their weights


@dataclass(frozen=True, eq=False)
class Parallel(Plain):
    """`Plain` of streams. What a layer with n-grams mixes is the streams after these, and the output's input."""

    count: int = field(default=1, kw_only=True)
    groups: tuple[int, ...] = field(default=(), kw_only=True)  # of the memories of n-grams
    tokens: Int[Array, "b t"] | None = field(default=None, kw_only=True)

    compacts = False

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        known, ngrams = list(decoder.groups(Recurrence)), decoder.ngrams
        groups = tuple(map(known.index, ngrams.memories)) if ngrams else ()
        return cls(positions, mixer, reports=decoder.reports_experts, count=decoder.streams.count, groups=groups)

    def project(self, layer, weights, x, given):
        rows = self.mean(layer, weights, FIRST, x)
        return products(layer, weights, [rows] * len(mixing_of(layer).projections), self.positions)

    def mix(self, layer, weights, i, x, given, cache):
        if layer.ngrams is None:
            return super().mix(layer, weights, i, x, given, cache)
        mixers, streams = tuple(map(self.mixer.group, self.groups)), x.reshape(*x.shape[:2], self.count, -1)
        of = layer, weights, mixers, self.tokens, streams, valid_count(self.positions)
        added, cache = ngrams_of(*of, cache)
        x = x + added.reshape(x.shape)
        mixed, cache = super().mix(layer, weights, i, x, given, cache)
        return (x, mixed), cache

    def finish(self, layer, weights, after, x, mixed):
        x, mixed = mixed if layer.ngrams else (x, mixed)
        return super().finish(layer, weights, after, x, mixed)

    @jax.named_scope("output_projection")
    def add(self, layer, weights, x, mixed):
        out = add_product(None, mixed, weights, "out", valid_count(self.positions))
        return self.injected(layer, weights, FIRST, x, out), None

    def feed(self, layer, weights, after, x, given):
        rows, chosen = self.mean(layer, weights, SECOND, x), [] if self.reports else None
        if isinstance(layer.feed, Mixture):
            out = mixture(layer.feed, weights, None, rows, self.positions, chosen)
        else:
            out = mlp(layer.feed, weights, None, rows, valid_count(self.positions))
        return self.injected(layer, weights, SECOND, x, out), Chosen(*chosen) if chosen else None

    def mean(self, layer: Layer, weights: Weights, name: str, x: Float[Array, "b t c"]) -> Float[Array, "b t d"]:
        """The input of a sub-layer."""
        return gated_mean(weights, f"{name}_", x, self.count, layer.norm, valid_count(self.positions))

    @jax.named_scope("injection")
    def injected(
        self, layer: Layer, weights: Weights, name: str, x: Float[Array, "b t c"], out: Float[Array, "b t d"]
    ) -> Float[Array, "b t c"]:
        """The streams with a sub-layer's output, of which each of several devices has a part of the sum."""
        rows = normed_streams(x, weights[f"{name}_norm"], self.count, layer.norm).reshape(x.shape)
        gates = project(rows, weights[f"{name}_inject"], valid_count(self.positions))
        gates = 2 * jax.nn.sigmoid(gates / self.count)
        return x + (gates[..., None] * total(out)[:, :, None]).reshape(x.shape)


def normed_streams(
    x: Float[Array, "b t c"], weight: Float[Array, " c"], count: int, norm: Norm
) -> Float[Array, "b t s d"]:
    """Each stream with a norm and a weight of its own."""
    return normed(x.reshape(*x.shape[:-1], count, -1), weight.reshape(count, -1), norm)


@jax.named_scope("gated_mean")
def gated_mean(
    weights: Weights, prefix: str, x: Float[Array, "b t c"], count: int, norm: Norm, valid: Int[Array, "1"]
) -> Float[Array, "b t d"]:
    """The mean of the normed streams, each number times a gate of its own."""
    streams = normed_streams(x, weights[f"{prefix}norm"], count, norm)
    down = project(streams.reshape(x.shape), weights[f"{prefix}gates_in"], valid)
    gates = jax.nn.sigmoid(project(jax.nn.silu(down / count), weights[f"{prefix}gates_out"], valid))
    return (gates.reshape(streams.shape) * streams).mean(axis=2)


def as_one(
    decoder: Decoder,
    params: dict[str, Any],
    outputs: Sequence[Float[Array, "b t c"]],
    positions: Int[Array, "b t"],
    capture: tuple[int, ...],
) -> tuple[Float[Array, "b t d"], list[Array]]:
    """The row that the head takes, and those that stand for the streams behind layers that are captured: what the next
    layer would mix of them, or behind the last what the head takes."""
    of = decoder.streams.count, decoder.norm, valid_count(positions)
    last, out = gated_mean(params["streams"], "", outputs[-1], *of), list(outputs)
    for i in set(capture) & set(range(len(out))):
        behind = i + 1 < len(out)
        out[i] = gated_mean(params["layers"][i + 1], f"{FIRST}_", out[i], *of) if behind else last
    return last, out


STREAMS = dataclasses.replace(
    PLAIN,
    describes={
        **{kind: fields for kind, fields in IMPLEMENTS.items() if kind is not LayerInputs},
        Decoder: IMPLEMENTS[Decoder] - {"layer_inputs"} | {"streams"},
        Layer: frozenset({"mixing", "feed", "norm", "pre_norm", "ngrams"}),
        Streams: frozenset(Streams.__dataclass_fields__),
        NGrams: frozenset(NGrams.__dataclass_fields__),
    },
    ops=Parallel.of,
)
