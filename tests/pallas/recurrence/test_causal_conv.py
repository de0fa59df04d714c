"""The causal convolution by slot against one convolution over each request's whole text."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.recurrence import causal_conv as op

LAYERS, LAYER, SLOTS, C, W = 2, 1, 6, 12, 4


@partial(jax.jit, static_argnums=0)
def run(operation, *given):
    """Run an operation on channels that stand behind other columns of x, and put their parts together."""
    *slots, x, weight = given
    x = jnp.pad(x, ((0, 0), (0, 0), (3, 2)), constant_values=9)
    parts, windows = operation(*slots, x, weight, op.Channels(3, (5, 7), x.shape[1]))
    assert [part.shape[2] for part in parts] == [5, 7]
    return jnp.concatenate(parts, axis=-1), windows


step, chunk = partial(run, op.step), partial(run, op.chunk)


def convolve(text, weight):
    """silu(conv) of a text [t, c] that nothing goes before, f64."""
    padded = np.concatenate([np.zeros((W - 1, C)), text])
    x = sum(padded[j : j + len(text)] * weight[:, j] for j in range(W))
    return x / (1 + np.exp(-x))


def setup(seed, rows):
    rng = np.random.default_rng(seed)
    windows = op.empty_windows(LAYERS, SLOTS, rows, C, W, jnp.float32) + 7.0
    return rng, windows, rng.standard_normal((C, W)).astype(np.float32)


def rows_of(rng, *shape):
    return rng.standard_normal((*shape, C)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_a_prompt_and_its_rounds_are_one_text(rows):
    rng, windows, weight = setup(rows, rows)
    slots, count = np.array([4, 2]), np.array([5, 2])
    x = rows_of(rng, 2, 5)
    out, windows = chunk(windows, LAYER, slots, np.array([-1, -1]), np.array([-1, -1]), count, x, weight.T)
    texts, outs = [[x[r, :c]] for r, c in enumerate(count)], [[out[r, :c]] for r, c in enumerate(count)]
    replay = np.zeros(2, np.int32)
    for _ in range(6):
        x = rows_of(rng, 2, rows)
        out, windows = step(windows, LAYER, slots, replay, x, weight.T)
        replay = rng.integers(0, rows + 1, 2)
        for r in range(2):
            texts[r].append(x[r, : replay[r]])
            outs[r].append(out[r, : replay[r]])
    for text, out in zip(texts, outs, strict=True):
        np.testing.assert_allclose(np.concatenate(out), convolve(np.concatenate(text), weight), rtol=1e-5, atol=1e-5)
    assert (np.asarray(windows)[[0, 1, 1], [4, 0, 3]] == 7).all()


@pytest.mark.parametrize("seed", range(12))
def test_blocks_in_order(seed):
    """Blocks of one to six tokens, so that a block looks back on several; sources are any slots written before."""
    rng, windows, weight = setup(seed, 1)
    b, t = 8, 6
    written, texts = [-1], {-1: np.zeros((0, C))}
    x, count = rows_of(rng, b, t), rng.integers(1, t + 1, b)
    slots, source, keep = (np.zeros(b, np.int32) for _ in range(3))
    expected = []
    for r in range(b):
        source[r], slots[r], keep[r] = rng.choice(written), rng.integers(SLOTS), rng.integers(-2, SLOTS + 2)
        text = np.concatenate([texts[source[r]], x[r, : count[r]]])
        texts[slots[r]] = text
        expected.append(convolve(text, weight)[-count[r] :])
        if 0 <= keep[r] < SLOTS:
            texts[keep[r]] = text
        written = list(texts)
    out, windows = chunk(windows, LAYER, slots, source, keep, count, x, weight.T)
    for r in range(b):
        np.testing.assert_allclose(out[r, : count[r]], expected[r], rtol=1e-5, atol=1e-5)
    for slot in range(SLOTS):
        text = np.concatenate([np.zeros((W - 1, C)), texts[slot]]) if slot in texts else np.full((W - 1, C), 7.0)
        np.testing.assert_array_equal(windows[LAYER, slot, : W - 1], text[1 - W :].astype(np.float32))


def test_too_many_rows():
    rng, windows, weight = setup(0, 2)
    with pytest.raises(ValueError, match="a step of 3 rows with windows for rounds of 2"):
        op.step(windows, jnp.int32(0), np.array([0]), np.array([0]), rows_of(rng, 1, 3), weight.T, None)
