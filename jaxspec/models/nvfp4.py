"""NVFP4 in plain jnp: what kernels for it compute.

Numbers are E2M1, two a byte, in the order that `mxfp4` gives them on the device. Each `GROUP` inputs of an output share
a scale in e4m3, and a whole matrix has a factor in float32. A weight is number times scale times factor. Several
matrices are fused in one weight here, so each output has a factor of its own.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxspec.models import fp8, mxfp4

GROUP = 16  # inputs that share a scale


def dequantise(
    values: UInt8[Array, "*e n k2"], scales: Float[Array, "*e s n"], factors: Float[Array, "*e n"]
) -> Float[Array, "*e n k"]:
    """The weight in float32."""
    by_output = jnp.swapaxes(scales, -1, -2).astype(jnp.float32) * factors[..., None]
    groups = mxfp4.numbers(values).reshape(*by_output.shape, GROUP)
    return (groups * by_output[..., None]).reshape(*values.shape[:-1], -1)


def quantise(
    weight: Float[Array, "*e n k"],
) -> tuple[UInt8[Array, "*e n k2"], Float[Array, "*e s n"], Float[Array, "*e n"]]:
    """Values, scales and factors of a weight whose inputs are a multiple of 32, one factor for each matrix.

    The factor makes the largest scale of a matrix the largest number of e4m3, as ModelOpt does.
    """
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1) / mxfp4.LARGEST
    factor = jnp.max(largest, axis=(-2, -1)) / fp8.LARGEST
    factor = jnp.where(factor > 0, factor, 1.0)[..., None, None]
    scales = jnp.clip(largest / factor, 2.0**-9, fp8.LARGEST).astype(fp8.E4M3)
    parts = groups / (scales.astype(jnp.float32) * factor)[..., None]
    values = mxfp4.packed(parts)
    factors = jnp.broadcast_to(factor[..., 0], weight.shape[:-1])
    return values.reshape(*weight.shape[:-1], -1), jnp.swapaxes(scales, -1, -2), factors
