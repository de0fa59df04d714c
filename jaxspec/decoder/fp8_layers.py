"""Layers with FP8 weights at up to 128 rows: each product is `pallas.fp8_rows`, each sum and norm `pallas.add_norm`.

Rows stay padded from a norm to the product after it, and parts of sums go to the kernel that follows as they are.
Mixing is the plain layer's, and so are routers and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.layer import attention, delta_rule, mixture, projections
from jaxspec.decoder.matmul import gate, matmul
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.path import Call, Path, Stack, Weights, numbered
from jaxspec.models.description import ROPE_SCALINGS, Attention, Decoder, DeltaRule, Layer, Mixture, Mlp, Norm, Rope
from jaxspec.models.weights import Fp8, Unquantised, Weight
from jaxspec.pallas.dense import fp8_rows
from jaxspec.pallas.dense.add_norm import add_norm
from jaxspec.pallas.dense.add_norm import supported as norm_supported

IMPLEMENTS = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale"}),
    Layer: frozenset({"mixing", "feed", "norm"}),
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "gated", "window", "scale"}),
    DeltaRule: frozenset({"key_heads", "value_heads", "key_dim", "value_dim", "taps"}),
    Mlp: frozenset({"width"}),
    Mixture: frozenset({"experts", "per_token", "width", "renormalised", "shared"}),
    Norm: frozenset({"eps", "centred"}),
    Rope: frozenset({"theta", "scaling", "columns"}),
    **ROPE_SCALINGS,
    Unquantised: frozenset(),
    Fp8: frozenset({"block"}),
}


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """As `Path.fits`."""
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a layer ends in the norm of the next one
    rows, dtype = call.requests * call.rows, layers[0]["attn_norm"].dtype
    for layer, weights in zip(decoder.layers, layers, strict=True):
        for name in _multiplied(layer):
            weight = weights[name]
            if not isinstance(weight.format, Fp8):
                return "weights that aren't FP8"
            block, unit = weight.format.block, weight.outputs // len(weight.scales)
            if reason := fp8_rows.supported(rows, dtype, block, weight.outputs, weight.inputs, unit):
                return reason
    return norm_supported(decoder.width, dtype)


def _multiplied(layer: Layer) -> tuple[str, ...]:
    """Names of the weights that `fp8_rows` multiplies by."""
    mixing = "qkv" if isinstance(layer.mixing, Attention) else "qkvz"
    return (mixing, "out") if isinstance(layer.feed, Mixture) else (mixing, "out", "gate_up", "down")


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
    shape, norm, outputs = x.shape, decoder.layers[0].norm, []
    following = partial(add_norm, eps=norm.eps, centred=norm.centred)

    @partial(jax.jit, static_argnums=0)  # one trace and one lowering for all layers alike: the index is data
    def one(layer, weights, next_norm, i, x, rows, cache):
        made = [_projected(layer, weights, name, rows, positions.shape) for name in projections(layer)]
        if isinstance(layer.mixing, Attention):
            mixed, cache = attention(layer, weights, i, *made, positions, mixer, cache, x.dtype)
        else:
            mixed, cache = delta_rule(layer, weights, i, *made, positions, mixer, cache)
        mixed = mixed[:, : shape[1]].reshape(len(x), -1)
        x, rows = following(x, _parts(mixed, weights["out"]), weights["mlp_norm"])
        if isinstance(layer.feed, Mixture):
            valid = rows[: len(x)].reshape(shape)
            x, parts = mixture(layer.feed, weights, x.reshape(shape), valid, positions).reshape(x.shape), None
        else:
            gate_up = _parts(rows, weights["gate_up"]).sum(0).astype(x.dtype)
            parts = _parts(gate(gate_up, weights["gate_up"].layout.interleave), weights["down"])
        return *following(x, parts, next_norm), cache

    x, rows = following(x.reshape(-1, shape[2]), None, layers[0]["attn_norm"])
    nexts = [each["attn_norm"] for each in (*layers[1:], layers[-1])]  # nobody takes the last one's
    for (layer, weights, i), after in zip(numbered(decoder, layers), nexts, strict=True):
        x, rows, cache = one(layer, weights, after, i, x, rows, cache)
        outputs.append(x.reshape(shape))
    return Stack(outputs, cache)


def _projected(
    layer: Layer, weights: Weights, name: str, rows: Float[Array, "p d"], batch: tuple[int, int]
) -> Float[Array, "*s b t n"]:
    """A product of normed rows that goes into the mixing: of queries, keys and values its parts, to be summed there."""
    b, t = batch
    if name == "ba":
        return matmul(rows[: b * t].reshape(b, t, -1), weights[name], jnp.float32)
    parts = _parts(rows, weights[name])[:, : b * t].reshape(-1, b, t, weights[name].outputs)
    return parts if isinstance(layer.mixing, Attention) else parts.sum(0).astype(rows.dtype)


def _parts(rows: Float[Array, "r k"], weight: Weight) -> Float[Array, "s p n"]:
    return fp8_rows.parts(rows, weight.values, weight.scales)


FP8_ROWS = Path("fp8_rows", IMPLEMENTS, 1, fits, run)
