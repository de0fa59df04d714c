"""Layers of which all matmuls from one attention to the next are one kernel (`pallas.dense.weight_stream`).

There are two paths: one for bfloat16 weights, one for FP8 ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import product
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.path import Call, Path, implementing, layers_differ
from jaxspec.decoder.plain import Plain
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Decoder
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import HALF, Weight, matmul
from jaxspec.pallas.dense import weight_stream
from jaxspec.pallas.dense.few_rows import GROUP
from jaxspec.parallel.peers import summed
from jaxspec.parallel.sharding import devices

IMPLEMENTS = implementing({Rope: {"columns"}})
FP8_DEVICES = 1  # that FP8 layers are divided among: no GPU has timed them on several
MATMULS = "out", "gate_up", "down", "qkv"  # as the kernel takes them; the last one is the next layer's


def fits(decoder: Decoder, layers: Any, call: Call) -> str | None:
    if reason := layers_differ(decoder):
        return reason
    names = ("qkv", "down") if call.devices == 1 else MATMULS
    weights = [layers[0][name] for name in names]
    widths = [width for weight in weights for width in (weight.inputs, weight.outputs)]
    return weight_stream.supported(call.requests * call.rows, weights[0].dtype, *widths)


def fp8_fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    if reason := layers_differ(decoder):
        return reason
    given = [weights[name] for weights in layers for name in MATMULS]
    if not all(weight.quantised for weight in given):
        return "weights that aren't FP8"
    if any(weights["gate_up"].layout.interleave != HALF for weights in layers):
        return f"an MLP {layers[0]['down'].inputs} wide"
    rows = call.requests * call.rows
    if call.devices > FP8_DEVICES:
        return f"{rows} rows in FP8 over {call.devices} devices, which no GPU has timed"
    sizes = {(w.format.block, w.outputs, w.inputs, w.outputs // len(w.scales)) for w in given}
    return weight_stream.fp8_supported(rows, layers[0]["attn_norm"].dtype, sorted(sizes, key=str))


def _operand(weight: Weight) -> Array | tuple[Array, Array]:
    """A weight as the kernels take it."""
    return (weight.values, weight.scales) if weight.quantised else weight.unquantised


class Streamed(Ops):
    """Given to a layer is its first product, in parts but for the first layer's. The last layer has no next one, in
    whose product the kernel would end."""

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        return cls(positions, mixer) if devices() == 1 else StreamedParts(positions, mixer)

    def first(self, layer, weights, x, inputs):
        rows = normed(x, weights["attn_norm"], layer.norm)
        return x, (product([rows], weights["qkv"]) if weights["qkv"].quantised else matmul(rows, weights["qkv"]))

    def after(self, decoder, layers):
        return [*({name: each[name] for name in ("qkv", "attn_norm")} for each in layers[1:]), None]

    def project(self, layer, weights, x, given):
        return [given]

    def finish(self, layer, weights, after, x, mixed):
        if after is None:
            plain = Plain(self.positions, self.mixer)
            return plain.finish(layer, weights, None, x, mixed)
        chain = [_operand((after if name == "qkv" else weights)[name]) for name in MATMULS]
        stream = weight_stream.stream_fp8 if after["qkv"].quantised else weight_stream.stream
        rows = x.reshape(-1, x.shape[-1]), mixed.reshape(-1, mixed.shape[-1])
        out, partials = stream(*rows, chain, [weights["mlp_norm"], after["attn_norm"]], eps=layer.norm.eps)
        return out.reshape(x.shape), partials.reshape(len(partials), *x.shape[:-1], -1)


class StreamedParts(Ops):
    """Layers that are divided among devices, with the matmuls between two sums as one kernel.

    A layer is three of them: its projections with the norm before them; the output projection; MLP and norm. Partials
    of the last two go to the sum over devices as they are, and the sum adds the residual stream. Rows are flat, and
    padding rows, which are nobody's, stay from the first layer to the last.
    """

    def first(self, layer, weights, x, inputs):
        return self._padded(x), None

    def _padded(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return jnp.pad(rows, ((0, -len(rows) % GROUP), (0, 0)))

    def batched(self, x):
        b, t = self.positions.shape
        return x[: b * t].reshape(b, t, x.shape[1])

    def _stream(self, layer, weights, names, x, mixed, norms, stages):
        stream = weight_stream.stream_part_fp8 if weights["qkv"].quantised else weight_stream.stream_part
        chain = [_operand(weights[name]) for name in names]
        return stream(x, mixed, chain, [weights[norm] for norm in norms], stages=stages, eps=layer.norm.eps)

    def project(self, layer, weights, x, given):
        b, t = self.positions.shape
        made = self._stream(layer, weights, ["qkv"], x, None, ["attn_norm"], ("norm", "matmul"))
        return [made[:, : b * t].reshape(-1, b, t, made.shape[-1])]

    def add(self, layer, weights, x, mixed):
        made = self._stream(layer, weights, ["out"], x, self._padded(mixed), [], ("matmul",))
        return summed(made, x, prefetch=weights["gate_up"].raw), None

    def feed(self, layer, weights, after, x, given):
        stages = "norm", "gated", "matmul"
        return summed(self._stream(layer, weights, ["gate_up", "down"], x, None, ["mlp_norm"], stages), x), None


WEIGHT_STREAM = Path("weight_stream", IMPLEMENTS, weight_stream.BLOCKS, fits, Streamed.of, sums=True)
FP8_STREAM = Path("fp8_stream", IMPLEMENTS, weight_stream.BLOCKS, fp8_fits, Streamed.of, sums=True)
