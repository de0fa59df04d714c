"""A chain of drafts in which each changes the next row's logits, as one kernel on Hopper: DSpark's, greedy.

A step adds to a row's logits the product of the last draft's embedding with a matrix over the vocabulary, and takes the
highest. In XLA that is a matmul, an addition, an argmax and a lookup for each draft. Here the blocks stay. They take
tiles of the vocabulary in turn, and prefetch the next tiles' weights, those of the next step too. Steps meet twice,
through memory and counters: each block leaves its highest logits, and then block i finds row i's token and copies its
embedding for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from jaxspec.pallas.dense.few_rows.block import by_row
from jaxspec.pallas.dense.few_rows.share import GROUP, TILE
from jaxspec.pallas.hopper import BULK_COPY, SHARED_BYTES, THREADS
from jaxspec.pallas.hopper.export import lower_once

BLOCKS = 128  # all must be resident, since they wait for one another; a row's highest are loaded by as many
MAX_STAGES = 4  # tiles of the matrix in a block's shared memory
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, rank: int, tokens: int, dtypes: Sequence[Any]) -> str | None:
    """Why the kernel can't run a chain of these sizes, or None if it can. `dtypes`: of embeddings and matrix."""
    if wrong := [jnp.dtype(each).name for each in dtypes if jnp.dtype(each) != jnp.bfloat16]:
        return f"weights in {wrong[0]}; supported: bfloat16"
    if rank % THREADS or rank > BULK_COPY:
        return f"a rank of {rank}; supported: {THREADS} and {BULK_COPY}"
    if rows > BLOCKS:
        return f"{rows} rows; supported: up to {BLOCKS}"
    if tokens % TILE or tokens >= 2**24:
        return f"{tokens} tokens; supported: multiples of {TILE}"
    return None


def reference(
    base: Float[Array, "r n v"], rows: Float[Array, "r k"], before: Float[Array, "w k"], after: Float[Array, "k v"]
) -> Int[Array, "r n"]:
    """`chain` in plain jnp."""
    tokens = []
    for step in range(base.shape[1]):
        logits = base[:, step] + jnp.dot(rows, after, preferred_element_type=_f32)
        tokens.append(jnp.argmax(logits, axis=-1).astype(_i32))
        rows = before[tokens[-1]]
    return jnp.stack(tokens, axis=1)


@lower_once("markov_chain")
def chain(
    base: Float[Array, "r n v"],
    rows: BFloat16[Array, "r k"],
    before: BFloat16[Array, "w k"],
    after: BFloat16[Array, "k v"],
    *,
    interpret: Any = False,
) -> Int[Array, "r n"]:
    """Tokens of n steps: the highest of `base[:, i]` and the product of the last token's row of `before` with `after`,
    in float32, the lowest of equals. `rows`: of the tokens before the first step. They are padded to a multiple of
    eight.

    In interpret mode, which has no counters between blocks, each step is two kernels.
    """
    b, n, _ = base.shape
    padding = -b % GROUP
    base, rows = jnp.pad(base, ((0, padding), (0, 0), (0, 0))), jnp.pad(rows, ((0, padding), (0, 0)))
    if not interpret:
        return _launch(_fused, n, base, rows, before, after, interpret)[-1].T[:b]
    tokens = []
    for step in range(n):
        top, at = _launch(_products, 1, base[:, step : step + 1], rows, before, after, interpret)[:2]
        rows, token = _launch(_choices, 1, top, at, before, after, interpret)[2:]
        rows = rows[0]
        tokens.append(token[0])
    return jnp.stack(tokens, axis=1)[:b]


def _launch(body, n, first, second, before, after, interpret):
    """Results: the blocks' highest logits and their tokens, the tokens' embeddings, and the tokens, by step."""
    r, (k, v) = first.shape[1 if body is _choices else 0], after.shape
    held = r * k * 2 + r * TILE * 4 + k * 2 + 4096  # the rest for barriers and reductions
    stages = min(MAX_STAGES, (SHARED_BYTES - held) // (k * TILE * 2), n * -(-v // TILE // BLOCKS))
    found = jax.ShapeDtypeStruct((n, r, BLOCKS), _f32)
    return plgpu.kernel(
        partial(body, n),
        kernel_name="markov_chain",
        out_type=[found, found, jax.ShapeDtypeStruct((n, r, k), before.dtype), jax.ShapeDtypeStruct((n, r), _i32)],
        grid=(BLOCKS,),
        grid_names=("block",),
        scratch_types=dict(
            weight_s=plgpu.SMEM((stages, k, TILE), after.dtype),
            rows_s=plgpu.SMEM((r, k), before.dtype),
            found_s=plgpu.SMEM((r, TILE), _f32),
            row_s=plgpu.SMEM((k,), before.dtype),
            ready=plgpu.Barrier(num_barriers=stages),
            rows_ready=plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=2048),
        interpret=interpret,
    )(first, second, before, after)


def _fused(n, base_g, rows_g, before_g, after_g, top_g, at_g, embedded_g, tokens_g, **scratch):
    found, chosen = (pl.get_global(plgpu.SemaphoreType.REGULAR((n,))) for _ in range(2))
    block, r = lax.axis_index("block"), rows_g.shape[0]
    tiles = _Tiles(n, after_g, scratch)
    tiles.begin()
    _load_rows(rows_g, scratch)

    def step(s, none):
        tiles.highest(base_g, s, s, top_g, at_g)
        plgpu.semaphore_signal(found.at[s], memory_scope="gpu")
        plgpu.semaphore_wait(found.at[s], BLOCKS, decrement=False, memory_scope="gpu")

        @pl.when(block < r)
        def _():
            _choose(s, before_g, top_g, at_g, embedded_g, tokens_g, scratch["row_s"])
            plgpu.semaphore_signal(chosen.at[s], memory_scope="gpu")

        @pl.when(s + 1 < n)
        def _():
            plgpu.semaphore_wait(chosen.at[s], r, decrement=False, memory_scope="gpu")
            _load_rows(embedded_g.at[s], scratch)

        return none

    lax.fori_loop(_i32(0), _i32(n), step, _i32(0))


def _products(n, base_g, rows_g, before_g, after_g, top_g, at_g, embedded_g, tokens_g, **scratch):
    tiles = _Tiles(n, after_g, scratch)
    tiles.begin()
    _load_rows(rows_g, scratch)
    tiles.highest(base_g, _i32(0), _i32(0), top_g, at_g)


def _choices(n, found_g, places_g, before_g, after_g, top_g, at_g, embedded_g, tokens_g, **scratch):
    @pl.when(lax.axis_index("block") < tokens_g.shape[1])
    def _():
        _choose(_i32(0), before_g, found_g, places_g, embedded_g, tokens_g, scratch["row_s"])


def _load_rows(rows_g, scratch):
    plgpu.commit_smem()  # all warps have read those before
    plgpu.copy_gmem_to_smem(rows_g, scratch["rows_s"], scratch["rows_ready"])
    plgpu.barrier_wait(scratch["rows_ready"])


class _Tiles:
    """A block's tiles of the matrix: `turns` of them in each of n steps, prefetched in a ring."""

    def __init__(self, n: int, after_g: Any, scratch: dict[str, Any]):
        self.after_g, self.scratch = after_g, scratch
        self.tiles, self.block = after_g.shape[1] // TILE, lax.axis_index("block")
        self.turns = -(-self.tiles // BLOCKS)
        self.all, self.stages = n * self.turns, scratch["weight_s"].shape[0]

    def begin(self) -> None:
        for i in range(self.stages):
            self._fetch(_i32(i), i)

    def _tile(self, turn: Any) -> Any:
        """The tile of a turn of a step; a block without one left takes the last one again."""
        return jnp.minimum(self.block + turn * BLOCKS, self.tiles - 1)

    def _fetch(self, i: Any, stage: Any) -> None:
        columns = pl.ds(self._tile(lax.rem(i, _i32(self.turns))) * TILE, TILE)
        ready, weight_s = self.scratch["ready"], self.scratch["weight_s"]
        plgpu.copy_gmem_to_smem(self.after_g.at[:, columns], weight_s.at[stage], ready.at[stage])

    def highest(self, base_g: Any, row: Any, step: Any, top_g: Any, at_g: Any) -> None:
        """Leave the highest logits of this block's tiles, with `base_g[:, row]` added, and their tokens."""
        scratch, layout, (r, _) = self.scratch, by_row(4), self.scratch["rows_s"].shape
        load = partial(plgpu.load, layout=layout, optimized=False)
        groups = [pl.ds(at, GROUP) for at in range(0, r, GROUP)]

        def take(turn, found):
            i = step * self.turns + turn
            stage, tile = lax.rem(i, _i32(self.stages)), self._tile(turn)
            added = [load(base_g.at[group, row, pl.ds(tile * TILE, TILE)]) for group in groups]
            plgpu.barrier_wait(scratch["ready"].at[stage])

            def run(total):
                weights = scratch["weight_s"].at[stage].transpose((1, 0))
                plgpu.wgmma(total, weights, scratch["rows_s"].transpose((1, 0)))
                return total[...]

            total = pl.run_scoped(run, plgpu.ACC((TILE, r), _f32))
            pl.when(i + self.stages < self.all)(lambda: self._fetch(i + self.stages, stage))
            plgpu.commit_smem()  # all warps have read the sums before
            scratch["found_s"].transpose((1, 0))[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            left = []
            for group, base, (top, at) in zip(groups, added, found, strict=True):
                logits = load(scratch["found_s"].at[group]) + base
                higher = logits > top
                left.append((jnp.where(higher, logits, top), jnp.where(higher, tile.astype(_f32), at)))
            return tuple(left)

        empty = (jnp.full((GROUP, TILE), start, _f32) for start in (-jnp.inf, 0))
        empty = tuple(plgpu.layout_cast(x, layout) for x in empty)
        found = lax.fori_loop(_i32(0), _i32(self.turns), take, (empty,) * len(groups))
        column = plgpu.broadcasted_iota(_i32, (GROUP, TILE), 1, layout=layout).astype(_f32)
        for group, (top, at) in zip(groups, found, strict=True):
            best, token = jnp.max(top, axis=1), at * TILE + column  # exact, as there are fewer than 2**24
            highest = top == lax.broadcast_in_dim(best, top.shape, [0])
            top_g[step, group, self.block] = best
            at_g[step, group, self.block] = -jnp.max(jnp.where(highest, -token, -jnp.inf), axis=1)


def _choose(step, before_g, top_g, at_g, embedded_g, tokens_g, row_s):
    """Find the token of the row that has this block's number, and copy its embedding."""
    row, layout = lax.axis_index("block"), plgpu.Layout.WG_STRIDED((BLOCKS,), vec_size=1)
    top, at = (plgpu.load(x.at[step, row], layout=layout, optimized=False) for x in (top_g, at_g))
    token = (-jnp.max(jnp.where(top == jnp.max(top), -at, -jnp.inf))).astype(_i32)
    tokens_g[step, row] = token
    spread = plgpu.Layout.WG_STRIDED(row_s.shape, vec_size=row_s.shape[0] // THREADS)
    row_s[...] = plgpu.load(before_g.at[token], layout=spread, optimized=False)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(row_s, embedded_g.at[step, row])
    plgpu.wait_smem_to_gmem(0)
