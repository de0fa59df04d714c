"""Gated MLPs of many experts on any NVIDIA GPU; see `pallas.experts`.

Up to `FEW` tokens, each (token, expert) pair is computed by itself (`few`): a program takes a few hidden columns of a
pair, and in a second launch a few outputs of a token, whose experts it adds up. So nothing is planned, gathered or
combined. With more tokens, or FP8 weights, a program takes a tile of an item's products (`items`), rows of one expert.
FP8 numbers become the rows' dtype, and their scales multiply the sums of the inputs that share one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import Weight
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.experts.expert_stream import ALIGN, COUNT, EXPERT, ROW_BLOCKS, SOURCE, TARGET, Items
from jaxspec.pallas.portable import fp8

FEW = 8  # tokens
LEAST_ROWS = 16  # of a product
NARROW = 64  # model and expert widths are multiples of this
Arrays = list[tuple[Array, Array]]  # of each stack: gate and up [e, 2f, d], or up alone [e, f, d]; down [e, d, f]


def supported(dtype: Any, stacks: list) -> str | None:
    """Why the kernels can't compute these `experts_mlp.Stack`s, unquantised or all in one format of FP8, of rows of
    `dtype`; None if they can."""
    if any(len(stack) > 2 for stack in stacks):
        return "experts with biases"
    weights = [weight for stack in stacks for weight in stack]
    if rounding := [weight.format for weight in weights if weight.quantised and weight.format.activations]:
        return f"weights in {rounding[0]}"
    if dtypes := {weight.dtype.name for weight in weights if not weight.quantised} - {jnp.dtype(dtype).name}:
        return f"weights in {dtypes.pop()} and rows in {jnp.dtype(dtype).name}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"rows in {jnp.dtype(dtype).name}; bfloat16 and float16 are supported"
    downs = {stack[1].values.shape[1:] for stack in stacks}
    if len(downs) > 1:
        return f"experts of different widths, {', '.join(str(f) for _, f in sorted(downs))}"
    ((d, f),) = downs
    return f"widths {d} and {f}; multiples of {NARROW} are supported" if d % NARROW or f % NARROW else None


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides n and is at most so large."""
    return min(n & -n, most)


def parts_of(ref: Any, f: int) -> tuple[int, ...]:
    """The first rows of gate and of up in an expert's weight for f hidden columns, or of up alone."""
    return (0,) if ref.shape[1] == f else (0, f)


def activated(gating: Callable | None, gate: Array, *up: Array) -> Array:
    """The hidden columns from gate's and up's, or from up's alone; no `gating`: silu(gate) * up."""
    return gating(gate, *up) if gating else gate * jax.nn.sigmoid(gate) * up[0]


def few(
    x: Float[Array, "t d"],
    stacks: Arrays,
    ids: Int[Array, "t w"],
    weights: Float[Array, "t w"],
    each: int,
    gating: Callable | None = None,
    interpret: bool = False,
) -> Float[Array, "t d"]:
    """`experts_mlp.experts_mlp` without a residual, of up to `FEW` tokens."""
    hopper.count("portable_experts_few")
    return _few(x, stacks, ids[:, :each], weights[:, :each], gating=gating, interpret=interpret)


@partial(jax.jit, static_argnames=("gating", "interpret"))
def _few(x, stacks, ids, weights, *, gating, interpret):
    (t, d), k, f = x.shape, ids.shape[1], stacks[0][1].shape[2]
    counts = tuple(len(down) for _, down in stacks)
    columns, outputs = _divisor(f, 16), _divisor(d, 8 if t == 1 else 16)
    launch = partial(pl.pallas_call, interpret=interpret, compiler_params=portable.triton().CompilerParams(num_warps=4))
    hidden = launch(
        partial(_few_up, counts, k, columns, _divisor(d, 256), gating),
        out_shape=jax.ShapeDtypeStruct((t * k, f), x.dtype),
        grid=(f // columns, t * k),
        name="portable_experts_few_up",
    )(ids.reshape(-1), x, *(gate_up for gate_up, _ in stacks))
    return launch(
        partial(_few_down, counts, k, outputs, _divisor(f, 512)),
        out_shape=jax.ShapeDtypeStruct((t, d), x.dtype),
        grid=(d // outputs, t),
        name="portable_experts_few_down",
    )(ids.reshape(-1), weights.astype(jnp.float32).reshape(-1), hidden, *(down for _, down in stacks))


def _of(expert: Array, counts: tuple[int, ...], refs: tuple[Any, ...], rows: Any, columns: Any) -> Array:
    """Load a part of an expert's weight, float32, from the stack that has it; zeros if none has."""
    total, first = 0.0, 0
    for count, ref in zip(counts, refs, strict=True):
        own = (expert >= first) & (expert < first + count)
        part = ref.at[jnp.where(own, expert - first, 0), rows, columns]
        mask = jnp.broadcast_to(own, (rows.size, columns.size))
        total = total + portable.triton().load(part, mask=mask, other=0.0).astype(jnp.float32)
        first += count
    return total


def _few_up(counts, k, columns, step, gating, ids_ref, x_ref, *refs):
    """Compute some hidden columns of a pair."""
    *refs, out_ref = refs
    pair = pl.program_id(1)
    token, expert, first = lax.div(pair, jnp.int32(k)), ids_ref[pair], pl.program_id(0) * columns
    width, begins = x_ref.shape[1], parts_of(refs[0], out_ref.shape[1])

    def body(i, sums):
        inputs = pl.ds(i * step, step)
        row = x_ref[token, inputs].astype(jnp.float32)[None]
        parts = (_of(expert, counts, refs, pl.ds(begin + first, columns), inputs) for begin in begins)
        return tuple(total + part * row for total, part in zip(sums, parts, strict=True))

    zeros = (jnp.zeros((columns, step), jnp.float32),) * len(begins)
    parts = [jnp.sum(x, axis=1) for x in lax.fori_loop(0, width // step, body, zeros)]
    out_ref[pair, pl.ds(first, columns)] = activated(gating, *parts).astype(out_ref.dtype)


def _few_down(counts, k, outputs, step, ids_ref, weights_ref, hidden_ref, *refs):
    """Compute some outputs of a token: its experts', each rounded, then weighted and added."""
    *refs, out_ref = refs
    token, first, f = pl.program_id(1), pl.program_id(0) * outputs, hidden_ref.shape[1]
    total = jnp.zeros((outputs,), jnp.float32)
    for j in range(k):  # unrolled, so that all loads can be under way
        pair = token * k + j
        expert, sums = ids_ref[pair], jnp.zeros((outputs, step), jnp.float32)
        for i in range(f // step):
            inputs = pl.ds(i * step, step)
            row = hidden_ref[pair, inputs].astype(jnp.float32)[None]
            sums = sums + _of(expert, counts, refs, pl.ds(first, outputs), inputs) * row
        mixed = jnp.sum(sums, axis=1).astype(out_ref.dtype).astype(jnp.float32)
        total = total + jnp.where(expert < sum(counts), mixed * weights_ref[pair], 0.0)
    out_ref[token, pl.ds(first, outputs)] = total.astype(out_ref.dtype)


def items(
    rows: Float[Array, "r d"],
    stacks: list[tuple[Weight, Weight]],
    work: Items,
    gating: Callable | None = None,
    interpret: bool = False,
) -> Float[Array, "c d"]:
    """`experts_mlp.reference`, of weights that are unquantised or FP8. Rows that are no item's may hold anything."""
    hopper.count("portable_experts")
    return _items(rows, [tuple(map(_operands, stack)) for stack in stacks], work, gating=gating, interpret=interpret)


def _operands(weight: Weight) -> tuple[Array, ...]:
    """The array of a weight, or its FP8 numbers and their scales."""
    return (fp8.bits(weight.values), weight.scales) if weight.quantised else (weight.values,)


@partial(jax.jit, static_argnames=("gating", "interpret"))
def _items(rows, stacks, work, *, gating, interpret):
    d, f = rows.shape[1], stacks[0][1][0].shape[2]
    counts, tile = tuple(len(down[0]) for _, down in stacks), max(work.rows, LEAST_ROWS)
    most, capacity = len(work.table), work.capacity
    warps, columns = (8, 128) if tile >= 128 else (4, 64)
    params = portable.triton().CompilerParams(num_warps=warps, num_stages=3)
    launch = partial(pl.pallas_call, interpret=interpret, compiler_params=params)
    # Bytes of an output's inputs that are loaded at once: as many as two sums' tiles leave room for.
    step = 128 if len(stacks[0][0]) > 1 and tile < 128 else 64
    width = _divisor(f, 64)
    hidden = launch(
        partial(_item_up, counts, tile, width, _divisor(d, step), gating),
        out_shape=jax.ShapeDtypeStruct((capacity, f), rows.dtype),
        grid=(f // width, most),
        name="portable_experts_up",
    )(work.table, rows, *(array for gate_up, _ in stacks for array in gate_up))
    width = _divisor(d, columns)
    return launch(
        partial(_item_down, counts, tile, width, _divisor(f, step)),
        out_shape=jax.ShapeDtypeStruct((capacity, d), rows.dtype),
        grid=(d // width, most),
        name="portable_experts_down",
    )(work.table, hidden, *(array for _, down in stacks for array in down))


def each_stack(counts: tuple[int, ...], table_ref: Any, item: Array, refs: Any, run: Callable) -> None:
    """Run `run(ref, expert)` for the stack that has an item's expert, if the item is valid."""
    expert, first = table_ref[item, EXPERT], 0
    valid = (item < table_ref[0, COUNT]) & (table_ref[item, ROW_BLOCKS] > 0)
    for count, ref in zip(counts, refs, strict=True):
        own = valid & (expert >= first) & (expert < first + count)
        pl.when(own)(partial(run, ref, expert - first))
        first += count


def tile_rows(table_ref: Any, item: Array, column: int, tile: int) -> tuple[Array, Array]:
    """The rows of an item's tile, and whether each is the item's."""
    row = jnp.arange(tile, dtype=jnp.int32)
    return table_ref[item, column] * ALIGN + row, row < table_ref[item, ROW_BLOCKS] * ALIGN


def rows_of(ref: Any, index: Array, mask: Array, first: Array, step: int) -> Array:
    """Load some columns of rows; zeros where `mask` is false."""
    column = first + jnp.arange(step, dtype=jnp.int32)
    at = ref.at[jnp.broadcast_to(index[:, None], (len(index), step)), jnp.broadcast_to(column, (len(index), step))]
    return portable.triton().load(at, mask=jnp.broadcast_to(mask[:, None], (len(index), step)), other=0.0)


def put(ref: Any, index: Array, mask: Array, first: Array, value: Array) -> None:
    """Write some columns of rows."""
    column = first + jnp.arange(value.shape[1], dtype=jnp.int32)
    at = ref.at[jnp.broadcast_to(index[:, None], value.shape), jnp.broadcast_to(column, value.shape)]
    portable.triton().store(at, value.astype(ref.dtype), mask=jnp.broadcast_to(mask[:, None], value.shape))


def times(rows: Float[Array, "r k"], weight: Float[Array, "n k"]) -> Float[Array, "r n"]:
    return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _sums(refs, expert, begins, width, step, rows_ref, index, mask):
    """Multiply rows by `width` outputs of an expert's weight, from each of `begins` on."""
    values, *scales = refs

    def scaled(part, begin, first):
        """Multiply products of inputs from `first` on by their scales."""
        output = begin + jnp.arange(width, dtype=jnp.int32)
        same, unit = jnp.full_like(output, 1), values.shape[1] // scales[0].shape[1]
        block = same * lax.div(first, jnp.int32(BLOCK))
        return part * scales[0][same * expert, lax.div(output, jnp.int32(unit)), block][None]

    def product(rows, begin, first):
        part = values[expert, pl.ds(begin, width), pl.ds(first, step)]
        if not scales:
            return times(rows, part)
        part = times(rows, fp8.numbers(part, rows.dtype))
        return scaled(part, begin, first) if scales[0].shape[2] > 1 else part

    def body(i, sums):
        rows = rows_of(rows_ref, index, mask, i * step, step)
        return tuple(total + product(rows, begin, i * step) for total, begin in zip(sums, begins, strict=True))

    zeros = (jnp.zeros((len(index), width), jnp.float32),) * len(begins)
    sums = lax.fori_loop(0, values.shape[2] // step, body, zeros)
    if scales and scales[0].shape[2] == 1:  # of all inputs
        return [scaled(total, begin, jnp.int32(0)) for total, begin in zip(sums, begins, strict=True)]
    return sums


def _by_stack(refs: tuple[Any, ...], counts: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Divide references among the stacks, equally many for each."""
    each = len(refs) // len(counts)
    return [refs[i : i + each] for i in range(0, len(refs), each)]


def _item_up(counts, tile, width, step, gating, table_ref, rows_ref, *refs):
    """Compute some hidden columns of an item."""
    *refs, out_ref = refs
    item, first, begins = pl.program_id(1), pl.program_id(0) * width, parts_of(refs[0], out_ref.shape[1])

    def run(refs, expert):
        outputs = [begin + first for begin in begins]
        parts = _sums(refs, expert, outputs, width, step, rows_ref, *tile_rows(table_ref, item, SOURCE, tile))
        target, mask = tile_rows(table_ref, item, TARGET, tile)
        put(out_ref, target, mask, first, activated(gating, *parts))

    each_stack(counts, table_ref, item, _by_stack(refs, counts), run)


def _item_down(counts, tile, width, step, table_ref, hidden_ref, *refs):
    """Compute some outputs of an item."""
    *refs, out_ref = refs
    item, first = pl.program_id(1), pl.program_id(0) * width

    def run(refs, expert):
        index, mask = tile_rows(table_ref, item, TARGET, tile)
        (total,) = _sums(refs, expert, [first], width, step, hidden_ref, index, mask)
        put(out_ref, index, mask, first, total)

    each_stack(counts, table_ref, item, _by_stack(refs, counts), run)
