"""Logits that are NaN or infinite give no token: whatever chooses it, in whatever row of a round they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.drafters.base import Proposal
from jaxspec.rounds import programs
from jaxspec.rounds.programs import GREEDY, NO_TOKEN, SAMPLED, Masks, tokens_if_finite
from jaxspec.sampling.acceptance import Tree
from jaxspec.structured import programs as structured
from tests.support.exact import slots_for
from tests.support.sample import rare

B, Q, V = 4, 4, 32
LOGITS = np.random.default_rng(0).standard_normal((B, Q, V)).astype(np.float32)
SETTINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=9)]
SLOTS = slots_for([*SETTINGS, SETTINGS[1]], [[1, 2, 3]] * B, [[]] * B, capacity=16, new_tokens=9)
SLOTS = jax.tree.map(lambda x: x[:B], SLOTS)  # without the dummy
ALLOWED = jnp.asarray(np.random.default_rng(1).random((B, Q, V)) < 0.5).at[:, :, 5].set(True)


@partial(jax.jit, static_argnames="how")
def chosen(how, logits, drafts):
    """Outputs and how many of them count, of a round in which these drafts were made."""
    logits, nothing = jnp.asarray(logits), Proposal(jnp.asarray(drafts), jnp.full(B, Q - 1))
    if how == "greedy":
        best = tokens_if_finite(logits.argmax(-1), logits.max(-1))
        return programs._accept(best, SLOTS, nothing, GREEDY, None)
    if how == "greedy in a grammar":
        words = np.packbits(np.asarray(ALLOWED), axis=-1, bitorder="little").view(np.uint32)
        best, masks = structured._score(logits, jnp.asarray(words), jnp.zeros((B, Q, 1), jnp.int32), GREEDY, V)
        return programs._accept(best, SLOTS, nothing, GREEDY, masks)
    if how == "in a grammar":
        return programs._accept(logits, SLOTS, nothing, SAMPLED, Masks(ALLOWED, jnp.zeros((B, Q, 1), jnp.int32)))
    if how == "by blocks":
        p = jax.nn.one_hot(drafts, V)
        return programs._accept(logits, SLOTS, nothing.replace(probs=p), SAMPLED, None)
    if how == "in a tree":
        chain = nothing.replace(parents=jnp.broadcast_to(jnp.arange(Q - 1), (B, Q - 1)))
        outputs, _, accepted = programs._accept_path(logits, SLOTS, chain, Tree.of(chain.parents, Q - 1), SAMPLED, None)
        return outputs, accepted
    return programs._accept(logits, SLOTS, nothing, SAMPLED, None, fixed=how == "deterministic")


@pytest.mark.parametrize("how", [
    "greedy", rare("by blocks"), "in a tree", "greedy in a grammar", rare("sampled"), rare("deterministic"),
    rare("in a grammar"),
])  # fmt: skip
def test_no_token_follows_logits_that_are_not_finite(how):
    drafts = np.zeros((B, Q - 1), np.int32)
    for j in range(Q - 1):  # the target's own, so that all are accepted
        outputs, _ = chosen(how if how != "by blocks" else "sampled", LOGITS, drafts)
        drafts[:, j] = outputs[:, j]
    outputs, accepted = map(np.asarray, chosen(how, LOGITS, drafts))
    assert (outputs >= 0).all() and (how == "by blocks" or accepted.tolist() == [Q] * B)
    emitted, done, broken = programs._stop(SLOTS, jnp.asarray(outputs), jnp.asarray(accepted))
    assert emitted.tolist() == accepted.tolist() and not done.any() and not broken.any()
    for bad in (np.nan, np.inf, -np.inf):
        logits = LOGITS.copy()
        rows = [(0, 0), (1, 2), (2, 1)]  # requests and rows; the last request has none
        for i, j in rows:
            logits[i, j, slice(None) if bad == -np.inf else 5] = bad  # all, or one that every grammar allows
        found, counts = chosen(how, logits, drafts)
        emitted, done, broken = (x.tolist() for x in programs._stop(SLOTS, found, counts))
        for i, j in rows:
            if counts[i] > j:
                assert found[i, j] == NO_TOKEN and (emitted[i], done[i], broken[i]) == (j, True, True)
            same = np.asarray(found)[i, : emitted[i]] == outputs[i, : emitted[i]]
            assert same.all() or how == "by blocks", "which may accept fewer drafts, and has a bonus in place of one"
        assert broken[0], "in row 0 nothing else can happen"
        assert how == "by blocks" or all(broken[:3])
        assert found[3].tolist() == outputs[3].tolist() and not broken[3] and not done[3]


def test_an_end_before_them_comes_first():
    slots = SLOTS.replace(limit=SLOTS.length + 2, done=jnp.array([False, False, False, True]))
    sampling = slots.sampling.replace(stop_ids=slots.sampling.stop_ids.at[0, 0].set(7))
    outputs = jnp.array([[7, -1, 1, 1], [3, 4, -1, 1], [3, -1, 4, 4], [-1, 1, 1, 1]])
    emitted, done, broken = programs._stop(slots.replace(sampling=sampling), outputs, jnp.full(B, Q))
    assert (emitted.tolist(), done.tolist(), broken.tolist()) == (
        [1, 2, 1, 0],
        [True] * 4,
        [False, False, True, False],
    )
