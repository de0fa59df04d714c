"""What the paths of few rows share: sums that the next norm takes as they come, and a mixture of experts after them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import layer as equations
from jaxspec.decoder.functions import normed
from jaxspec.decoder.path import Weights
from jaxspec.decoder.spec import Layer
from jaxspec.pallas import few_rows
from jaxspec.peers import summed
from jaxspec.sharding import devices
from jaxspec.weights import Weight

Given = tuple[Float[Array, "r d"], Float[Array, " d"] | None] | few_rows.Scaled  # rows and their norm's scale


def add(
    x: Float[Array, "r d"],
    rows: Float[Array, "r k"],
    weight: Weight,
    scale: Float[Array, " d"] | None,
    centred: bool = False,
    bias: Float[Array, " d"] | None = None,
    ahead: Weight | None = None,
) -> tuple[Float[Array, "r d"], Given]:
    """The residual stream after a product is added, and what is given to the norm that follows, of this `scale`.

    Narrow rows aren't scaled for it: they are normed before weights arrive. No scale: nothing follows. Among several
    devices the product is a part of the sum, rounded to bfloat16; `ahead`: weights to prefetch while it is made.
    """
    if devices() > 1:
        scaled = x.shape[1] > few_rows.NARROW and scale is not None
        part = few_rows.product([rows], weight.unquantised)
        part = part if bias is None else part + bias  # which is zero but on the first device
        following = None if ahead is None else ahead.unquantised
        out = summed(part, x, scale if scaled else None, following, centred=centred)
        return out if scaled else (out, (out, scale))
    if x.shape[1] > few_rows.NARROW and scale is not None:
        return few_rows.add_product(x, rows, weight.unquantised, scale, bias, centred=centred)
    x = few_rows.add_product(x, rows, weight.unquantised, None, bias)
    return x, (x, scale)


def mixture(
    layer: Layer,
    weights: Weights,
    x: Float[Array, "r d"],
    mixed: Float[Array, "r k"],
    positions: Int[Array, "1 r"],
    valid: int,
) -> Float[Array, "r d"]:
    """The output projection of what was mixed, and the mixture of experts, each added to the residual stream.

    Norm and router are one kernel where that serves. Only the first `valid` rows go through the mixture, of those the
    ones that aren't padding, whose positions are negative: one token alone has an experts' kernel that looks for no
    other.
    """
    norm, router, bias = layer.norm, weights["router"].unquantised, weights.get("router_bias")
    x, given = add(x, mixed, weights["out"], weights["mlp_norm"], norm.centred, weights.get("out_bias"))
    experts = router.shape[1]
    if lacking := -experts % few_rows.TILE:  # to a whole tile of columns: gpt-oss-20b has 32 experts
        router = jnp.pad(router, ((0, 0), (0, lacking)))
        bias = None if bias is None else jnp.pad(bias, (0, lacking))
    if few_rows.normed_supported(*x.shape, [router.shape[1]], router.dtype) is not None:
        rows = normed(x[None], weights["mlp_norm"], norm)
        return equations.mixture(layer.feed, weights, x[None], rows, positions)[0]
    options = dict(eps=norm.eps, dtypes=("float32",), centred=norm.centred, keep=True)
    logits, rows = few_rows.normed(*given, [router], bias, **options)
    return equations.mix_experts(layer.feed, weights, rows, logits[:, :experts], positions, x, valid)
