"""Experts in MXFP4 on any NVIDIA GPU, with biases and any activation; see `experts_mlp` and `models.mxfp4`.

A program takes a tile of an item's products (`experts_mlp.items`). A word has eight inputs, two of which are a pair
that one shift and a mask bring out. So rows are arranged beforehand: all words' first inputs, all their second ones,
and so on. A number becomes float16's bits, times its block's scale, which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxspec.models.mxfp4 import BLOCK, MASK
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.experts.expert_stream import COUNT, EXPERT, ROW_BLOCKS, SOURCE, TARGET, Items
from jaxspec.pallas.portable.experts import LEAST_ROWS, NARROW, gated, put, rows_of, tile_rows, times

WORDS = 16  # of each output, that are multiplied at once
EACH = 8  # inputs of a word
MAX_ROWS = 16  # of an item: larger tiles compile, but no GPU has run them yet
_MASK = MASK - 2**32  # as a signed number


def supported(dtype: Any, stacks: list) -> str | None:
    """Why the kernels can't compute these `experts_mlp.Stack`s in MXFP4 of rows of `dtype`, or None if they can."""
    if len(stacks) > 1:
        return "several stacks of experts in MXFP4"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; bfloat16 is supported"
    down = stacks[0][1]
    d, f = down.outputs, down.inputs
    return f"widths {d} and {f}; multiples of {NARROW} are supported" if d % NARROW or f % NARROW else None


def items(
    rows: Float[Array, "r d"],
    stack: tuple,
    work: Items,
    gating: Callable | None = None,
    interpret: bool = False,
) -> Float[Array, "c d"]:
    """`experts_mlp.reference` of one stack. Rows that are no item's may hold anything."""
    hopper.count("portable_mxfp4")
    gate_up, down, *biases = stack
    up = (*map(_words, (gate_up.values, gate_up.scales)), *biases[:1])
    down = (*map(_words, (down.values, down.scales)), *biases[1:])
    return _items(rows, up, down, work, gating=gating, interpret=interpret)


def _words(values: Array) -> Array:
    """Pack four neighbouring bytes into a word. Triton can't transpose tiles of bytes on every card."""
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, 4), jnp.int32)


@partial(jax.jit, static_argnames=("gating", "interpret"))
def _items(rows, up, down, work, *, gating, interpret):
    tile = max(work.rows, LEAST_ROWS)
    params = portable.triton().CompilerParams(num_warps=4, num_stages=2)
    for name, source, weights, gates in (("up", SOURCE, up, 2), ("down", TARGET, down, 1)):
        outputs = weights[0].shape[1] // gates
        rows = pl.pallas_call(
            partial(_item, tile, source, gates, gating, len(weights) > 2),
            out_shape=jax.ShapeDtypeStruct((work.capacity, outputs), rows.dtype),
            grid=(outputs // NARROW, len(work.table)),
            compiler_params=params,
            interpret=interpret,
            name=f"portable_mxfp4_{name}",
        )(work.table, _arranged(rows), *weights)
    return rows


def _arranged(rows: Float[Array, "r k"]) -> Float[Array, "r k"]:
    """Order inputs by their place in a word: all first ones, then all second ones, ...

    Word c of a block has inputs 8i + 2c and the next.
    """
    r, k = rows.shape
    return rows.reshape(r, k // BLOCK, 4, 4, 2).transpose(0, 2, 4, 1, 3).reshape(r, k)


def _item(tile, source, gates, gating, biased, table_ref, rows_ref, words_ref, scales_ref, *refs):
    """Compute `NARROW` outputs of an item: of one product, or of gate and up, which it combines."""
    item, first = pl.program_id(1), pl.program_id(0) * NARROW
    expert, words = table_ref[item, EXPERT], words_ref.shape[2]
    outputs = words_ref.shape[1] // gates

    @pl.when((item < table_ref[0, COUNT]) & (table_ref[item, ROW_BLOCKS] > 0))
    def _():
        index, mask = tile_rows(table_ref, item, source, tile)

        def body(i, sums):
            begin = i * WORDS
            parts = [_part(rows_ref, index, mask, n * words + begin, begin, words) for n in range(EACH)]
            return tuple(
                _added(total, parts, words_ref, scales_ref, expert, gate * outputs + first, begin)
                for gate, total in enumerate(sums)
            )

        sums = (jnp.zeros((tile, NARROW), jnp.float32),) * gates
        sums = lax.fori_loop(0, -(-words // WORDS), body, sums)
        if biased:
            each = [refs[0][expert, pl.ds(gate * outputs + first, NARROW)] for gate in range(gates)]
            sums = [total + bias.astype(jnp.float32)[None] for total, bias in zip(sums, each, strict=True)]
        target, mask_out = tile_rows(table_ref, item, TARGET, tile)
        put(refs[-1], target, mask_out, first, gated(*sums, gating) if gates > 1 else sums[0])


def _part(rows_ref, index, mask, first, begin, words):
    """Load the rows' n-th inputs of some words; zeros past the last word."""
    there = begin + jnp.arange(WORDS, dtype=jnp.int32) < words
    return jnp.where(there[None], rows_of(rows_ref, index, mask, first, WORDS), 0)


def _added(total, parts, words_ref, scales_ref, expert, first, begin):
    """Add the products of some words' inputs to a sum."""
    shape = NARROW, WORDS
    output, word = (lax.broadcasted_iota(jnp.int32, shape, axis) + start for axis, start in enumerate((first, begin)))
    there = word < words_ref.shape[2]
    which, load = jnp.full(shape, 1, jnp.int32) * expert, portable.triton().load
    words = load(words_ref.at[which, output, word], mask=there, other=0)
    block = lax.div(word, jnp.int32(BLOCK // EACH))
    power = load(scales_ref.at[which, block, lax.div(output, jnp.int32(4))], mask=there, other=0)
    power = lax.shift_right_logical(power, lax.rem(output, jnp.int32(4)) * 8) & 0xFF
    scale = lax.bitcast_convert_type(power << 23, jnp.float32) * 2.0**14
    for i, bits in enumerate(_unpacked(words)):
        for parity in range(2):
            number = _number(bits & 0xFFFF if parity == 0 else lax.shift_right_logical(bits, jnp.int32(16)))
            total = total + times(parts[2 * i + parity], (number * scale).astype(parts[0].dtype))
    return total


def _unpacked(word: Array) -> list[Array]:
    """Unpack signed words as `mxfp4.unpacked` does."""
    right = lambda by: lax.shift_right_logical(word, jnp.int32(by))  # noqa: E731
    each = word, word << 10 | right(22), right(4) ^ word << 4, word << 6
    return [bits & jnp.int32(_MASK) for bits in each]


def _number(half: Array) -> Array:
    """Convert E2M1 in bfloat16's bit positions to float32 times 2**-14."""
    bits = (half & 0x8000) | ((half & 0x1C0) << 3)
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16).astype(jnp.float32)
