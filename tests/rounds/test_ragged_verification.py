"""Ragged verification: which drafts get a round's rows, that text stays exact, and that no tokens are lost by it."""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.compiling.programs import settle
from jaxspec.config.options import ConfigError
from jaxspec.drafters.base import Proposal
from jaxspec.rounds.packing import empty_slots
from jaxspec.rounds.programs import DRAFTED, GREEDY, SAMPLED, decode_round
from jaxspec.rounds.ragged_verification import FIRST, Packed, Ragged, observe, share, standing
from jaxspec.scheduling.draft_count import PRIOR, Chooser
from tests.engine import test_lossless
from tests.rounds import test_distribution
from tests.support import widths
from tests.support.sample import one_in, rare
from tests.support.tiny import tiny_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

# -- which drafts ------------------------------------------------------------------------------------------------------


def worth(rates, counts):
    return sum(np.cumprod(row)[:n].sum() for row, n in zip(rates, counts, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_of_as_many_drafts_is_worth_more(seed):
    rng = np.random.default_rng(seed)
    rates, has = rng.uniform(size=(3, 3)).astype(np.float32), rng.integers(0, 4, size=3)
    for rows in range(10):
        chosen = np.asarray(share(jnp.asarray(rates), jnp.asarray(has), jnp.int32(rows)))
        assert (chosen <= has).all() and chosen.sum() == min(rows, has.sum())
        others = [n for n in itertools.product(range(4), repeat=3) if (n <= has).all() and sum(n) <= rows]
        np.testing.assert_allclose(worth(rates, chosen), max(worth(rates, n) for n in others), rtol=1e-6)


def test_requests_that_are_alike_have_alike_many():
    chosen = share(jnp.full((4, 7), 0.8), jnp.full(4, 7), jnp.int32(14))
    assert chosen.tolist() == [4, 4, 3, 3]


def test_whether_a_draft_is_verified_does_not_depend_on_it_or_on_later_ones():
    """Rates of position j may know the drafts before j. Those behind know draft j, and must not decide about it."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        rates, rows, j = rng.uniform(size=(4, 5)), int(rng.integers(0, 20)), int(rng.integers(0, 4))
        other = rates.copy()
        other[2, j + 1 :] = rng.uniform(size=4 - j)  # what draft j, another one, would make of the positions behind it
        verified = [share(jnp.asarray(each), jnp.full(4, 5), jnp.int32(rows))[2] > j for each in (rates, other)]
        assert verified[0] == verified[1]


def test_rows_are_packed_and_spread():
    count, q = jnp.array([2, 0, 4, 1]), 4
    packed = Packed.of(count, 9)
    assert packed.valid.tolist() == [True] * 7 + [False] * 2
    of = jnp.arange(4)[:, None] * 10 + jnp.arange(q)
    rows = packed.take(of)
    assert rows[:7, 0].tolist() == [0, 1, 20, 21, 22, 23, 30]
    back = packed.spread(rows, q)
    assert all(back[r, i] == of[r, i] for r in range(4) for i in range(int(count[r])))


def test_a_request_is_judged_by_its_last_rounds_and_at_first_like_its_neighbours():
    slots, ids, live = empty_slots(2, 8), jnp.array([0, 1]), jnp.array([True, True])
    of = lambda slots: jax.tree.map(lambda x: x[ids], slots)  # noqa: E731
    np.testing.assert_allclose(standing(of(slots), live), FIRST)
    for _ in range(20):  # one has all of three accepted, the other none of them
        slots = observe(slots, ids, jnp.array([3, 3]), jnp.array([4, 1]))
    good, bad = standing(of(slots), live)
    assert good > 0.9 and bad < 0.35
    slots = observe(slots, ids, jnp.array([0, 0]), jnp.array([1, 1]))  # without drafts nothing is judged
    for _ in range(60):
        slots = observe(slots, ids, jnp.array([3, 0]), jnp.array([4, 1]))
    assert standing(of(slots), live)[1] > 0.8, "what is long ago is forgotten, so that it is tried again"


@pytest.mark.parametrize("rates,each", one_in(
    4, [((0.2, 0.9),), ((0.6, 0.6),), ((0.85, 0.85),), ((0.1, 0.1, 0.1, 1.0),)], [1, 2]
))  # fmt: skip
def test_never_fewer_tokens_of_the_same_rows(each, rates):
    """Requests of several kinds, seven drafts of each: rows shared out, beside as many drafts for everybody."""
    b, d, rng, rounds = 32, 7, np.random.default_rng(0), 400
    rate = np.resize(rates, b)
    slots, ids, live = empty_slots(b, 8), jnp.arange(b), jnp.ones(b, bool)

    @jax.jit
    def turn(slots, stand):
        own = jax.tree.map(lambda x: x[:b], slots)
        of = jnp.broadcast_to(standing(own, live)[:, None], (b, d))
        count = share(of, jnp.full(b, d), jnp.int32(b * each))
        accepted = jnp.minimum(count, stand) + 1
        return observe(slots, ids, count, accepted), accepted.sum()

    shared, alike = 0, 0
    for _ in range(rounds):
        stand = np.cumprod(rng.uniform(size=(b, d)) < rate[:, None], axis=1).sum(axis=1)
        slots, tokens = turn(slots, jnp.asarray(stand))
        shared, alike = shared + int(tokens), alike + int((np.minimum(stand, each) + 1).sum())
    assert shared >= 0.998 * alike
    if len(set(rates)) > 1:
        assert shared > 1.04 * alike


# -- exact text --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive  # n-grams over Llama are in test_lossless.py, whose engines it has
@pytest.mark.parametrize("family,draft,overlap,rounds", [
    ("qwen3", "ngram", True, 1),
    ("qwen3", "standalone:self", True, 1),
    ("qwen3_moe", "standalone:noisy", True, 1),
    ("llama", "standalone:noisy", False, 4),
])  # fmt: skip
def test_greedy_text_is_plain_decodings(family, draft, overlap, rounds, monkeypatch):
    monkeypatch.setattr(test_lossless, "engine", partial(test_lossless.engine, ragged=True))
    llm = test_lossless.engine(family, draft)
    widths.switch(llm, monkeypatch)
    test_lossless.test_greedy_output_equals_plain(family, draft, overlap, rounds, monkeypatch)
    assert widths.took_turns(llm)


@dataclass(frozen=True)
class Doubtful(test_distribution.Noise):
    """`Noise`, which trusts its second draft as the first one says. `early`: each by itself, which isn't allowed."""

    early: bool = False

    def propose(self, params, state, batch):
        proposal, state = super().propose(params, state, batch)
        by = proposal.tokens if self.early else jnp.concatenate([batch.tokens(-1, 1), proposal.tokens[:, :1]], axis=1)
        trust = (by * 5 % test_distribution.VOCAB + 0.5) / test_distribution.VOCAB
        return Proposal(proposal.tokens, jnp.full(len(by), 2), proposal.probs, confidence=trust), state


def sampled(name, monkeypatch):
    monkeypatch.setattr(test_distribution, "SAMPLES", 10_000)  # fewer pass where a confidence knows the draft
    monkeypatch.setattr(test_distribution, "Lanes", partial(test_distribution.Lanes, fewer=(1,), ragged=True))
    test_distribution.test_round_samples_the_target(name)


@pytest.mark.parametrize("name", ["doubtful", rare("noise"), rare("ngram")])
def test_rounds_sample_the_target(name, monkeypatch):
    monkeypatch.setitem(test_distribution.DRAFTERS, "doubtful", lambda: (Doubtful(), {}))
    if name == "doubtful":  # what settings mean is the same in all rounds
        some = {setting: test_distribution.SETTINGS[setting] for setting in ("temperature", "everything")}
        monkeypatch.setattr(test_distribution, "SETTINGS", some)
    sampled(name, monkeypatch)


@pytest.mark.exhaustive
def test_a_confidence_that_knows_the_draft_would_bend_it(monkeypatch):
    """So the test above can fail."""
    monkeypatch.setitem(test_distribution.DRAFTERS, "early", lambda: (Doubtful(early=True), {}))
    with pytest.raises(AssertionError):
        sampled("early", monkeypatch)


class Roomy(Ragged):
    """Packs rows even where there is one for every draft."""

    packs = True


@pytest.mark.parametrize("family,draft,vocab,layers,mode", [
    rare("llama", "eagle/specforge-eagle3", 96, 8, GREEDY),
    rare("qwen3_5", "eagle/specforge-eagle3", 96, 8, SAMPLED),
    rare("llama", "eagle/specforge-eagle3", 96, 8, SAMPLED),
    rare("qwen3_5", "eagle/specforge-eagle3", 96, 8, GREEDY),
    rare("qwen3_moe", "dflash/full", 40, 6, SAMPLED),
])  # fmt: skip
def test_packed_rounds_leave_what_others_do(family, draft, vocab, layers, mode):
    """The text, the caches of target and drafter, states and records, and what the drafter made of features."""
    folder = tiny_checkpoint(family, vocab, num_hidden_layers=layers)
    options = {"context_length": 60, "page_size": 64, "max_running_requests": 4, "disable_overlap": True}
    llm = LLM(str(folder), str(GOLDEN / draft), num_draft_tokens=2, skip_warmup=True, few_programs=True, **options)
    core, rng = llm.engine, np.random.default_rng(0)
    for i, n in enumerate((3, 20, 9)):  # and padding rows
        params = SamplingParams(temperature=float(mode == SAMPLED), max_tokens=30, ignore_eos=True, seed=i)
        core.add(core.prepare(rng.integers(0, vocab, n).tolist(), params))
    while core.busy and core.counts.totals["generation_tokens"] < 20:
        core.step()
    seqs = core.scheduler.running
    settle(core.runner)
    runner = core.runner
    programs, drafter = runner.programs, runner._drafter
    packed = runner._pack([seq.slot for seq in seqs], core.scheduler.table, 4)
    states, outs = [], []
    after = jax.jit(partial(decode_round, runner._local, drafter, mode))
    for by in (Ragged(drafter, 2), Roomy(drafter, 2)):
        step = jax.jit(partial(decode_round, runner._local, by, mode))
        state, out = step(*programs._params, runner.state, packed)
        states.append(jax.tree.leaves((state.cache.kv, state.draft)))
        outs.append([out])
        for _ in range(3):  # rounds that read what this one has left, records of linear attention too
            state, out = after(*programs._params, state, packed)
            outs[-1].append(out)
    alike, packed_ones = (np.stack(each)[:, : len(seqs)] for each in outs)
    assert len(seqs) >= 2 and (alike[0, :, DRAFTED] > 0).any() and (alike == packed_ones).all()
    for one, two in zip(*states, strict=True):
        pages = np.s_[:, 1:] if one.ndim == 6 else np.s_[:]  # the dummy page is padding's
        np.testing.assert_allclose(one[pages], two[pages], atol=1e-4)


# -- how many ----------------------------------------------------------------------------------------------------------


def test_the_chooser_learns_what_shared_drafts_yield():
    """Half of the requests accept all three drafts and half none. A draft each yields 0.5, shared out up to 1."""
    times = {("round", 8): {0: 1.0, 1: 1.25, 3: 1.9}}
    chooser = Chooser({0: 0, 1: 3, 3: 3}, times, shared=(1,))
    first = chooser.expected()
    assert first[1] == pytest.approx(1 + 0.6) and first[3] > first[1]
    for _ in range(200):
        chooser.accepted(3, Counter({1: 4, 4: 4}))
        chooser.accepted(1, Counter({1: 5, 3: 2, 4: 1}))
    known = chooser.expected()
    assert known[3] == pytest.approx(2.5, abs=0.05)
    assert known[1] == pytest.approx(1 + 7 / 8, abs=0.05 + PRIOR / 1000)
    assert chooser.choose(("round", 8), 1.0) == 1


@pytest.mark.parametrize("options,words", [
    ({"deterministic": True}, "--deterministic"),
    ({"draft": "tests.rounds.test_trees:Wild", "topk": 2}, "--topk 12 drafts trees"),
])  # fmt: skip
def test_where_rows_cannot_be_shared_out_that_is_said(options, words):
    options = {"draft": "ngram"} | options
    with pytest.raises(ConfigError, match=f"--draft-policy ragged: .*{words}.*--draft-policy auto"):
        LLM(str(tiny_checkpoint()), options.pop("draft"), draft_policy="ragged", skip_warmup=True, **options)
