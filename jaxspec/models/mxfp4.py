"""MXFP4 in plain jnp, by the Open Compute Project's microscaling formats (OCP MX v1.0): what kernels for it compute.

A number is E2M1: a sign, two bits of exponent and one of mantissa. Two stand in a byte, the first one in its low half.
Each `BLOCK` inputs of an output share a scale E8M0, a byte s that stands for 2**(s - 127); 255 is no number. A weight
is numbers times scales. bfloat16 holds such a product exactly, unless it is too large or subnormal; 2**-127 counts as
zero, since that is what devices make of it.

On the device the bits stand in another order than in checkpoints, so that eight instructions put those of a word's
numbers, eight as well, where bfloat16 has them. A block of 32 inputs is four words of 32 bits. Word c holds inputs
8i + 2c and the next, i = 0..3, which one thread gives to the tensor cores as a pair. Pair i is `MASK` of the word and
its shifts:

    0: w    1: w, 10 bits rotated to the left    2: (w >> 4) ^ (w << 4)    3: w << 6

One shift for each pair would do, could four copies of the mask's bits fill a word; they can't, so two shifts overlap in
pair 2, and what they have in common is undone beforehand (`_words`). Scales stand block by block, `[blocks, outputs]`.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8, UInt32

Pairs = UInt32[Array, "*w"]

BLOCK = 32  # inputs that share a scale
LARGEST = 6.0  # of E2M1
NAN = 255  # the scale that isn't a number
MOST = 190  # the largest scale that kernels compute with: 2^63
MASK = 0x81C081C0  # of two bfloat16: sign, the last two bits of the exponent, the first of the mantissa
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits


def arrange(
    packed: UInt8[Array, "*e n k2"], scales: UInt8[Array, "*e n b"]
) -> tuple[UInt8[Array, "*e n k2"], UInt8[Array, "*e b n"]]:
    """Rearrange a checkpoint's numbers, two a byte, and scales as devices have them."""
    return arranged(packed), jnp.swapaxes(scales, -1, -2)


def arranged(packed: UInt8[Array, "*e n k2"]) -> UInt8[Array, "*e n k2"]:
    """The values of a checkpoint's numbers, two a byte, the first in the low half."""
    return _bytes(jnp.stack([packed & 15, packed >> 4], axis=-1))


def _bytes(codes: UInt8[Array, "*e n _ _"]) -> UInt8[Array, "*e n k2"]:
    """Numbers in the order of inputs, whatever the last two axes, as values."""
    blocks = codes.reshape(*codes.shape[:-2], -1, 4, 4, 2).astype(jnp.uint32)
    halves = (blocks >> 3) << 15 | (blocks & 7) << 6
    pairs = halves[..., 0] | halves[..., 1] << 16  # as bfloat16 has them
    words = _words(*(pairs[..., i, :] for i in range(4)))
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*codes.shape[:-2], -1)


def _words(first: Pairs, second: Pairs, third: Pairs, fourth: Pairs) -> Pairs:
    """The word of which `unpacked` makes these pairs."""
    word = first | _rotated(second, 32 - 10) | fourth >> 6
    # Eight bits are left, 3, 4, 10, 11, 19, 20, 26 and 27. Bit t of the third pair is the sum of bits t + 4 and t - 4,
    # one of which is known, if in this order.
    for known, lacking in ((35, 27), (27, 19), (19, 11), (11, 3), (2, 10), (12, 4), (18, 26), (28, 20)):
        bit = third >> ((known + lacking) // 2) & 1
        if known < 32:
            bit = bit ^ word >> known & 1
        word = word | bit << lacking
    return word


def unpacked(word: Pairs) -> list[Pairs]:
    """The four pairs of numbers in a word, each as two bfloat16 that are 2**-126 of what they stand for."""
    return [part & jnp.uint32(MASK) for part in (word, _rotated(word, 10), word >> 4 ^ word << 4, word << 6)]


def _rotated(word: Pairs, by: int) -> Pairs:
    return word << by | word >> (32 - by)


def numbers(values: UInt8[Array, "*e n k2"]) -> Float[Array, "*e n k"]:
    """The numbers in the order of inputs, without scales."""
    words = lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, 4, 4), jnp.uint32)
    pairs = jnp.stack(unpacked(words), axis=-2)
    halves = jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-1)
    return _number(halves >> 15 << 3 | halves >> 6 & 7).reshape(*values.shape[:-1], -1)


def dequantise(values: UInt8[Array, "*e n k2"], scales: UInt8[Array, "*e b n"]) -> Float[Array, "*e n k"]:
    """The weight in float32, k = 2 k2 inputs of which each 32 have one of the b scales."""
    powers = _powers(jnp.swapaxes(scales, -1, -2))
    return (numbers(values).reshape(*powers.shape, BLOCK) * powers[..., None]).reshape(*values.shape[:-1], -1)


def _powers(scales: UInt8[Array, "*s"]) -> Float[Array, "*s"]:
    """E8M0 is the exponent of a float32."""
    return lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)


def _number(code: UInt[Array, "*s"]) -> Float[Array, "*s"]:
    """E2M1 by arithmetic, which fuses with what follows where a table's look-ups wouldn't."""
    exponent, mantissa = ((code >> 1) & 3).astype(jnp.int32), (code & 1).astype(jnp.float32)
    magnitude = jnp.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * (1 << jnp.maximum(exponent - 1, 0)))
    return jnp.where(code >= 8, -magnitude, magnitude)


def quantise(weight: Float[Array, "*e n k"]) -> tuple[UInt8[Array, "*e n k2"], UInt8[Array, "*e b n"]]:
    """Values and scales of a weight whose inputs are a multiple of 32, as the standard says it.

    A scale is the power of two of a block's largest magnitude, over 4.
    """
    blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    power = jnp.where(largest > 0, jnp.frexp(largest)[1] - 1 - 2, 0)  # 4 is two powers above 1
    scales = jnp.clip(power + _BIAS, 1, NAN - 1).astype(jnp.uint8)
    return packed(blocks / _powers(scales)[..., None]), jnp.swapaxes(scales, -1, -2)


def packed(parts: Float[Array, "*e n _ _"]) -> UInt8[Array, "*e n k2"]:
    """The values of numbers that are rounded to E2M1, whatever the last two axes.

    Numbers go to the nearest, halfway ones to the even mantissa, and those above 6 to 6.
    """
    magnitudes = jnp.minimum(jnp.abs(parts), LARGEST)
    # Between two magnitudes' middles each; at a middle the even one of the two, whose last bit is zero.
    code = jnp.zeros(parts.shape, jnp.uint8)
    for i, (low, high) in enumerate(itertools.pairwise(_MAGNITUDES)):
        middle = (low + high) / 2
        code = code + ((magnitudes >= middle) if i % 2 else (magnitudes > middle)).astype(jnp.uint8)
    return _bytes(jnp.where(parts < 0, code + 8, code))
