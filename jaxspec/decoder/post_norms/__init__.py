"""Layers with norms behind their sub-layers at few rows: each product is a kernel, and so are the norms around a sum.

Two kernels a layer (`pallas.dense.post_norm`) norm what a sub-layer gave, add it to the residual stream, and norm that
for the products after it. So products take normed rows, and have no norm of their own. `write_heads` norms and rotates
queries and keys and writes them with values, where it has their fields. A mixture's experts stay the plain layer's.

Rows are flat here, each request's padded, as in `fused_norms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import feed
from jaxspec.decoder.few_rows import rope_table
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import ACTIVATIONS
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.mixture_rows import operand, quantised_refused, stored_as
from jaxspec.decoder.padding import flat, padded, valid_rows
from jaxspec.decoder.path import MIXTURE, Call, Path, implementing
from jaxspec.decoder.post_norms import heads
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import (
    Attention,
    ClampedSwiglu,
    Decoder,
    Layer,
    LayerInputs,
    Mixture,
    Mlp,
    Norm,
    beyond,
)
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas.attention.prompt_attention import UNIT
from jaxspec.pallas.dense import few_rows, post_norm
from jaxspec.pallas.operation import choose

IMPLEMENTS = implementing({
    Decoder: {"layer_inputs"}, LayerInputs: {"width", "vocab_size", "padding"},
    Layer: {"pre_norm", "post_norm", "input_width", "output_scaled"},
    Mlp: {"activation"}, Mixture: {*MIXTURE, "activation", "beside"}, ClampedSwiglu: {"alpha", "limit"},
    Norm: {"centred"}, Rope: {"columns", "interleaved"},
})  # fmt: skip
GATES = "silu", "gelu_tanh"  # activations that the kernel has
PRODUCTS = "qkv", "gate_up", "out", "down", "router", "input_gate", "input_out"  # by kernels, where a layer has them
NORMS = (
    *("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "input_norm", "layer_scale"),
    *("router_norm", "experts_norm", "mlp_own_norm", "experts_own_norm"),
)  # that the kernel has, likewise


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Refuse a call, as `Path.fits`."""
    if not all(layer.post_norm for layer in decoder.layers):
        return "layers without norms behind their sub-layers"
    if call.rows >= UNIT:
        return f"{call.rows} rows of a request, which are a prompt's"
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a layer ends in the norm of the next one
    if len({layer.pre_norm for layer in decoder.layers}) > 1:
        return "norms before some layers alone"
    rows, width = call.requests * padded(call.requests, call.rows), decoder.width
    for layer, weights in zip(decoder.layers, layers, strict=True):
        dtype = weights["attn_post_norm"].dtype
        norms = [weights[name].dtype for name in NORMS if name in weights]
        reasons = [post_norm.supported(width, *norms), _feed_refused(layer, weights)]
        reasons += [_product_refused(name, weights[name], rows, dtype) for name in PRODUCTS if name in weights]
        if reason := next(filter(None, reasons), None):
            return reason
    return None


def _product_refused(name: str, weight: Weight, rows: int, dtype: Any) -> str | None:
    """Why no kernel takes the product of so many rows with this weight, or None if one does."""
    dtype, stored = dtype if weight.quantised else weight.dtype, stored_as(weight)
    if name in ("qkv", "gate_up", "router"):
        columns = weight.outputs + _lacking(weight.outputs) if name == "router" else weight.outputs
        reason = few_rows.normed_supported(rows, weight.inputs, [columns], dtype, **stored, scaled=True)
    else:
        reason = few_rows.product_supported(rows, [weight.inputs], (weight.inputs, weight.outputs), dtype, **stored)
    return reason or (quantised_refused(weight) if weight.quantised else None)


def _lacking(experts: int) -> int:
    """How many columns of zeros a router needs beside its experts', for whole tiles."""
    return -experts % few_rows.TILE


def _feed_refused(layer: Layer, weights: Weights) -> str | None:
    """Why the layer's second half can't be these kernels, or None if it can."""
    m = layer.feed
    mlp = m.beside if isinstance(m, Mixture) else m
    if mlp is None:
        return "a mixture without an MLP beside it"
    if mlp.activation not in GATES:
        return f"an MLP with {mlp.activation}"
    if weights["gate_up"].layout.interleave != HALF:
        return f"an MLP {mlp.width} wide"
    return None


@dataclass(frozen=True, eq=False)
class PostNorms(Ops):
    """Flat rows, each request's padded. Given to a step are its rows: normed, or without pre-norms as they are. Those
    of a mixture with an MLP beside it are three: the MLP's, the router's and the experts'."""

    valid: tuple[Int[Array, "1 r"], int]  # which rows a mixture of experts is for, see `valid_rows`
    tables: tuple[tuple[Attention, Any], ...]  # rope tables of padded rows
    inputs: Float[Array, "b t l w"] | None = field(default=None, kw_only=True)  # of each layer

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        kinds = dict.fromkeys(layer.mixing for layer in decoder.layers if not beyond(layer.mixing, heads.WRITTEN))
        return cls(positions, mixer, valid_rows(positions), tuple((a, rope_table(a, positions)) for a in kinds))

    def first(self, layer, weights, x, inputs):
        x = flat(x)
        return x, normed(x, weights["attn_norm"], layer.norm) if layer.pre_norm else x

    def after(self, decoder, layers):
        """The next layer's norm, and the layer's own input if it has one. The last layer's result is normed as the
        first layer's input, which nobody reads: so layers that are alike share a trace."""
        norms = [{"attn_norm": each.get("attn_norm")} for each in (*layers[1:], layers[0])]
        if self.inputs is None:
            return norms
        b, t, count, _ = self.inputs.shape
        own = flat(self.inputs.reshape(b, t, -1)).reshape(-1, count, self.inputs.shape[3])
        return [norm | {"own": own[:, i]} for i, norm in enumerate(norms)]

    def mix(self, layer, weights, i, x, given, cache):
        (name,) = mixing_of(layer).projections
        (made,) = few_rows.normed(given, None, [operand(weights[name])], eps=layer.norm.eps, dtypes=(str(x.dtype),))
        call = self, layer, weights, i, made, cache
        return choose("heads of few rows", heads.HEADS, *call).run(*call)

    def normed_sum(self, layer, x, parts, scale, following, own=(), output_scale=None, factors=()):
        """The residual stream and a sub-layer's normed output, and its norms by `following`, or itself if none."""
        named = dict(eps=layer.norm.eps, centred=layer.norm.centred, factors=factors)
        x, rows = post_norm.post_norm(x, parts, own, scale, following, output_scale, **named)
        return x, rows or [x]

    def add(self, layer, weights, x, mixed):
        made, mixture = few_rows.product([mixed], operand(weights["out"])), isinstance(layer.feed, Mixture)
        made = made + weights["out_bias"] if "out_bias" in weights else made
        names = ("mlp_norm", "router_norm", "experts_norm") if mixture else ("mlp_norm",) * layer.pre_norm
        factors = (1.0, x.shape[1] ** -0.5, 1.0) if mixture else ()
        following = [weights[name] for name in names]
        return self.normed_sum(layer, x, [made], weights["attn_post_norm"], following, factors=factors)

    def feed(self, layer, weights, after, x, given):
        m, dense = layer.feed, given[0]
        mlp = m.beside if isinstance(m, Mixture) else m
        named = {} if mlp.activation == "silu" else {"activation": mlp.activation}
        hidden = few_rows.gated(dense, None, operand(weights["gate_up"]), eps=layer.norm.eps, **named)
        parts, own = [few_rows.product([hidden], operand(weights["down"]))], []
        if isinstance(m, Mixture):
            parts.append(self.experts(layer, weights, *given[1:]))
            own = [weights["mlp_own_norm"], weights["experts_own_norm"]]
        following = [after["attn_norm"]] if layer.pre_norm else []
        output_scale = weights["layer_scale"] if layer.output_scaled else None
        if not layer.input_width:
            of = layer, x, parts, weights["mlp_post_norm"], following, own, output_scale
            x, (given,) = self.normed_sum(*of)
            return x, given
        x, _ = self.normed_sum(layer, x, parts, weights["mlp_post_norm"], [], own)
        with jax.named_scope("layer_input"):
            gates = ACTIVATIONS[layer.feed.activation](few_rows.product([x], operand(weights["input_gate"])))
            made = few_rows.product([gates * after["own"]], operand(weights["input_out"]))
        x, (given,) = self.normed_sum(layer, x, [made], weights["input_norm"], following, (), output_scale)
        return x, given

    @jax.named_scope("mixture")
    def experts(self, layer, weights, routed, rows):
        """The experts' sum, of the rows up to the last valid one."""
        positions, valid = self.valid
        router, experts = weights["router"].unquantised, layer.feed.experts
        if lacking := _lacking(experts):
            router = jnp.pad(router, ((0, 0), (0, lacking)))
        (logits,) = few_rows.normed(routed, None, [router], eps=layer.norm.eps, dtypes=("float32",))
        return feed.mix_experts(layer.feed, weights, rows, logits[:, :experts], positions, None, valid=valid)


POST_NORMS = Path("post_norms", IMPLEMENTS, 1, fits, PostNorms.of, axes=False)
