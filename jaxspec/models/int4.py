"""Integers of four bits in plain jnp: what kernels for AWQ, GPTQ and compressed-tensors' packed weights compute.

A number is an integer n from 0 to 15. Each group of inputs of an output shares a scale and a zero point, so a weight is
(n - zero point) times scale. The zero point of symmetric weights is `MIDDLE`, and isn't stored.

On the device the bits stand so that a mask and a shift make bfloat16 of them, in the order of the tensor cores' left
operand. A `BLOCK` of 32 inputs is four words of 32 bits. Word c holds inputs 8i + 2c and the next, i = 0..3: the first
one's number at bit 4i, the other's at bit 16 + 4i. A group is a multiple of a block. Of `UNIT` inputs, or as many as
divide both them and all inputs, the blocks' words 0 come first, then their words 1, and so on (`by_lane`): a lane of
the tensor cores takes the same word of each block, and so loads neighbours.

Scales stand by group, `[groups, outputs]`. With zero points there are two rows a group: scales, then zero points.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK = 32  # inputs whose numbers are arranged together
UNIT = 256  # inputs whose words are arranged together
GROUP = 128  # inputs that share a scale in weights quantised on load
MIDDLE = 8  # the zero point of symmetric weights


def arrange(packed: UInt8[Array, "*e n k2"]) -> UInt8[Array, "*e n k2"]:
    """Rearrange bytes of two numbers each, the first one in the low half, as devices have them."""
    return _bytes(jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1))


def _bytes(numbers: UInt8[Array, "*e n k"]) -> UInt8[Array, "*e n k2"]:
    """Numbers in the order of inputs, as values."""
    blocks = numbers.reshape(*numbers.shape[:-1], -1, 4, 4, 2).astype(jnp.uint32)  # [block, i, c, first or second]
    at = 4 * jnp.arange(4, dtype=jnp.uint32)[:, None, None] + 16 * jnp.arange(2, dtype=jnp.uint32)
    words = jnp.sum(blocks << at, axis=(-3, -1), dtype=jnp.uint32)
    return by_lane(lax.bitcast_convert_type(words, jnp.uint8).reshape(*numbers.shape[:-1], -1))


def unit_of(inputs: int) -> int:
    """How many of so many inputs have their words arranged together."""
    return math.gcd(inputs, UNIT)


def by_lane(values: UInt8[Array, "*e n k2"]) -> UInt8[Array, "*e n k2"]:
    """Values whose words stand block by block, lane by lane in each unit."""
    words = values.reshape(*values.shape[:-1], -1, unit_of(2 * values.shape[-1]) // BLOCK, 4, 4)
    return jnp.swapaxes(words, -3, -2).reshape(values.shape)


def by_block(values: UInt8[Array, "*e n k2"]) -> UInt8[Array, "*e n k2"]:
    """`by_lane` undone."""
    words = values.reshape(*values.shape[:-1], -1, 4, unit_of(2 * values.shape[-1]) // BLOCK, 4)
    return jnp.swapaxes(words, -3, -2).reshape(values.shape)


def numbers(values: UInt8[Array, "*e n k2"]) -> UInt8[Array, "*e n k"]:
    """The numbers in the order of inputs."""
    words = lax.bitcast_convert_type(by_block(values).reshape(*values.shape[:-1], -1, 1, 4, 1, 4), jnp.uint32)
    at = 4 * jnp.arange(4, dtype=jnp.uint32)[:, None, None] + 16 * jnp.arange(2, dtype=jnp.uint32)
    return (words >> at & 15).astype(jnp.uint8).reshape(*values.shape[:-1], -1)


def dequantise(
    values: UInt8[Array, "*e n k2"], scales: Float[Array, "*e s n"], zeros: bool = False
) -> Float[Array, "*e n k"]:
    """The weight in float32. `zeros`: scales have a row of zero points behind each of their rows."""
    by_output = jnp.swapaxes(scales, -1, -2).astype(jnp.float32)
    by_output = by_output.reshape(*by_output.shape[:-1], -1, 2 if zeros else 1)
    groups = numbers(values).astype(jnp.float32).reshape(*by_output.shape[:-1], -1)
    return ((groups - (by_output[..., 1:] if zeros else MIDDLE)) * by_output[..., :1]).reshape(*values.shape[:-1], -1)


def group_of(inputs: int) -> int | None:
    """How many inputs share a scale in a weight that is quantised on load; None for inputs that no group divides."""
    group = math.gcd(inputs, GROUP)
    return group if group % BLOCK == 0 else None


def quantise(
    weight: Float[Array, "*e n k"], group: int, largest: Float[Array, "*e n"] | None = None
) -> tuple[UInt8[Array, "*e n k2"], Float[Array, "*e s n"]]:
    """Values and bfloat16 scales of a symmetric weight, whose numbers go to the nearest.

    A scale makes a group's largest magnitude 7.5, as compressed-tensors does, so that the range from -8 to 7 is used
    whole. It is rounded before numbers are divided by it. `largest`: magnitudes of whole outputs, if these are parts of
    them and all inputs are one group.
    """
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group)
    largest = jnp.max(jnp.abs(groups), axis=-1) if largest is None else largest[..., None]
    scales = (largest / 7.5).astype(jnp.bfloat16)
    scales = jnp.where(scales > 0, scales, jnp.bfloat16(1))
    parts = jnp.round(groups / scales.astype(jnp.float32)[..., None]) + MIDDLE
    parts = jnp.clip(parts, 0, 15).astype(jnp.uint8).reshape(weight.shape)
    return _bytes(parts), jnp.swapaxes(scales, -1, -2)
