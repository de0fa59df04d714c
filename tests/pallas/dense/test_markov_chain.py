"""The chain of drafts as one kernel, against plain jnp: interpreted, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense import markov_chain
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import rare


def operands(rows: int, steps: int, tokens: int, rank: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(rows), 4)
    base = drawn.normal(keys[0], (rows, steps, tokens))
    before, after = (drawn.normal(key, shape, jnp.bfloat16) for key, shape in zip(
        keys[1:], ((tokens, rank), (rank, tokens)), strict=False
    ))  # fmt: skip
    base = base.at[..., -2:].set(base[..., :1])  # the first of equals
    after = after.at[:, -2:].set(after[:, :1])
    return base, before[:rows], before, after * jnp.bfloat16(rank**-0.5)


def check(rows: int, steps: int, tokens: int, rank: int, **options) -> None:
    base, newest, before, after = operands(rows, steps, tokens, rank)
    got = markov_chain.chain(base, newest, before, after, **options)
    expected = markov_chain.reference(base, newest, before, after)
    assert got.shape == (rows, steps) and len(set(np.asarray(expected).ravel().tolist())) > steps // 2
    same = np.cumprod(np.asarray(got == expected), axis=1)
    first = np.argmin(same, axis=1)  # where a chain parts from the other, two logits are all but equal
    for row in np.flatnonzero(~same.all(axis=1).astype(bool)):
        step = first[row]
        last = newest[row] if step == 0 else before[expected[row, step - 1]]
        logits = base[row, step] + jnp.dot(last, after, preferred_element_type=jnp.float32)
        assert abs(logits[got[row, step]] - logits[expected[row, step]]) < 1e-3
    assert same.mean() > 0.9


@pytest.mark.parametrize("rows,tokens", [(3, 64 * 5), rare(16, 64 * 3)])
def test_tokens_equal_those_of_plain_steps(rows, tokens, monkeypatch):
    """Blocks that take several tiles, and not all as many."""
    monkeypatch.setattr(markov_chain, "BLOCKS", 16 if rows > 8 else 8)
    monkeypatch.setattr(markov_chain, "THREADS", 8)
    check(rows, 3, tokens, 128, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("rows", [8, rare(1), rare(32), 128])
def test_lowers_for_cuda_as_one_kernel(rows):
    shapes = jax.eval_shape(lambda: operands(rows, 7, 151936, 256))
    assert kernels(lambda of: markov_chain.chain(*of), shapes) == 1


@pytest.mark.parametrize("change,words", [
    ({"dtypes": (jnp.bfloat16, jnp.float32)}, "weights in float32; supported: bfloat16"),
    ({"rank": 64}, "a rank of 64; supported: 128 and 256"),
    ({"rows": 129}, "129 rows; supported: up to 128"),
    ({"tokens": 100}, "100 tokens; supported: multiples of 64"),
])  # fmt: skip
def test_what_cannot_run_is_named(change, words):
    fits = dict(rows=8, rank=256, tokens=151936, dtypes=(jnp.bfloat16, jnp.bfloat16))
    assert markov_chain.supported(**fits) is None
    assert markov_chain.supported(**fits | change) == words
