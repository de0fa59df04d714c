"""Layers at few rows, each in four kernels and attention's (`pallas.few_rows`); a mixture has two and its own.

They run a target's layers, DFlash's, and EAGLE-3's one, whose q, k and v are made of two inputs side by side. Rows are
flat here, each request's padded so that the kernels take eight together (`padding`): once before the first layer, and
attention takes and gives them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import layer as equations
from jaxspec.decoder.functions import cos_sin
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixture_rows import Given, add, given_first, mixture, operand
from jaxspec.decoder.padding import flat, padded, unflat, untimed, valid_rows
from jaxspec.decoder.path import Call, Path, Stack, Weights
from jaxspec.models.description import ROPE_SCALINGS, Attention, ClampedSwiglu, Decoder, Layer, Mixture, Mlp, Norm, Rope
from jaxspec.models.weights import HALF, Fp8, Mxfp4, Unquantised, Weight
from jaxspec.pallas.attention.prompt_attention import UNIT
from jaxspec.pallas.dense import few_rows

TIMED_WIDTH = 4096  # over several devices, of dense models in FP8 at 9 to 32 rows
ALONE_DEVICES = 1  # that a layer by itself is divided among: no GPU has timed it on several

Table = tuple[Float[Array, "r half"], Float[Array, "r half"]]

IMPLEMENTS = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale"}),
    Layer: frozenset({"mixing", "feed", "norm"}),
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "bias", "out_bias", "window", "sinks"}),
    Mlp: frozenset({"width"}),
    Mixture: frozenset(
        {"experts", "per_token", "width", "renormalised", "shared", "bias", "router_bias", "activation"}
    ),
    ClampedSwiglu: frozenset({"alpha", "limit"}),
    Norm: frozenset({"eps"}),
    Rope: frozenset({"theta", "scaling"}),
    **ROPE_SCALINGS,
    Unquantised: frozenset(),
    Fp8: frozenset({"block"}),
    Mxfp4: frozenset(),  # of a mixture's experts, which have kernels of their own
}


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """As `Path.fits`."""
    if call.rows >= UNIT:
        return f"{call.rows} rows of a request, which are a prompt's"  # not measured
    if call.devices > 1 and decoder.width <= few_rows.NARROW:
        return f"rows of {decoder.width} divided among {call.devices} devices"
    if call.inputs is not None and call.devices > ALONE_DEVICES:
        return f"a layer by itself divided among {call.devices} devices"
    # `sizes_fit` has the limit of weights that aren't FP8.
    timed = decoder.width <= TIMED_WIDTH and all(isinstance(layer.feed, Mlp) for layer in decoder.layers)
    if reason := untimed(call.requests * padded(call.requests, call.rows), call.devices, timed):
        return reason
    return sizes_fit(decoder, layers, call)


def sizes_fit(decoder: Decoder, layers: Sequence[Weights], call: Call, fp8: bool = True) -> str | None:
    """Why the kernels can't take these layers' sizes and dtypes, or None if they can. `fp8`: FP8 weights may fit."""
    if call.pages is None:
        return "no pages to write to"
    if call.inputs == ():
        return "rows that are normed already"
    beside = sum(call.inputs[1:]) if call.inputs else 0
    if len({layer.norm for layer in decoder.layers}) > 1:
        return "layers whose norms differ"  # a kernel begins in one layer and ends in the next
    a, norm = decoder.attention, decoder.layers[0].norm
    if len({layer.mixing.rope for layer in decoder.layers}) > 1:
        return "layers whose ropes differ"  # there is one table for all
    if odd := [each.mixing.qk_norm for each in decoder.layers if each.mixing.qk_norm not in (None, norm)]:
        return f"norms of q and k that aren't the layer's, {odd[0]}"
    widths = decoder.width, a.heads * a.head_dim
    if mlps := {layer.feed.width for layer in decoder.layers if isinstance(layer.feed, Mlp)}:
        if len(mlps) > 1:
            return f"MLPs of different widths, {sorted(mlps)}"
        widths += tuple(mlps)
        if any(each["gate_up"].layout.interleave != HALF for each in layers if "gate_up" in each):
            return f"an MLP {max(mlps)} wide"
    rows, multiplied = call.requests * padded(call.requests, call.rows), _multiplied(layers)
    formats = {isinstance(weight.format, Fp8) for weight in multiplied}
    if len(formats) > 1 or (True in formats and not fp8):
        return "weights of which some are FP8" if fp8 else "FP8 weights"
    (quantised,) = formats
    for weight in multiplied if quantised else ():
        unit = weight.outputs // len(weight.scales)
        if reason := few_rows.fp8_supported(weight.format.block, weight.outputs, weight.inputs, unit):
            return reason
    dtype = layers[0]["attn_norm"].dtype if quantised else multiplied[0].dtype
    return few_rows.supported(rows, a.head_dim, widths, dtype, call.pages, beside=beside, fp8=quantised)


def _multiplied(layers: Sequence[Weights]) -> list[Weight]:
    """The weights of dense products."""
    return [layer[name] for layer in layers for name in ("qkv", "out", "gate_up", "down") if name in layer]


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
    (b, t), outputs, table = positions.shape, [], rope_table(decoder.attention, positions)
    valid = valid_rows(positions)

    @partial(jax.jit, static_argnums=0)  # one trace and one lowering for all layers alike: the index is data
    def one(layer, weights, following, i, given, x, cache):
        return run_flat(layer, weights, i, [given], x, b, table, mixer, cache, following, valid)

    x, first = flat(x), layers[0]
    given = given_first(decoder.layers[0], first, x, first["attn_norm"])
    for i, (layer, weights) in enumerate(zip(decoder.layers, layers, strict=True)):
        following = layers[(i + 1) % len(layers)]  # after the last, the next round's first
        following = {name: following[name] for name in ("qkv", "attn_norm")}
        x, given, cache = one(layer, weights, following, jnp.int32(i), given, x, cache)
        outputs.append(unflat(x, b, t))
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
    """The layer of a decoder of one. What it gives keeps its padding rows: the next call takes them as they are."""
    layer, b = decoder.layers[0], len(positions)
    given = [(flat(rows), scale) for rows, scale in inputs]
    table = rope_table(layer.mixing, positions)
    out, _, cache = run_flat(layer, weights, jnp.int32(0), given, flat(x), b, table, mixer, cache)
    return out.reshape(b, -1, out.shape[1]), cache


def run_flat(
    layer: Layer,
    weights: Weights,
    i: Int[Array, ""],
    inputs: Sequence[Given],
    x: Float[Array, "r d"],
    b: int,
    table: Table,
    mixer: Mixer,
    cache: Any,
    following: Weights | None = None,
    valid: tuple[Int[Array, "1 r"], int] | None = None,
) -> tuple[Float[Array, "r d"], Given | None, Any]:
    """A layer over the flat rows of `b` requests: what attention and MLP make of the residual stream `x`.

    Queries, keys and values are made of `inputs` side by side. `following`: weights of the layer after this one, whose
    input comes second. `valid`: which rows a mixture of experts is for, see `valid_rows`.
    """
    a, eps = layer.mixing, layer.norm.eps
    small = x.shape[1] <= few_rows.NARROW  # memory is idle for most of a small layer, and later weights are prefetched
    after = following["attn_norm"] if following else None
    norms = [weights["q_norm"], weights["k_norm"]] if a.qk_norm else []
    small = small and not isinstance(weights["qkv"].format, Fp8)
    ahead = [weights[name].unquantised for name in ("out", "gate_up", "down") if small and name in weights]

    def write(kv, place, inverse):
        operands = *zip(*inputs, strict=True), operand(weights["qkv"]), *table, kv, i, place.reshape(-1)
        q, kv = few_rows.heads(*operands, norms, ahead, weights.get("qkv_bias"), inverse, eps=eps)
        return q.reshape(b, -1, a.heads, a.head_dim), kv

    mixed, cache = mixer.attend_written(cache, i, len(x) // b, write, a.window, **equations.sinks(a, weights))
    mixed = mixed.reshape(len(x), -1)
    if isinstance(layer.feed, Mixture):
        return *mixture(layer, weights, x, mixed, *valid, after, following and following["qkv"]), cache
    bias = weights.get("out_bias")
    x, given = add(x, mixed, weights["out"], weights["mlp_norm"], bias=bias, ahead=weights["gate_up"])
    ahead = [following["qkv"].unquantised] if small and following else []
    hidden = few_rows.gated(*given, operand(weights["gate_up"]), ahead, eps=eps)
    x, given = add(x, hidden, weights["down"], after, ahead=following["qkv"] if following else None)
    return x, given, cache


def rope_table(attention: Attention, positions: Int[Array, "b t"]) -> Table:
    """Cosine and sine of each flat row's angles."""
    return cos_sin(flat(positions[..., None])[:, 0], attention)


FEW_ROWS = Path("few_rows", IMPLEMENTS, 1, fits, run, run_one, sums=True)
