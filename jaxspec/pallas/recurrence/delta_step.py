"""A round of gated delta-rule attention on Hopper: replay the accepted rows, then run the new ones.

A Mosaic GPU kernel, bound by reading and writing the states. A warpgroup takes 64 rows of a head's state through
registers, some of the columns at a time. The new rows' u and o depend on the state before them only through its
products with their keys and queries,

    u_t = beta_t (v_t - G_t S k_t - sum_(i<t) G_t/G_i (k_i k_t) u_i)
    o_t = G_t S q_t + sum_(i<=t) G_t/G_i (k_i q_t) u_i

with G the running product of the decays. Those products run on the tensor cores, which take bfloat16, so a state enters
as a sum of `PIECES` of them.

A block has the value rows of one request and key head. With few requests it has a part of them, and the blocks of a
cluster share them. Parts of the state go through a ring: a part is loaded, changed in place and written back. While its
write drains, the next one is computed; only then is its slot filled again.

A state space (`space_step`) has updates that don't depend on the state, u_t = step_t x_t, and o_t has skip x_t added.
Its heads may be as wide as one tile. A key head with more tiles than a cluster has blocks is cut into pieces, whose
keys' records are written once the kernel is over.

Decays by key channel scale a state's columns, not its products. So rows then enter the state one after the other, in
registers (`fixed_order`), and a part of it has all columns.

With `fixed`, a row's results don't depend on how many rows a round has: see `fixed_order`, which then does both halves.

Invariant: records are overwritten after every block that reads them has read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.recurrence import fixed_order, gates_and_norm
from jaxspec.pallas.recurrence.delta_plan import (
    GATES,
    MAX_GROUP,
    MAX_ROWS,
    MAX_TILES,
    PIECES,
    TILE,
    WIDTH,
    Division,
    Plan,
    division_of,
    operands_supported,
    scratch_of,
)
from jaxspec.pallas.recurrence.delta_pool import DeltaPool
from jaxspec.pallas.recurrence.float32_products import product
from jaxspec.pallas.recurrence.gates_and_norm import Around, AroundChannels, Steps

_i32 = jnp.int32


def supported(q_shape: tuple[int, ...], v_shape: tuple[int, ...], rows: int, state_dtype, *dtypes) -> str | None:
    """Why the kernel can't serve such operands, as `operands_supported` takes them, with records of `rows` rows; None
    if it can."""
    if reason := operands_supported(q_shape, v_shape, state_dtype, *dtypes):
        return reason
    (_, t, m, _), n = q_shape, v_shape[2]
    if n // m > MAX_GROUP:
        return f"{n} value heads over {m} key heads; supported: groups of up to {MAX_GROUP}"
    return _rows_supported(t, rows)


def space_supported(q_shape: tuple[int, ...], x_shape: tuple[int, ...], rows: int, state_dtype, *dtypes) -> str | None:
    """Why the kernel can't serve such operands of a state space, as `supported`."""
    width = WIDTH if x_shape[3] == WIDTH else TILE
    reason = operands_supported(q_shape, x_shape, state_dtype, *dtypes, value_width=width)
    return reason or _rows_supported(q_shape[1], rows)


def _rows_supported(t: int, rows: int) -> str | None:
    return f"{max(t, rows)} rows a request; supported: up to {MAX_ROWS}" if max(t, rows) > MAX_ROWS else None


def delta_step(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    *gates: Float[Array, "b t n *k"],
    around: Around | AroundChannels | None = None,
    eps: float = 0.0,
    interpret: Any = False,
    division: Division | None = None,
    padded_rows: int | None = None,
    fixed: bool = False,
) -> tuple[Float[Array, "b r n v"], DeltaPool]:
    """Run `gated_delta.step`; returns what the rows read, in bfloat16, and the updated pool.

    `q`, `k`, `v` and the pool's keys are bfloat16, the rest float32, but states may be bfloat16. `interpret`: as in
    `plgpu.kernel`. `division`: by default, the one that keeps all multiprocessors busy. `padded_rows`: as in
    `gated_delta.step`; nothing is written to the padding rows from t on. `gates` are decay and beta; or none, if there
    is `around`, with the `eps` of its norm: then the results are normed and gated (`gates_and_norm`). `fixed`: the bits
    of a row's results, and of its update of the state, depend on the rows before it alone, not on how they were divided
    into rounds. A state in bfloat16 is then rounded after each of them.

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    dtypes = pool.state.dtype, q.dtype, k.dtype, pool.keys.dtype, v.dtype
    if reason := supported(q.shape, v.shape, pool.keys.shape[2], *dtypes):
        raise ValueError(f"delta_step doesn't support {reason}")
    return _step(
        pool,
        layer,
        slots,
        replay,
        q,
        k,
        v,
        gates if around is None else around,
        eps=eps,
        interpret=interpret,
        division=division,
        padded_rows=padded_rows or v.shape[1],
        fixed=fixed,
    )


def space_step(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    x: Float[Array, "b t n v"],
    steps: Steps,
    limits: tuple[float, float],
    *,
    interpret: Any = False,
    division: Division | None = None,
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run `accumulate.step` with the updates and decays that `steps` between these `limits` make of x, and add skip x.

    Returns that in bfloat16, and the updated pool. All else as `delta_step`.

    **Raises:** `ValueError` if `space_supported` has a reason against it.
    """
    dtypes = pool.state.dtype, q.dtype, k.dtype, pool.keys.dtype, x.dtype
    if reason := space_supported(q.shape, x.shape, pool.keys.shape[2], *dtypes):
        raise ValueError(f"delta_step doesn't support {reason}")
    named = dict(division=division, padded_rows=x.shape[1], eps=0.0, fixed=False, limits=limits)
    return _step(pool, layer, slots, replay, q, k, x, steps, **named, interpret=interpret)


@lower_once("delta_step", "division", "padded_rows", "eps", "fixed", "limits")
def _step(pool, layer, slots, replay, q, k, v, gates, *, eps, interpret, division, padded_rows, fixed, limits=None):
    b, t, n, width = v.shape
    m = q.shape[2]
    rows, dtype, channels = pool.keys.shape[2], pool.state.dtype, pool.decay.ndim > 4
    around, tiles = isinstance(gates, Around | AroundChannels), n // m * width // TILE
    pieces = next(p for p in range(1, tiles + 1) if (n // m) % p == 0 and tiles // p <= MAX_TILES)
    division = division or division_of(b * m * pieces, n // m // pieces, t, rows, dtype, around, width, channels)
    if fixed or channels:  # a row's sums are over all columns
        division = replace(division, stages=max(1, division.stages // 2), columns=WIDTH)
    plan = Plan(b, t, rows, m * pieces, n // m // pieces, dtype, division, bool(interpret), eps if around else None,
                fixed, width, limits, pieces, channels)  # fmt: skip
    refs = [jax.new_ref(x) for x in jax.tree.leaves(pool)]
    out = plgpu.kernel(
        partial(_block, plan),
        kernel_name="delta_step",
        out_type=jax.ShapeDtypeStruct((b, padded_rows, *v.shape[2:]), v.dtype),
        grid=(b, plan.m),
        grid_names=("b", "m"),
        cluster=(division.splits,),
        cluster_names=("split",),
        scratch_types=scratch_of(plan),
        # Safe here: a thread's writes are committed before another thread reads them, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(layer.reshape(1), slots, replay, q, k, v, *gates, *refs)
    pool = DeltaPool(*map(jax.freeze, refs))
    if pieces > 1:  # blocks that no cluster joins read a key head's records
        pool = pool.replace(keys=pool.keys.at[layer, slots, :t].set(k))
    return out, pool


class _Shared(NamedTuple):
    """A block's arrays in shared memory (`delta_plan`)."""

    rows_s: Any
    kq_s: Any
    keys_s: Any
    among_s: Any
    updates_s: Any
    decays_s: Any
    gates_s: Any
    values_s: Any
    fresh_s: Any = None


@dataclass(frozen=True)
class _Ring:
    """A block's parts of the state: loaded into the stages of `state_s`, changed in place there, and written back."""

    plan: Plan
    pool_part: Callable  # gives a part's reference in the pool
    state_s: Any
    ready: Any

    @property
    def stages(self) -> int:
        return self.plan.division.stages

    def stage(self, part: Any) -> Any:
        return lax.rem(part, _i32(self.stages))

    def fetch(self, part: Any) -> None:
        """Begin to copy a part of the state into its stage."""
        stage = self.stage(part)
        plgpu.copy_gmem_to_smem(self.pool_part(part), self.state_s.at[stage], self.ready.at[stage])

    def write(self, part: Any) -> None:
        """Begin to write a part back, and to fetch one into a stage whose write is over."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.state_s.at[self.stage(part)], self.pool_part(part))
        parts = self.plan.share * self.plan.parts
        if self.stages < parts:
            behind = min(1, self.stages - 1)  # parts whose write may still be under way when a stage is refilled
            plgpu.wait_smem_to_gmem(behind, wait_read_only=True)
            coming = part + self.stages - behind
            pl.when((part >= behind) & (coming < parts))(partial(self.fetch, coming))


def _block(plan: Plan, layer_g, slots_g, replay_g, q_g, k_g, v_g, *refs, state_s, brought, shared, ready, read=None,
           **arrays):  # fmt: skip
    """Run one block, of one warpgroup: its tiles of one request and key head."""
    *gates_g, state_g, keys_g, updates_g, decays_g, out_g = refs
    b, m, split = (lax.axis_index(name) for name in ("b", "m", "split"))
    key = m if plan.pieces == 1 else lax.div(m, _i32(plan.pieces))
    layer, slot, replay, own = layer_g[0], slots_g[b], replay_g[b], _Shared(**arrays)
    t = plan.t
    first = split * plan.share  # of the key head's tiles
    head = m * plan.group + lax.div(first, _i32(plan.halves))
    # The block's value heads, and which of their rows it has.
    heads, width = pl.ds(head, plan.heads), decays_g.shape[3]
    rows, new = pl.ds(lax.rem(first, _i32(plan.halves)) * TILE if plan.share == 1 else 0, plan.width), pl.ds(0, t)
    ring = _Ring(plan, partial(_part_of, plan, state_g, layer, slot, m, first), state_s, ready)

    # Keys and queries first: they needn't wait for the slot.
    plgpu.copy_gmem_to_smem(k_g.at[b, :, key], own.rows_s.at[pl.ds(0, t)], brought)
    plgpu.copy_gmem_to_smem(q_g.at[b, :, key], own.rows_s.at[pl.ds(t, t)], brought)
    if plan.channels and plan.eps is None:
        for h in range(plan.heads):
            plgpu.copy_gmem_to_smem(gates_g[0].at[b, :, head + h], own.fresh_s.at[h, new], brought)
    copy_in = partial(plgpu.copy_gmem_to_smem, barrier=shared)
    gates = _load_gates(plan, gates_g, b, head)
    skips = [] if plan.limits is None else [gates_g[-1][head + h] for h in range(plan.heads)]
    z = None if plan.eps is None else gates_and_norm.load_z(gates_g, b, t, plan.heads, head, plan.m * plan.group)
    copy_in(v_g.at[b, :, heads, rows], own.values_s)
    copy_in(keys_g.at[layer, slot, :, key], own.keys_s)
    copy_in(updates_g.at[layer, slot, :, heads, rows], own.updates_s)
    for h in range(plan.heads):
        records = own.decays_s.at[h] if plan.channels else own.decays_s.at[h, pl.ds(0, width)]
        copy_in(decays_g.at[layer, slot, head + h], records)
    for part in range(ring.stages):
        ring.fetch(_i32(part))
    _write_gates(plan, gates, skips, own, width)
    plgpu.barrier_wait(brought)
    if plan.by_token:
        plgpu.commit_smem()  # the gates
    else:
        _write_products(plan, own.rows_s, own.kq_s, own.among_s)
    plgpu.barrier_wait(shared)
    if plan.division.splits > 1:
        plgpu.barrier_arrive(read)
    lax.fori_loop(_i32(0), _i32(plan.share), partial(_tile, plan, ring, replay, own), None)
    plgpu.commit_smem()
    if plan.division.splits > 1:
        plgpu.barrier_wait(read)
    decays_g = [decays_g.at[layer, slot, head + h] for h in range(plan.heads)]
    records = keys_g.at[layer, slot, new, key], updates_g.at[layer, slot, new, heads, rows], decays_g
    decays_s = own.fresh_s if plan.channels else own.gates_s
    _write_records(plan, split, first, (own.rows_s.at[new], own.updates_s.at[new], decays_s), records)
    if plan.eps is None:
        plgpu.copy_smem_to_gmem(own.values_s, out_g.at[b, new, heads, rows])
    else:
        gates_and_norm.write_normed(own.values_s, out_g.at[b], *z, head, plan.eps, sigmoid=plan.channels)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tile(plan: Plan, ring: _Ring, replay: Any, own: _Shared, i: Any, carry: None) -> None:
    """One tile of the block's state: replay its records, run the new rows, and leave their updates and results."""
    h = lax.div(i, _i32(plan.halves)) if plan.share > 1 else 0
    cut = pl.ds(lax.rem(i, _i32(plan.halves)) * TILE if plan.share > 1 else 0, TILE)
    columns, products = plan.division.columns, []
    rounded = plan.dtype if plan.fixed else jnp.float32
    replayed = partial(fixed_order.replayed, rounded) if plan.by_token else partial(_replayed, columns)
    for p in range(plan.parts):
        part, across = i * plan.parts + p, pl.ds(p * columns, columns)
        stage = ring.stage(part)
        plgpu.barrier_wait(ring.ready.at[stage])
        records = own.keys_s.at[:, across], own.updates_s.at[:, h, cut], own.decays_s.at[h]
        state = replayed(replay, ring.state_s.at[stage], *records)
        ring.state_s[stage] = state.astype(plan.dtype)
        if p == plan.parts - 1:
            values = _values(plan, own.values_s.at[:, h, cut])
        ring.write(part)
        if not plan.by_token:
            operand = own.kq_s.at[:, across].transpose((1, 0))
            products.append(product(state, [operand], pieces=PIECES, interpreted=plan.interpreted))
    if plan.by_token:
        decay = lambda j: fixed_order.row(own.fresh_s.at[h, j]) if plan.channels else own.gates_s[h, j]  # noqa: E731
        gates = [(decay(j), own.gates_s[h, MAX_ROWS + j]) for j in range(plan.t)]
        updates, outs = fixed_order.run_rows(state, values, own.rows_s, gates, rounded)
    else:
        updates, outs = _run_rows(plan, sum(products), values, own.among_s, own.gates_s.at[h])
    for j in range(plan.t):
        own.updates_s[j, h, cut] = updates[j]
        own.values_s[j, h, cut] = outs[j].astype(jnp.bfloat16)


def _write_records(plan: Plan, split, first, made, records):
    """Write the new rows' keys, updates and decays to the records, which no other block of the cluster still reads."""
    (keys_s, updates_s, decays_s), (keys_g, updates_g, decays_g) = made, records
    plgpu.copy_smem_to_gmem(updates_s, updates_g)
    # One of the two blocks that have half a head each.
    pl.when(lax.rem(first, _i32(plan.halves)) == 0)(lambda: _write_decays(plan, decays_s, decays_g))
    if plan.pieces == 1:
        pl.when(split == 0)(lambda: plgpu.copy_smem_to_gmem(keys_s, keys_g))


def _write_decays(plan: Plan, decays_s, decays_g):
    """Write the decays of each of the block's heads to its records."""
    for h, out_g in enumerate(decays_g):
        rows = pl.ds(0, plan.t if plan.channels else out_g.shape[0])
        plgpu.copy_smem_to_gmem(decays_s.at[h, rows], out_g.at[rows] if plan.channels else out_g)


def _part_of(plan: Plan, state_g, layer, slot, m, first, part):
    """The reference to a part of the state, of the block whose tiles of the key head begin at `first`."""
    tile, across = first + lax.div(part, _i32(plan.parts)), lax.rem(part, _i32(plan.parts))
    head, half = m * plan.group + lax.div(tile, _i32(plan.halves)), lax.rem(tile, _i32(plan.halves))
    columns = plan.division.columns
    return state_g.at[layer, slot, head, pl.ds(half * TILE, TILE), pl.ds(across * columns, columns)]


def _lanes():
    """A layout of keys and queries in which 16 lanes have a row, 4 columns in a run: few shuffles for a row's sum."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def _load_gates(plan: Plan, gates_g, b, head):
    """Load the decay and the beta, or a state space's step, of each row of each of the block's value heads, by head and
    row. A decay by channel is a vector, or comes by a copy.

    All loads are issued before the first is needed. A bulk copy can't do it: a head's numbers lie a row of heads apart.
    """
    each = [(h, t) for h in range(plan.heads) for t in range(plan.t)]
    if plan.channels and plan.eps is None:
        return {(h, t): (None, gates_g[1][b, t, head + h]) for h, t in each}
    if plan.channels:
        of = [ref.at[b] if at < 2 else ref for at, ref in enumerate(gates_g[:4])]
        return {(h, t): gates_and_norm.channel_gates(*of, t, head + h) for h, t in each}
    if plan.eps is not None:
        ba_g, log_g, bias_g, *_ = gates_g
        return {(h, t): gates_and_norm.gates(ba_g.at[b], log_g, bias_g, t, head + h) for h, t in each}
    if plan.limits is not None:
        rows_g, *heads_g, _ = gates_g
        return {(h, t): gates_and_norm.steps(rows_g.at[b], *heads_g, t, head + h, plan.limits) for h, t in each}
    decay_g, beta_g = (gate_g.at[b] for gate_g in gates_g)
    return {(h, t): (decay_g[t, head + h], beta_g[t, head + h]) for h, t in each}


def _write_gates(plan: Plan, gates, skips, own: _Shared, width):
    """Put the decays of each head, the betas or steps behind them, and a state space's skip, into a row of `gates_s`.
    All threads write the same; of decays by channel each has its own, unless a copy brings them."""
    gates_s = own.gates_s
    for (h, t), (decay, beta) in gates.items():
        if plan.channels and decay is not None:
            own.fresh_s[h, t] = decay
        elif not plan.channels:
            gates_s[h, t] = decay
        gates_s[h, MAX_ROWS + t] = beta
    for h in range(0 if plan.channels else plan.heads):
        for t in range(plan.t, width):  # the pool's columns after the last row's
            gates_s[h, t] = jnp.float32(1)
    for h, skip in enumerate(skips):
        gates_s[h, GATES] = skip


def _write_products(plan: Plan, rows_s, kq_s, among_s):
    """Put each new key's products with all new keys and queries into a row of `among_s`, and all of these into `kq_s`.

    Their rows are rounded up to a multiple of eight. The padding is uninitialised, and its products are never read.
    """
    layout, shape = _lanes(), (plan.both, WIDTH)
    rows = plgpu.load(rows_s, layout=layout, optimized=False)
    kq_s[...] = rows
    kq = rows.astype(jnp.float32)
    for i in range(plan.t):
        key = plgpu.load(rows_s.at[i], layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        products = (kq * lax.broadcast_in_dim(key, shape, [1])).sum(axis=1)
        among_s[i] = plgpu.layout_cast(products, layout.reduce(1))
    plgpu.commit_smem()


def _replayed(columns: int, replay, state_s, keys_s, updates_s, decays_s):
    """Replay the accepted records into a part of the state; float32, in registers."""
    layout, shape = plgpu.Layout.WGMMA, (TILE, columns)
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


def _values(plan: Plan, values_s):
    """Load each row's values of a tile into registers, before the rows' results overwrite them."""
    rows_only = plgpu.Layout.WGMMA.reduce(1)
    return [plgpu.load(values_s.at[t], layout=rows_only, optimized=False).astype(jnp.float32) for t in range(plan.t)]


def _run_rows(plan: Plan, products, values, among_s, gates_s):
    """Compute the rows' updates and what they read, from the products of the state before them."""
    column = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA)
    take = lambda j: jnp.where(column == j, products, 0.0).sum(axis=1)  # noqa: E731
    decay = [gates_s[t] for t in range(plan.t)]
    updates, outs, total, corrected = [], [], jnp.float32(1), plan.limits is None
    for t in range(plan.t):
        total = total * decay[t]
        update = values[t] - take(t) * total if corrected else values[t]
        out = take(plan.t + t) * total
        since = jnp.float32(1)
        for i in reversed(range(t)):
            since = since * decay[i + 1]
            if corrected:
                update = update - updates[i] * (since * among_s[i, t])
            out = out + updates[i] * (since * among_s[i, plan.t + t])
        updates.append(update * gates_s[MAX_ROWS + t])
        out = out + updates[t] * among_s[t, plan.t + t]
        outs.append(out if corrected else out + values[t] * gates_s[GATES])
    return updates, outs
