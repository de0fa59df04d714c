"""Layers with FP8 weights at up to 128 rows: products are `pallas.dense.fp8_rows`, sums and norms `add_norm` beside it.

Rows stay padded from a norm to the product after it, and parts of sums go to the kernel that follows as they are.
Mixing is the plain layer's, and so are routers and experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.feed import mixture
from jaxspec.decoder.matmul import gate, matmul
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.path import MIXTURE, SIGMOID_SCORES, Call, Path, implementing
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Decoder, Layer, Mixture, Norm, SigmoidScores
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense import fp8_rows
from jaxspec.pallas.dense.add_norm import add_norm
from jaxspec.pallas.dense.add_norm import supported as norm_supported

IMPLEMENTS = implementing({
    Mixture: {*MIXTURE, "shared_gated", "scores"}, SigmoidScores: SIGMOID_SCORES,
    Norm: {"centred"}, Rope: {"columns"},
})  # fmt: skip


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Refuse a call, as `Path.fits`."""
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a layer ends in the norm of the next one
    rows, dtype = call.requests * call.rows, layers[0]["attn_norm"].dtype
    for layer, weights in zip(decoder.layers, layers, strict=True):
        for name in multiplied(layer):
            weight = weights[name]
            if not weight.quantised:
                return "weights that aren't FP8"
            block, unit = weight.format.block, weight.outputs // len(weight.scales)
            if reason := fp8_rows.supported(rows, dtype, block, weight.outputs, weight.inputs, unit):
                return reason
    return norm_supported(decoder.width, dtype)


def multiplied(layer: Layer) -> tuple[str, ...]:
    """Names of the weights that a layer's own kernels multiply by: all but routers, experts and what is exact."""
    mixing = mixing_of(layer)
    first = tuple(name for name in mixing.projections if name not in mixing.exact)
    return (*first, "out") if isinstance(layer.feed, Mixture) else (*first, "out", "gate_up", "down")


class Fp8Rows(Ops):
    """Flat rows. Given to a step are the normed rows, padded."""

    def first(self, layer, weights, x, inputs):
        return self._summed(layer, x.reshape(-1, x.shape[2]), None, weights["attn_norm"])

    def after(self, decoder, layers):
        """Nobody takes the rows that the last layer norms."""
        return [{"attn_norm": each["attn_norm"]} for each in (*layers[1:], layers[-1])]

    def _summed(self, layer, x, parts, scale):
        """The residual stream and parts of a sum, and their norm."""
        return add_norm(x, parts, scale, eps=layer.norm.eps, centred=layer.norm.centred)

    def project(self, layer, weights, x, given):
        (b, t), made, mixing = self.positions.shape, [], mixing_of(layer)
        for name in mixing.projections:
            if name in mixing.exact:
                made.append(matmul(given[: b * t].reshape(b, t, -1), weights[name], jnp.float32))
                continue
            parts = _parts(given, weights[name])[:, : b * t].reshape(-1, b, t, weights[name].outputs)
            made.append(parts if mixing.parts else parts.sum(0).astype(given.dtype))
        return made

    def add(self, layer, weights, x, mixed):
        mixed = mixed[:, : self.positions.shape[1]].reshape(len(x), -1)
        return self._summed(layer, x, _parts(mixed, weights["out"]), weights["mlp_norm"])

    def feed(self, layer, weights, after, x, given):
        if isinstance(layer.feed, Mixture):
            rows = self.batched(given[: len(x)])
            x, parts = mixture(layer.feed, weights, self.batched(x), rows, self.positions).reshape(x.shape), None
        else:
            gate_up = _parts(given, weights["gate_up"]).sum(0).astype(x.dtype)
            parts = _parts(gate(gate_up, weights["gate_up"].layout.interleave), weights["down"])
        return self._summed(layer, x, parts, after["attn_norm"])


def _parts(rows: Float[Array, "r k"], weight: Weight) -> Float[Array, "s p n"]:
    return fp8_rows.parts(rows, weight.values, weight.scales)


FP8_ROWS = Path("fp8_rows", IMPLEMENTS, 1, fits, Fp8Rows.of)
