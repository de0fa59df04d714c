"""FP8 arithmetic in plain jnp: the specification of what FP8 kernels compute.

Values are e4m3 [outputs, inputs], as checkpoints have them and tensor cores take them. Scales [outputs / g, groups] are
float32: one for g outputs and for a group of inputs. With `block`, groups are of that many inputs, the last one of what
is left; without, all inputs are one. A weight is values times scales.

Rows are quantised as they come: each row's group of `BLOCK` inputs by its own largest magnitude, however many inputs
share a scale of the weight. e4m3 has no infinity, so what is larger than its largest number is clipped.

Rows of a norm are quantised before the norm's factor, which multiplies the products: a row's scale takes any factor. So
no kernel needs the factor of a row before its products.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.loops import zeros_after

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BLOCK = 128  # inputs and outputs of a block in checkpoints


def quantise_blocks(
    weight: Float[Array, "n k"], largest: Float[Array, "a b"] | None = None
) -> tuple[Float[Array, "n k"], Float[Array, "a b"]]:
    """Values and scales of a weight in blocks of 128 x 128, the last ones of what is left. No scale is zero.

    Each scale is for n / a outputs: where 128 don't divide n, a block's scale is there for each part of it that does.
    `largest`: magnitudes of the blocks, where n / a outputs are a part of one.
    """
    n, k = weight.shape
    blocks = _blocks(weight, BLOCK if largest is None else n // len(largest))
    scales = _scales(jnp.max(jnp.abs(blocks), axis=(1, 3)) if largest is None else largest)
    values = _e4m3(blocks / scales[:, None, :, None])
    if largest is None and n % BLOCK:
        unit = math.gcd(n, BLOCK)
        scales = jnp.repeat(scales, BLOCK // unit, axis=0)[: n // unit]
    return values.reshape(-1, values.shape[2] * BLOCK)[:n, :k], scales


def finer(scales: Float[Array, "a b"], outputs: int, unit: int) -> Float[Array, "c b"]:
    """Scales of so many outputs, one for each `unit` of them, from those for more at once."""
    return jnp.repeat(scales, outputs // len(scales) // unit, axis=0)


def magnitudes(weight: Float[Array, "n k"], outputs: int) -> Float[Array, "a b"]:
    """The largest magnitudes of so many outputs and a block of inputs."""
    return jnp.max(jnp.abs(_blocks(weight, outputs)), axis=(1, 3))


def _blocks(weight: Float[Array, "n k"], outputs: int) -> Float[Array, "a o b i"]:
    n, k = weight.shape
    whole = jnp.pad(weight.astype(jnp.float32), ((0, -n % outputs), (0, -k % BLOCK)))
    return whole.reshape(-(-n // outputs), outputs, -1, BLOCK)


def quantise_outputs(
    weight: Float[Array, "n k"], largest: Float[Array, " n"] | None = None
) -> tuple[Float[Array, "n k"], Float[Array, "n 1"]]:
    """Values and scales of a weight, one for each output. `largest`: magnitudes of the whole outputs of parts."""
    if largest is None:
        largest = jnp.max(jnp.abs(weight.astype(jnp.float32)), axis=1)
    scales = _scales(largest[:, None])
    return _e4m3(weight.astype(jnp.float32) / scales), scales


def quantise_rows(x: Float[Array, "*r k"]) -> tuple[Float[Array, "*r k"], Float[Array, "*r b"]]:
    """Values and scales of rows, a scale for each group of `BLOCK` inputs."""
    k = x.shape[-1]
    whole = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -k % BLOCK)])
    groups = whole.reshape(*x.shape[:-1], -1, BLOCK)
    scales = _scales(jnp.max(jnp.abs(groups), axis=-1))
    quotients = groups * (1 / scales[..., None])
    # XLA may leave out a conversion to e4m3 and back, so these are its numbers already: of four bits, or of fewer.
    normal = jax.lax.reduce_precision(quotients, exponent_bits=8, mantissa_bits=3)
    values = _e4m3(jnp.where(jnp.abs(quotients) < 2.0**-6, jnp.round(quotients * 512) / 512, normal))
    return values.reshape(*x.shape[:-1], -1)[..., :k], scales


def rounded(x: Float[Array, "*r k"], factor: Float[Array, "*r"] | None = None) -> Float[Array, "*r k"]:
    """Quantised rows times their scales, and each times its factor, in their own dtype: for kernels that take no
    quantised rows."""
    (values, scales), k = quantise_rows(x), x.shape[-1]
    scales = scales if factor is None else scales * factor[..., None]
    return (values.astype(jnp.float32) * jnp.repeat(scales, BLOCK, axis=-1)[..., :k]).astype(x.dtype)


def dequantise(
    values: Float[Array, "*e n k"], scales: Float[Array, "*e a b"], block: int | None
) -> Float[Array, "*e n k"]:
    """The weight in float32."""
    n, k = values.shape[-2:]
    scales = jnp.repeat(scales, n // scales.shape[-2], axis=-2)
    if block:
        scales = jnp.repeat(scales, block, axis=-1)[..., :k]
    return values.astype(jnp.float32) * scales


def product(
    x: Float[Array, "*r k"],
    values: Float[Array, "n k"],
    scales: Float[Array, "a b"],
    block: int | None,
    factor: Float[Array, "*r"] | None = None,
) -> Float[Array, "*r n"]:
    """Rows, quantised, times a weight, in float32: the sum over groups of what each gives, times both scales, and times
    each row's factor, if there are any.

    Products of two e4m3 numbers and the sums over a group are exact enough in any dtype whose products are summed in
    float32. Groups go one after the other, so that no more than one group's products are kept.
    """
    rows, row_scales = quantise_rows(x)
    row_scales = row_scales if factor is None else row_scales * factor[..., None]
    n, k = values.shape
    pad = lambda a: jnp.pad(a.astype(x.dtype), [(0, 0)] * (a.ndim - 1) + [(0, -k % BLOCK)])  # noqa: E731
    groups = jnp.moveaxis(pad(rows).reshape(*x.shape[:-1], -1, BLOCK), -2, 0)
    parts = jnp.moveaxis(pad(values).reshape(n, -1, BLOCK), 1, 0)
    weight_scales = jnp.repeat(scales, n // len(scales), axis=0).T  # [groups, n]
    weight_scales = weight_scales if block else jnp.broadcast_to(weight_scales, (len(groups), n))

    def add(total, group):
        row, part, row_scale, weight_scale = group
        dots = jnp.einsum("...k,nk->...n", row, part, preferred_element_type=jnp.float32)
        return total + dots * row_scale[..., None] * weight_scale, None

    start = zeros_after(x, (*x.shape[:-1], n), jnp.float32)
    return jax.lax.scan(add, start, (groups, parts, jnp.moveaxis(row_scales, -1, 0), weight_scales))[0]


def _scales(largest: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Scales that map the largest magnitude to the largest number; 1 where all are zero, or too small for a scale."""
    scales = largest * (1 / LARGEST)
    return jnp.where(scales > 0, scales, 1.0)


def _e4m3(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return jnp.clip(x, -LARGEST, LARGEST).astype(E4M3)
