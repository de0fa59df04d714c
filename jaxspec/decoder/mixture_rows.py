"""Steps that the paths of few rows share: sums as the next norm takes them, and a mixture of experts after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import feed
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import quantises_rows
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.models.description import Layer, Mixture, SigmoidScores
from jaxspec.models.weights import FourBits, Fp8, Mxfp4, Weight
from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.experts import expert_few
from jaxspec.pallas.experts import router as one_router
from jaxspec.pallas.experts.experts_mlp import scaled as experts_scaled
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.parallel.peers import summed
from jaxspec.parallel.sharding import devices

Given = tuple[Float[Array, "r d"], Float[Array, " d"] | None] | few_rows.Scaled  # rows and their norm's scale


def operand(weight: Weight) -> Float[Array, "k n"] | few_rows.Fp8Weight | Weight:
    """A weight as `pallas.dense.few_rows` takes it."""
    if isinstance(weight.format, Fp8):
        kind = few_rows.Fp8WeightAndRows if quantises_rows(weight) else few_rows.Fp8Weight
        return kind(weight.values, weight.scales)
    return weight if isinstance(weight.format, FourBits) else weight.unquantised


def stored_as(weight: Weight) -> dict[str, Any]:
    """How a quantised weight is stored, as `pallas.dense.few_rows` asks to tell which sizes fit; nothing for others."""
    if not weight.quantised:
        return {}
    return {name: each for name, each in few_rows.format_of(operand(weight)).items() if name != "rounds"}


def quantised_refused(weight: Weight) -> str | None:
    """Why `pallas.dense.few_rows` can't read a dense weight in FP8 or four bits, or None if it can."""
    if weight.order is not None:
        return "inputs in an order of their own"
    if isinstance(weight.format, FourBits):
        return few_rows.four_bits_supported(weight)
    unit = weight.outputs // len(weight.scales)
    return few_rows.fp8_supported(weight.format.block, weight.outputs, weight.inputs, unit)


def given_to(weight: Weight, given: Given, centred: bool) -> Given:
    """Return what a kernel of this weight takes for its norm. Wide rows of a quantised weight are `Scaled`, and
    quantised rows however narrow they are. Rows of two inputs are narrow, however many inputs their weight has."""
    wide = weight.quantised and given[0].shape[1] > few_rows.NARROW
    if not (wide or quantises_rows(weight)) or isinstance(given, few_rows.Scaled):
        return given
    return few_rows.scale_rows(*given, centred)


def add(
    x: Float[Array, "r d"],
    rows: Float[Array, "r k"],
    weight: Weight,
    scale: Float[Array, " d"] | None,
    centred: bool = False,
    bias: Float[Array, " d"] | None = None,
    prefetch: Weight | None = None,
    adapters: Sequence[few_rows.Adapters] = (),
) -> tuple[Float[Array, "r d"], Given]:
    """The residual stream after a product is added, and what is given to the norm that follows, of this `scale`.

    Narrow rows aren't scaled for it, unless the weight after it quantises them: they are normed before weights arrive.
    No scale: nothing follows. Among several devices the product is a part of the sum, rounded to bfloat16. `prefetch`:
    the weight after the norm, to fetch while that is made. `adapters`: what rows' add, on one device.
    """
    if devices() > 1:
        part = few_rows.product([rows], operand(weight))
        part = part if bias is None else part + bias  # which is zero but on the first device
        return _summed(part, x, scale, centred, prefetch)
    wide = x.shape[1] > few_rows.NARROW or (prefetch is not None and quantises_rows(prefetch))
    if wide and scale is not None:
        return few_rows.add_product(x, rows, operand(weight), scale, bias, *adapters, centred=centred)
    x = few_rows.add_product(x, rows, operand(weight), None, bias, *adapters)
    return x, (x, scale)


def _summed(
    part: Float[Array, "r d"],
    x: Float[Array, "r d"],
    scale: Float[Array, " d"] | None,
    centred: bool = False,
    prefetch: Weight | None = None,
) -> tuple[Float[Array, "r d"], Given]:
    """x and the sum of all devices' parts, and what is given to the norm that follows; as `add`."""
    scaled = x.shape[1] > few_rows.NARROW and scale is not None
    out = summed(part, x, scale if scaled else None, None if prefetch is None else prefetch.raw, centred=centred)
    return out if scaled else (out, (out, scale))


def mixture(
    layer: Layer,
    weights: Weights,
    x: Float[Array, "r d"],
    given: Given,
    positions: Int[Array, "1 r"],
    valid: int,
    after: Float[Array, " d"] | None = None,
    prefetch: Weight | None = None,
) -> tuple[Float[Array, "r d"], Given]:
    """The residual stream and its mixture of experts, of what `add` gave to the norm before it.

    Norm and router are one kernel where that serves. Only the first `valid` rows go through the mixture, of those the
    ones that aren't padding, whose positions are negative: one token alone has an experts' kernel that looks for no
    other. After the residual stream comes what is given to the norm that follows, of the scale `after`. `prefetch`: as
    in `add`, while the experts' parts are summed.
    """
    m, norm, router, bias = layer.feed, layer.norm, weights["router"].unquantised, weights.get("router_bias")
    experts, several = router.shape[1], devices() > 1
    if lacking := -experts % few_rows.TILE:  # to a whole tile of columns: gpt-oss-20b has 32 experts
        router = jnp.pad(router, ((0, 0), (0, lacking)))
        bias = None if bias is None else jnp.pad(bias, (0, lacking))
    width = router.shape[1]
    residual = jnp.zeros_like(x) if several else x  # the sum over devices adds the stream
    scaled = isinstance(given, few_rows.Scaled)
    if few_rows.normed_supported(*x.shape, [width], router.dtype, scaled=scaled) is not None:
        rows = normed(x[None], weights["mlp_norm"], norm)
        made = feed.mixture(m, weights, residual[None], rows, positions)[0]
        return _summed(made, x, after, norm.centred, prefetch) if several else (made, (made, after))
    own = after is not None and _experts_scale(layer, x)  # of several devices too, which leave what it scales
    further = dict(residual=residual, valid=valid, scale=after if own else None, centred=norm.centred)
    call = layer, weights, given, router, bias, positions, experts, further
    made = choose("a mixture's router", ROUTER, *call).run(*call)
    if several:
        return _summed(made[0] if own else made, x, after, norm.centred, prefetch)
    return made if own else (made, (made, after))


def _routed_refuses(layer, weights, given, router, *_) -> str | None:
    """Why norm, router and choice can't be one kernel, or None if they can."""
    if not isinstance(given, few_rows.Scaled):
        return "rows that aren't scaled"
    if isinstance(layer.feed.scores, SigmoidScores):
        return "scores by a sigmoid"
    if layer.feed.shared:
        return "a shared expert, with which two kernels are faster"
    return one_router.supported(*given.rows.shape, router.shape[1], layer.feed.per_token, router.dtype)


def _routed(layer, weights, given, router, bias, positions, experts, further):
    m = layer.feed
    options = dict(k=m.per_token, renormalised=m.renormalised, eps=layer.norm.eps, num_experts=experts)
    ids, scores, rows = one_router.router(given, router, positions.reshape(-1), bias, **options)
    return feed.mix_chosen(m, weights, rows, ids, scores, **further)


def _normed_and_routed(layer, weights, given, router, bias, positions, experts, further):
    options = dict(eps=layer.norm.eps, dtypes=("float32",), centred=layer.norm.centred, keep=True)
    logits, rows = few_rows.normed(*given, [router], bias, **options)
    return feed.mix_experts(layer.feed, weights, rows, logits[:, :experts], positions, **further)


ROUTER = (
    Implementation("router", HOPPER, _routed_refuses, _routed),
    Implementation("normed", ANY, nothing, _normed_and_routed),
)


def given_first(layer: Layer, weights: Weights, x: Float[Array, "r d"], scale: Float[Array, " d"]) -> Given:
    """Give the first layer's first norm its rows: as layers like it give it to the next, so that all are traced
    once."""
    quantised = (
        not isinstance(layer.feed, Mixture) and devices() == 1 and "qkv" in weights and quantises_rows(weights["qkv"])
    )
    if not quantised and not scaled_sums(layer, x):
        return x, scale
    rows, squares = few_rows.scale_rows(x, scale, layer.norm.centred)
    mixture = isinstance(layer.feed, Mixture) and devices() == 1
    blocks = x.shape[1] // expert_few.COLUMNS
    if mixture and blocks in expert_few.BLOCKS and not isinstance(weights["experts_down"].format, Mxfp4):
        squares = jnp.pad(squares, ((0, max(0, blocks - len(squares))), (0, 0)))
    return few_rows.Scaled(rows, squares)


def scaled_sums(layer: Layer, x: Float[Array, "r d"]) -> bool:
    """Whether a layer gives its sums of rows like these as `Scaled`, if a norm follows."""
    if devices() > 1 or not isinstance(layer.feed, Mixture):
        return x.shape[1] > few_rows.NARROW
    return _experts_scale(layer, x)


def _experts_scale(layer: Layer, x: Float[Array, "r d"]) -> bool:
    """Whether the kernel that adds a mixture's experts up scales their sums as well."""
    return x.shape[1] > few_rows.NARROW and experts_scaled(x, layer.feed.per_token + bool(layer.feed.shared))
