"""Layers at few rows with each norm in one kernel with the products after it (`pallas.dense.few_rows.normed`).

These are up to eight rows, and up to 32 with FP8 weights.

The output projection is one kernel with the residual stream, and so is the second product of an MLP in FP8, whose first
one is one with its gate. Mixing stays the plain layer's, so linear attention and gated attention run so. Each request's
rows are padded from the embedding to the last layer, because XLA would put each cut and each padding into a kernel of
its own, were it not part of one that is there anyway: so linear attention's result comes with padding rows, which hold
anything, and nothing that follows looks from one row at another. What mixes tokens is given the valid rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Int

from jaxspec.decoder import plain
from jaxspec.decoder.few_rows import FEW_ROWS
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.mixture_rows import add, given_first, given_to, mixture, operand, quantised_refused, stored_as
from jaxspec.decoder.padding import flat, padded, untimed, valid_rows
from jaxspec.decoder.path import MIXTURE, SIGMOID_SCORES, Call, Path, implementing
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import (
    Absent,
    ClampedSwiglu,
    Decoder,
    Layer,
    Mixture,
    Mlp,
    Norm,
    SigmoidScores,
    beyond,
)
from jaxspec.models.positions import ScaleByPosition
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas.dense import few_rows

IMPLEMENTS = implementing({
    Absent: set(), Mlp: {"bias", "activation", "gated"}, Norm: {"centred"}, Rope: {"columns", "interleaved"},
    ScaleByPosition: {"beta", "period", "offset"}, Mixture: {*MIXTURE, "shared_gated", "scores", "activation", "gated"},
    ClampedSwiglu: {"alpha", "limit"}, SigmoidScores: SIGMOID_SCORES,
})  # fmt: skip


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Refuse a call, as `Path.fits`."""
    lacking = any(beyond(layer.mixing, FEW_ROWS.implements) for layer in decoder.layers if layer.mixing.memory)
    if not lacking and not all(layer.norm.centred for layer in decoder.layers):
        return "norms that aren't zero-centred"  # not measured where `few_rows` has all of the mixing
    if call.inputs is not None and len(call.inputs) != 1:
        return "inputs that aren't one residual stream"
    rows = call.requests * padded(call.requests, call.rows)
    if reason := untimed(rows, call.devices):
        return reason
    for layer, weights in zip(decoder.layers, layers, strict=True):
        dtype, quantised = weights[_first_norm(layer)].dtype, any(map(_quantised, weights.values()))
        for names in _together(layer, weights):
            columns, of = [weights[name].outputs for name in names], stored_as(weights[names[0]])
            if not quantised and (odd := max(columns)) % few_rows.TILE:
                return f"{odd} columns of unquantised weights"  # took longer than plain layers, docs/experiments.md
            scaled = _takes_scaled(layer, quantised, decoder.width)
            if reason := few_rows.normed_supported(rows, decoder.width, columns, dtype, **of, scaled=scaled):
                return reason
        reason = _sum_refused(weights["out"], rows, dtype) if "out" in weights else None
        if quantised and not isinstance(layer.feed, Mixture | Absent):
            reason = reason or _mlp_refused(layer, weights, rows)
        if reason := reason or _scales_refused(weights):
            return reason
    return None


def _first_norm(layer: Layer) -> str:
    """Name the norm that a layer begins with."""
    return "mlp_norm" if layer.mixing.memory is None else "attn_norm"


def _takes_scaled(layer: Layer, quantised: bool, width: int) -> bool:
    """Whether a layer's products take rows this wide as `few_rows.Scaled` whatever comes before them. With centred
    norms they needn't: the kernel norms what comes unscaled."""
    return (quantised or not layer.norm.centred) and width > few_rows.NARROW


def _quantised(weight: Any) -> bool:
    return isinstance(weight, Weight) and weight.quantised


def _together(layer: Layer, weights: Weights) -> list[tuple[str, ...]]:
    """The weights that make of a layer's normed rows what it mixes; those of one kernel together."""
    names = () if layer.mixing.memory is None else mixing_of(layer).projections
    apart = not names or any(_quantised(weights[name]) for name in names)
    return [(name,) for name in names] if apart else [names]


def _sum_refused(weight: Weight, rows: int, dtype: Any) -> str | None:
    """Why the kernel of a product and the residual stream can't take so many rows of this weight, or None."""
    shape = weight.inputs, weight.outputs
    return few_rows.product_supported(rows, [weight.inputs], shape, dtype, **stored_as(weight))


def _mlp_refused(layer: Layer, weights: Weights, rows: int) -> str | None:
    """Why an MLP can't be two kernels, or None if it can."""
    if not layer.feed.gated:
        return "an MLP without a gate"
    m, d, gate_up = layer.feed, weights["down"].outputs, weights["gate_up"]
    if not _quantised(gate_up):
        return "an unquantised MLP"  # took longer than the plain layer's, docs/experiments.md
    if m.bias or m.activation != "silu":
        return "an MLP with biases" if m.bias else f"an MLP with {m.activation}"
    if d <= few_rows.NARROW or gate_up.layout.interleave != HALF:
        return f"an MLP {m.width} wide, of rows of {d}"
    reason = few_rows.normed_supported(rows, d, [gate_up.outputs], weights["attn_norm"].dtype, **stored_as(gate_up))
    return reason or _sum_refused(weights["down"], rows, weights["attn_norm"].dtype)


def _scales_refused(weights: Weights) -> str | None:
    """Why the kernels can't read the scales of a layer's dense weights, or None if they can."""
    names = "qkv", "qkvz", "latents", "out", "gate_up", "down"
    dense = [weights[name] for name in names if name in weights]
    return next(filter(None, (quantised_refused(weight) for weight in dense if _quantised(weight))), None)


@dataclass(frozen=True, eq=False)
class FusedNorms(Ops):
    """Flat rows, each request's padded. Given to a layer are rows for its first norm."""

    valid: tuple[Int[Array, "1 r"], int]  # which rows a mixture of experts is for, see `valid_rows`

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        return cls(positions, mixer, valid_rows(positions))

    def first(self, layer, weights, x, inputs):
        x, scale = flat(x), weights[_first_norm(layer)]
        if inputs is None and (isinstance(layer.feed, Mixture | Absent) or not _mlp_refused(layer, weights, len(x))):
            return x, given_first(layer, weights, x, scale)
        return x, (x, scale)

    def after(self, decoder, layers):
        """The next layer's norm. The last layer's result is normed as the first layer's input, which nobody reads: so
        layers that are alike share a trace."""
        each = list(zip(decoder.layers, layers, strict=True))
        return [{"attn_norm": weights[_first_norm(layer)]} for layer, weights in (*each[1:], each[0])]

    def project(self, layer, weights, x, given):
        """The products of `ba`, which go into exponents, are float32."""
        norm, made, mixing = {"eps": layer.norm.eps, "centred": layer.norm.centred}, [], mixing_of(layer)
        quantised = any(_quantised(weights[name]) for name in mixing.projections)
        if _takes_scaled(layer, quantised, x.shape[1]) and not isinstance(given, few_rows.Scaled):
            given = few_rows.scale_rows(*given, layer.norm.centred)
        for names in _together(layer, weights):
            dtypes = tuple("float32" if name in mixing.exact else str(given[0].dtype) for name in names)
            own = given_to(weights[names[0]], given, layer.norm.centred)
            made += few_rows.normed(*own, [operand(weights[name]) for name in names], dtypes=dtypes, **norm)
        return [self.batched(out)[:, : None if mixing.padding else self.positions.shape[1]] for out in made]

    def mix(self, layer, weights, i, x, given, cache):
        mixed, cache = super().mix(layer, weights, i, x, given, cache)
        return flat(mixed), cache

    def finish(self, layer, weights, after, x, mixed):
        if isinstance(layer.feed, Absent):
            return add(x, mixed, weights["out"], after and after["attn_norm"], layer.norm.centred)
        return super().finish(layer, weights, after, x, mixed)

    def add(self, layer, weights, x, mixed):
        mixes = isinstance(layer.feed, Mixture)
        if not mixes and _mlp_refused(layer, weights, len(x)):
            return add(x, mixed, weights["out"], None)
        follows = weights["router" if mixes else "gate_up"]
        return add(x, mixed, weights["out"], weights["mlp_norm"], layer.norm.centred, prefetch=follows)

    def feed(self, layer, weights, after, x, given):
        scale, norm = None if after is None else after["attn_norm"], layer.norm
        if isinstance(layer.feed, Mixture):
            return mixture(layer, weights, x, given, *self.valid, scale)
        if _mlp_refused(layer, weights, len(x)):
            x = plain.feed(layer, weights, self.batched(x), self.positions).reshape(x.shape)
            return x, (x, scale)
        given = given_to(weights["gate_up"], given, norm.centred)
        hidden = few_rows.gated(*given, operand(weights["gate_up"]), eps=norm.eps)
        return add(x, hidden, weights["down"], scale, norm.centred)


FUSED_NORMS = Path("fused_norms", IMPLEMENTS, 1, fits, FusedNorms.of, one=True, sums=True)
