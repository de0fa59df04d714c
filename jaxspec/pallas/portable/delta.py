"""Linear attention on any NVIDIA GPU: rounds, as `gated_delta.step` and `accumulate.step` have them, prompts' states.

A program has some rows of a head's state, which depend on no others. It replays the accepted records into them, writes
them, and runs the new rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxspec.pallas import hopper, portable
from jaxspec.pallas.recurrence.delta_pool import DeltaPool

ROWS = 32  # of a state that a program has
STATES = (jnp.float32, jnp.bfloat16)


def supported(q_shape: tuple[int, ...], v_shape: tuple[int, ...], *dtypes: Any) -> str | None:
    """Why the kernel can't run queries [b, t, m, k] and values [b, t, n, v], or None if it can. `dtypes`: the states',
    the keys' and the values'."""
    (m, k), (n, v) = q_shape[2:], v_shape[2:]
    if jnp.dtype(dtypes[0]) not in STATES:
        return f"states in {jnp.dtype(dtypes[0]).name}; float32 and bfloat16 are supported"
    if k & (k - 1) or v % ROWS:
        return f"keys of width {k} and values of width {v}; powers of two and multiples of {ROWS} are supported"
    return f"{n} value heads over {m} key heads; whole groups are supported" if n % m else None


def scan_supported(states: Any, dtype: Any) -> str | None:
    """Why the kernel can't run states [l, r, n, v, k] through a prompt's blocks of keys in `dtype`, or None if it can.

    Models in float32 need products that are more exact.
    """
    if states.dtype not in STATES or jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype.name} and keys in {jnp.dtype(dtype).name}"
    v, k = states.shape[3:]
    return f"keys of width {k} and values of width {v}" if k & (k - 1) or k < 16 or v % ROWS else None


def step(
    pool: DeltaPool,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    q: Float[Array, "b t m k"],
    k: Float[Array, "b t m k"],
    v: Float[Array, "b t n v"],
    decay: Float[Array, "b t n *k"],
    beta: Float[Array, "b t n"] | None,
    interpret: bool = False,
) -> tuple[Float[Array, "b t n v"], DeltaPool]:
    """Run t new rows of each slot as `gated_delta.step` does; without `beta` as `accumulate.step`, v being updates.

    Returns what they read, in v's dtype, and the pool after them.
    """
    hopper.count("portable_delta_step")
    t = q.shape[1]
    gates = [gate.astype(jnp.float32) for gate in (decay, beta) if gate is not None]
    operands = pool.state, pool.updates, pool.keys, pool.decay, layer.reshape(1), slots, replay, q, k, v, *gates
    state, updates, k, decay, out = _step(*operands, interpret=interpret)
    keys = pool.keys.at[layer, slots, :t].set(k)
    decays = pool.decay.at[layer, slots, :, :t].set(decay.swapaxes(1, 2))
    return out, DeltaPool(state, keys, updates, decays)


@partial(jax.jit, static_argnames="interpret")
def _step(*operands, interpret):
    """States and updates, the new keys and decays, and what rows read.

    Keys and decays come back as they are given: so XLA records them after the kernel has read those before, and needn't
    copy the pool.
    """
    same, v = {0: 0, 1: 1, 8: 2, 10: 3}, operands[9]
    b, _, n, width = v.shape
    return pl.pallas_call(
        partial(_rows, interpret),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*(operands[i] for i in same), v)],
        grid=(width // ROWS, n, b),
        input_output_aliases=same,
        compiler_params=portable.triton().CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="portable_delta_step",
    )(*operands)


def _rows(interpret, _, __, keys, decays, layer, slots, replay, q, k, v, decay, *refs):
    """Run `ROWS` rows of one request's state of one head. No other program has their updates."""
    *beta, state, updates, _, _, out = refs
    first, n, b = pl.program_id(0) * ROWS, pl.program_id(1), pl.program_id(2)
    m = lax.div(n, jnp.int32(state.shape[2] // keys.shape[3]))
    at, rows = (layer[0], slots[b]), pl.ds(first, ROWS)
    width = pl.ds(0, state.shape[4])
    channels = [width] * (len(decay.shape) - 3)  # where each has a decay of its own

    def enter(i, s):
        key = keys[*at, i, m, width].astype(jnp.float32)
        return s * jnp.maximum(decays[*at, n, i, *channels], 1e-37) + updates[*at, i, n, rows][:, None] * key[None]

    s = state[*at, n, rows, width].astype(jnp.float32)
    s = lax.fori_loop(0, replay[b], enter, s)
    state[*at, n, rows, width] = s.astype(state.dtype)
    if not interpret:
        portable.triton().debug_barrier()  # other threads of this program read what these write from here on

    def run(i, s):
        key, query = (x[b, i, m, width].astype(jnp.float32)[None] for x in (k, q))
        s = s * jnp.maximum(decay[b, i, n, *channels], 1e-37)
        update = v[b, i, n, rows].astype(jnp.float32)
        if beta:
            update = beta[0][b, i, n] * (update - jnp.sum(s * key, axis=1))
        s = s + update[:, None] * key
        updates[*at, i, n, rows] = update
        out[b, i, n, rows] = jnp.sum(s * query, axis=1).astype(out.dtype)
        return s

    lax.fori_loop(0, q.shape[1], run, s)


def scan(
    states: Float[Array, "l r n v k"],
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    source: Int[Array, " b"],
    keep: Int[Array, " b"],
    carry: Float[Array, "b n k k"] | Float[Array, "b n"],
    write: Float[Array, "b n v k"],
    interpret: bool = False,
) -> tuple[Float[Array, "l r n v k"], Float[Array, "b n v k"]]:
    """Run `delta_pool.scan_blocks`: the states of a prompt's blocks, in order, S <- S carry + write.

    Returns the states after all blocks, and the state before each, float32.
    """
    hopper.count("portable_delta_scan")
    return _scan(states, layer.reshape(1), slots, source, keep, carry, write, interpret=interpret)


@partial(jax.jit, static_argnames="interpret")
def _scan(states, layer, slots, source, keep, carry, write, *, interpret):
    b, n, v, _ = write.shape
    return pl.pallas_call(
        partial(_blocks, b, interpret),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (states, write)],
        grid=(v // ROWS, n),
        input_output_aliases={0: 0},
        compiler_params=portable.triton().CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="portable_delta_scan",
    )(states, layer, slots, source, keep, carry, write)


def _blocks(count, interpret, _, layer, slots, source, keep, carry, write, states, before):
    """Run `ROWS` rows of a head's state through all blocks. A block reads what earlier ones wrote."""
    n, rows = pl.program_id(1), pl.ds(pl.program_id(0) * ROWS, ROWS)
    every = pl.ds(0, states.shape[4])
    precision = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3  # float32's, nearly

    def body(i, carried):
        start, kept = source[i], keep[i]
        s = states[layer[0], jnp.maximum(start, 0), n, rows, every].astype(jnp.float32)
        s = jnp.where(start < 0, 0.0, s)
        before[i, n, rows, every] = s
        if len(carry.shape) == 2:
            s = s * carry[i, n]
        else:
            s = lax.dot(s, carry[i, n, every, every], precision=precision, preferred_element_type=jnp.float32)
        s = s + write[i, n, rows, every]
        after = s.astype(states.dtype)
        states[layer[0], slots[i], n, rows, every] = after

        @pl.when((kept >= 0) & (kept < states.shape[1]))
        def _():
            states[layer[0], kept, n, rows, every] = after

        if not interpret:
            portable.triton().debug_barrier()  # other threads of this program read what these have written
        return carried

    lax.fori_loop(0, count, body, 0)
