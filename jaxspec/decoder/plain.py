"""Layers one after the other, each matmul by itself: what every description can be run with, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import normed
from jaxspec.decoder.layer import run_layer
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.path import Path, Stack, Weights, numbered
from jaxspec.models.description import (
    ROPE_SCALINGS,
    Attention,
    ClampedSwiglu,
    Decoder,
    DeltaRule,
    Layer,
    Mixture,
    Mlp,
    Norm,
    Rope,
)
from jaxspec.models.weights import Fp8, Mxfp4, Unquantised

IMPLEMENTS = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale"}),
    Layer: frozenset({"mixing", "feed", "norm", "post_norm"}),
    Attention: frozenset(
        {"heads", "kv_heads", "head_dim", "rope", "qk_norm", "gated", "bias", "out_bias", "window", "scale", "sinks"}
    ),
    DeltaRule: frozenset({"key_heads", "value_heads", "key_dim", "value_dim", "taps"}),
    Mlp: frozenset({"width", "bias", "activation"}),
    Mixture: frozenset(
        {"experts", "per_token", "width", "renormalised", "shared", "bias", "router_bias", "activation", "groups"}
    ),
    ClampedSwiglu: frozenset({"alpha", "limit"}),
    Norm: frozenset({"eps", "centred"}),
    Rope: frozenset({"theta", "scaling", "columns", "interleaved"}),
    **ROPE_SCALINGS,
    Unquantised: frozenset(),
    Fp8: frozenset({"block", "activations"}),
    Mxfp4: frozenset(),
}


def run(
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    requested: Int[Array, " b"] | None,
) -> Stack:
    """The last layer attends for sequences that `requested` names a row of, and computes that row alone after it."""
    outputs = []

    # One trace and one lowering for all layers alike: the index is data.
    @partial(jax.jit, static_argnums=0)
    def one(layer, weights, i, x, cache, row):
        return run_layer(layer, weights, i, x, positions, mixer, cache, row)

    for layer, weights, i in numbered(decoder, layers):
        x, cache = one(layer, weights, i, x, cache, requested if weights is layers[-1] else None)
        outputs.append(x)
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
    """The layer of a decoder of one: see `forward.run_layer`. Padding rows of its inputs are cut off, and if one row of
    each sequence is requested, the others too."""
    layer, t = decoder.layers[0], positions.shape[1]
    inputs = [(rows[:, :t], scale) for rows, scale in inputs]
    rows = [rows if scale is None else normed(rows, scale, layer.norm) for rows, scale in inputs]
    rows = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)
    return run_layer(layer, weights, jnp.int32(0), x[:, :t], positions, mixer, cache, requested, rows)


PLAIN = Path("plain", IMPLEMENTS, 0, lambda *_: None, run, run_one, sums=True)
