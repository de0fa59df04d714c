"""Gated MLPs of many experts, each over its own tokens: the division of work, in plain jnp or by the kernel.

A (token, expert) pair is a row of work. Rows of one expert stand together, from a multiple of `ALIGN` rows on (where a
bulk copy can start), and are cut into items of at most n rows, which go through that expert's weights. The work is
proportional to the pairs, never to tokens times experts, and only chosen experts' weights are read.

Up to 128 tokens, a kernel makes that plan and gathers the rows (`expert_plan`); few tokens' sums are added up for the
norm after them (`expert_add`), and there one token alone needs no plan. Up to eight tokens `expert_few` multiplies all
but MXFP4 in models 2,048 wide, and needs no items. Otherwise `expert_stream` multiplies unquantised weights,
`expert_fp8` FP8 ones (in prompts `expert_wide`), and `expert_four` those of four bits, and XLA all others, item by
item.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.models.loops import zeros_after
from jaxspec.models.weights import Format, FourBits, Fp8, Mxfp4, Unquantised, Weight, expert_matmul, formats
from jaxspec.pallas import hopper
from jaxspec.pallas.dense.few_rows import Fp8Weight, Scaled
from jaxspec.pallas.experts import (
    expert_add,
    expert_few,
    expert_four,
    expert_fp8,
    expert_plan,
    expert_rows,
    expert_stream,
    expert_wide,
)
from jaxspec.pallas.experts.expert_stream import ALIGN, COUNT, Gating, Items
from jaxspec.pallas.hopper import too_few_processors
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing
from jaxspec.pallas.portable import experts as portable_experts
from jaxspec.pallas.portable import four_bits as portable_four_bits

# Experts' gate and up, [e, 2f, d], gate's rows first; their down, [e, d, f]; and both their biases, if they have some.
# Of experts without a gate, the first is up alone, [e, f, d].
Stack = tuple[Weight, Weight] | tuple[Weight, Weight, Float[Array, "e n"], Float[Array, "e d"]]

ITEM_ROWS = (8, 16, 32, 64, 128)
SPARE = 2.5  # rows of an item, as a multiple of an expert's mean
QUANTISED_SPARE = 2  # weights are converted for each item, so its rows are fewer, even if more experts need two
NOBODY = 2**30  # the id of no expert
CHUNK = 256  # pairs that are ranked against one another at once


def experts_mlp(
    x: Float[Array, "t d"],
    stacks: list[Stack],
    ids: Int[Array, "t w"],
    weights: Float[Array, "t w"],
    each: int | None = None,
    residual: Float[Array, "n d"] | None = None,
    gating: Gating | None = None,
    scale: Float[Array, " d"] | None = None,
    centred: bool = False,
    tokens: int | None = None,
) -> Float[Array, "n d"] | tuple[Float[Array, "n d"], Scaled]:
    """Sum over j of `weights[t, j] * down @ (silu(gate @ x[t]) * (up @ x[t]))` of expert `ids[t, j]`, in x's dtype,
    added to `residual`, whose rows from t on stay as they are. `gating`: another function of gate and up, or of up
    alone where experts have no gate.

    Experts are numbered through all `stacks`, (gate_up [e, 2f, d], down [e, d, f]) each, or with their biases [e, 2f]
    and [e, d] after them, which are added to the products. Where `several_widths` allows it, an expert n times as wide
    as those of the first stack has n numbers, one for each part of its hidden columns. A token's must be distinct, or
    `NOBODY`. Each expert's result is rounded to x's dtype before it is weighted, and the sum, in float32, at last.
    Columns from `each` on, if it is given, hold no experts.

    With the `scale` of the norm after it the sums come as `Scaled` rows, too (`centred`: as in `few_rows.add_product`).
    That is for rows where `scaled` is true. `tokens`: the number of valid rows of `x`, `ids` and `weights`, which come
    first; None: all are valid.
    """
    each, whole = each or ids.shape[1], x
    parts = [list(part) for _, part in itertools.groupby(stacks, formats)]
    if len(parts) > 1:  # no kernel reads several formats: a checkpoint may leave its shared expert unquantised
        named, first = dict(gating=gating, centred=centred, tokens=tokens), 0
        for part in parts:
            count = sum(len(stack[1].values) for stack in part)
            own = jnp.where((ids >= first) & (ids < first + count), ids - first, NOBODY)
            last = {"scale": scale} if part is parts[-1] else {}
            residual, first = experts_mlp(x, part, own, weights, each, residual, **last, **named), first + count
        return residual
    x, ids, weights = (array[:tokens] for array in (x, ids, weights))
    call = Call(x, whole, stacks, ids, weights, each, residual, gating, scale, centred)
    return choose("a mixture of experts", EXPERTS, call).run(call)


class Call(NamedTuple):
    """Operands of `experts_mlp`: `x`, `ids` and `weights` of the tokens alone, and the `whole` of x's rows."""

    x: Float[Array, "t d"]
    whole: Float[Array, "r d"]
    stacks: list[Stack]
    ids: Int[Array, "t w"]
    weights: Float[Array, "t w"]
    each: int
    residual: Float[Array, "n d"] | None
    gating: Gating | None
    scale: Float[Array, " d"] | None
    centred: bool

    @property
    def arrays(self) -> list[tuple[Array, Array]]:
        """Gate and up, and down, of each stack. **Raises:** as `Weight.unquantised`."""
        return [(stack[0].unquantised, stack[1].unquantised) for stack in self.stacks]

    @property
    def fp8(self) -> list[expert_few.Stack]:
        """Gate and up, and down, of each stack of FP8 experts, with their scales."""
        return [tuple(Fp8Weight(weight.values, weight.scales) for weight in stack) for stack in self.stacks]

    def added(self, mixed: Float[Array, "t d"]) -> Float[Array, "n d"]:
        """The mixture, added to the residual stream if there is one."""
        if self.residual is None:
            return mixed
        return self.residual + jnp.pad(mixed, ((0, len(self.residual) - len(mixed)), (0, 0)))


class ExpertKernel(NamedTuple):
    """A kernel for items: `run(call, rows, items)` as `reference`, of items that `plan` makes with these sizes."""

    run: Callable[[Call, Array, Items], Array]
    highest: int = ITEM_ROWS[-1]
    spare: float = SPARE
    unplanned: bool = False  # takes one token's experts as items without a plan

    def mix(self, call: Call) -> Float[Array, "n d"] | tuple[Float[Array, "n d"], Scaled]:
        """The mixture: its items planned, multiplied and combined."""
        x, whole, stacks, ids, weights, each, residual, _, scale, centred = call
        experts = sum(len(stack[1].values) * (stack[1].inputs // stacks[0][1].inputs) for stack in stacks)
        alone = self.unplanned and len(x) == 1 and len(whole) >= ALIGN and scale is not None
        if alone:
            rows, items, place = whole, Items(ids, ALIGN, each * ALIGN, each), ids
        else:
            rows, items, place = plan(x, ids, experts, each, self.highest, self.spare)
        out = self.run(call, rows, items)
        if scale is None:
            return call.added(combine(out, place, weights[:, :each]))
        named = {"each": each, "centred": centred, "alone": experts if alone else 0}
        return expert_add.add_scaled(out, place, weights, residual, scale, **named)


def _not_in(kinds: type[Format] | tuple[type[Format], ...], call: Call) -> str | None:
    others = [each for each in formats(call.stacks) if not isinstance(each, kinds)]
    return f"weights in {others[0]}" if others else None


def ungated(stack: Stack) -> bool:
    """Whether a stack's experts have no gate."""
    return stack[0].outputs == stack[1].inputs


def _without_gate(call: Call) -> str | None:
    return "experts without a gate" if any(map(ungated, call.stacks)) else None


def _biased(call: Call) -> str | None:
    return "experts with biases" if any(len(stack) > 2 for stack in call.stacks) else None


def _beyond_silu(call: Call) -> str | None:
    """Name what kernels of experts that SiLU gates can't compute of these; None if nothing."""
    return _biased(call) or _without_gate(call) or ("an activation that isn't SiLU" if call.gating else None)


def _unquantised_refused(call: Call) -> str | None:
    reason = _not_in(Unquantised, call) or _biased(call)
    return reason or expert_stream.supported(call.x.dtype, call.arrays)


def _fp8_refused(call: Call) -> str | None:
    reason = _not_in(Fp8, call) or _beyond_silu(call)
    return reason or expert_fp8.supported(call.x.dtype, call.stacks)


def _wide_refused(call: Call) -> str | None:
    return _fp8_refused(call) or expert_wide.supported(len(call.x), call.each, call.stacks)


def _four_refused(call: Call) -> str | None:
    reason = _not_in((Mxfp4, FourBits), call) or _without_gate(call)
    return reason or expert_four.supported(call.x.dtype, call.stacks)


def _stream_refused(call: Call) -> str | None:
    return _unquantised_refused(call) or too_few_processors(expert_stream.BLOCKS)


def _few_refused(call: Call) -> str | None:
    return _beyond_silu(call) or _unquantised_refused(call) or _rows_refused(call, call.arrays)


def _few_fp8_refused(call: Call) -> str | None:
    return _fp8_refused(call) or _rows_refused(call, call.fp8)


def _few_four_refused(call: Call) -> str | None:
    reason = _not_in(FourBits, call) or _beyond_silu(call)
    return reason or _rows_refused(call, call.stacks)


def _rows_refused(call: Call, stacks: list[expert_few.Stack]) -> str | None:
    rows, width = len(call.x if call.residual is None else call.residual), call.x.shape[1]
    reason = expert_few.supported(rows, call.each, call.x.dtype, stacks)
    return reason or too_few_processors(width // expert_few.COLUMNS)


def _few(call: Call, stacks: list[expert_few.Stack]) -> Float[Array, "n d"] | tuple[Float[Array, "n d"], Scaled]:
    x, _, _, ids, weights, each, residual, _, scale, centred = call
    return expert_few.mix(x, stacks, ids, weights, residual, scale, each=each, centred=centred)


def _portable_refused(call: Call) -> str | None:
    return _not_in((Unquantised, Fp8), call) or portable_experts.supported(call.x.dtype, call.stacks)


def _portable_few_refused(call: Call) -> str | None:
    most = portable_experts.FEW
    reason = _not_in(Unquantised, call) or _portable_refused(call)
    return reason or (f"{len(call.x)} tokens, more than {most}" if len(call.x) > most else None)


def _portable_few(call: Call) -> Float[Array, "n d"]:
    mixed = portable_experts.few(call.x, call.arrays, call.ids, call.weights, call.each, call.gating)
    return call.added(mixed)


def _portable_four_refused(call: Call) -> str | None:
    return _not_in((Mxfp4, FourBits), call) or portable_four_bits.supported(call.x.dtype, call.stacks)


_QUANTISED = {"spare": QUANTISED_SPARE, "unplanned": True}
_FOUR = ExpertKernel(
    lambda call, rows, items: expert_four.mix(rows, call.stacks, items, gating=call.gating),
    expert_four.MAX_ROWS,
    **_QUANTISED,
)
_FP8 = ExpertKernel(
    lambda call, rows, items: expert_fp8.mix(rows, call.stacks, items), expert_fp8.MAX_ROWS, **_QUANTISED
)
_WIDE = ExpertKernel(
    lambda call, rows, items: expert_wide.mix(rows, call.stacks, items), expert_wide.MAX_ROWS, QUANTISED_SPARE
)
_STREAM = ExpertKernel(lambda call, rows, items: expert_stream.stream(rows, call.arrays, items, call.gating))
_PORTABLE_FOUR = ExpertKernel(
    lambda call, rows, items: portable_four_bits.items(rows, call.stacks, items, call.gating),
    portable_four_bits.MAX_ROWS,
    QUANTISED_SPARE,
)
_PORTABLE = ExpertKernel(lambda call, rows, items: portable_experts.items(rows, call.stacks, items, call.gating))
_REFERENCE = ExpertKernel(lambda call, rows, items: reference(rows, call.stacks, items, call.gating))

EXPERTS = (
    Implementation("expert_few", HOPPER, _few_refused, lambda call: _few(call, call.arrays)),
    Implementation("expert_few_fp8", HOPPER, _few_fp8_refused, lambda call: _few(call, call.fp8)),
    Implementation("expert_few_four", HOPPER, _few_four_refused, lambda call: _few(call, call.stacks)),
    Implementation("expert_four", HOPPER, _four_refused, _FOUR.mix),
    Implementation("expert_wide", HOPPER, _wide_refused, _WIDE.mix),
    Implementation("expert_fp8", HOPPER, _fp8_refused, _FP8.mix),
    Implementation("expert_stream", HOPPER, _stream_refused, _STREAM.mix),
    Implementation("portable_four_on_hopper", HOPPER, _portable_four_refused, _PORTABLE_FOUR.mix),
    Implementation("portable_few_on_hopper", HOPPER, _portable_few_refused, _portable_few),
    Implementation("portable_on_hopper", HOPPER, _portable_refused, _PORTABLE.mix),
    Implementation("portable_few", PORTABLE, _portable_few_refused, _portable_few),
    Implementation("portable_four_bits", PORTABLE, _portable_four_refused, _PORTABLE_FOUR.mix),
    Implementation("portable", PORTABLE, _portable_refused, _PORTABLE.mix),
    Implementation("reference", ANY, nothing, _REFERENCE.mix, slow=True),
)


def scaled(residual: Float[Array, "n d"], each: int) -> bool:
    """Whether `experts_mlp` can give sums of rows like these, of so many experts each, as `Scaled` rows as well."""
    reason = expert_add.supported(len(residual), each, residual.shape[1], residual.dtype)
    return (reason or hopper.kernels_here()) is None


def several_widths(x: Float[Array, "t d"], stacks: list[Stack], gating: Gating | None) -> bool:
    """Whether a kernel here takes experts of these widths in one mixture, the wide ones in parts. Few tokens of experts
    that SiLU gates have kernels of their own, which take one width."""
    first, last = stacks[0][1], stacks[-1][1]
    call = Call(x, x, stacks, None, None, 0, None, gating, None, False)
    parts = last.inputs > first.inputs and last.inputs % first.inputs == 0
    many = len(x) > expert_few.ROWS or _beyond_silu(call)
    return parts and bool(many) and hopper.kernels_here() is None and _stream_refused(call) is None


def combine(out: Float[Array, "r d"], place: Int[Array, "t k"], weights: Float[Array, "t k"]) -> Float[Array, "t d"]:
    """Each token's weighted sum of the rows that hold its experts' results; row -1 is no expert's."""
    return choose("the sum of experts", COMBINE, out, place, weights).run(out, place, weights)


def _reference_combine(out, place, weights) -> Array:
    rows = jnp.where(place[..., None] >= 0, out[jnp.maximum(place, 0)], 0)  # what nobody wrote may be NaN
    return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1).astype(out.dtype)


def _combine_refused(out, place, weights) -> str | None:
    return expert_rows.supported(*place.shape, out.shape[1], out.dtype)


COMBINE = (
    Implementation("weighted_rows", HOPPER, _combine_refused, lambda *call: expert_rows.weighted_rows(*call)),
    Implementation("reference", ANY, nothing, _reference_combine),
)


def expected_experts(tokens: float, each: int, num_experts: int) -> float:
    """How many different experts `tokens` tokens choose, if all are equally likely."""
    return num_experts * (1 - (1 - each / num_experts) ** tokens)


def plan(
    x: Float[Array, "t d"],
    ids: Int[Array, "t w"],
    num_experts: int,
    each: int | None = None,
    highest: int = ITEM_ROWS[-1],
    spare: float = SPARE,
) -> tuple[Float[Array, "r d"], Items, Int[Array, "t k"]]:
    """Rows to multiply, the items over them, and each pair's row of the result, -1 where it has no expert.

    A token has k = `each` pairs, by default as many as `ids` has columns; further columns hold no experts. Items have
    the fewest of `ITEM_ROWS` rows that reach `spare` times an expert's mean, but no more than `highest`.
    """
    t, k = len(x), each or ids.shape[1]
    rows = min(rows_per_item(t * k / num_experts, spare), highest)
    call = x, ids, num_experts, k, rows
    return choose("the plan of a mixture", PLAN, *call).run(*call)


def _plan(x, ids, num_experts, k, rows) -> tuple[Array, Items, Array]:
    most, capacity = most_items(len(x) * k, num_experts, rows)
    sizes = {"each": k, "experts": num_experts, "rows": rows, "items": most, "capacity": capacity}
    gathered, table, place = expert_plan.plan(x, ids, **sizes)
    return gathered, Items(table, rows, capacity), place


def _plan_by_xla(take: Callable[[Array, Array], Array], x, ids, num_experts, k, rows) -> tuple[Array, Items, Array]:
    """Rows and items in plain jnp. `take(x, token)`: `x[token]`."""
    items, place = _by_expert(ids[:, :k], num_experts, rows)
    flat, pair = place.reshape(-1), jnp.arange(len(x) * k, dtype=jnp.int32)
    token = jnp.zeros(items.capacity, jnp.int32)
    into = jnp.where(flat < 0, items.capacity + pair, flat)
    token = token.at[into].set(lax.div(pair, jnp.int32(k)), unique_indices=True, mode="drop")
    return take(x, token), items, place


def _plan_refused(x, ids, num_experts, k, rows) -> str | None:
    return expert_plan.supported(len(x), k, num_experts, x.shape[1], x.dtype)


def _take_refused(x, ids, num_experts, k, rows) -> str | None:
    return expert_rows.supported(len(x), k, x.shape[1], x.dtype)


PLAN = (
    Implementation("expert_plan", HOPPER, _plan_refused, _plan),
    Implementation("take_rows", HOPPER, _take_refused, partial(_plan_by_xla, lambda *of: expert_rows.take_rows(*of))),
    Implementation("reference", ANY, nothing, partial(_plan_by_xla, lambda x, token: x[token])),
)


def rows_per_item(mean: float, spare: float = SPARE) -> int:
    """Rows of an item where experts have `mean` rows: few experts need two items, and most fill theirs by half."""
    return next((rows for rows in ITEM_ROWS if rows >= spare * mean), ITEM_ROWS[-1])


def most_items(pairs: int, num_experts: int, rows: int) -> tuple[int, int]:
    """The most items of up to `rows` rows that so many pairs need, and rows for them and for the last one's reads."""
    most = min(num_experts, pairs)
    return (pairs + most * (rows - 1)) // rows, -(-(pairs + most * (ALIGN - 1)) // ALIGN) * ALIGN + rows - ALIGN


def _by_expert(ids: Int[Array, "t k"], num_experts: int, rows: int) -> tuple[Items, Int[Array, "t k"]]:
    """Cut each expert's pairs into items of up to `rows` rows. Returns them, and each pair's row of the result."""
    flat = ids.reshape(-1)
    per_item = rows // ALIGN
    most, capacity = most_items(flat.size, num_experts, rows)
    counts, rank = _ranks(flat, num_experts)
    blocks, tiles = _covering(counts, ALIGN), _covering(counts, rows)
    first_block, first_item = _before(blocks), _before(tiles)
    item = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum(item[:, None] >= (first_item + tiles)[None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    done = (item - _of(first_item, expert)) * per_item
    start = jnp.minimum(_of(first_block, expert) + done, (capacity - rows) // ALIGN)
    count = jnp.broadcast_to(tiles.sum(), most)
    columns = expert, start, start, jnp.clip(_of(blocks, expert) - done, 0, per_item), count
    items = Items(jnp.stack(columns, axis=1), rows, capacity)  # made by one kernel
    place = _of(first_block, jnp.minimum(flat, num_experts - 1)) * ALIGN + rank
    return items, jnp.where(ids < num_experts, place.reshape(ids.shape), -1)


def _ranks(flat: Int[Array, " p"], num_experts: int) -> tuple[Int[Array, " e"], Int[Array, " p"]]:
    """How many pairs each expert has, and how many of its expert's pairs come before a pair, if it has an expert.

    A counting sort by comparing: on a GPU, a few small fused kernels, where sorting would be many.
    """
    pairs = len(flat)
    chunk = pairs if pairs <= 4 * CHUNK else CHUNK
    chunks = jnp.pad(flat, (0, -pairs % chunk), constant_values=num_experts).reshape(-1, chunk)
    earlier = jnp.tri(chunk, k=-1, dtype=bool)
    within = jnp.sum((chunks[:, :, None] == chunks[:, None]) & earlier, axis=2, dtype=jnp.int32)
    counts = jnp.sum(chunks[:, :, None] == jnp.arange(num_experts), axis=1, dtype=jnp.int32)
    in_bounds = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    rank = within + jnp.take_along_axis(_before(counts), jnp.minimum(chunks, num_experts - 1), axis=1, **in_bounds)
    return counts.sum(0), rank.reshape(-1)[:pairs]


def _before(counts: Int[Array, " n *m"]) -> Int[Array, " n *m"]:
    """Sums of all earlier counts, along the first axis. n^2 additions that fuse, where a scan takes several kernels."""
    earlier = jnp.tri(len(counts), k=-1, dtype=bool)
    earlier = earlier.reshape(*earlier.shape, *[1] * (counts.ndim - 1))
    return jnp.sum(jnp.where(earlier, counts[None], 0), axis=1, dtype=jnp.int32)


def _covering(counts: Int[Array, " n"], size: int) -> Int[Array, " n"]:
    """Counts over `size`, rounded up. `//` would take care of signs, in seven operations of each layer."""
    return lax.div(counts + (size - 1), jnp.int32(size))


def _of(values: Int[Array, " n"], which: Int[Array, " m"]) -> Int[Array, " m"]:
    """`values[which]`, indices in bounds. Plain indexing would allow for negative ones, in three operations."""
    return values.at[which].get(mode="promise_in_bounds", wrap_negative_indices=False)


@partial(jax.jit, static_argnames="gating", inline=True)
def reference(
    rows: Float[Array, "r d"], stacks: list[Stack], items: Items, gating: Gating | None = None
) -> Float[Array, "c d"]:
    """Run each item's rows through its expert, in plain jnp, item by item. Rows that no item has are zero.

    It has gradients, for rows and weights. They take a loop over all rows of the table.
    """
    return _reference(gating, rows, stacks, items)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reference(gating: Gating | None, rows: Array, stacks: list[Stack], items: Items) -> Array:
    return _each_item(gating, rows, stacks, items, items.table[0, COUNT])


def _reference_forward(gating, rows, stacks, items):
    return _reference(gating, rows, stacks, items), (rows, stacks, items)


def _reference_backward(gating, kept, cotangent):
    rows, stacks, items = kept
    whole = lambda rows, stacks: _each_item(gating, rows, stacks, items, len(items.table))  # noqa: E731
    return *jax.vjp(whole, rows, stacks)[1](cotangent), jax.tree.map(
        lambda x: np.zeros(x.shape, jax.dtypes.float0), items
    )


_reference.defvjp(_reference_forward, _reference_backward)


def _each_item(gating: Gating | None, rows: Array, stacks: list[Stack], items: Items, count: Array | int) -> Array:
    """Run `reference` for the first `count` rows of the table; those that aren't items change nothing."""

    def mlp(stack, part, expert):
        gate_up, down, *biases = stack
        more = [bias[expert] for bias in biases] or [0, 0]
        made = expert_matmul(part, gate_up, expert) + more[0]
        parts = (made,) if ungated(stack) else jnp.split(made, 2, axis=1)
        hidden = gating(*parts) if gating else jax.nn.silu(parts[0]) * parts[1]
        return (expert_matmul(hidden.astype(rows.dtype), down, expert) + more[1]).astype(rows.dtype)

    first = np.cumsum([0, *(len(stack[1].values) for stack in stacks)])
    branches = [
        lambda part, expert, stack=stack, begin=begin: mlp(stack, part, expert - begin)
        for stack, begin in zip(stacks, first[:-1], strict=True)
    ]

    def one(i, out):
        expert, source, target, blocks, _ = items.table[i]
        part = jax.lax.dynamic_slice_in_dim(rows, ALIGN * source, items.rows)
        new = jax.lax.switch(jnp.sum(expert >= first[1:-1]), branches, part, expert)
        start = ALIGN * target
        there = i < items.table[0, COUNT]
        mine = there & (jnp.arange(items.rows)[:, None] < ALIGN * blocks)
        new = jnp.where(mine, new, jax.lax.dynamic_slice_in_dim(out, start, items.rows))
        return jax.lax.dynamic_update_slice_in_dim(out, new, start, axis=0)

    out = zeros_after(rows, (items.capacity, rows.shape[1]), rows.dtype)
    return jax.lax.fori_loop(0, count, one, out)
