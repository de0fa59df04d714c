"""Layers of which all matmuls from one attention to the next are one kernel (`pallas.weight_stream`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import normed
from jaxspec.decoder.layer import attention, finish
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.path import Call, Path, Stack, Weights
from jaxspec.decoder.spec import ROPE_SCALINGS, Attention, Decoder, Layer, Mlp, Norm, Rope
from jaxspec.pallas import weight_stream
from jaxspec.weights import Unquantised, matmul

IMPLEMENTS = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale"}),
    Layer: frozenset({"mixing", "feed", "norm"}),
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "bias", "window", "scale"}),
    Mlp: frozenset({"width"}),
    Norm: frozenset({"eps"}),
    Rope: frozenset({"theta", "scaling", "columns"}),
    **ROPE_SCALINGS,
    Unquantised: frozenset(),
}


def fits(decoder: Decoder, layers: Any, call: Call) -> str | None:
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a kernel begins in one layer and ends in the next
    weights = layers[0]["qkv"], layers[0]["down"]
    widths = [width for weight in weights for width in (weight.inputs, weight.outputs)]
    return weight_stream.supported(call.requests * call.rows, weights[0].dtype, *widths)


def run(
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    wanted: Int[Array, " b"] | None,
) -> Stack:
    """The last layer has no next one, whose q, k, v the kernel would end in."""
    first, last, outputs = decoder.layers[0], decoder.layers[-1], []

    @partial(jax.jit, static_argnums=0)
    def attend(layer, weights, i, qkv, cache):
        return attention(layer, weights, i, qkv, positions, mixer, cache, x.dtype)

    @jax.jit
    def stream(weights, following, x, mixed):
        chain = [*(weights[name].unquantised for name in ("out", "gate_up", "down")), following["qkv"].unquantised]
        scales = [weights["mlp_norm"], following["attn_norm"]]
        flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        out, partials = weight_stream.stream(flat(x), flat(mixed), chain, scales, eps=first.norm.eps)
        return out.reshape(x.shape), partials.reshape(len(partials), *x.shape[:-1], -1)

    qkv = matmul(normed(x, layers[0]["attn_norm"], first.norm), layers[0]["qkv"])  # few rows
    for i, (weights, following) in enumerate(itertools.pairwise(layers)):
        mixed, cache = attend(decoder.layers[i], weights, jnp.int32(i), qkv, cache)
        x, qkv = stream(weights, following, x, mixed)
        outputs.append(x)
    mixed, cache = attend(last, layers[-1], jnp.int32(len(layers) - 1), qkv, cache)
    return Stack([*outputs, finish(last, layers[-1], x, mixed, positions)], cache)


WEIGHT_STREAM = Path("weight_stream", IMPLEMENTS, weight_stream.BLOCKS, fits, run)
