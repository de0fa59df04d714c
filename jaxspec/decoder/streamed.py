"""Layers of which all matmuls from one attention to the next are one kernel (`pallas.weight_stream`).

Where they are divided among devices, `streamed_parts` runs them.

There are two paths: one for bfloat16 weights, one for FP8 ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import streamed_parts
from jaxspec.decoder.functions import normed
from jaxspec.decoder.layer import attention, finish
from jaxspec.decoder.matmul import product
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.path import Call, Path, Stack, Weights
from jaxspec.models.description import ROPE_SCALINGS, Attention, Decoder, Layer, Mlp, Norm, Rope
from jaxspec.models.weights import HALF, Fp8, Unquantised, matmul
from jaxspec.pallas.dense import weight_stream
from jaxspec.parallel.sharding import devices

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
FP8_IMPLEMENTS = IMPLEMENTS | {Fp8: frozenset({"block"})}
FP8_DEVICES = 1  # that FP8 layers are divided among: no GPU has timed them on several
MATMULS = "out", "gate_up", "down", "qkv"  # as the kernel takes them; the last one is the next layer's


def fits(decoder: Decoder, layers: Any, call: Call) -> str | None:
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a kernel begins in one layer and ends in the next
    names = ("qkv", "down") if call.devices == 1 else MATMULS
    weights = [layers[0][name] for name in names]
    widths = [width for weight in weights for width in (weight.inputs, weight.outputs)]
    return weight_stream.supported(call.requests * call.rows, weights[0].dtype, *widths)


def fp8_fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a kernel begins in one layer and ends in the next
    given = [weights[name] for weights in layers for name in MATMULS]
    if not all(isinstance(weight.format, Fp8) for weight in given):
        return "weights that aren't FP8"
    if any(weights["gate_up"].layout.interleave != HALF for weights in layers):
        return f"an MLP {layers[0]['down'].inputs} wide"
    rows = call.requests * call.rows
    if call.devices > FP8_DEVICES:
        return f"{rows} rows in FP8 over {call.devices} devices, which no GPU has timed"
    sizes = {(w.format.block, w.outputs, w.inputs, w.outputs // len(w.scales)) for w in given}
    return weight_stream.fp8_supported(rows, layers[0]["attn_norm"].dtype, sorted(sizes, key=str))


def run(
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    requested: Int[Array, " b"] | None,
) -> Stack:
    """The last layer has no next one, whose q, k, v the kernel would end in."""
    if devices() > 1:
        return streamed_parts.run(decoder, layers, x, positions, mixer, cache, requested)
    first, last, outputs = decoder.layers[0], decoder.layers[-1], []
    quantised = isinstance(layers[0]["qkv"].format, Fp8)

    @partial(jax.jit, static_argnums=0)
    def attend(layer, weights, i, qkv, cache):
        return attention(layer, weights, i, qkv, positions, mixer, cache, x.dtype)

    @jax.jit
    def stream(weights, following, x, mixed):
        chain = [(following if name == "qkv" else weights)[name] for name in MATMULS]
        scales = [weights["mlp_norm"], following["attn_norm"]]
        of = (x.reshape(-1, x.shape[-1]), mixed.reshape(-1, mixed.shape[-1]))
        if quantised:
            chain = [(weight.values, weight.scales) for weight in chain]
            out, partials = weight_stream.stream_fp8(*of, chain, scales, eps=first.norm.eps)
        else:
            chain = [weight.unquantised for weight in chain]
            out, partials = weight_stream.stream(*of, chain, scales, eps=first.norm.eps)
        return out.reshape(x.shape), partials.reshape(len(partials), *x.shape[:-1], -1)

    rows = normed(x, layers[0]["attn_norm"], first.norm)
    qkv = product([rows], layers[0]["qkv"]) if quantised else matmul(rows, layers[0]["qkv"])
    for i, (weights, following) in enumerate(itertools.pairwise(layers)):
        mixed, cache = attend(decoder.layers[i], weights, jnp.int32(i), qkv, cache)
        x, qkv = stream(weights, following, x, mixed)
        outputs.append(x)
    mixed, cache = attend(last, layers[-1], jnp.int32(len(layers) - 1), qkv, cache)
    return Stack([*outputs, finish(last, layers[-1], x, mixed, positions)], cache)


WEIGHT_STREAM = Path("weight_stream", IMPLEMENTS, weight_stream.BLOCKS, fits, run, sums=True)
FP8_STREAM = Path("fp8_stream", FP8_IMPLEMENTS, weight_stream.BLOCKS, fp8_fits, run, sums=True)
