"""Gated MLPs of many experts, each over its own tokens: who computes what, in plain jnp or by the kernel.

A (token, expert) pair is a row of work. Rows of one expert stand together, from a multiple of `ALIGN` rows on (what a
bulk copy can start at), and are cut into items of at most n rows: item i takes rows of `x` through expert i's weights.
What is done is proportional to the pairs, never to tokens times experts, and only chosen experts' weights are read.

Up to `ALIGN` tokens need no grouping: there an item is a pair, and all tokens' rows go through its expert, since a
matmul of one row costs what one of eight does. The first pair of each expert does it for the others.
"""

from __future__ import annotations

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ALIGN = 8  # rows
ITEM_ROWS = (8, 16, 32, 64, 128)
CHUNK = 256  # pairs that are ranked against one another at once


@flax.struct.dataclass
class Items:
    """Work items: item i multiplies rows `ALIGN * source[i]` and on, `ALIGN * blocks[i]` of them, by `expert[i]`.

    Results go to rows `ALIGN * target[i]` and on of `capacity` rows. Of the arrays' items the first `count[0]` are
    real, and of those some may have no blocks, so nothing to do. Reading `rows` rows from an item's first is safe.
    """

    expert: Int[Array, " i"]
    source: Int[Array, " i"]
    target: Int[Array, " i"]
    blocks: Int[Array, " i"]
    count: Int[Array, " 1"]
    rows: int = flax.struct.field(pytree_node=False)
    capacity: int = flax.struct.field(pytree_node=False)


def experts_mlp(
    x: Float[Array, "t d"],
    gate_up: Float[Array, "e 2f d"],
    down: Float[Array, "e d f"],
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
) -> Float[Array, "t d"]:
    """Sum over j of `weights[t, j] * down @ (silu(gate @ x[t]) * (up @ x[t]))` of expert `ids[t, j]`, in float32.

    A token's experts must be distinct. Each expert's result is rounded to x's dtype before it is weighted.
    """
    rows, items, place = plan(x, ids, len(gate_up))
    out = reference(rows, gate_up, down, items)
    return jnp.einsum("tkd,tk->td", out[place].astype(jnp.float32), weights)


def plan(
    x: Float[Array, "t d"], ids: Int[Array, "t k"], num_experts: int
) -> tuple[Float[Array, "r d"], Items, Int[Array, "t k"]]:
    """Rows to multiply, the items over them, and the row of the result that each pair's is."""
    t, k = ids.shape
    if t <= ALIGN:
        items, place = _by_pair(ids)
        return jnp.pad(x, ((0, ALIGN - t), (0, 0))), items, place
    items, place = _by_expert(ids, num_experts, rows_per_item(t * k / num_experts))
    token = jnp.zeros(items.capacity, jnp.int32)
    token = token.at[place.reshape(-1)].set(jnp.repeat(jnp.arange(t), k), unique_indices=True)
    return x[token], items, place


def rows_per_item(mean: float) -> int:
    """Rows of an item where experts have `mean` rows: few experts need two items, and most fill theirs by half."""
    return next((rows for rows in ITEM_ROWS if rows >= 2.5 * mean), ITEM_ROWS[-1])


def _by_pair(ids: Int[Array, "t k"]) -> tuple[Items, Int[Array, "t k"]]:
    """Items of a few tokens: all of them through the expert of each pair that is its expert's first."""
    t, k = ids.shape
    flat, pair = ids.reshape(-1), jnp.arange(t * k)
    first = pair if t == 1 else jnp.argmax(flat[None] == flat[:, None], axis=1)
    items = Items(
        expert=flat,
        source=jnp.zeros(t * k, jnp.int32),
        target=pair.astype(jnp.int32),
        blocks=(first == pair).astype(jnp.int32),
        count=jnp.full(1, t * k, jnp.int32),
        rows=ALIGN,
        capacity=ALIGN * t * k,
    )
    return items, ALIGN * first.reshape(t, k) + jnp.arange(t)[:, None]


def _by_expert(ids: Int[Array, "t k"], num_experts: int, rows: int) -> tuple[Items, Int[Array, "t k"]]:
    """Items of many tokens: the pairs of each expert, `rows` at a time."""
    flat = ids.reshape(-1)
    pairs, most = flat.size, min(num_experts, flat.size)
    per_item = rows // ALIGN
    counts, rank = _ranks(flat, num_experts)
    blocks = -(-counts // ALIGN)
    tiles = -(-counts // rows)
    first_block, first_item = _before(blocks), _before(tiles)
    item = jnp.arange((pairs + most * (rows - 1)) // rows, dtype=jnp.int32)
    expert = jnp.sum(item[:, None] >= (first_item + tiles)[None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    done = (item - first_item[expert]) * per_item
    capacity = -(-(pairs + most * (ALIGN - 1)) // ALIGN) * ALIGN + rows - ALIGN
    start = jnp.minimum(first_block[expert] + done, (capacity - rows) // ALIGN)
    items = Items(
        expert=expert,
        source=start,
        target=start,
        blocks=jnp.clip(blocks[expert] - done, 0, per_item),
        count=tiles.sum(keepdims=True),
        rows=rows,
        capacity=capacity,
    )
    return items, (first_block[flat] * ALIGN + rank).reshape(ids.shape)


def _ranks(flat: Int[Array, " p"], num_experts: int) -> tuple[Int[Array, " e"], Int[Array, " p"]]:
    """How many pairs each expert has, and how many of a pair's expert come before it.

    A counting sort by comparing: on a GPU, a few small fused kernels, where sorting would be many.
    """
    pairs = len(flat)
    chunk = pairs if pairs <= 4 * CHUNK else CHUNK
    chunks = jnp.pad(flat, (0, -pairs % chunk), constant_values=num_experts).reshape(-1, chunk)
    earlier = jnp.tri(chunk, k=-1, dtype=bool)
    within = jnp.sum((chunks[:, :, None] == chunks[:, None]) & earlier, axis=2, dtype=jnp.int32)
    counts = jnp.sum(chunks[:, :, None] == jnp.arange(num_experts), axis=1, dtype=jnp.int32)
    rank = within + jnp.take_along_axis(_before(counts), jnp.minimum(chunks, num_experts - 1), axis=1)
    return counts.sum(0), rank.reshape(-1)[:pairs]


def _before(counts: Int[Array, "n *m"]) -> Int[Array, "n *m"]:
    """Sums of all earlier counts, along the first axis. n^2 additions that fuse, where a scan takes several kernels."""
    earlier = jnp.tri(len(counts), k=-1, dtype=bool)
    earlier = earlier.reshape(*earlier.shape, *[1] * (counts.ndim - 1))
    return jnp.sum(jnp.where(earlier, counts[None], 0), axis=1, dtype=jnp.int32)


@partial(jax.jit, inline=True)
def reference(
    rows: Float[Array, "r d"], gate_up: Float[Array, "e 2f d"], down: Float[Array, "e d f"], items: Items
) -> Float[Array, "c d"]:
    """Each item's rows through its expert, in plain jnp, item by item. Rows that are no item's are zero."""
    matmul = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one(i, out):
        part = jax.lax.dynamic_slice_in_dim(rows, ALIGN * items.source[i], items.rows)
        gate, up = jnp.split(matmul("rd,fd->rf", part, gate_up[items.expert[i]]), 2, axis=1)
        hidden = (jax.nn.silu(gate) * up).astype(rows.dtype)
        new = matmul("rf,df->rd", hidden, down[items.expert[i]]).astype(rows.dtype)
        start = ALIGN * items.target[i]
        mine = jnp.arange(items.rows)[:, None] < ALIGN * items.blocks[i]
        new = jnp.where(mine, new, jax.lax.dynamic_slice_in_dim(out, start, items.rows))
        return jax.lax.dynamic_update_slice_in_dim(out, new, start, axis=0)

    out = jnp.zeros((items.capacity, rows.shape[1]), rows.dtype)
    return jax.lax.fori_loop(0, items.count[0], one, out)
