"""Products of up to 128 rows with FP8 weights on any NVIDIA GPU, as `fp8_rows.product` has them; and e4m3's numbers.

A program makes some outputs from a part of the inputs, a block of them at a time. XLA adds the parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxspec.models.fp8 import BLOCK, E4M3
from jaxspec.pallas import hopper, portable

MAX_ROWS, LEAST_ROWS = 128, 16
OUTPUTS = 64  # of a program
CONVERTED = 8.9  # compute capability from which there are instructions that convert e4m3


def bits(values: Float[Array, "*s"]) -> Array:
    """e4m3 numbers as a kernel's operand: their bits if the device can't convert them."""
    return values if portable.capability() >= CONVERTED else lax.bitcast_convert_type(values, jnp.int8)


def numbers(values: Array, dtype: Any) -> Array:
    """Convert `bits` to their numbers within a kernel, exactly. Shifted, they are float16's times 2^-8."""
    if values.dtype == E4M3:
        return values.astype(jnp.float16).astype(dtype)
    wide = values.astype(jnp.int32)
    shifted = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    half = lax.bitcast_convert_type(shifted.astype(jnp.int16), jnp.float16)
    return (half.astype(jnp.float32) * 256).astype(dtype)


def supported(rows: int, dtype: Any, block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can.

    `block` inputs and `unit` outputs share a scale.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"rows in {jnp.dtype(dtype).name}; bfloat16 and float16 are supported"
    if rows > MAX_ROWS:
        return f"{rows} rows; up to {MAX_ROWS} are supported"
    if block != BLOCK or outputs % unit:
        return f"scales that aren't for {BLOCK} inputs each"
    if outputs % OUTPUTS or inputs % BLOCK:
        return f"a weight of {inputs} x {outputs}; multiples of {BLOCK} x {OUTPUTS} are supported"
    return None


def product(
    x: Float[Array, "r k"], values: Float[Array, "n k"], scales: Float[Array, "a b"], *, interpret: bool = False
) -> Float[Array, "r n"]:
    """x @ (values * scales)', in float32: `fp8.dequantise` in blocks of 128 inputs."""
    hopper.count("portable_fp8")
    parts = portable.parts_of(x.shape[1] // BLOCK, len(values) // OUTPUTS)
    return _product(x, bits(values), scales, parts=parts, interpret=interpret).sum(0)


@partial(jax.jit, static_argnames=("parts", "interpret"))
def _product(x, values, scales, *, parts, interpret):
    (r, k), n = x.shape, len(values)
    tile = max(LEAST_ROWS, 1 << (r - 1).bit_length())
    return pl.pallas_call(
        partial(_part, tile, k // BLOCK // parts, n // len(scales)),
        out_shape=jax.ShapeDtypeStruct((parts, r, n), jnp.float32),
        grid=(n // OUTPUTS, parts),
        compiler_params=portable.triton().CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="portable_fp8",
    )(x, values, scales)


def _part(tile, blocks, unit, x_ref, values_ref, scales_ref, out_ref):
    """Compute some outputs from a part of the inputs."""
    first, part = pl.program_id(0) * OUTPUTS, pl.program_id(1)
    row, output = jnp.arange(tile, dtype=jnp.int32), first + jnp.arange(OUTPUTS, dtype=jnp.int32)
    valid = jnp.broadcast_to((row < x_ref.shape[0])[:, None], (tile, BLOCK))

    def body(i, total):
        block = part * blocks + i
        at = jnp.broadcast_to(block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None], valid.shape)
        rows = portable.triton().load(x_ref.at[jnp.broadcast_to(row[:, None], valid.shape), at], mask=valid, other=0.0)
        weight = numbers(values_ref[pl.ds(first, OUTPUTS), pl.ds(block * BLOCK, BLOCK)], rows.dtype)
        scale = scales_ref[lax.div(output, jnp.int32(unit)), jnp.full_like(output, 1) * block]
        dots = lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return total + dots * scale[None]

    total = lax.fori_loop(0, blocks, body, jnp.zeros((tile, OUTPUTS), jnp.float32))
    shape = total.shape
    at = out_ref.at[
        jnp.full(shape, 1, jnp.int32) * part,
        jnp.broadcast_to(row[:, None], shape),
        jnp.broadcast_to(output[None], shape),
    ]
    portable.triton().store(at, total, mask=jnp.broadcast_to((row < x_ref.shape[0])[:, None], shape))
