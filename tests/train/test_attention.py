"""Packed rows attend as each text would alone, in blocks as at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder import functions
from jaxspec.models.positions import Chunks
from jaxspec.train import attention


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("block,window,sunk,cap", [
    (3, None, False, 0.5), (3, 3, True, None), (256, None, False, None), (3, Chunks(4), False, None)
])  # fmt: skip
def test_packed_texts_dont_see_each_other(block, window, sunk, cap, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    q, k, v = draw(1, 11, 4, 8), draw(1, 11, 2, 8, seed=1), draw(1, 11, 2, 8, seed=2)
    first, sinks = jnp.array([[0] * 3 + [3] * 8]), draw(4, seed=3) if sunk else None

    def packed(q):
        return attention.packed_attention(first).attend(None, None, q, k, v, window, sinks, cap)[0]

    def alone(q):
        texts = ([x[:, s] for x in (q, k, v)] for s in (slice(3), slice(3, 11)))
        parts = [functions.causal_attention(None, jnp.int32(0), *text, window, sinks, cap)[0] for text in texts]
        return jnp.concatenate(parts, axis=1)

    np.testing.assert_allclose(jax.jit(packed)(q), jax.jit(alone)(q), atol=1e-6)
    gradient = lambda f: jax.jit(jax.grad(lambda q: (f(q) ** 2).sum()))(q)  # noqa: E731
    np.testing.assert_allclose(gradient(packed), gradient(alone), atol=1e-5)


def test_a_group_sees_its_span_and_its_own():
    q, k, v = draw(1, 3, 2, 2, 4), draw(1, 6, 1, 4, seed=1), draw(1, 6, 1, 4, seed=2)
    own = draw(1, 3, 5, 1, 4, seed=3), draw(1, 3, 5, 1, 4, seed=4)
    first, last = jnp.array([[0, 2, 4]]), jnp.array([[1, 5, 3]])  # the last one sees nothing but its own
    out = attention.span_attention(q, k, v, first, last, own)
    for g in range(3):
        seen = slice(int(first[0, g]), int(last[0, g]) + 1)
        keys = jnp.concatenate([k[0, seen, 0], own[0][0, g, :, 0]])
        values = jnp.concatenate([v[0, seen, 0], own[1][0, g, :, 0]])
        expected = jax.nn.softmax(jnp.einsum("rnh,sh->rns", q[0, g], keys) / 2) @ values
        np.testing.assert_allclose(out[0, g], expected, atol=1e-6)
