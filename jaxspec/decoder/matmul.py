"""Products of rows with weights. Here alone it is decided what computes one: a kernel of ours, or XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import normed
from jaxspec.decoder.padding import flat, padded, unflat
from jaxspec.models import fp8
from jaxspec.models.description import ClampedSwiglu, Norm
from jaxspec.models.weights import Fp8, Unquantised, Weight, matmul
from jaxspec.pallas import portable
from jaxspec.pallas.dense import few_rows, fp8_quantise, fp8_rows, fp8_tiles, fp8_wide, tile_matmul
from jaxspec.pallas.hopper import chosen
from jaxspec.pallas.portable import fp8 as portable_fp8


class Quantised(NamedTuple):
    """Rows as e4m3, and their scales for each 128 inputs."""

    values: Float[Array, "*b k"]
    scales: Float[Array, "r g"]


def normed_for(
    weights: Sequence[Weight], x: Float[Array, "*b k"], scale: Float[Array, " k"], norm: Norm
) -> Float[Array, "*b k"] | Quantised:
    """The norm of x as `project` takes it: quantised already, if one weight alone reads it and a kernel does both."""
    rows = x.reshape(-1, x.shape[-1])
    if len(weights) != 1 or not chosen(_not_normed_and_quantised(rows, *weights)):
        return normed(x, scale, norm)
    values, scales = fp8_quantise.norm_and_quantise(rows, scale, eps=norm.eps, centred=norm.centred)
    return Quantised(values.reshape(x.shape), scales)


def _not_normed_and_quantised(rows: Float[Array, "r k"], weight: Weight) -> str | None:
    """Why no kernel norms and quantises these rows for this weight, or None if one does."""
    if not (isinstance(weight.format, Fp8) and weight.format.activations):
        return f"a weight in {weight.format}"
    return _not_fp8_tiled(rows, weight) or fp8_quantise.norm_supported(*rows.shape, rows.dtype, weight.format.block)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def project(
    x: Float[Array, "*b k"] | Quantised,
    weight: Weight,
    valid: Int[Array, "1"],
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """`residual + x @ weight`; `gated`, without a residual, silu(gate) * up of the product, half as wide.

    Rows from `valid` on are padding, and may be anything finite. x is `Quantised` where `normed_for` made it so.
    """
    if isinstance(x, Quantised):
        rows = x.values.reshape(-1, x.values.shape[-1]), x.scales
        out = fp8_tiles.matmul(*rows, weight.values, weight.scales, valid, block=weight.format.block, gated=gated)
        return out.reshape(*x.values.shape[:-1], -1)
    rows = x.reshape(-1, x.shape[-1])
    before = None if residual is None else residual.reshape(-1, residual.shape[-1])
    if chosen(_not_tiled(len(rows), weight)):
        out = tile_matmul.matmul(rows, weight.unquantised, valid, before, gated=gated)
    elif chosen(_not_fp8_rows(rows, weight)):
        return _finished(_fp8_product(x, weight), weight, residual, gated)
    elif chosen(_not_fp8_tiled(rows, weight)):
        out = _fp8_tiled(rows, weight, valid, before, gated)
    elif portable.chosen(_not_fp8_rows(rows, weight, portable_fp8), portable_fp8.SEEN):
        return _finished(_fp8_product(x, weight, portable_fp8), weight, residual, gated)
    else:
        return reference(x, weight, residual, gated)
    return out.reshape(*x.shape[:-1], -1)


def _not_tiled(rows: int, weight: Weight) -> str | None:
    """Why `tile_matmul` can't take this weight, or None if it can."""
    if not isinstance(weight.format, Unquantised):
        return f"a weight in {weight.format}"
    return tile_matmul.supported(rows, weight.dtype, weight.inputs, weight.outputs)


def reference(
    x: Float[Array, "*b k"],
    weight: Weight,
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """The same in plain jnp, of all rows."""
    return _finished(matmul(x, weight), weight, residual, gated)


def _finished(product, weight, residual, gated):
    if gated:
        product = gate(product, weight.layout.interleave)
    return product if residual is None else residual + product


def _not_fp8_rows(rows: Float[Array, "r k"], weight: Weight, by: ModuleType = fp8_rows) -> str | None:
    """Why `fp8_rows`, or the portable one, can't multiply these rows by this weight, or None if it can."""
    match weight.format:
        case Fp8(None):
            return by.supported(len(rows), rows.dtype, fp8.BLOCK, weight.outputs, weight.inputs, weight.outputs)
        case Fp8(block, activations=False):
            unit = weight.outputs // len(weight.scales)
            return by.supported(len(rows), rows.dtype, block, weight.outputs, weight.inputs, unit)
    return f"a weight in {weight.format}"


def _fp8_product(
    x: Float[Array, "*b k"], weight: Weight, by: ModuleType = fp8_rows, dtype: Any = None
) -> Float[Array, "*b n"]:
    """The product by `fp8_rows`, or the portable one, rounded to `dtype`, by default that of x. Scales for all inputs
    come last."""
    rows, scales, by_row, by_output = x.reshape(-1, x.shape[-1]), weight.scales, 1.0, 1.0
    if weight.format.block is None:
        by_output = jnp.repeat(scales[:, 0], weight.outputs // len(scales))
        scales = jnp.ones((1, weight.inputs // fp8.BLOCK), jnp.float32)
    if weight.format.activations:
        quantised, by_row = fp8.quantise_rows(rows, None)
        rows = quantised.astype(rows.dtype)  # which is exact
    out = by.product(rows, weight.values, scales) * by_row * by_output
    return out.astype(dtype or x.dtype).reshape(*x.shape[:-1], -1)


def _not_fp8_tiled(rows: Float[Array, "r k"], weight: Weight) -> str | None:
    """Why neither `fp8_tiles`, `fp8_wide` nor `tile_matmul` with the dequantised weight can multiply the rows by it."""
    match weight.format:
        case Fp8(block, activations=True):
            unit = weight.outputs // len(weight.scales)
            return fp8_tiles.supported(rows.dtype, block, weight.outputs, weight.inputs, unit)
        case Fp8() if _not_fp8_wide(rows, weight):
            return tile_matmul.supported(len(rows), rows.dtype, weight.inputs, weight.outputs)
        case Fp8():
            return None
    return f"a weight in {weight.format}"


def _not_fp8_wide(rows: Float[Array, "r k"], weight: Weight) -> str | None:
    """Why `fp8_wide` can't multiply the rows by this FP8 weight, or None if it can."""
    unit = weight.outputs // len(weight.scales)
    return fp8_wide.supported(len(rows), rows.dtype, weight.format.block, weight.outputs, weight.inputs, unit)


def _fp8_tiled(rows, weight, valid, residual=None, gated=False):
    """What `project` gives, of a weight that `_not_fp8_tiled` has nothing against."""
    if not weight.format.activations:
        if not _not_fp8_wide(rows, weight):
            of = weight.values, weight.scales, valid, residual
            return fp8_wide.matmul(rows, *of, block=weight.format.block, gated=gated)
        return tile_matmul.matmul(rows, weight.dequantised(rows.dtype), valid, residual, gated=gated)
    block = weight.format.block
    ours = chosen(fp8_quantise.supported(len(rows), rows.dtype, block))
    quantised = fp8_quantise.quantise_rows(rows) if ours else fp8.quantise_rows(rows, block)
    return fp8_tiles.matmul(*quantised, weight.values, weight.scales, valid, residual, block=block, gated=gated)


def _forward(x, weight, valid, residual, gated):
    return project(x, weight, valid, residual, gated), (x, weight, residual)


def _backward(gated, kept, gradient):
    x, weight, residual = jax.vjp(partial(reference, gated=gated), *kept)[1](gradient)
    return x, weight, None, residual


project.defvjp(_forward, _backward)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


@functools.cache  # so that what is traced and lowered for it is found again
def gating(activation: str | ClampedSwiglu) -> Callable[[Array, Array], Array]:
    """The function of gate and up that an MLP's or an expert's activation is."""
    if isinstance(activation, ClampedSwiglu):
        return partial(clamped_swiglu, alpha=activation.alpha, limit=activation.limit)
    return lambda gate, up: ACTIVATIONS[activation](gate) * up


def clamped_swiglu(
    gate: Float[Array, "*b n"], up: Float[Array, "*b n"], *, alpha: float, limit: float
) -> Float[Array, "*b n"]:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def gate(gate_up: Float[Array, "*b n"], run: int, activation: str = "silu") -> Float[Array, "*b o"]:
    """activation(gate) * up of columns that alternate in runs of both."""
    *batch, width = gate_up.shape
    runs = gate_up.reshape(*batch, -1, 2, run)
    return gating(activation)(runs[..., 0, :], runs[..., 1, :]).reshape(*batch, width // 2)


def product(rows: Sequence[Float[Array, "b _ _"]], weight: Weight, keep_padding: bool = False) -> Float[Array, "b _ n"]:
    """The product of rows side by side, by a kernel where it serves. Some may have padding rows, and others none.

    `keep_padding`: leave the kernel's in the result, for `forward.run_layer`.
    """
    b, t = len(rows[0]), min(x.shape[1] for x in rows)
    if chosen(_not_few(b * padded(b, t), [x.shape[2] for x in rows], weight)):
        out = few_rows.product([flat(x) for x in rows], weight.unquantised)
        return out.reshape(b, -1, out.shape[1]) if keep_padding else unflat(out, b, t)
    whole = jnp.concatenate([x[:, :t] for x in rows], axis=-1)
    whole_rows = whole.reshape(b * t, -1)
    if chosen(_not_fp8_rows(whole_rows, weight)):
        return _fp8_product(whole, weight)
    if portable.chosen(_not_fp8_rows(whole_rows, weight, portable_fp8), portable_fp8.SEEN):
        return _fp8_product(whole, weight, portable_fp8)
    if chosen(_not_fp8_tiled(whole_rows, weight)):
        return _fp8_tiled(whole_rows, weight, jnp.array([b * t], jnp.int32)).reshape(b, t, -1)
    return matmul(whole, weight)


def logits(x: Float[Array, "*b d"], head: Weight) -> Float[Array, "*b v"]:
    """`x @ head` in float32."""
    rows = x.reshape(-1, x.shape[-1])
    if chosen(_not_fp8_rows(rows, head)):
        return _fp8_product(x, head, dtype=jnp.float32)
    if portable.chosen(_not_fp8_rows(rows, head, portable_fp8), portable_fp8.SEEN):
        return _fp8_product(x, head, portable_fp8, jnp.float32)
    return matmul(x, head, jnp.float32)


def _not_few(rows: int, widths: list[int], weight: Weight) -> str | None:
    """Why `few_rows.product` can't take this weight, or None if it can."""
    if not isinstance(weight.format, Unquantised):
        return f"a weight in {weight.format}"
    return few_rows.product_supported(rows, widths, (weight.inputs, weight.outputs), weight.dtype)


def valid_count(positions: Int[Array, "b t"]) -> Int[Array, "1"]:
    """How many rows there are up to the last that isn't padding, which has a negative position."""
    row = jnp.arange(1, positions.size + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(positions.reshape(-1) >= 0, row, 0), keepdims=True)
