"""Layers at up to eight rows with each norm in one kernel with the products after it (`pallas.few_rows.normed`).

The output projection is one kernel with the residual stream. Mixing stays the plain layer's, so linear attention and
gated attention run so. Each request's rows are padded from the embedding to the last layer, because XLA would put each
cut and each padding into a kernel of its own, were it not part of one that is there anyway: so linear attention's
result comes with padding rows, which hold anything, and nothing that follows looks from one row at another. What mixes
tokens is given the valid rows alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.layer import feed, mix, projections
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixture_rows import Given, given_first, mixture
from jaxspec.decoder.padding import flat, pad, padded, valid_rows
from jaxspec.decoder.path import Call, Path, Stack, Weights
from jaxspec.decoder.spec import ROPE_SCALINGS, Attention, Decoder, DeltaRule, Layer, Mixture, Mlp, Norm, Rope
from jaxspec.pallas import few_rows
from jaxspec.weights import Unquantised

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
}


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    if not all(layer.norm.centred for layer in decoder.layers):
        return "norms that aren't zero-centred"  # not measured
    if call.inputs is not None and len(call.inputs) != 1:
        return "inputs that aren't one residual stream"
    rows = call.requests * padded(call.requests, call.rows)
    for layer, weights in zip(decoder.layers, layers, strict=True):
        out, d = weights["out"], decoder.width
        columns = [weights[name].outputs for name in projections(layer)]
        reason = few_rows.normed_supported(rows, d, columns, out.dtype)
        reason = reason or few_rows.product_supported(rows, [out.inputs], (out.inputs, d), out.dtype)
        if reason is not None:
            return reason
    return None


def run(
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    wanted: Int[Array, " b"] | None,
) -> Stack:
    """All rows go through the last layer, too."""
    x, t, outputs, counts = pad(x), positions.shape[1], [], Counter()

    @partial(jax.jit, static_argnums=0)  # one trace and one lowering for all layers alike: the index is data
    def one(layer, weights, after, i, given, x, cache):
        return run_padded(layer, weights, i, given, x, positions, mixer, cache, after)

    given = flat_rows(x), layers[0]["attn_norm"]
    if isinstance(decoder.layers[0].feed, Mixture):
        given = given_first(decoder.layers[0], layers[0], *given)
    for at, (layer, weights) in enumerate(zip(decoder.layers, layers, strict=True)):
        kind, after = type(layer.mixing), layers[(at + 1) % len(layers)]["attn_norm"]  # at last, the next round's first
        x, given, cache = one(layer, weights, after, jnp.int32(counts[kind]), given, x, cache)
        counts[kind] += 1
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
    wanted: Int[Array, " b"] | None = None,
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
    names, rows, t = projections(layer), flat_rows(x), positions.shape[1]
    dtypes = tuple("float32" if name == "ba" else str(x.dtype) for name in names)
    norm = {"eps": layer.norm.eps, "centred": layer.norm.centred}
    projecting = [weights[name].unquantised for name in names]
    made = few_rows.normed(*given, projecting, dtypes=dtypes, **norm)
    made = [out.reshape(*x.shape[:2], -1) for out in made]
    if isinstance(layer.mixing, Attention):
        made = [out[:, :t] for out in made]
    mixed, cache = mix(layer, weights, i, made, positions, mixer, cache)
    mixed = flat(mixed)
    if isinstance(layer.feed, Mixture):
        out, given = mixture(layer, weights, rows, mixed, *valid_rows(positions), after)
        return out.reshape(x.shape), given, cache
    x = few_rows.add_product(rows, mixed, weights["out"].unquantised).reshape(x.shape)
    x = feed(layer, weights, x, positions)
    return x, (flat_rows(x), after), cache


FUSED_NORMS = Path("fused_norms", IMPLEMENTS, 1, fits, run, run_one)
