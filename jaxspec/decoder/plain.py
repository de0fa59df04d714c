"""Layers one after the other, each matmul by itself: every description runs so, on any device.

A layer's weights are a dict of `Weight`s and arrays; q, k, v are one matmul, gate and up another: fewer, larger reads
of weights. Layers with post norms add norm(out(...)) and norm(feed(...)) instead; without pre norms, mix and feed x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import by_request
from jaxspec.decoder.feed import add_product, mixture, mlp
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import ACTIVATIONS, Quantised, Weighted, exact, normed_for, project, valid_count
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.path import MIXTURE, SIGMOID_SCORES, Path, implementing
from jaxspec.decoder.stack import Chosen, Ops
from jaxspec.models.description import (
    Absent,
    ClampedSwiglu,
    Decoder,
    Layer,
    LayerInputs,
    Mixture,
    Mlp,
    Norm,
    SigmoidScores,
)
from jaxspec.models.positions import Chunks, ScaleByPosition
from jaxspec.models.rope_scaling import Rope
from jaxspec.parallel.peers import summed
from jaxspec.parallel.sharding import devices, embed, total

IMPLEMENTS = implementing({
    Decoder: {"reports_experts", "layer_inputs"}, Absent: set(), Norm: {"centred", "mean"},
    Layer: {"pre_norm", "post_norm", "residual_scale", "input_width", "output_scaled", "parallel"},
    LayerInputs: {"width", "vocab_size", "padding"},
    Mlp: {"bias", "activation", "gated"},
    Rope: {"columns", "interleaved"}, ScaleByPosition: {"beta", "period", "offset"}, Chunks: {"size"},
    Mixture: {*MIXTURE, "shared_gated", "scores", "bias", "router_bias", "activation", "groups", "gated", "latent",
              "beside"},
    ClampedSwiglu: {"alpha", "limit"}, SigmoidScores: SIGMOID_SCORES,
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Plain(Ops):
    """The equations. What is given to a layer is None, or rows that it mixes in place of its normed residual stream."""

    reports: bool = field(default=False, kw_only=True)  # the experts that mixtures choose
    inputs: Float[Array, "b t l w"] | None = field(default=None, kw_only=True)  # of each layer

    compacts = True

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        return cls(positions, mixer, reports=decoder.reports_experts)

    def first(self, layer, weights, x, inputs):
        if inputs is None:
            return x, None
        t = self.positions.shape[1]
        rows = [rows[:, :t] if scale is None else normed(rows[:, :t], scale, layer.norm) for rows, scale in inputs]
        return x[:, :t], rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)

    def after(self, decoder, layers):
        """The layers' own inputs, if they have some."""
        return super().after(decoder, layers) if self.inputs is None else list(jnp.moveaxis(self.inputs, 2, 0))

    def project(self, layer, weights, x, given):
        mixing = mixing_of(layer)
        if given is None and layer.pre_norm:
            readers = [[] if name in mixing.exact else [weights[name]] for name in mixing.projections]
            rows = [normed_for(each, x, weights["attn_norm"], layer.norm) for each in readers]
        else:
            rows = [x if given is None else given] * len(mixing.projections)
        return products(layer, weights, rows, self.positions)

    def mix(self, layer, weights, i, x, given, cache):
        if (devices := by_request_of(layer)) == 1:
            return super().mix(layer, weights, i, x, given, cache)
        some = lambda ops, x, given, cache: Ops.mix(ops, layer, weights, i, x, given, cache)  # noqa: E731
        return by_request.mix(self, some, weights, x, given, cache, devices)

    @jax.named_scope("output_projection")
    def add(self, layer, weights, x, mixed):
        valid = valid_count(self.positions)
        projected = lambda x: add_product(x, mixed, weights, "out", valid)  # noqa: E731
        if by_request_of(layer) > 1:
            projected = lambda _: mixed  # noqa: E731
        return added(layer, weights, "attn_post_norm", x, projected), x if layer.parallel else None

    def finish(self, layer, weights, after, x, mixed):
        x, given = super().finish(layer, weights, after, x, mixed)
        if layer.input_width:
            x = with_input(layer, weights, x, after, self.positions)
        return x * weights["layer_scale"] if layer.output_scaled else x, given

    def feed(self, layer, weights, after, x, given):
        if not (self.reports and isinstance(layer.feed, Mixture)):
            return feed(layer, weights, x, self.positions, beside=given), None
        chosen: list[Array] = []
        x = feed(layer, weights, x, self.positions, chosen, given)
        return x, Chosen(*chosen)


def by_request_of(layer: Layer) -> int:
    """How many devices the layer's requests are divided among."""
    return getattr(layer.mixing, "by_request", 1)


@jax.named_scope("layer_input")
def with_input(
    layer: Layer, weights: Weights, x: Float[Array, "b t d"], own: Float[Array, "b t w"], positions: Int[Array, "b t"]
) -> Float[Array, "b t d"]:
    """The residual stream after a layer's own input is added."""
    valid = valid_count(positions)
    gated = ACTIVATIONS[layer.feed.activation](project(x, weights["input_gate"], valid)) * own
    return x + normed(project(gated, weights["input_out"], valid), weights["input_norm"], layer.norm)


def layer_inputs(
    decoder: Decoder, params: dict[str, Any], tokens: Int[Array, "b t"], x: Float[Array, "b t d"], positions: Array
) -> Float[Array, "b t l w"]:
    """All layers' own inputs, of the tokens and of their embeddings `x`; see `LayerInputs`."""
    width, shape = decoder.layer_inputs.width, (*tokens.shape, len(decoder.layers), -1)
    number = partial(jnp.asarray, dtype=x.dtype)
    projected = project(x, params["layer_projection"], valid_count(positions)) * number(x.shape[-1] ** -0.5)
    projected = normed(projected.reshape(shape), params["layer_projection_norm"], decoder.norm)
    looked_up = embed(params["layer_embed"], tokens) * number(width**0.5)
    return (projected + looked_up.reshape(shape)) * number(2**-0.5)


@jax.named_scope("projections")
def products(
    layer: Layer,
    weights: Weights,
    rows: Sequence[Float[Array, "b t w"] | Quantised | Weighted],
    positions: Int[Array, "b t"],
) -> list[Array]:
    """The products that the layer mixes, each of its own normed rows."""
    valid, mixing = valid_count(positions), mixing_of(layer)
    return [
        exact(own, weights[name]) if name in mixing.exact else project(own, weights[name], valid)
        for own, name in zip(rows, mixing.projections, strict=True)
    ]


def added(
    layer: Layer, weights: Weights, name: str, x: Float[Array, "b t d"], sub: Callable[[Array | None], Array]
) -> Float[Array, "b t d"]:
    """The residual stream x after a sub-layer. `sub(x)` adds to x, `sub(None)` to nothing.

    Of weights that are divided among devices, each device has a part of the sum.
    """
    changed = layer.post_norm or layer.residual_scale != 1
    if devices() == 1 and not changed:
        return sub(x)
    part = sub(None)
    if not changed:
        return summed(part.reshape(-1, part.shape[-1]), x.reshape(-1, x.shape[-1])).reshape(x.shape)
    whole = total(part)
    if layer.post_norm:
        whole = normed(whole, weights[name], layer.norm)
    if layer.residual_scale != 1:
        whole = (whole.astype(jnp.float32) * layer.residual_scale).astype(x.dtype)
    return x + whole


def feed(
    layer: Layer,
    weights: Weights,
    x: Float[Array, "b t d"],
    positions: Int[Array, "b _"],
    report: list[Array] | None = None,
    beside: Float[Array, "b t d"] | None = None,
) -> Float[Array, "b t d"]:
    """x + feed(norm(x)). Padding, at negative positions, is no row of an MLP and chooses no expert. `report`: as in
    `mixture`. `beside`: in a parallel layer, the residual stream before the mixing, which is normed for both."""
    if isinstance(layer.feed, Mixture) and layer.feed.beside:
        return x + normed(side_by_side(layer, weights, x, positions, report), weights["mlp_post_norm"], layer.norm)
    readers = [] if isinstance(layer.feed, Mixture) else [weights["gate_up" if layer.feed.gated else "up"]]
    rows, name = (x, "mlp_norm") if beside is None else (beside, "attn_norm")
    rows = normed_for(readers, rows, weights[name], layer.norm) if layer.pre_norm else rows
    if isinstance(layer.feed, Mixture):
        mixed = lambda x: mixture(layer.feed, weights, x, rows, positions, report)  # noqa: E731
        return added(layer, weights, "mlp_post_norm", x, mixed)
    valid = valid_count(positions)
    return added(layer, weights, "mlp_post_norm", x, lambda x: mlp(layer.feed, weights, x, rows, valid))


def side_by_side(
    layer: Layer, weights: Weights, x: Float[Array, "b t d"], positions: Int[Array, "b _"], report: list[Array] | None
) -> Float[Array, "b t d"]:
    """norm(mlp(norm(x))) + norm(experts(norm(x))), each with norms of its own; see `Mixture.beside`. Each device has
    all of the sum."""
    m, norm = layer.feed, layer.norm
    dense = normed_for([weights["gate_up"]], x, weights["mlp_norm"], norm)
    dense = total(mlp(m.beside, weights, None, dense, valid_count(positions)))
    routed = normed(x, weights["router_norm"], norm) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    rows = normed(x, weights["experts_norm"], norm)
    mixed = total(mixture(m, weights, None, rows, positions, report, routed))
    return normed(dense, weights["mlp_own_norm"], norm) + normed(mixed, weights["experts_own_norm"], norm)


PLAIN = Path("plain", IMPLEMENTS, 0, lambda *_: None, Plain.of, one=True, sums=True, adapters=True)
