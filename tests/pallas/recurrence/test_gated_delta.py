"""Gated delta-rule attention against a loop over tokens in float64: rounds with replay, prompts in blocks, both."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.recurrence import delta_pool
from jaxspec.pallas.recurrence import gated_delta as op

LAYERS, LAYER, SLOTS = 2, 1, 6
SIZES = dict(key_heads=2, value_heads=4, key_width=16, value_width=24)
STRANGER = 7.0  # what states and records that nobody should see are filled with
step, chunk = jax.jit(op.step), jax.jit(op.chunk)


def token_loop(state, q, k, v, decay, beta):
    """The recurrence as it is defined, over tokens [t, ...] of one request; the outputs and the last state, f64."""
    state = np.array(state, np.float64)
    k, q = (np.repeat(np.asarray(x, np.float64), v.shape[1] // x.shape[1], axis=1) for x in (k, q))
    out = []
    for t in range(len(v)):
        alpha = np.asarray(decay[t], np.float64)
        state = state * alpha.reshape(len(alpha), 1, -1)
        update = np.asarray(beta[t])[:, None] * (v[t] - np.einsum("nvk,nk->nv", state, k[t]))
        state = state + update[:, :, None] * k[t][:, None, :]
        out.append(np.einsum("nvk,nk->nv", state, q[t]))
    return np.array(out), state


def tokens(rng, *shape, alike=False, sizes=SIZES, by_channel=False):
    """q, k, v, decay, beta of random tokens; `alike`, as of one token repeated, which corrects itself the most.

    `by_channel`: decays are of key channels, some of which forget all within two tokens."""
    m, n, h = sizes["key_heads"], sizes["value_heads"], sizes["key_width"]

    def normal(*tail):
        lead = shape[:-1] if alike else shape
        x = rng.standard_normal((*lead, *([1] if alike else []), *tail))
        return np.broadcast_to(x, (*shape, *tail)).astype(np.float32)

    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    decay = np.exp(-np.exp((2 * normal(n, h) if by_channel else normal(n)) - 2))
    beta = 1 / (1 + np.exp(-normal(n)))
    if alike:
        decay, beta = np.ones_like(decay), 0.99 * np.ones_like(beta)
    return unit(normal(m, h)) * h**-0.5, unit(normal(m, h)), normal(n, sizes["value_width"]), decay, beta


def a_pool(rng, rows, dtype=jnp.float32, by_channel=False):
    sizes = SIZES | {"channel_decay": by_channel}
    pool = delta_pool.empty(LAYERS, SLOTS, rows, **sizes, dtype=dtype, key_dtype=jnp.float32)
    state = pool.state + rng.standard_normal(pool.state.shape)
    return pool.replace(
        state=state.astype(dtype), keys=pool.keys + STRANGER, updates=pool.updates + STRANGER, decay=pool.decay * 0.1
    )


def close(actual, expected, tolerance=1e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < tolerance, error


@pytest.mark.parametrize("rows,by_channel", [(1, False), (3, False), (8, False), (16, False), (3, True)])
def test_a_round_goes_on_from_what_was_accepted(rows, by_channel):
    """Three rounds, of which the accepted rows differ by slot: as a loop over the accepted tokens."""
    rng = np.random.default_rng(rows)
    pool, slots = a_pool(rng, rows, by_channel=by_channel), np.array([4, 0, 3])
    before = pool
    texts = [[] for _ in slots]
    replay = np.zeros(3, np.int32)
    for _ in range(3):
        new = tokens(rng, 3, rows, by_channel=by_channel)
        out, pool = step(pool, jnp.int32(LAYER), slots, replay, *new)
        for r, slot in enumerate(slots):
            everything = [np.concatenate(x) for x in zip(*texts[r], [x[r] for x in new], strict=True)]
            expected, _ = token_loop(before.state[LAYER, slot], *everything)
            close(out[r], expected[-rows:])
            committed = [x[: len(x) - rows] for x in everything]
            close(pool.state[LAYER, slot], token_loop(before.state[LAYER, slot], *committed)[1])
        replay = rng.integers(0, rows + 1, 3).astype(np.int32)
        for r in range(3):
            texts[r].append([x[r, : replay[r]] for x in new])
    others = [1, 2, 5]
    for was, is_ in zip(jax.tree.leaves(before), jax.tree.leaves(pool), strict=True):
        np.testing.assert_array_equal(was[LAYER, others], is_[LAYER, others])
        np.testing.assert_array_equal(was[0], is_[0])


def test_records_that_nobody_accepted_may_be_nan():
    rng = np.random.default_rng(1)
    pool, slots, new = a_pool(rng, 3), np.array([4, 0]), tokens(rng, 2, 3)
    expected, _ = step(pool, jnp.int32(LAYER), slots, np.array([0, 0]), *new)
    left = pool.replace(keys=pool.keys * np.nan, updates=pool.updates * np.nan, decay=pool.decay * np.nan)
    out, after = step(left, jnp.int32(LAYER), slots, np.array([0, 0]), *new)
    np.testing.assert_array_equal(out, expected)
    assert jnp.isfinite(after.state).all()


def test_fewer_rows_than_records_and_more():
    rng = np.random.default_rng(0)
    pool = a_pool(rng, 4)
    slots, start = np.array([2]), pool.state[LAYER, 2]
    first, second = tokens(rng, 1, 2), tokens(rng, 1, 3)
    _, pool = step(pool, jnp.int32(LAYER), slots, np.array([0]), *first)
    out, _ = step(pool, jnp.int32(LAYER), slots, np.array([2]), *second)
    expected, _ = token_loop(start, *(np.concatenate([a[0], b[0]]) for a, b in zip(first, second, strict=True)))
    close(out[0], expected[2:])
    with pytest.raises(ValueError, match="a step of 5 rows in a pool with records of 4"):
        op.step(pool, jnp.int32(LAYER), slots, np.array([0]), *tokens(rng, 1, 5))


@pytest.mark.parametrize("t,by_channel", [(64, False), (7, False), (64, True)])
def test_blocks_in_order(t, by_channel):
    """Two requests, one from a stored state and one from nothing, snapshots on the way, one taken up by a third."""
    rng = np.random.default_rng(t)
    pool = a_pool(rng, 1, by_channel=by_channel)
    start = np.asarray(pool.state[LAYER])
    new = tokens(rng, 6, t, by_channel=by_channel)
    slots = np.array([0, 1, 0, 1, 3, 5])
    source = np.array([2, -1, 0, 1, 4, 5])
    keep = np.array([-1, 4, SLOTS, -1, -1, SLOTS + 3])
    count = np.array([t, t, t - 3, t, 2, 0])
    out, after = chunk(pool, jnp.int32(LAYER), slots, source, keep, count, *new)
    states = {-1: np.zeros_like(start[0]), **dict(enumerate(start))}
    for r in range(6):
        expected, state = token_loop(states[source[r]], *(x[r, : count[r]] for x in new))
        states[slots[r]] = state
        if 0 <= keep[r] < SLOTS:
            states[keep[r]] = state
        if count[r]:
            close(out[r, : count[r]], expected)
    for slot in range(SLOTS):
        close(after.state[LAYER, slot], states[slot])
    np.testing.assert_array_equal(after.state[0], pool.state[0])
    np.testing.assert_array_equal(after.state[LAYER, [2, 5]], start[[2, 5]])
    np.testing.assert_array_equal(after.keys, pool.keys)


@pytest.mark.parametrize("run", ["step", "chunk"])
def test_a_repeated_token(run):
    """Equal keys that are corrected in full make the triangular system as bad as it can be."""
    rng = np.random.default_rng(0)
    pool = a_pool(rng, 64)
    new = tokens(rng, 1, 64, alike=True)
    where = [np.array([1])] * 2
    if run == "step":
        out, _ = step(pool, jnp.int32(LAYER), where[0], np.array([0]), *new)
    else:
        out, _ = chunk(pool, jnp.int32(LAYER), *where, np.array([-1]), np.array([64]), *new)
    close(out[0], token_loop(pool.state[LAYER, 1], *(x[0] for x in new))[0])


def test_a_decay_of_zero_forgets_everything():
    rng = np.random.default_rng(0)
    pool = a_pool(rng, 8)
    q, k, v, decay, beta = tokens(rng, 1, 8)
    decay[0, 3] = 0
    out, _ = step(pool, jnp.int32(LAYER), np.array([1]), np.array([0]), q, k, v, decay, beta)
    close(out[0], token_loop(pool.state[LAYER, 1], q[0], k[0], v[0], decay[0], beta[0])[0])


@pytest.mark.parametrize("dtype,tolerance", [(jnp.float32, 2e-5), (jnp.bfloat16, 0.05)])
def test_a_prompt_and_its_rounds_are_one_text(dtype, tolerance):
    """A prompt in blocks over two programs, then rounds with random acceptance: as one long loop."""
    rng = np.random.default_rng(1)
    rows, t, slot = 4, 16, np.array([3])
    pool, text, outs = a_pool(rng, rows, dtype), [], []
    for source, counts in [(-1, [16, 16]), (3, [16, 5])]:
        new = tokens(rng, 2, t)
        blocks = np.repeat(slot, 2), np.array([source, 3]), np.array([-1, -1]), np.array(counts)
        out, pool = chunk(pool, jnp.int32(LAYER), *blocks, *new)
        text += [[x[r, :c] for x in new] for r, c in enumerate(counts)]
        outs += [out[r, :c] for r, c in enumerate(counts)]
    replay = np.array([0])
    for _ in range(12):
        new = tokens(rng, 1, rows)
        out, pool = step(pool, jnp.int32(LAYER), slot, replay, *new)
        replay = rng.integers(0, rows + 1, 1)
        text.append([x[0, : replay[0]] for x in new])
        outs.append(out[0, : replay[0]])
    zero = np.zeros(pool.state.shape[2:])
    expected, _ = token_loop(zero, *(np.concatenate(x) for x in zip(*text, strict=True)))
    close(np.concatenate(outs), expected, tolerance)


def test_where_a_prompt_is_cut_into_programs_does_not_show():
    """Though its state is rounded: that happens after every block, wherever the next one runs."""
    rng = np.random.default_rng(2)
    pool, new = a_pool(rng, 1, jnp.bfloat16), tokens(rng, 3, 16)
    slots, keep, count = np.array([1, 1, 1]), np.array([-1, -1, -1]), np.array([16, 16, 16])
    whole, at_once = chunk(pool, jnp.int32(LAYER), slots, np.array([-1, 1, 1]), keep, count, *new)
    parts = []
    for r in range(3):
        source = np.array([1 if r else -1])
        out, pool = chunk(pool, jnp.int32(LAYER), slots[:1], source, keep[:1], count[:1], *(x[r : r + 1] for x in new))
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pool.state, at_once.state, rtol=1e-5, atol=1e-5)


def test_nothing_is_copied():
    """The pool is updated in place: donated, it is returned in its own memory."""
    rng = np.random.default_rng(0)
    pool = a_pool(rng, 4)
    lowered = jax.jit(partial(op.step), donate_argnums=0).lower(
        pool, jnp.int32(0), np.array([1]), np.array([0]), *tokens(rng, 1, 4)
    )
    aliased = lowered.compile().memory_analysis().alias_size_in_bytes
    assert aliased == sum(x.nbytes for x in jax.tree.leaves(pool))


def test_long_blocks_have_no_products_of_many_axes():
    """XLA's CPU compiler ends the process, at run time, on some products of eight axes, as gradients are full of."""
    rng = np.random.default_rng(9)
    slots, count = jnp.arange(2), jnp.full(2, 200)
    read = lambda *operands: op.chunk(a_pool(rng, 1), jnp.int32(0), slots, slots, slots - 9, count, *operands)[0].sum()  # noqa: E731
    gradient = jax.make_jaxpr(jax.grad(read, argnums=range(5)))(*tokens(rng, 2, 200))
    axes = [shape.count(",") + 1 for shape in re.findall(r"\[([\d,]+)\] = dot_general", str(gradient))]
    assert len(axes) > 40 and max(axes) < 8
