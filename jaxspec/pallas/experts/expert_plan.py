"""The plan of a mixture of experts for up to 128 tokens, as one kernel on Hopper: from the router's choice to the rows
and items that `expert_stream` takes.

A Mosaic GPU kernel in place of nine of XLA's. A warpgroup takes a token, and nothing passes between blocks: each counts
every expert's tokens by itself.

- A thread takes a token and makes of its experts a bit each, in words of 32.
- A thread takes four experts and adds up their bits of all tokens, in a byte each, with earlier tokens apart.
- A warp takes one of the block's pairs, and adds up the blocks and items of all experts before its own.

Then the block knows where the token's row goes, once for each of its experts. The first pair in an item writes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.experts import expert_rows
from jaxspec.pallas.experts.expert_stream import ALIGN, COUNT, EXPERT, ROW_BLOCKS, SOURCE, TARGET
from jaxspec.pallas.hopper.export import lower_once

MOST = 128  # tokens: a warpgroup's threads, and what a byte can count
MOST_EACH = 16  # experts of a token
MOST_EXPERTS = 1024
WARPS, LANES = 4, 32
GROUP = 4  # numbers that a thread loads at once
BITS = 32  # experts in a word of bits
APART = 8  # from one of the four experts that are counted in a word to the next: a byte of the word, and as many bits
WORDS = 16  # of bits, or a multiple: then each thread counts for as many experts
HALF = 16  # bits of a word that hold a number of blocks; the others hold a number of items
_TILED, _Tiling = plgpu.Layout.TILED, plgpu.Tiling
# [tokens, experts], a thread a token; [words, bits, tokens], a thread a bit; [pairs, words, bits], a warp a pair.
BY_TOKEN = _TILED(_Tiling(((MOST, GROUP), (LANES, GROUP))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
BY_BIT = _TILED(
    _Tiling(((WORDS, APART, GROUP), (WORDS // WARPS, APART, GROUP))), warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1
)
BY_PAIR = _TILED(_Tiling(((WARPS, WORDS, APART), (GROUP,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
_i32 = jnp.int32
_load = partial(plgpu.load, optimized=False)


def supported(tokens: int, each: int, experts: int, width: int, dtype: Any) -> str | None:
    """Why the kernel can't plan for so many tokens, each `width` wide and for `each` of the experts, None if it can."""
    if tokens > MOST:
        return f"{tokens} tokens, more than {MOST}"
    if each > MOST_EACH or experts > MOST_EXPERTS:
        return f"{each} of {experts} experts a token; supported: up to {MOST_EACH} of {MOST_EXPERTS}"
    if dtype != jnp.bfloat16:
        return f"rows are {jnp.dtype(dtype).name}, not bfloat16"
    return None if expert_rows.parts(width) else f"a width of {width} is not a multiple of {WARPS * LANES}"


@lower_once("expert_plan", "each", "experts", "rows", "items", "capacity")
def plan(
    x: Float[Array, "t d"],
    ids: Int[Array, "t w"],
    *,
    each: int,
    experts: int,
    rows: int,
    items: int,
    capacity: int,
    interpret: Any = False,
) -> tuple[Float[Array, "c d"], Int[Array, "i 5"], Int[Array, "t k"]]:
    """Make the plan: `capacity` rows to multiply; the table of at most `items` items, of up to `rows` rows each; and
    each pair's row, -1 where it has no expert. k is `each`: further columns of `ids` hold no experts.

    Rows that no pair has are arbitrary, and so are rows of the table beyond its items, and all but the first `COUNT`.
    """
    if ids.shape[1] % GROUP:
        ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % GROUP)), constant_values=jnp.iinfo(_i32).max)
    groups, words = -(-each // GROUP), -(-experts // (BITS * WORDS)) * WORDS
    smem = lambda *shape: plgpu.SMEM(shape, _i32)  # noqa: E731
    return plgpu.kernel(
        partial(_token, each, experts, rows),
        kernel_name="expert_plan",
        out_type=(
            jax.ShapeDtypeStruct((capacity, x.shape[1]), x.dtype),
            jax.ShapeDtypeStruct((items, 5), _i32),
            jax.ShapeDtypeStruct((len(x), each), _i32),
        ),
        grid=(len(x),),
        grid_names=("token",),
        scratch_types=dict(
            ids_s=smem(groups, MOST, GROUP),
            ready=plgpu.Barrier(num_arrivals=groups),
            bits_s=smem(words, MOST + GROUP),  # more than are written: so several words' bits lie in different banks
            all_s=smem(words, APART),
            earlier_s=smem(words, APART),
            before_s=smem(groups * GROUP),
        ),
        # Safe here: threads exchange data through `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, ids)


def _token(each, experts, rows, x_g, ids_g, *outs, ready, ids_s, bits_s, all_s, earlier_s, before_s):
    token, (tokens, width), (out_g, table_g, place_g) = lax.axis_index("token"), x_g.shape, outs
    for i in range(ids_s.shape[0]):
        plgpu.copy_gmem_to_smem(ids_g.at[:, pl.ds(i * GROUP, GROUP)], ids_s.at[i, pl.ds(0, tokens)], ready)
    row = expert_rows.load(x_g, token)
    plgpu.barrier_wait(ready)
    _find_bits(tokens, experts, ids_s, bits_s)
    plgpu.commit_smem()
    _count(tokens, experts, token, bits_s, all_s, earlier_s)
    plgpu.commit_smem()
    items = _add_up(rows, ids_s, token, all_s, before_s)
    plgpu.commit_smem()

    @pl.when(token == 0)
    def _():
        table_g[0, COUNT] = items

    pairs = [_place(experts, ids_s[j // GROUP, token, j % GROUP], before_s[j], all_s, earlier_s) for j in range(each)]
    for j, (expert, block, item, rank, blocks) in enumerate(pairs):
        exists, place = expert < experts, block * ALIGN + rank
        place_g[token, j] = jnp.where(exists, place, -1)

        @pl.when(exists)
        def _(place=place):
            expert_rows.store(out_g, place, row, width)

        @pl.when(exists & (lax.rem(rank, _i32(rows)) == 0))
        def _(expert=expert, block=block, item=item, rank=rank, blocks=blocks):
            index, done = item + lax.div(rank, _i32(rows)), _shift(rank, 3)
            table_g[index, EXPERT] = expert
            table_g[index, SOURCE] = table_g[index, TARGET] = block + done
            table_g[index, ROW_BLOCKS] = jnp.minimum(blocks - done, rows // ALIGN)


def _place(experts, expert, before, all_s, earlier_s):
    """A pair's expert, the expert's first block and item, the pair's rank in it, and how many blocks it has."""
    some = jnp.minimum(expert, experts - 1)  # `NOBODY` has no counts
    of = lambda counts_s: _shift(counts_s[_shift(some, 5), some & (APART - 1)], some & 24) & 255  # noqa: E731
    rank, blocks = of(earlier_s), _shift(of(all_s) + (ALIGN - 1), 3)
    return expert, before & (2**HALF - 1), _shift(before, HALF), rank, blocks


def _find_bits(tokens, experts, ids_s, bits_s):
    """Each token's experts, a bit each, in words."""
    valid = plgpu.broadcasted_iota(_i32, (MOST, GROUP), 0, layout=BY_TOKEN) < tokens  # no ids were loaded for others
    pairs = []
    for i in range(ids_s.shape[0]):
        ids = _load(ids_s.at[i], layout=BY_TOKEN)
        pairs.append((jnp.where(valid, _shift(ids, 5), -1), 1 << (ids & (BITS - 1))))
    for i in range(-(-experts // BITS)):
        bits_s[i, pl.ds(0, MOST)] = jnp.sum(sum(jnp.where(word == i, bit, 0) for word, bit in pairs), axis=1)


def _count(tokens, experts, token, bits_s, all_s, earlier_s):
    """How many tokens each expert has, and how many before `token`: experts 0, 8, 16, 24 of 32 in a word, then 1..."""
    shape = bits_s.shape[0], APART, GROUP
    bit, place = (plgpu.broadcasted_iota(_i32, shape, i, layout=BY_BIT) for i in (1, 2))

    def add(i, counts):
        everyone, earlier = counts
        for first in range(0, LANES, GROUP):
            first += i * LANES
            bits = _load(bits_s.at[:, pl.ds(first, GROUP)], layout=BY_BIT.reduce(1))
            bits = plgpu.layout_cast(lax.broadcast_in_dim(bits, shape, [0, 2]), BY_BIT)
            each = _shift(bits, bit) & 0x01010101
            everyone += jnp.sum(each, axis=2)
            earlier += jnp.sum(jnp.where(place + first < token, each, 0), axis=2)
        return everyone, earlier

    none = plgpu.layout_cast(jnp.zeros(shape[:2], _i32), BY_BIT.reduce(2))
    everyone, earlier_s[...] = lax.fori_loop(_i32(0), _i32(-(-tokens // LANES)), add, (none, none))
    word = plgpu.broadcasted_iota(_i32, shape[:2], 0, layout=BY_BIT.reduce(2))
    all_s[...] = jnp.where(word * BITS < experts, everyone, 0)  # there were no bits of words beyond


def _add_up(rows, ids_s, token, all_s, before_s):
    """For each of a token's pairs the blocks and items of all experts before its own, in a word; and all items."""
    counts = _load(all_s, layout=BY_PAIR.reduce(0))
    word, bit = (plgpu.broadcasted_iota(_i32, all_s.shape, i, layout=BY_PAIR.reduce(0)) for i in range(2))
    across = lambda x, axes: plgpu.layout_cast(lax.broadcast_in_dim(x, (WARPS, *all_s.shape), axes), BY_PAIR)  # noqa: E731
    each, total = [], 0
    for byte in range(0, BITS, APART):
        count = _shift(counts, byte) & 255
        taken = _shift(count + (ALIGN - 1), 3) | _shift(count + (rows - 1), rows.bit_length() - 1) << HALF
        each.append((across(word * BITS + byte + bit, [1, 2]), across(taken, [1, 2])))
        total += taken
    for i in range(ids_s.shape[0]):
        own = across(_load(ids_s.at[i, token], layout=BY_PAIR.reduce((1, 2))), [0])
        before = sum(jnp.where(expert < own, taken, 0) for expert, taken in each)
        before_s[pl.ds(i * GROUP, GROUP)] = jnp.sum(jnp.sum(before, axis=2), axis=1)
    return _shift(jnp.sum(jnp.sum(total, axis=1), axis=0), HALF)


def _shift(x, by):
    """Shift to the right. Nothing here is negative."""
    return lax.shift_right_logical(x, jnp.full_like(x, by) if isinstance(by, int) else by)
