"""Layers with FP8 weights that quantise their rows, at 33 to 128 rows: products are `pallas.dense.fp8_tiles`.

A product's parts go to the kernel of the next norm as they are: it adds them to the residual stream, norms and
quantises it (`pallas.dense.fp8_quantise.norm`). Dense layers give the plain path's bits. Mixing is the plain layer's,
and so are routers and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.feed import mixture
from jaxspec.decoder.fp8_rows import IMPLEMENTS, multiplied
from jaxspec.decoder.matmul import Quantised, exact, project, quantises_rows
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.path import Call, Path
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Decoder, Mixture
from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas.dense import fp8_quantise, fp8_tiles


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Refuse a call, as `Path.fits`."""
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a layer ends in the norm of the next one
    rows, dtype = call.requests * call.rows, layers[0]["attn_norm"].dtype
    if rows > fp8_tiles.LEAST_ROWS:
        return f"{rows} rows; supported: up to {fp8_tiles.LEAST_ROWS}"  # more are added to the stream by the products
    for layer, weights in zip(decoder.layers, layers, strict=True):
        for name in multiplied(layer):
            weight = weights[name]
            if not quantises_rows(weight):
                return "weights that aren't FP8, or don't quantise rows"
            sizes = weight.format.block, weight.outputs, weight.inputs, weight.outputs // len(weight.scales)
            if reason := fp8_tiles.supported(dtype, *sizes):
                return reason
        if "gate_up" in weights and weights["gate_up"].layout.interleave != HALF:
            return f"an MLP {weights['down'].inputs} wide"
    return fp8_quantise.norm_supported(rows, decoder.width, dtype)


@dataclass(frozen=True, eq=False)
class Fp8Tiles(Ops):
    """Flat rows. Given to a step is `fp8_quantise.Normed` of them."""

    keeps: bool = False  # whether layers read normed rows that aren't quantised, too

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        return cls(positions, mixer, any(mixing_of(layer).exact for layer in decoder.layers))

    def first(self, layer, weights, x, inputs):
        return self._next(layer, x.reshape(-1, x.shape[2]), None, weights)

    def after(self, decoder, layers):
        """After the last layer, its own: nobody takes the rows that it norms."""
        return [{"attn_norm": each["attn_norm"]} for each in (*layers[1:], layers[-1])]

    def _next(self, layer, x, parts, after):
        """The residual stream with parts of a sum, and what is given to the next layer."""
        made = self._normed(layer, x, parts, after["attn_norm"], keep=self.keeps)
        return made.x, made

    def _normed(self, layer, x, parts, scale, **options) -> fp8_quantise.Normed:
        return fp8_quantise.norm(x, scale, parts, eps=layer.norm.eps, centred=layer.norm.centred, **options)

    def project(self, layer, weights, x, given):
        mixing, shape = mixing_of(layer), (*self.positions.shape, x.shape[1])
        quantised = Quantised(*given.quantised, shape)
        return [
            exact(self.batched(given.rows), weights[name])
            if name in mixing.exact
            else project(quantised, weights[name], self._valid(x))
            for name in mixing.projections
        ]

    @jax.named_scope("output_projection")
    def add(self, layer, weights, x, mixed):
        mixes = isinstance(layer.feed, Mixture)
        parts = self._parts(mixed.reshape(len(x), -1), weights["out"])
        made = self._normed(layer, x, parts, weights["mlp_norm"], keep=mixes, quantise=not mixes)
        return made.x, made

    def feed(self, layer, weights, after, x, given):
        if isinstance(layer.feed, Mixture):
            rows = self.batched(given.rows)
            x = mixture(layer.feed, weights, self.batched(x), rows, self.positions).reshape(x.shape)
            return self._next(layer, x, None, after)
        with jax.named_scope("mlp"):
            rows = Quantised(*given.quantised, x.shape)
            hidden = project(rows, weights["gate_up"], self._valid(x), gated=True)
            return self._next(layer, x, self._parts(hidden, weights["down"]), after)

    def _parts(self, rows: Float[Array, "r k"], weight: Weight) -> Float[Array, "p s n"]:
        values, scales = fp8_quantise.quantise_rows(rows)
        of = values, scales, weight.values, weight.scales, self._valid(rows)
        return fp8_tiles.parts(*of, block=weight.format.block, rows=len(rows))

    def _valid(self, rows: Float[Array, "r _"]) -> Array:
        return jnp.array([len(rows)], jnp.int32)


FP8_TILES = Path("fp8_tiles", IMPLEMENTS, 1, fits, Fp8Tiles.of)
