"""A round of gated delta-rule attention on Hopper: replay what was accepted, then run the new rows.

A Mosaic GPU kernel, and bound by reading and writing the states: a warpgroup takes 64 rows of a head's state through
registers. In what comes out of the new rows u and o, the state before them enters through its products with their keys
and queries alone,

    u_t = beta_t (v_t - G_t S k_t - sum_(i<t) G_t/G_i (k_i k_t) u_i)
    o_t = G_t S q_t + sum_(i<=t) G_t/G_i (k_i q_t) u_i

with G the running product of the decays; those products run on the tensor cores. They take bfloat16, so a state goes in
as a sum of `PIECES` of them.

A block has the value rows of one request and key head, or where requests are few a part of them: then the blocks of a
cluster share them. Invariant: records are overwritten once every block that reads them has them.
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

from jaxspec.pallas.once import lower_once
from jaxspec.pallas.pieces import product

TILE = 64  # rows of a state that a warpgroup has at a time: the M of its matmul
WIDTH = 128  # of keys and values
MAX_ROWS = 16
MAX_GROUP = 4  # value heads of a key head: 8 tiles, as many as a cluster has blocks
GATES = 2 * MAX_ROWS  # decays and betas of a head's rows: 128 bytes, what a bulk copy's target is aligned to
PIECES = 2  # errors of 2^-18 of an element, so some 1e-6 of a product
ENOUGH = 250  # blocks: about two for each multiprocessor, whose shared memory has room for two
_i32 = jnp.int32


@dataclass(frozen=True)
class _Plan:
    """Everything about one call that is static."""

    b: int
    t: int
    rows: int  # of the records
    m: int
    group: int
    dtype: Any  # of the state
    splits: int  # blocks that share a request's key head
    stages: int  # tiles of the state that a block has room for
    pieces: int
    interpreted: bool

    @property
    def tiles(self) -> int:
        """Of a request's key head."""
        return self.group * WIDTH // TILE

    @property
    def share(self) -> int:
        """Tiles of one block."""
        return self.tiles // self.splits

    @property
    def padded(self) -> int:
        """Rows of keys in the right operand, then as many of queries."""
        return -(-self.t // 8) * 8


def supported(q_shape: tuple[int, ...], v_shape: tuple[int, ...], rows: int, state_dtype, *dtypes) -> str | None:
    """Why the kernel can't serve queries [b, t, m, k] and values [b, t, n, v] over states of `state_dtype` with records
    of `rows` rows; None if it can. `dtypes` are those of queries, keys and values."""
    _, t, m, k = q_shape
    n, v = v_shape[2:]
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"queries, keys or values in {wrong[0]}; bfloat16 are"
    if jnp.dtype(state_dtype) not in (jnp.float32, jnp.bfloat16):
        return f"states in {jnp.dtype(state_dtype).name}; float32 and bfloat16 are"
    if (k, v) != (WIDTH, WIDTH):
        return f"keys of width {k} and values of width {v}; {WIDTH} and {WIDTH} are"
    if n % m or n // m > MAX_GROUP:
        return f"{n} value heads over {m} key heads; whole groups of up to {MAX_GROUP} are"
    if max(t, rows) > MAX_ROWS:
        return f"{max(t, rows)} rows a request; up to {MAX_ROWS} are"
    return None


def delta_step(
    state: Float[Array, "l r n v k"],
    keys: Float[Array, "l r s m k"],
    updates: Float[Array, "l r s n v"],
    decays: Float[Array, "l r n w"],
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    decay: Float[Array, "b t n"],
    beta: Float[Array, "b t n"],
    *,
    interpret: Any = False,
    division: tuple[int, int] | None = None,
    pieces: int = PIECES,
) -> tuple[Float[Array, "b t n v"], tuple[Array, Array, Array, Array]]:
    """`gated_delta.step` on the arrays of a pool; returns what the rows read, in bfloat16, and those arrays anew.

    `q`, `k`, `v` and `keys` are bfloat16, the rest float32, but for `state`, which may be bfloat16. `interpret`: as in
    `plgpu.kernel`. `division`: how many blocks share a request's key head, and how many tiles each has room for; one
    has one tile or whole heads. By default, what keeps all multiprocessors busy.

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    if reason := supported(q.shape, v.shape, keys.shape[2], state.dtype, q.dtype, k.dtype, keys.dtype, v.dtype):
        raise ValueError(f"delta_step doesn't support {reason}")
    pool = state, keys, updates, decays
    return _step(
        pool, layer, slots, replay, q, k, v, decay, beta, interpret=interpret, division=division, pieces=pieces
    )


@lower_once("division", "pieces")
def _step(pool, layer, slots, replay, q, k, v, decay, beta, *, interpret, division, pieces):
    b, t, n, _ = v.shape
    m = q.shape[2]
    division = division or _division(b * m, n // m)
    plan = _Plan(b, t, pool[1].shape[2], m, n // m, pool[0].dtype, *division, pieces, bool(interpret))
    pad = lambda x, to, value=0: jnp.pad(x, [(0, 0), (0, to - t), *[(0, 0)] * (x.ndim - 2)], constant_values=value)  # noqa: E731
    kq = jnp.concatenate([pad(k, plan.padded), pad(q, plan.padded)], axis=1)
    gates = jnp.concatenate([pad(decay, MAX_ROWS, 1), pad(beta, MAX_ROWS)], axis=1).swapaxes(1, 2)
    refs = [jax.new_ref(x) for x in pool]
    out = plgpu.kernel(
        partial(_block, plan),
        kernel_name="delta_step",
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(b, m),
        grid_names=("b", "m"),
        cluster=(plan.splits,),
        cluster_names=("split",),
        scratch_types=_scratch(plan, pool[3].shape[3]),
        # Safe here: what one thread writes and another reads is committed in between, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(layer.reshape(1), slots, replay, kq, v, gates, *refs)
    return out, tuple(jax.freeze(ref) for ref in refs)


def _division(key_heads: int, group: int) -> tuple[int, int]:
    """For so many key heads of all requests: few blocks with many tiles each, the next on its way, if that is enough.

    Then what a key head's blocks have in common is done once, and none waits for the others of its cluster.
    """
    tiles = group * WIDTH // TILE
    splits = next((splits for splits in (1, group) if key_heads * splits >= ENOUGH), tiles)
    return splits, min(2, tiles // splits)


def _scratch(plan: _Plan, width: int) -> dict:
    """Shared memory and barriers. What a tile brings with it has an entry for each stage."""
    both = 2 * plan.padded
    scratch = dict(
        kq_s=plgpu.SMEM((both, WIDTH), jnp.bfloat16),  # as the tensor cores want it
        plain_s=plgpu.SMEM((both, WIDTH), jnp.bfloat16),  # the same, row by row
        keys_s=plgpu.SMEM((plan.rows, WIDTH), jnp.bfloat16),
        among_s=plgpu.SMEM((plan.padded, both), jnp.float32),
        state_s=plgpu.SMEM((plan.stages, TILE, WIDTH), plan.dtype),
        updates_s=plgpu.SMEM((plan.stages, plan.rows, TILE), jnp.float32),
        decays_s=plgpu.SMEM((plan.stages, GATES), jnp.float32),
        gates_s=plgpu.SMEM((plan.stages, GATES), jnp.float32),
        values_s=plgpu.SMEM((plan.stages, plan.t, TILE), jnp.bfloat16),
        new_s=plgpu.SMEM((plan.t, TILE), jnp.float32),
        out_s=plgpu.SMEM((plan.t, TILE), jnp.bfloat16),
        shared=plgpu.Barrier(num_arrivals=3),
        ready=plgpu.Barrier(num_arrivals=5, num_barriers=plan.stages),
    )
    if plan.splits > 1:
        scratch["read"] = plgpu.ClusterBarrier(collective_axes=("split",))
    return scratch


def _block(plan: _Plan, layer_g, slots_g, replay_g, kq_g, v_g, gates_g, state_g, keys_g, updates_g, decays_g, out_g, *,
           kq_s, plain_s, keys_s, among_s, state_s, updates_s, decays_s, gates_s, values_s, new_s, out_s, shared, ready,
           read=None):  # fmt: skip
    """What one block, of one warpgroup, does."""
    b, m, split = (lax.axis_index(name) for name in ("b", "m", "split"))
    layer, slot, replay = layer_g[0], slots_g[b], replay_g[b]
    halves = WIDTH // TILE

    def place(i):
        """The value head of this block's i-th tile, and which of its rows the tile has."""
        tile = split * plan.share + i
        return m * plan.group + lax.div(tile, _i32(halves)), lax.rem(tile, _i32(halves))

    def fetch(i, stage):
        head, half = place(i)
        cut = pl.ds(half * TILE, TILE)
        bring = partial(plgpu.copy_gmem_to_smem, barrier=ready.at[stage])
        bring(state_g.at[layer, slot, head, cut], state_s.at[stage])
        bring(updates_g.at[layer, slot, :, head, cut], updates_s.at[stage])
        bring(decays_g.at[layer, slot, head], decays_s.at[stage, pl.ds(0, decays_g.shape[3])])
        bring(gates_g.at[b, head], gates_s.at[stage])
        bring(v_g.at[b, :, head, cut], values_s.at[stage])

    fetch(_i32(0), 0)
    plgpu.copy_gmem_to_smem(kq_g.at[b, :, m], kq_s, shared)
    plgpu.copy_gmem_to_smem(kq_g.at[b, :, m], plain_s, shared)
    plgpu.copy_gmem_to_smem(keys_g.at[layer, slot, :, m], keys_s, shared)
    for stage in range(1, plan.stages):
        fetch(_i32(stage), stage)
    plgpu.barrier_wait(shared)
    _write_products(plan, plain_s, among_s)

    def tile(i, carry):
        stage = lax.rem(i, _i32(plan.stages))
        head, half = place(i)
        cut = pl.ds(half * TILE, TILE)
        plgpu.barrier_wait(ready.at[stage])
        if plan.splits > 1:
            pl.when(i == plan.share - 1)(lambda: plgpu.barrier_arrive(read))
        state = _replayed(plan, replay, state_s.at[stage], keys_s, updates_s.at[stage], decays_s.at[stage])
        state_s[stage] = state.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_s.at[stage], state_g.at[layer, slot, head, cut])
        products = product(state, [kq_s.transpose((1, 0))], pieces=plan.pieces, interpreted=plan.interpreted)
        _run_rows(plan, products, among_s, gates_s.at[stage], values_s.at[stage], new_s, out_s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(new_s, updates_g.at[layer, slot, pl.ds(0, plan.t), head, cut])
        plgpu.copy_smem_to_gmem(out_s, out_g.at[b, :, head, cut])
        if plan.splits > 1:
            pl.when(i == plan.share - 1)(lambda: plgpu.barrier_wait(read))
        writes = half == (halves - 1 if plan.share > 1 else 0)  # one block has all of the head, or the cluster has it

        @pl.when(writes)
        def _():
            decays = gates_s.at[stage, pl.ds(0, decays_g.shape[3])]
            plgpu.copy_smem_to_gmem(decays, decays_g.at[layer, slot, head])

        if plan.share > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(i + plan.stages < plan.share)(lambda: fetch(i + plan.stages, stage))
        return carry

    lax.fori_loop(_i32(0), _i32(plan.share), tile, None)

    @pl.when(split == 0)
    def _():
        plgpu.copy_smem_to_gmem(plain_s.at[pl.ds(0, plan.t)], keys_g.at[layer, slot, pl.ds(0, plan.t), m])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _lanes():
    """A layout of keys and queries in which a row lies in 8 lanes, 4 columns in a run: few shuffles for a row's sum."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def _write_products(plan: _Plan, plain_s, among_s):
    """Put each new key's products with all new keys and queries into a row of `among_s`."""
    layout, both = _lanes(), 2 * plan.padded
    kq = plgpu.load(plain_s, layout=layout, optimized=False).astype(jnp.float32)
    for i in range(plan.t):
        key = plgpu.load(plain_s.at[i], layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        products = (kq * lax.broadcast_in_dim(key, (both, WIDTH), [1])).sum(axis=1)
        among_s[i] = plgpu.layout_cast(products, layout.reduce(1))
    plgpu.commit_smem()


def _replayed(plan: _Plan, replay, state_s, keys_s, updates_s, decays_s):
    """A tile of the state with the accepted records in it, float32, in registers."""
    layout, shape = plgpu.Layout.WGMMA, (TILE, WIDTH)
    total = lax.fori_loop(_i32(0), replay, lambda i, total: total * decays_s[i], jnp.float32(1))

    def record(behind, carry):
        state, later = carry
        i = replay - 1 - behind
        update = plgpu.load(updates_s.at[i], layout=layout.reduce(1), optimized=False) * later
        key = plgpu.load(keys_s.at[i], layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        state = state + lax.broadcast_in_dim(update, shape, [0]) * lax.broadcast_in_dim(key, shape, [1])
        return state, later * decays_s[i]

    state = plgpu.load(state_s, layout=layout).astype(jnp.float32) * total
    return lax.fori_loop(_i32(0), replay, record, (state, jnp.float32(1)))[0]


def _run_rows(plan: _Plan, products, among_s, gates_s, values_s, new_s, out_s):
    """From the products of the state before the rows to the rows' updates and what they read."""
    rows_only = plgpu.Layout.WGMMA.reduce(1)
    column = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA)
    take = lambda j: jnp.where(column == j, products, 0.0).sum(axis=1)  # noqa: E731
    decay = [gates_s[t] for t in range(plan.t)]
    updates, outs, total = [], [], jnp.float32(1)
    for t in range(plan.t):
        total = total * decay[t]
        value = plgpu.load(values_s.at[t], layout=rows_only, optimized=False).astype(jnp.float32)
        update, out = value - take(t) * total, take(plan.padded + t) * total
        since = jnp.float32(1)
        for i in reversed(range(t)):
            since = since * decay[i + 1]
            update = update - updates[i] * (since * among_s[i, t])
            out = out + updates[i] * (since * among_s[i, plan.padded + t])
        updates.append(update * gates_s[MAX_ROWS + t])
        outs.append(out + updates[t] * among_s[t, plan.padded + t])
    for t in range(plan.t):  # not sooner: a write would hold up the reads that follow it
        new_s[t] = updates[t]
        out_s[t] = outs[t].astype(jnp.bfloat16)
