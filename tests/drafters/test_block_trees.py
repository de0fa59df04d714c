"""DFlash's trees: the likeliest branches of a block's distributions, exact text, whole caches."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, EngineConfig, load_drafter, load_model
from jaxspec.drafters import eagle_tree
from jaxspec.drafters.base import DraftBatch, NoDrafter
from jaxspec.rounds.packing import empty_slots
from jaxspec.sampling.acceptance import Tree
from tests.support import drawn
from tests.support.blocks import GOLDEN
from tests.support.sample import rare
from tests.support.trees import Session

FULL = GOLDEN / "dflash" / "full"  # blocks of eight
PROMPTS = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in (1, 7, 15, 16, 17)]


@functools.cache
def target():
    return load_model(str(GOLDEN / "dflash" / "target"), dtype="float32", progress=False)


def load(**given):
    return load_drafter(f"dflash:{FULL}", target(), EngineConfig(draft="dflash", **given))


def batch_of(requests: int) -> DraftBatch:
    slots = jax.tree.map(lambda x: x[:requests], empty_slots(requests, 16))
    ids, live = jnp.arange(requests), jnp.ones(requests, bool)
    return DraftBatch(ids, slots.length, slots.history, jnp.zeros((requests, 1), jnp.int32), live, slots.sampling, True)


@pytest.mark.parametrize("steps,topk,drafts", [(1, 4, 3), (3, 4, 9), (3, 2, 10), (4, 5, 24)])
def test_a_tree_holds_the_likeliest_branches(steps, topk, drafts):
    """Compare with all branches of the `topk` likeliest tokens, where a step's beam leaves none of them out."""
    logits = 3 * drawn.normal(jax.random.key(steps), (2, steps, 30))
    proposal = jax.jit(eagle_tree.of_block, static_argnums=(1, 2))(logits, topk, drafts, {}, batch_of(2), 30)
    likely = np.asarray(jax.nn.log_softmax(logits), np.float64)
    for request in range(2):
        tokens, parents = np.asarray(proposal.tokens[request]), np.asarray(proposal.parents[request])
        branches = []
        for token, parent in zip(tokens, parents, strict=True):
            branches.append((*(branches[parent - 1] if parent else ()), int(token)))
        best = [np.argsort(-row, kind="stable")[:topk] for row in likely[request]]
        score = {}
        for depth in range(1, steps + 1):
            for branch in itertools.product(*best[:depth]):
                score[tuple(map(int, branch))] = sum(likely[request, i, token] for i, token in enumerate(branch))
        expected = sorted(score, key=score.get, reverse=True)[:drafts]
        beam = all(sum(len(b) == depth for b in expected) <= topk for depth in range(1, steps + 1))
        assert len(set(branches)) == drafts and set(branches) <= set(score)
        assert set(branches) == set(expected) or not beam
        assert min(score[b] for b in branches) <= max(score[b] for b in branches)
    assert np.asarray(proposal.count).tolist() == [drafts, drafts]


@pytest.mark.exhaustive  # that the drafts are good is seen below
def test_a_draft_is_one_of_its_places_likeliest():
    loaded = load(topk=4, num_draft_tokens=12)
    prop = jaxspec.propose(target(), loaded, PROMPTS[2], 12)
    chain = jaxspec.propose(target(), load(), PROMPTS[2], 7)
    depth = np.asarray(Tree.of(jnp.asarray(prop.parents)[None], 7).depth[0])[1:]
    for token, at in zip(prop.tokens, depth, strict=True):
        assert token in np.argsort(-chain.logits[at - 1])[:4]
    assert prop.tokens[0] == chain.tokens[0] and prop.count == 12


@pytest.mark.parametrize("given", [
    pytest.param(dict(topk=4, num_draft_tokens=12), marks=pytest.mark.exhaustive),
    rare(dict(topk=8, num_steps=2, num_draft_tokens=20)),  # verifying takes more places than the block
    pytest.param(dict(topk=2, num_steps=7), marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_greedy_text_and_caches_are_plain_decodings(given):
    loaded, plain = load(**given), Session(target(), NoDrafter(), {}, PROMPTS)
    session = Session(target(), loaded.drafter, loaded.params, PROMPTS)
    assert session.texts == plain.texts
    for i in range(len(PROMPTS)):
        np.testing.assert_allclose(session.kv(i), plain.kv(i), atol=1e-4)
    assert np.concatenate(session.accepted).mean() > 1, "some of a tree's are right, though none of a chain's"


@pytest.mark.parametrize("given,steps,drafts,lookahead", [
    (dict(), None, 7, 8),
    (dict(topk=4), 7, 8, 9),
    (dict(topk=4, num_steps=2), 2, 8, 9),
    (dict(topk=2, num_draft_tokens=3), 3, 3, 4),
])  # fmt: skip
def test_what_is_left_out_is_chosen(given, steps, drafts, lookahead):
    drafter = load(**given).drafter
    assert (drafter.num_steps, drafter.num_draft_tokens, drafter.lookahead) == (steps, drafts, lookahead)
    assert drafter.longest == (steps or 7)


def test_trees_that_cannot_be_are_refused():
    for given, words in (
        (dict(topk=4, num_steps=9), "--num-steps 9: this DFlash drafter fills blocks of 8"),
        (dict(topk=2, num_steps=2, num_draft_tokens=7), "finds 6 candidates"),
        (dict(topk=41), "--topk 41: it knows 40 tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(**given)
    with pytest.raises(ConfigError, match="drafts chains, not trees"):
        draft = f"dspark:{GOLDEN / 'dspark' / 'deepspec'}"
        load_drafter(draft, target(), EngineConfig(draft=draft, topk=2))
