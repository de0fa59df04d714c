"""Blocks of prompts through gated delta-rule attention, in order, on Hopper: the sequential part.

A Mosaic GPU kernel. The interactions within a block are known beforehand (`delta_within`), and the state S before the
block enters linearly,

    U = written - taken S^T,   out = total Q S^T + mixed U,   S <- total_t S + U^T diag(left) K

So a warpgroup takes one value head and 64 of its value rows through all blocks. The state stays in shared memory, and
the next block's operands are prefetched. Products run on the tensor cores with the value rows as M, so U and the output
come out transposed. States and updates enter as two pieces of bfloat16.

Invariant: a state is rounded to the pool's dtype after every block, wherever it goes next. So the division of blocks
among programs doesn't show.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper import WGMMA_ROWS
from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.recurrence.delta_plan import operands_supported
from jaxspec.pallas.recurrence.float32_products import product
from jaxspec.pallas.recurrence.intra_chunk import BLOCK, PIECES, WIDTH, delta_within

TILE = WGMMA_ROWS  # value rows of a warpgroup
STAGES = 2  # pipeline stages: blocks whose operands are in shared memory
SLOT, SOURCE, KEEP = range(3)  # columns of the orders
NONE, CARRY = -1, -2  # no slot, or a state of zeros; the state that the block before left
_i32 = jnp.int32


@dataclass(frozen=True)
class _Plan:
    """Everything about one call that is static."""

    b: int
    m: int
    n: int
    dtype: Any  # of the state
    interpreted: bool


def supported(q_shape: tuple[int, ...], v_shape: tuple[int, ...], state_dtype, *dtypes) -> str | None:
    """Why the kernel can't serve blocks of such operands, as `operands_supported` takes them; None if it can."""
    if reason := operands_supported(q_shape, v_shape, state_dtype, *dtypes):
        return reason
    return None if q_shape[1] == BLOCK else f"blocks of {q_shape[1]} tokens; supported: {BLOCK}"


@lower_once("delta_chunk")
def delta_chunk(
    state: Float[Array, "l r n v k"],
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    source: Int[Array, " b"],
    keep: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    logs: Float[Array, "b n t"],
    beta: Float[Array, "b n t"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "b t n v"], Float[Array, "l r n v k"]]:
    """Run blocks of prompt tokens through the states, in order, as `gated_delta.chunk` does.

    Returns what the tokens read, bfloat16, and the states after all blocks. `q`, `k` and `v` are bfloat16; `logs` are
    running sums of the decays' logarithms, without padding rows' decays, and padding rows' `beta` is 0; both float32.
    Slots are as in `gated_delta.chunk`, `interpret` as in `plgpu.kernel`.
    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    if reason := supported(q.shape, v.shape, state.dtype, q.dtype, k.dtype, v.dtype):
        raise ValueError(f"delta_chunk doesn't support {reason}")
    plan = _Plan(len(slots), q.shape[2], state.shape[2], state.dtype, bool(interpret))
    taken, written, mixed = delta_within(q, k, v, logs, beta, interpret=interpret)
    gates = jnp.exp(jnp.stack([logs, logs[..., -1:] - logs], axis=2))
    orders = jnp.pad(_orders(slots, source, keep, state.shape[1]), ((0, 0), (0, 29)))  # to a bulk copy's 128 bytes
    ref = jax.new_ref(state)
    out = plgpu.kernel(
        partial(_warpgroup, plan),
        kernel_name="delta_chunk",
        out_type=jax.ShapeDtypeStruct((plan.b, BLOCK, plan.n, WIDTH), jnp.bfloat16),
        grid=(plan.n, WIDTH // TILE),
        grid_names=("n", "half"),
        scratch_types=dict(
            q_s=plgpu.SMEM((STAGES, BLOCK, WIDTH), jnp.bfloat16),
            k_s=plgpu.SMEM((STAGES, BLOCK, WIDTH), jnp.bfloat16),
            taken_s=plgpu.SMEM((STAGES, PIECES, BLOCK, WIDTH), jnp.bfloat16),
            written_s=plgpu.SMEM((STAGES, TILE, BLOCK), jnp.float32),
            mixed_s=plgpu.SMEM((STAGES, BLOCK, BLOCK), jnp.bfloat16),
            gates_s=plgpu.SMEM((STAGES, 2, BLOCK), jnp.float32),
            orders_s=plgpu.SMEM((STAGES, 32), jnp.int32),
            state_s=plgpu.SMEM((TILE, WIDTH), plan.dtype),
            out_s=plgpu.SMEM((BLOCK, TILE), jnp.bfloat16),
            ready=plgpu.Barrier(num_arrivals=8, num_barriers=STAGES),
            loaded=plgpu.Barrier(),
        ),
        # Safe here: a thread's writes are committed before another thread reads them, written out below.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(
        layer.reshape(1),
        orders,
        q,
        k,
        taken,
        written,
        mixed,
        gates,
        ref,
    )
    return out, jax.freeze(ref)


def _orders(slots, source, keep, num_slots):
    """Each block's slot to write at its end, the slot that it starts from, and the slot for a copy: i32[b, 3]."""
    follows = jnp.concatenate([jnp.zeros(1, bool), (source[1:] == slots[:-1]) & (source[1:] >= 0)])
    again = jnp.concatenate([slots[1:] == slots[:-1], jnp.zeros(1, bool)])  # the next block overwrites it
    outside = (keep < 0) | (keep >= num_slots)
    columns = [jnp.where(again, NONE, slots), jnp.where(follows, CARRY, jnp.maximum(source, NONE))]
    return jnp.stack([*columns, jnp.where(outside, NONE, keep)], axis=1).astype(jnp.int32)


def _warpgroup(plan: _Plan, layer_g, orders_g, q_g, k_g, taken_g, written_g, mixed_g, gates_g, state_g, out_g, *, q_s,
               k_s, taken_s, written_s, mixed_s, gates_s, orders_s, state_s, out_s, ready, loaded):  # fmt: skip
    """Run half of one head's state through all blocks."""
    head, half, layer = lax.axis_index("n"), lax.axis_index("half"), layer_g[0]
    m = lax.div(head, _i32(plan.n // plan.m))
    cut = pl.ds(half * TILE, TILE)

    def fetch(i, stage):
        prefetch = partial(plgpu.copy_gmem_to_smem, barrier=ready.at[stage])
        prefetch(orders_g.at[i], orders_s.at[stage])
        for piece in range(PIECES):
            prefetch(taken_g.at[i, head, piece], taken_s.at[stage, piece])
        prefetch(written_g.at[i, head, cut], written_s.at[stage])
        prefetch(q_g.at[i, :, m], q_s.at[stage])
        prefetch(k_g.at[i, :, m], k_s.at[stage])
        prefetch(mixed_g.at[i, head], mixed_s.at[stage])
        prefetch(gates_g.at[i, head], gates_s.at[stage])

    for i in range(min(STAGES, plan.b)):
        fetch(_i32(i), i)

    def block(i, carry):
        stage = lax.rem(i, _i32(STAGES))
        plgpu.barrier_wait(ready.at[stage])
        slot, source, keep = (orders_s[stage, column] for column in (SLOT, SOURCE, KEEP))

        @pl.when(source >= 0)
        def _():
            plgpu.wait_smem_to_gmem(0)  # this slot's state may still be on its way to memory
            plgpu.copy_gmem_to_smem(state_g.at[layer, source, head, cut], state_s, loaded)
            plgpu.barrier_wait(loaded)

        @pl.when(source == NONE)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            state_s[...] = plgpu.layout_cast(jnp.zeros((TILE, WIDTH), plan.dtype), plgpu.Layout.WGMMA)

        state = plgpu.load(state_s, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        gates = [
            plgpu.load(gates_s.at[stage, row], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) for row in (0, 1)
        ]
        across = [lax.broadcast_in_dim(gate, (TILE, BLOCK), [1]) for gate in gates]
        multiply = partial(product, interpreted=plan.interpreted)

        pieces = [taken_s.at[stage, piece].transpose((1, 0)) for piece in range(PIECES)]
        updates = plgpu.load(written_s.at[stage], layout=plgpu.Layout.WGMMA) - multiply(state, pieces, pieces=PIECES)
        out = multiply(state, [q_s.at[stage].transpose((1, 0))], pieces=PIECES) * across[0]
        out = out + multiply(updates, [mixed_s.at[stage]], pieces=1)
        state = state * gates_s[stage, 0, BLOCK - 1] + multiply(updates * across[1], [k_s.at[stage]], pieces=PIECES)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        state_s[...] = state.astype(plan.dtype)
        out_s.transpose((1, 0))[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()

        plgpu.copy_smem_to_gmem(out_s, out_g.at[i, :, head, cut])
        pl.when(slot >= 0)(lambda: plgpu.copy_smem_to_gmem(state_s, state_g.at[layer, slot, head, cut]))
        pl.when(keep >= 0)(lambda: plgpu.copy_smem_to_gmem(state_s, state_g.at[layer, keep, head, cut]))
        pl.when(i + STAGES < plan.b)(lambda: fetch(i + STAGES, stage))
        return carry

    lax.fori_loop(_i32(0), _i32(plan.b), block, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
