"""Weights in four bits on any NVIDIA GPU: experts, with biases and any activation, and products of up to 128 rows.

A program takes a tile of an item's products (`experts_mlp.items`), or some outputs of a product from a part of the
inputs, which XLA adds. A word has eight inputs, two of which are a pair that one shift and a mask bring out. So rows
are arranged beforehand: all words' first inputs, all their second ones, and so on. E2M1 numbers become float16's bits;
times its scale a number is rounded to the rows' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxspec.models import int4, nvfp4
from jaxspec.models.mxfp4 import BLOCK, MASK
from jaxspec.models.weights import Int4, Mxfp4, Weight
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.experts.expert_stream import SOURCE, TARGET, Items
from jaxspec.pallas.portable.experts import LEAST_ROWS, NARROW, activated, each_stack, put, rows_of, tile_rows, times

WORDS = 16  # of each output, that are multiplied at once
EACH = 8  # inputs of a word
BYTES = 4  # of a word
MAX_ROWS = 16  # of an item: larger tiles compile, but no GPU has run them yet
MOST_ROWS = 128  # of a product
_MASK = MASK - 2**32  # as a signed number


@dataclass(frozen=True)
class Packing:
    """How a weight's words and scales stand: the words of `unit` inputs lane by lane (`int4.by_lane`).

    `group`: inputs that share a scale. `kind`: the name of the format's class. `zeros`: scales have zero points.
    """

    kind: str
    unit: int
    group: int
    zeros: bool = False

    @classmethod
    def of(cls, weight: Weight) -> Packing:
        fmt = weight.format
        if isinstance(fmt, Mxfp4):
            return cls("Mxfp4", BLOCK, BLOCK)
        unit = int4.unit_of(weight.inputs)
        if isinstance(fmt, Int4):
            return cls("Int4", unit, fmt.group or weight.inputs, fmt.zeros)
        return cls("Nvfp4", unit, nvfp4.GROUP)

    def arranged(self, rows: Float[Array, "r k"]) -> Float[Array, "r k"]:
        """Order inputs by their place in a word: all first ones, then all second ones, ...

        Word c of a block has inputs 8i + 2c and the next.
        """
        r, k = rows.shape
        parts = rows.reshape(r, k // self.unit, self.unit // BLOCK, 4, 4, 2)  # [unit, block, i, c, first or second]
        return parts.transpose(0, 3, 5, 1, 4, 2).reshape(r, k)


def supported(dtype: Any, stacks: Sequence[Sequence[Weight]]) -> str | None:
    """Why the kernels can't compute with these weights in four bits and rows of `dtype`, or None if they can.

    `stacks`: those of `experts_mlp`, or a weight alone.
    """
    weights = [weight for stack in stacks for weight in stack[:2]]
    dtypes = ("bfloat16",) if any(isinstance(w.format, Mxfp4) for w in weights) else ("bfloat16", "float16")
    if jnp.dtype(dtype).name not in dtypes:
        return f"rows in {jnp.dtype(dtype).name}; {' and '.join(dtypes)} are supported"
    if len({(len(stack), *((w.format, w.inputs, w.outputs) for w in stack[:2])) for stack in stacks}) > 1:
        return "experts in several formats or sizes in one mixture"
    if bad := [width for w in weights for width in (w.inputs, w.outputs) if width % NARROW]:
        return f"a width of {bad[0]}; multiples of {NARROW} are supported"
    return None


def items(
    rows: Float[Array, "r d"],
    stacks: list[tuple],
    work: Items,
    gating: Callable | None = None,
    interpret: bool = False,
) -> Float[Array, "c d"]:
    """`experts_mlp.reference`. Rows that are no item's may hold anything."""
    hopper.count("portable_four_bits")
    gates = stacks[0][0].outputs // stacks[0][1].inputs
    packings = Packing.of(stacks[0][0]), Packing.of(stacks[0][1])
    parts = [[_operands(*stack[n::2]) for stack in stacks] for n in range(2)]
    return _items(rows, *parts, work, packings=packings, gates=gates, gating=gating, interpret=interpret)


def _operands(weight: Weight, bias: Array | None = None) -> dict[str, Array]:
    """A stack's arrays, bytes in words. Triton can't transpose tiles of bytes on every card."""
    words = lambda x: lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, BYTES), jnp.int32)  # noqa: E731
    scales = weight.scales if isinstance(weight.format, Int4) else words(weight.scales)
    held = {"words": words(weight.values), "scales": scales, "factors": weight.factors, "bias": bias}
    return {name: array for name, array in held.items() if array is not None}


@partial(jax.jit, static_argnames=("packings", "gates", "gating", "interpret"))
def _items(rows, up, down, work, *, packings, gates, gating, interpret):
    tile = max(work.rows, LEAST_ROWS)
    params = portable.triton().CompilerParams(num_warps=4, num_stages=2)
    for name, source, stacks, packing, count in zip(
        ("up", "down"), (SOURCE, TARGET), (up, down), packings, (gates, 1), strict=True
    ):
        outputs, names = stacks[0]["words"].shape[1] // count, tuple(stacks[0])
        sizes = tuple(len(stack["words"]) for stack in stacks)
        finish = partial(_finished, name == "up", gating)
        rows = pl.pallas_call(
            partial(_item, packing, tile, source, count, finish, sizes, names),
            out_shape=jax.ShapeDtypeStruct((work.capacity, outputs), rows.dtype),
            grid=(outputs // NARROW, len(work.table)),
            compiler_params=params,
            interpret=interpret,
            name=f"portable_four_bits_{name}",
        )(work.table, packing.arranged(rows), *(stack[each] for stack in stacks for each in names))
    return rows


def _finished(up, gating, *sums):
    """The stage's columns of gate's and up's sums, of up's alone, or of down's."""
    return activated(gating, *sums) if up else sums[0]


def _item(packing, tile, source, gates, finish, sizes, names, table_ref, rows_ref, *refs):
    """Compute `NARROW` outputs of an item: of one product, or of gate and up."""
    *refs, out_ref = refs
    item, first = pl.program_id(1), pl.program_id(0) * NARROW
    stacks = [dict(zip(names, refs[i : i + len(names)], strict=True)) for i in range(0, len(refs), len(names))]

    def run(stack, expert):
        index, mask = tile_rows(table_ref, item, source, tile)
        outputs = [gate * out_ref.shape[1] + first for gate in range(gates)]
        chunks = -(-stack["words"].shape[2] // WORDS)
        sums = _sums(packing, stack, expert, outputs, rows_ref, index, mask, 0, chunks)
        by_output = lambda name, start: stack[name][expert, pl.ds(start, NARROW)].astype(jnp.float32)[None]  # noqa: E731
        if "factors" in stack:
            sums = [total * by_output("factors", start) for total, start in zip(sums, outputs, strict=True)]
        if "bias" in stack:
            sums = [total + by_output("bias", start) for total, start in zip(sums, outputs, strict=True)]
        target, mask_out = tile_rows(table_ref, item, TARGET, tile)
        put(out_ref, target, mask_out, first, finish(*sums))

    each_stack(sizes, table_ref, item, stacks, run)


def product(x: Float[Array, "r k"], weight: Weight, *, interpret: bool = False) -> Float[Array, "r n"]:
    """x @ weight in float32. An order of inputs is the caller's."""
    hopper.count("portable_four_bits")
    chunks = -(-weight.inputs // (EACH * WORDS))
    parts = portable.parts_of(chunks, weight.outputs // NARROW)
    held = {name: each[None] for name, each in _operands(weight).items() if name != "factors"}
    out = _product(x, held, packing=Packing.of(weight), parts=parts, interpret=interpret)
    return out if weight.factors is None else out * weight.factors


@partial(jax.jit, static_argnames=("packing", "parts", "interpret"))
def _product(x, held, *, packing, parts, interpret):
    (r, k), n = x.shape, held["words"].shape[1]
    tile, chunks = max(LEAST_ROWS, 1 << (r - 1).bit_length()), -(-k // (EACH * WORDS)) // parts
    out = pl.pallas_call(
        partial(_part, packing, tile, chunks),
        out_shape=jax.ShapeDtypeStruct((parts * r, n), jnp.float32),
        grid=(n // NARROW, parts),
        compiler_params=portable.triton().CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="portable_four_bits",
    )(packing.arranged(x), held["words"], held["scales"])
    return out.reshape(parts, r, n).sum(0)


def _part(packing, tile, chunks, rows_ref, words_ref, scales_ref, out_ref):
    """Compute `NARROW` outputs from a part of the inputs."""
    first, part = pl.program_id(0) * NARROW, pl.program_id(1)
    row = jnp.arange(tile, dtype=jnp.int32)
    mask, stack = row < rows_ref.shape[0], {"words": words_ref, "scales": scales_ref}
    (total,) = _sums(packing, stack, 0, [first], rows_ref, row, mask, part * chunks, chunks)
    put(out_ref, part * rows_ref.shape[0] + row, mask, first, total)


def _sums(packing, stack, expert, outputs, rows_ref, index, mask, begin, chunks):
    """The rows' products with an expert's `NARROW` outputs from each of `outputs` on, over some chunks of words."""
    words = stack["words"].shape[2]

    def body(i, sums):
        start = (begin + i) * WORDS
        parts = [_rows(rows_ref, index, mask, n * words + start, start, words) for n in range(EACH)]
        return tuple(
            _added(packing, total, parts, stack, expert, output, start)
            for total, output in zip(sums, outputs, strict=True)
        )

    zeros = (jnp.zeros((len(index), NARROW), jnp.float32),) * len(outputs)
    return lax.fori_loop(0, chunks, body, zeros)


def _rows(rows_ref, index, mask, first, begin, words):
    """Load the rows' n-th inputs of some words; zeros past the last word."""
    there = begin + jnp.arange(WORDS, dtype=jnp.int32) < words
    return jnp.where(there[None], rows_of(rows_ref, index, mask, first, WORDS), 0)


def _added(packing, total, parts, stack, expert, first, begin):
    """Add the products of some words' inputs to a sum."""
    shape, count, load = (NARROW, WORDS), stack["words"].shape[2], portable.triton().load
    output, word = (lax.broadcasted_iota(jnp.int32, shape, axis) + start for axis, start in enumerate((first, begin)))
    there, which = word < count, jnp.full(shape, 1, jnp.int32) * expert
    words = load(stack["words"].at[which, output, word], mask=there, other=0)
    scale = lambda row, at: load(stack["scales"].at[which, row, at], mask=there, other=0)  # noqa: E731
    numbers = _MAKE[packing.kind](packing, words, output, *_place(packing, word), scale)
    for part, number in zip(parts, numbers, strict=True):
        total = total + times(part, number.astype(part.dtype))
    return total


def _place(packing, word):
    """The unit of a word's inputs, and the block of 32 in this unit."""
    words = packing.unit // EACH
    return lax.div(word, jnp.int32(words)), lax.rem(lax.rem(word, jnp.int32(words)), jnp.int32(packing.unit // BLOCK))


def _byte(scale, row, at):
    """Load the byte of number `at` of a row of scales in words."""
    word = scale(row, lax.div(at, jnp.int32(BYTES)))
    return lax.shift_right_logical(word, lax.rem(at, jnp.int32(BYTES)) * 8) & 0xFF


def _integers(packing, words, output, unit, block, scale):
    """The eight numbers of each word, times their scales: those of integers."""
    group = lax.div(unit * packing.unit + block * BLOCK, jnp.int32(packing.group)) * (1 + packing.zeros)
    by = scale(group, output).astype(jnp.float32)
    less = scale(group + 1, output).astype(jnp.float32) if packing.zeros else float(int4.MIDDLE)
    number = lambda at: (lax.shift_right_logical(words, jnp.int32(at)) & 15).astype(jnp.float32)  # noqa: E731
    return [(number(4 * i + 16 * parity) - less) * by for i in range(4) for parity in range(2)]


def _mxfp4(packing, words, output, unit, block, scale):
    """MXFP4's; a scale is the exponent of a float32."""
    by = lax.bitcast_convert_type(_byte(scale, unit, output) << 23, jnp.float32)
    return _floats(words, [by] * 2)


def _nvfp4(packing, words, output, unit, block, scale):
    """NVFP4's, without the outputs' factors; each half of a block has a scale."""
    at = output * (packing.unit // nvfp4.GROUP) + block * (BLOCK // nvfp4.GROUP)
    return _floats(words, [nvfp4.decode(_byte(scale, unit, at + half)) for half in range(2)])


_MAKE = {"Int4": _integers, "Mxfp4": _mxfp4, "Nvfp4": _nvfp4}


def _floats(words, scales):
    """Unpack signed words of E2M1 numbers as `mxfp4.unpacked` does; a block's halves have these scales."""
    right = lambda by: lax.shift_right_logical(words, jnp.int32(by))  # noqa: E731
    each = words, words << 10 | right(22), right(4) ^ words << 4, words << 6
    made = []
    for i, bits in enumerate(each):
        pair = bits & jnp.int32(_MASK)
        made += [_number(half) * (scales[i // 2] * 2.0**14) for half in (pair & 0xFFFF, pair >> 16)]
    return made


def _number(half: Array) -> Array:
    """Convert E2M1 in bfloat16's bit positions to float32 times 2**-14."""
    bits = (half & 0x8000) | ((half & 0x1C0) << 3)
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16).astype(jnp.float32)
