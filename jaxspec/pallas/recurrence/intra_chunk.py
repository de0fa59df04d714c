"""The interactions within a block of gated delta-rule attention, on Hopper, for all blocks at once.

A Mosaic GPU kernel that runs before `delta_chunk`'s. A warpgroup takes one block of 64 tokens and one value head. With
G_ti = alpha_(i+1) .. alpha_t it makes, of the strictly lower triangular N_ti = beta_t G_ti (k_t k_i),

    X = (I + N)^-1,   taken = X diag(beta total) K,   written = X diag(beta) V,   mixed_ti = G_ti (q_t k_i)

with `total` the running product of the decays; `delta_chunk` explains their use. The inverse grows from that of
diagonal blocks of 1, 2, 4 .. tokens: with M the part of N between the halves of blocks twice as large, X <- X - X M X.
That is as stable as substitution, and consists of products of whole tiles, done on tensor cores with both sides as two
pieces of bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.pallas.recurrence.float32_products import product

BLOCK = 64  # tokens
WIDTH = 128  # of keys and values
PIECES = 2
_i32 = jnp.int32


def delta_within(
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    logs: Float[Array, "b n t"],
    beta: Float[Array, "b n t"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "b n p t k"], Float[Array, "b n v t"], Float[Array, "b n i t"]]:
    """Compute `taken` as two pieces of bfloat16, `written` transposed, float32, and `mixed` transposed, bfloat16.

    `q`, `k` and `v` are bfloat16, of shapes that `delta_chunk` supports; `logs` are running sums of the decays'
    logarithms, float32 as `beta`.
    """
    b, t, m, _ = q.shape
    n = v.shape[2]
    shape = jax.ShapeDtypeStruct
    tile = (BLOCK, BLOCK)
    return plgpu.kernel(
        partial(_warpgroup, n // m, bool(interpret)),
        kernel_name="delta_within",
        out_type=[
            shape((b, n, PIECES, t, WIDTH), jnp.bfloat16),
            shape((b, n, WIDTH, t), jnp.float32),
            shape((b, n, t, t), jnp.bfloat16),
        ],
        grid=(b, n),
        grid_names=("b", "n"),
        scratch_types=dict(
            q_s=plgpu.SMEM((BLOCK, WIDTH), jnp.bfloat16),
            k_s=plgpu.SMEM((BLOCK, WIDTH), jnp.bfloat16),
            v_s=plgpu.SMEM((BLOCK, WIDTH), jnp.bfloat16),
            row_gates_s=plgpu.SMEM((2, BLOCK), jnp.float32),
            column_gates_s=plgpu.SMEM((2, BLOCK), jnp.float32),
            right_s=plgpu.SMEM((PIECES, *tile), jnp.bfloat16),  # a product's right operand
            written_s=plgpu.SMEM((2, *tile), jnp.float32),
            mixed_s=plgpu.SMEM(tile, jnp.bfloat16),
            ready=plgpu.Barrier(num_arrivals=5),
        ),
        # Safe here: a thread's writes are committed before another thread reads them, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q, k, v, jnp.stack([logs, beta], axis=2))


def _warpgroup(group: int, interpreted: bool, q_g, k_g, v_g, gates_g, taken_g, written_g, mixed_g, *, q_s, k_s, v_s,
               row_gates_s, column_gates_s, right_s, written_s, mixed_s, ready):  # fmt: skip
    """Run one block of tokens and one value head."""
    b, head = lax.axis_index("b"), lax.axis_index("n")
    m = lax.div(head, _i32(group))
    plgpu.copy_gmem_to_smem(k_g.at[b, :, m], k_s, ready)
    for gates_s in (row_gates_s, column_gates_s):  # twice: Mosaic's search for layouts doesn't end if both are in one
        plgpu.copy_gmem_to_smem(gates_g.at[b, head], gates_s, ready)
    plgpu.copy_gmem_to_smem(q_g.at[b, :, m], q_s, ready)
    plgpu.copy_gmem_to_smem(v_g.at[b, :, head], v_s, ready)
    plgpu.barrier_wait(ready)

    tile, layout = (BLOCK, BLOCK), plgpu.Layout.WGMMA

    def along(axis, kind):
        """The logs (kind 0) or betas (1) of a tile's rows (axis 0) or columns."""
        gates_s = (row_gates_s, column_gates_s)[axis]
        gate = plgpu.load(gates_s.at[kind], layout=layout.reduce(1 - axis), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(gate, tile, [axis]), layout)

    row, column = (plgpu.broadcasted_iota(jnp.int32, tile, axis, layout=layout) for axis in (0, 1))
    difference = along(0, 0) - along(1, 0)

    # Transposed, as `delta_chunk` reads it: [i, t].
    spans = jnp.exp(jnp.where(row <= column, -difference, -jnp.inf))
    mixed_s[...] = (_from_shared(k_s, q_s.transpose((1, 0))) * spans).astype(jnp.bfloat16)

    spans = jnp.exp(jnp.where(row > column, difference, -jnp.inf))
    lower = _from_shared(k_s, k_s.transpose((1, 0))) * spans * along(0, 1)
    inverse = _unit_lower_inverse(lower, row, column, right_s, interpreted)

    corrected = inverse * along(1, 1)
    taken = product(corrected * jnp.exp(along(1, 0)), [k_s], pieces=PIECES, interpreted=interpreted)
    _write_pieces(taken, (q_s, k_s))  # over operands that are done with, so that two blocks share a multiprocessor
    _write_pieces(corrected, (right_s.at[0], right_s.at[1]))
    for half in range(2):
        values = v_s.at[:, pl.ds(half * BLOCK, BLOCK)].transpose((1, 0))
        written_s[half] = _from_shared(values, *(right_s.at[i].transpose((1, 0)) for i in range(PIECES)))
    plgpu.commit_smem()

    plgpu.copy_smem_to_gmem(mixed_s, mixed_g.at[b, head])
    for i, piece_s in enumerate((q_s, k_s)):
        plgpu.copy_smem_to_gmem(piece_s, taken_g.at[b, head, i])
    for half in range(2):
        plgpu.copy_smem_to_gmem(written_s.at[half], written_g.at[b, head, pl.ds(half * BLOCK, BLOCK)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _unit_lower_inverse(lower, row, column, right_s, interpreted: bool):
    """The inverse of I + `lower`, both in registers."""
    half = lambda x, size: lax.div(x, _i32(size))  # noqa: E731

    def between(size):
        """The part of `lower` between the halves of its diagonal blocks of 2 `size`; zero elsewhere.

        Multiplied, not selected: some registers would be zero whatever the thread, and ptxas (seen in 13.5) sets a left
        operand's constant registers after the matmul that reads them.
        """
        same = half(row, 2 * size) == half(column, 2 * size)
        return lower * jnp.where(same & (half(row, size) != half(column, size)), 1.0, 0.0)

    operands = [right_s.at[i] for i in range(PIECES)]
    multiply = partial(product, operands=operands, pieces=PIECES, interpreted=interpreted)
    inverse = jnp.where(row == column, 1.0, -between(1))
    for size in (2, 4, 8, 16, 32):
        _write_pieces(between(size), operands)
        corner = multiply(inverse)
        _write_pieces(inverse, operands)
        inverse = inverse - multiply(corner)
    return inverse


def _write_pieces(x, targets):
    """Write the pieces of x to shared memory once all warps have read what was there, and make them visible to all."""
    plgpu.commit_smem()
    for target in targets:
        piece = x.astype(jnp.bfloat16)
        target[...] = piece
        x = x - piece.astype(jnp.float32)
    plgpu.commit_smem()


def _from_shared(left, *rights):
    """left @ sum(rights), all in shared memory."""

    def run(acc):
        for right in rights:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], rights[0].shape[1]), jnp.float32))
