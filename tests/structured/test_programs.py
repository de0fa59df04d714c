"""Masks on the device, and forced text in place of proposals."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Proposal
from jaxspec.sampling import sampling
from jaxspec.structured.programs import force, unpack


@pytest.mark.parametrize("vocab", [32, 33, 100])
def test_bits_are_unpacked_lowest_first(vocab):
    allowed = np.random.default_rng(vocab).random((3, 2, vocab)) < 0.5
    padded = np.pad(allowed, ((0, 0), (0, 0), (0, -vocab % 32)))
    bits = np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(unpack(jnp.asarray(bits), vocab), allowed)


def test_where_every_allowed_token_was_banned_the_grammar_wins():
    logits = jnp.array([[[1.0, 5.0, 2.0]], [[1.0, 5.0, 2.0]]])
    adjusted = logits.at[:, :, 0].set(-jnp.inf)
    allowed = jnp.array([[[True, False, False]], [[True, False, True]]])
    out = np.asarray(sampling.allow(adjusted, logits, allowed))
    inf = np.inf
    np.testing.assert_array_equal(out, [[[1, -inf, -inf]], [[-inf, -inf, 2]]])


def proposal(**more):
    return Proposal(jnp.array([[1, 2, 3]] * 5), jnp.array([3, 3, 3, 1, 0]), **more)


COUNTS, FORCED = jnp.array([0, 2, 2, 2, 3]), jnp.array([[9, 9, 9], [1, 2, 9], [1, 7, 9], [1, 2, 9], [4, 5, 6]])


def test_forced_drafts_take_the_place_of_the_drafters():
    out = force(proposal(probs=jnp.full((5, 3, 10), 0.1)), COUNTS, FORCED, 3)
    assert out.tokens.tolist() == [[1, 2, 3], [1, 2, 3], [1, 7, 3], [1, 2, 3], [4, 5, 6]]
    assert out.count.tolist() == [3, 3, 2, 2, 3]  # its own go on where its first ones were those
    probs = np.asarray(out.probs)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    certain = probs.max(-1) == 1
    assert certain.tolist() == [[False] * 3, [True, True, False], [True, True, False], [True, True, False], [True] * 3]
    assert probs[4, 2, 6] == 1 and probs[1, 1, 2] == 1


def test_a_tree_becomes_a_chain_no_deeper_than_it_was():
    out = force(proposal(parents=jnp.array([[0, 0, 1]] * 5)), COUNTS, FORCED, 2)
    assert out.parents.tolist() == [[0, 0, 1], *[[0, 1, 2]] * 4]
    assert out.count.tolist() == [3, 2, 2, 2, 2]
    assert out.tokens[4].tolist() == [4, 5, 3]
