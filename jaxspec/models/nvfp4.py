"""NVFP4 in plain jnp: what kernels for it compute.

Numbers are E2M1, two a byte, in the order that `mxfp4` gives them on the device, their words lane by lane as `int4`'s.
Each `GROUP` inputs of an output share a scale in e4m3, and a whole matrix has a factor in float32. A weight is number
times scale times factor. Several matrices are fused in one weight here, so each output has a factor of its own.

A scale's byte has five bits of exponent and three of mantissa (`code`), so that all that e4m3 has are normal numbers:
shifted by four bits, and with three ones put before it, it is a bfloat16 of 2**118 times the scale. Those of a unit of
inputs (`int4.unit_of`) stand side by side: `[units, outputs * groups of a unit]`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxspec.models import fp8, int4, mxfp4

GROUP = 16  # inputs that share a scale
LEAST = 2.0**-9  # the least scale; numbers of a group without one become zero
_BIAS = (127 - 21) << 3  # of the exponent in float32, less that in a scale's byte, and its three bits of mantissa


def code(scales: Float[Array, "*s"]) -> UInt8[Array, "*s"]:
    """The bytes of scales, numbers of e4m3 from `LEAST` on."""
    bits = lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint32)
    return ((bits >> 20) - _BIAS).astype(jnp.uint8)


def decode(codes: UInt8[Array, "*s"]) -> Float[Array, "*s"]:
    """The scales, in float32."""
    return lax.bitcast_convert_type((codes.astype(jnp.uint32) + _BIAS) << 20, jnp.float32)


def arrange(
    packed: UInt8[Array, "*e n k2"], scales: Float[Array, "*e n s"]
) -> tuple[UInt8[Array, "*e n k2"], UInt8[Array, "*e u ng"]]:
    """Rearrange bytes of two numbers each, the first one in the low half, and their scales as devices have them."""
    empty = jnp.repeat(scales == 0, GROUP // 2, axis=-1)
    values = int4.by_lane(mxfp4.arranged(jnp.where(empty, 0, packed)))
    return values, _by_unit(code(jnp.maximum(scales.astype(jnp.float32), LEAST)))


def _by_unit(codes: UInt8[Array, "*e n s"]) -> UInt8[Array, "*e u ng"]:
    each = int4.unit_of(codes.shape[-1] * GROUP) // GROUP
    units = jnp.moveaxis(codes.reshape(*codes.shape[:-1], -1, each), -2, -3)
    return units.reshape(*units.shape[:-2], -1)


def scales_of(codes: UInt8[Array, "*e u ng"], outputs: int) -> Float[Array, "*e n s"]:
    """The scales of so many outputs' groups, in float32."""
    by_output = jnp.moveaxis(codes.reshape(*codes.shape[:-1], outputs, -1), -3, -2)
    return decode(by_output).reshape(*by_output.shape[:-2], -1)


def dequantise(
    values: UInt8[Array, "*e n k2"], scales: UInt8[Array, "*e u ng"], factors: Float[Array, "*e n"]
) -> Float[Array, "*e n k"]:
    """The weight in float32."""
    by_output = scales_of(scales, values.shape[-2]) * factors[..., None]
    groups = mxfp4.numbers(int4.by_block(values)).reshape(*by_output.shape, GROUP)
    return (groups * by_output[..., None]).reshape(*values.shape[:-1], -1)


def quantise(
    weight: Float[Array, "*e n k"], largest: Float[Array, "*e m"] | None = None
) -> tuple[UInt8[Array, "*e n k2"], UInt8[Array, "*e u ng"], Float[Array, "*e n"]]:
    """Values, scales and factors of a weight whose inputs are a multiple of 32, one factor for each matrix.

    The factor makes the largest scale of a matrix the largest number of e4m3, as ModelOpt does. `largest`: magnitudes
    of all outputs of the whole matrix, if this is a part of it.
    """
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, GROUP)
    of_groups = jnp.max(jnp.abs(groups), axis=-1)
    of_matrix = jnp.max(of_groups, axis=(-2, -1)) if largest is None else jnp.max(largest, axis=-1)
    factor = of_matrix / mxfp4.LARGEST / fp8.LARGEST
    factor = jnp.where(factor > 0, factor, 1.0)[..., None, None]
    scales = jnp.clip(of_groups / mxfp4.LARGEST / factor, LEAST, fp8.LARGEST).astype(fp8.E4M3)
    parts = groups / (scales.astype(jnp.float32) * factor)[..., None]
    values = mxfp4.packed(parts).reshape(*weight.shape[:-1], -1)
    return int4.by_lane(values), _by_unit(code(scales)), jnp.broadcast_to(factor[..., 0], weight.shape[:-1])
