"""What the paths of few rows share: sums that the next norm takes as they come, and a mixture of experts after them."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxspec.decoder import layer as equations
from jaxspec.decoder.functions import normed
from jaxspec.decoder.path import Weights
from jaxspec.decoder.spec import Layer
from jaxspec.pallas import few_rows
from jaxspec.weights import Weight

Given = tuple[Float[Array, "r d"], Float[Array, " d"] | None] | few_rows.Scaled  # rows and their norm's scale


def add(
    x: Float[Array, "r d"],
    rows: Float[Array, "r k"],
    weight: Weight,
    scale: Float[Array, " d"] | None,
    centred: bool = False,
) -> tuple[Float[Array, "r d"], Given]:
    """The residual stream after a product is added, and what is given to the norm that follows, of this `scale`.

    Narrow rows aren't scaled for it: they are normed before weights arrive. No scale: nothing follows.
    """
    if x.shape[1] > few_rows.NARROW and scale is not None:
        return few_rows.add_product(x, rows, weight.unquantised, scale, centred=centred)
    x = few_rows.add_product(x, rows, weight.unquantised)
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
    norm, router = layer.norm, weights["router"].unquantised
    x, given = add(x, mixed, weights["out"], weights["mlp_norm"], norm.centred)
    if few_rows.normed_supported(*x.shape, [router.shape[1]], router.dtype) is not None:
        rows = normed(x[None], weights["mlp_norm"], norm)
        return equations.mixture(layer.feed, weights, x[None], rows, positions)[0]
    logits, rows = few_rows.normed(*given, [router], eps=norm.eps, dtypes=("float32",), centred=norm.centred, keep=True)
    return equations.mix_experts(layer.feed, weights, rows, logits, positions, x, valid)
