"""Layers at few rows with each norm in one kernel with the products after it (`pallas.few_rows.normed`).

These are up to eight rows, and up to 32 with FP8 weights.

The output projection is one kernel with the residual stream, and so is the second product of an MLP in FP8, whose first
one is one with its gate. Mixing stays the plain layer's, so linear attention and gated attention run so. Each request's
rows are padded from the embedding to the last layer, because XLA would put each cut and each padding into a kernel of
its own, were it not part of one that is there anyway: so linear attention's result comes with padding rows, which hold
anything, and nothing that follows looks from one row at another. What mixes tokens is given the valid rows alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.layer import feed, mix, projections
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixture_rows import Given, add, given_first, mixture, operand
from jaxspec.decoder.padding import flat, pad, padded, untimed, valid_rows
from jaxspec.decoder.path import Call, Path, Stack, Weights, numbered
from jaxspec.decoder.spec import ROPE_SCALINGS, Attention, Decoder, DeltaRule, Layer, Mixture, Mlp, Norm, Rope
from jaxspec.pallas import few_rows
from jaxspec.weights import HALF, Fp8, Unquantised, Weight

IMPLEMENTS = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale"}),
    Layer: frozenset({"mixing", "feed", "norm"}),
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "gated", "window", "scale"}),
    DeltaRule: frozenset({"key_heads", "value_heads", "key_dim", "value_dim", "taps"}),
    Mlp: frozenset({"width", "bias", "activation"}),
    Mixture: frozenset({"experts", "per_token", "width", "renormalised", "shared"}),
    Norm: frozenset({"eps", "centred"}),
    Rope: frozenset({"theta", "scaling", "columns"}),
    **ROPE_SCALINGS,
    Unquantised: frozenset(),
    Fp8: frozenset({"block"}),
}


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """As `Path.fits`."""
    if not all(layer.norm.centred for layer in decoder.layers):
        return "norms that aren't zero-centred"  # not measured
    if call.inputs is not None and len(call.inputs) != 1:
        return "inputs that aren't one residual stream"
    rows = call.requests * padded(call.requests, call.rows)
    if reason := untimed(rows, call.devices):
        return reason
    for layer, weights in zip(decoder.layers, layers, strict=True):
        dtype, quantised = weights["attn_norm"].dtype, any(map(_in_fp8, weights.values()))
        for names in _together(layer, weights):
            columns, fp8 = [weights[name].outputs for name in names], _in_fp8(weights[names[0]])
            if not quantised and (odd := [each for each in columns if each % few_rows.TILE]):
                return f"{odd[0]} columns of unquantised weights"  # took longer than plain layers, docs/experiments.md
            scaled = quantised and decoder.width > few_rows.NARROW
            if reason := few_rows.normed_supported(rows, decoder.width, columns, dtype, fp8=fp8, scaled=scaled):
                return reason
        reason = _sum_refused(weights["out"], rows, dtype)
        if quantised and not isinstance(layer.feed, Mixture):
            reason = reason or _mlp_refused(layer, weights, rows)
        if reason := reason or _scales_refused(weights):
            return reason
    return None


def _in_fp8(weight: Any) -> bool:
    return isinstance(weight, Weight) and isinstance(weight.format, Fp8)


def _together(layer: Layer, weights: Weights) -> list[tuple[str, ...]]:
    """The weights that make of a layer's normed rows what it mixes; those of one kernel together."""
    names = projections(layer)
    return [(name,) for name in names] if any(_in_fp8(weights[name]) for name in names) else [names]


def _sum_refused(weight: Weight, rows: int, dtype: Any) -> str | None:
    """Why the kernel of a product and the residual stream can't take so many rows of this weight, or None."""
    shape = weight.inputs, weight.outputs
    return few_rows.product_supported(rows, [weight.inputs], shape, dtype, _in_fp8(weight))


def _mlp_refused(layer: Layer, weights: Weights, rows: int) -> str | None:
    """Why an MLP can't be two kernels, or None if it can."""
    m, d, gate_up = layer.feed, weights["down"].outputs, weights["gate_up"]
    if not _in_fp8(gate_up):
        return "an unquantised MLP"  # took longer than the plain layer's, docs/experiments.md
    if m.bias or m.activation != "silu":
        return "an MLP with biases" if m.bias else f"an MLP with {m.activation}"
    if d <= few_rows.NARROW or gate_up.layout.interleave != HALF:
        return f"an MLP {m.width} wide, of rows of {d}"
    reason = few_rows.normed_supported(rows, d, [gate_up.outputs], weights["attn_norm"].dtype, fp8=True)
    return reason or _sum_refused(weights["down"], rows, weights["attn_norm"].dtype)


def _scales_refused(weights: Weights) -> str | None:
    """Why the kernels can't read the scales of a layer's dense weights, or None if they can."""
    dense = [weights[name] for name in ("qkv", "qkvz", "out", "gate_up", "down") if name in weights]
    of = [(w.format.block, w.outputs, w.inputs, w.outputs // len(w.scales)) for w in dense if _in_fp8(w)]
    return next(filter(None, itertools.starmap(few_rows.fp8_supported, of)), None)


def run(
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    requested: Int[Array, " b"] | None,
) -> Stack:
    """All rows go through the last layer, too."""
    x, t, outputs = pad(x), positions.shape[1], []

    @partial(jax.jit, static_argnums=0)  # one trace and one lowering for all layers alike: the index is data
    def one(layer, weights, after, i, given, x, cache):
        return run_padded(layer, weights, i, given, x, positions, mixer, cache, after)

    given, first = (flat_rows(x), layers[0]["attn_norm"]), decoder.layers[0]
    if isinstance(first.feed, Mixture) or not _mlp_refused(first, layers[0], len(given[0])):
        given = given_first(first, layers[0], *given)
    nexts = [each["attn_norm"] for each in (*layers[1:], layers[0])]  # after the last, the next round's first
    for (layer, weights, i), after in zip(numbered(decoder, layers), nexts, strict=True):
        x, given, cache = one(layer, weights, after, i, given, x, cache)
        outputs.append(x[:, :t])
    return Stack(outputs, cache)


def run_one(
    decoder: Decoder,
    weights: Weights,
    inputs: Sequence[tuple[Float[Array, "b _ _"], Float[Array, " _"] | None]],
    x: Float[Array, "b r d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    requested: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b _ d"], Any]:
    """The layer of a decoder of one. What it gives keeps its padding rows: the next call takes them as they are."""
    x = pad(x)
    given = flat_rows(x), weights["attn_norm"]
    x, _, cache = run_padded(decoder.layers[0], weights, jnp.int32(0), given, x, positions, mixer, cache)
    return x, cache


def flat_rows(x: Float[Array, "b r d"]) -> Float[Array, "n d"]:
    return x.reshape(-1, x.shape[-1])


def run_padded(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    given: Given,
    x: Float[Array, "b p d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    after: Float[Array, " d"] | None = None,
) -> tuple[Float[Array, "b p d"], Given, Any]:
    """A layer over padded rows: the residual stream after it, what is given to the norm that follows, of the scale
    `after`, and the cache. `given`: to this layer's first norm."""
    rows, t, norm = flat_rows(x), positions.shape[1], layer.norm
    made = [out.reshape(*x.shape[:2], -1) for out in _projected(layer, weights, given)]
    if isinstance(layer.mixing, Attention):
        made = [out[:, :t] for out in made]
    mixed, cache = mix(layer, weights, i, made, positions, mixer, cache)
    mixed = flat(mixed)
    if isinstance(layer.feed, Mixture):
        out, given = mixture(layer, weights, rows, mixed, *valid_rows(positions), after)
        return out.reshape(x.shape), given, cache
    if _mlp_refused(layer, weights, len(rows)):
        rows, _ = add(rows, mixed, weights["out"], None)
        x = feed(layer, weights, rows.reshape(x.shape), positions)
        return x, (flat_rows(x), after), cache
    rows, given = add(rows, mixed, weights["out"], weights["mlp_norm"], norm.centred, prefetch=weights["gate_up"])
    hidden = few_rows.gated(*given, operand(weights["gate_up"]), eps=norm.eps)
    rows, given = add(rows, hidden, weights["down"], after, norm.centred)
    return rows.reshape(x.shape), given, cache


def _projected(layer: Layer, weights: Weights, given: Given) -> list[Float[Array, "n _"]]:
    """What a layer mixes, of its normed rows; the products of `ba`, which go into exponents, in float32."""
    norm, made, together = {"eps": layer.norm.eps, "centred": layer.norm.centred}, [], _together(layer, weights)
    fp8, wide = any(_in_fp8(weights[name]) for name in itertools.chain(*together)), given[0].shape[1] > few_rows.NARROW
    if fp8 and wide and not isinstance(given, few_rows.Scaled):
        given = few_rows.scale_rows(*given, layer.norm.centred)
    for names in together:
        dtypes = tuple("float32" if name == "ba" else str(given[0].dtype) for name in names)
        made += few_rows.normed(*given, [operand(weights[name]) for name in names], dtypes=dtypes, **norm)
    return made


FUSED_NORMS = Path("fused_norms", IMPLEMENTS, 1, fits, run, run_one, sums=True)
