"""Layers that are divided among devices, with the matmuls between two sums as one kernel (`pallas.weight_stream`).

A layer is three such kernels: its projections with the norm before them; the output projection; MLP and norm. Partials
of the last two go to the sum over devices as they are, and the sum adds the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.layer import attention
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.path import Stack, Weights
from jaxspec.decoder.spec import Decoder
from jaxspec.pallas import weight_stream
from jaxspec.pallas.few_rows import GROUP
from jaxspec.peers import summed
from jaxspec.weights import Fp8


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
    (b, t, d), outputs, eps = x.shape, [], decoder.layers[0].norm.eps
    more = ((0, -b * t % GROUP), (0, 0))  # padding rows, which are nobody's, stay from the first layer to the last
    quantised = isinstance(layers[0]["qkv"].format, Fp8)
    stream = partial(weight_stream.stream_part_fp8 if quantised else weight_stream.stream_part, eps=eps)

    @partial(jax.jit, static_argnums=0)  # one trace and one lowering for all layers alike: the index is data
    def one(layer, weights, i, x, cache):
        of = {name: weights[name] for name in ("qkv", "out", "gate_up", "down")}
        of = {name: (w.values, w.scales) if quantised else w.unquantised for name, w in of.items()}
        qkv = stream(x, None, [of["qkv"]], [weights["attn_norm"]], stages=("norm", "matmul"))
        qkv = qkv[:, : b * t].reshape(-1, b, t, qkv.shape[-1])
        mixed, cache = attention(layer, weights, i, qkv, positions, mixer, cache, x.dtype)
        mixed = jnp.pad(mixed.reshape(b * t, -1), more)
        made = stream(x, mixed, [of["out"]], [], stages=("matmul",))
        x = summed(made, x, prefetch=weights["gate_up"].raw)
        made = stream(x, None, [of["gate_up"], of["down"]], [weights["mlp_norm"]], stages=("norm", "gated", "matmul"))
        return summed(made, x), cache

    x = jnp.pad(x.reshape(b * t, d), more)
    for i, (layer, weights) in enumerate(zip(decoder.layers, layers, strict=True)):
        x, cache = one(layer, weights, jnp.int32(i), x, cache)
        outputs.append(x[: b * t].reshape(b, t, d))
    return Stack(outputs, cache)
