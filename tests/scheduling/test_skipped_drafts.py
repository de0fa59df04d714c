"""Rounds that rest: plain decoding beside a drafter that misses them, and drafts for its requests afterwards."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxspec import EngineConfig, SamplingParams, load_drafter, load_model
from jaxspec.compiling.ladder import ladder_of
from jaxspec.engine import defaults
from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.draft_count import KEEPING, SETTLED, SKIP_DRAFTER, Chooser
from tests.drafters import test_dflash, test_eagle
from tests.engine import test_hybrid
from tests.engine import test_lossless as lossless
from tests.scheduling import test_draft_count as loads
from tests.scheduling.test_draft_count import Load, expected, rates
from tests.support import heads
from tests.support.sample import one_in, rare

TOKEN = 22e-6  # seconds that one of a prompt takes
KEPT = {1: 1.01, 8: 1.02, 64: 1.04, 128: 1.045, 256: 1.07}  # a round without drafts over plain decoding's, EAGLE-3


class Course:
    """In place of a `Chooser`: all drafts, from the 7th round on a rest, and from the 21st on all drafts again. Those
    that rested then have them back, too, if `missed` is more than that takes."""

    def __init__(self, most, missed):
        self.chosen, self._missed, self.rounds, self.shares = most, missed, 0, []

    @property
    def missed(self):
        return self._missed * (self.rounds > 20)

    @property
    def resting(self):
        return 6 <= self.rounds <= 20

    def choose(self, group, share, able):
        self.rounds += 1
        self.shares.append((share, able))
        return SKIP_DRAFTER if 6 < self.rounds <= 20 else self.chosen

    def accepted(self, drafts, rows):
        assert drafts != SKIP_DRAFTER or not rows.total(), "rows that have no drafts say nothing of acceptance"

    def took(self, group, drafts, seconds):
        pass


class Always(Course):
    """Rests in each round."""

    missed, resting = 0.0, True

    def choose(self, group, share, able):
        return SKIP_DRAFTER


# EAGLE-3's, whose drafts are renewed, run in tests/drafters/test_eagle.py, whose engine it is.
KINDS = [
    rare(kind, renewed) for kind in ("eagle3", "mtp", "eagle", "standalone", "dflash") for renewed in (False, True)
]


def engine(kind):
    if kind == "mtp":
        return test_hybrid.engine("qwen3_5_moe", "mtp")
    if kind == "dflash":
        return test_dflash.watched_engine()
    return lossless.engine("qwen3", "standalone:self" if kind == "standalone" else f"{heads.folder_for(kind)}")


def prompts_for(llm, *lengths):
    rng = np.random.default_rng(4)
    return [rng.integers(0, min(llm.engine.model_config.vocab_size, 256), n).tolist() for n in lengths]


@pytest.mark.parametrize("kind,renewed", KINDS)
def test_text_is_plain_and_no_drafts_follow_what_the_drafter_missed(kind, renewed, monkeypatch):
    llm = engine(kind)
    # All of `standalone`'s drafts are accepted: a shorter text would end before its request may have drafts again.
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=70 if kind == "standalone" else 60)
    prompts = prompts_for(llm, 9, 17)
    assert llm.engine.flush_cache()
    plain = [out.token_ids for out in llm.generate(prompts, replace(greedy, speculative=False))]
    assert llm.engine.flush_cache()
    rested = llm.engine.counts.totals["rested_rounds"]
    course = Course(llm.engine.runner.drafts[-1], 1e9 * renewed)
    monkeypatch.setattr(llm.engine, "chooser", course)
    outs = llm.generate(prompts, greedy)
    assert [out.token_ids for out in outs] == plain
    assert llm.engine.counts.totals["rested_rounds"] == rested + 14
    assert course.shares[0] == (1, 1) and (0, 1) in course.shares
    assert ((1, 1) in course.shares[21:]) == renewed, "who rested has no drafts until its text was computed anew"
    for out in outs:
        assert out.metrics.preemptions == int(renewed)
        assert (out.metrics.drafted_tokens > 6 * course.chosen) == renewed
    audit(llm.engine.scheduler)
    if kind.startswith("eagle"):
        test_eagle.check_caches(llm)  # pages that are given to those that draft
    assert llm.engine.flush_cache()


@pytest.mark.exhaustive  # likewise
def test_a_next_turn_continues_from_what_the_drafter_missed_only_while_rounds_rest(monkeypatch):
    llm = engine("eagle3")
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)
    (prompt,) = prompts_for(llm, 9)

    def turn(text, chooser, **params):
        monkeypatch.setattr(llm.engine, "chooser", chooser)
        (out,) = llm.generate([text], replace(greedy, max_tokens=20, **params))
        assert out.token_ids == cold(text)
        return out.metrics

    def cold(text):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "prefix_cache", False)
            patch.setattr(llm.engine, "chooser", None)
            return llm.generate([text], replace(greedy, max_tokens=20))[0].token_ids

    assert llm.engine.flush_cache()
    monkeypatch.setattr(llm.engine, "chooser", Always(3, 0.0))
    (first,) = llm.generate([prompt], greedy)
    text = [*prompt, *first.token_ids, 1, 2, 3]
    known = (9 + 40 - 2) // 8 * 8
    metrics = turn(text, Always(3, 0.0))
    assert metrics.cached_tokens == known and not metrics.drafted_tokens
    test_eagle.check_caches(llm)
    metrics = turn(text, Always(3, 0.0), fixed_drafts=True)
    assert metrics.cached_tokens == 8 and metrics.drafted_tokens, "a request may ask for them"
    seeded = replace(greedy, temperature=1.0, seed=1)
    assert llm.engine.prepare(text, seeded).fixed_drafts, "a seed's text has the same drafts at any load"
    assert llm.engine.flush_cache()
    monkeypatch.setattr(llm.engine, "chooser", Always(3, 0.0))
    llm.generate([prompt], greedy)
    metrics = turn(text, None)
    assert metrics.cached_tokens == 8 and metrics.drafted_tokens, "the page of the prompt alone"
    metrics = turn(text, None)
    assert metrics.cached_tokens == len(text) // 8 * 8, "its own pages lie beside those that the drafter missed"
    test_eagle.check_caches(llm)
    audit(llm.engine.scheduler)
    assert llm.engine.flush_cache()


def test_rests_have_programs_of_the_sizes_that_rounds_without_drafts_have(monkeypatch):
    """And no others: a round that rests mustn't run as a larger batch."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = load_model(str(lossless.checkpoint("qwen3")), progress=False)
    draft = load_drafter(f"standalone:{lossless.checkpoint('qwen3')}", model)
    shapes = lambda **options: defaults.shapes_of(  # noqa: E731
        defaults.resolve(EngineConfig(draft=draft.name, max_running_requests=100, **options), model, draft),
        draft.drafter,
    )
    sizes = dict(shapes().narrower)
    assert sizes[SKIP_DRAFTER] == sizes[0] == (1, 8, 16, 32, 64, 100)
    kinds = {one for one in ladder_of(shapes()) if one[0].endswith(f"_{SKIP_DRAFTER}")}
    names = [f"{name}_{mode}_{SKIP_DRAFTER}" for name in ("round", "rounds") for mode in ("greedy", "sampled")]
    assert kinds == {(name, n) for name in names for n in sizes[SKIP_DRAFTER]}
    for options in ({"draft_policy": "fixed"}, {"few_programs": True}, {"deterministic": True}):
        assert SKIP_DRAFTER not in dict(shapes(**options).narrower)


class Resting(Load):
    """Rounds that rest take what the table says, others without drafts more. `news`: the share of requests that come in
    a round, in place of others. `behind`: tokens a request since it rested, which it takes time to compute anew."""

    def __init__(self, seed=0, news=0.0):
        super().__init__("EAGLE-3", seed)
        self.plain = {requests: self.times[requests][0] for requests in self.times}
        for requests, each in self.times.items():
            each[0] *= KEPT[requests]
        self.news, self.share, self.behind, self.renewals = news, 1.0, 0.0, 0
        table = {("round", n): {**each, SKIP_DRAFTER: self.plain[n]} for n, each in self.times.items()}
        self.chooser = Chooser({n: n for n in self.times[1]}, table)

    def run(self, requests, acceptance, rounds):
        time, tokens, chosen = 0.0, 0.0, loads.Counter()
        for _ in range(rounds):
            anew = TOKEN * requests * self.behind
            if self.chooser.missed and self.chooser.missed >= anew:
                self.share, self.behind, time, self.renewals = 1.0, 0.0, time + anew, self.renewals + 1
            drafts = self.chooser.choose(("round", requests), self.share, 1.0)
            took = self.plain[requests] if drafts == SKIP_DRAFTER else self.times[requests][drafts]
            self.chooser.took(("round", requests), drafts, took)
            if drafts > 0:
                left, yielded = int(requests * self.share), loads.Counter()
                for j in range(drafts):
                    stay = int(self.rng.binomial(left, acceptance[j]))
                    yielded[j + 1] += left - stay
                    left = stay
                yielded[drafts + 1] += left
                self.chooser.accepted(drafts, yielded)
            some = expected(acceptance, max(drafts, 0))
            time, tokens = time + took, tokens + 1 + self.share * (some - 1)
            self.share = 0.0 if drafts == SKIP_DRAFTER else self.share
            self.behind += 1 - self.share
            self.share += self.news * (1 - self.share)
            chosen[drafts] += 1
        return tokens / time, chosen


@pytest.mark.parametrize("news,requests", one_in(2, [0.0, 1 / 256], [8, 64, 128, 256]))
def test_where_drafts_never_pay_rounds_take_what_plain_decoding_does(requests, news):
    load = Resting(news=news)
    acceptance = rates(1.1, 3)
    load.run(requests, acceptance, 300)
    speed, chosen = load.run(requests, acceptance, 12_000)
    assert speed * load.plain[requests] > 0.99, chosen


def test_it_drafts_again_when_the_load_falls_and_when_drafts_get_better():
    load, acceptance = Resting(), rates(1.3, 3)
    _, chosen = load.run(256, acceptance, 400)
    assert chosen[SKIP_DRAFTER] > 200
    _, chosen = load.run(8, acceptance, 300)
    assert load.renewals == 1 and chosen[3] + chosen[1] > 60, "the old requests get drafts again"
    load.news = 1 / 256
    load.run(128, rates(1.1, 3), 400)
    rests = 2 * (KEPT[128] - 1) / KEEPING  # times as long as the state is kept up
    awake = int((rests + 3) * (SETTLED + 3) / load.plain[128])
    load.run(128, rates(3.9, 3), awake)
    assert load.chooser.chosen > 0


@pytest.mark.parametrize("length,requests", one_in(2, [1.2, 1.25, 1.3, 1.35, 1.4, 1.5], [64, 128, 256]))
def test_where_drafts_hardly_pay_texts_are_not_computed_anew_all_the_time(requests, length):
    load = Resting(seed=3)
    acceptance = rates(length, 3)
    load.run(requests, acceptance, 300)
    speed, chosen = load.run(requests, acceptance, 8000)
    best = max(load.fixed(requests, acceptance).values())
    assert speed > 0.99 / load.plain[requests], (chosen, load.renewals)
    assert speed > 0.97 * best, (chosen, load.renewals)


def test_nothing_rests_where_drafts_pay():
    load = Resting()
    _, chosen = load.run(8, rates(3.0, 3), 2000)
    assert not chosen[SKIP_DRAFTER] and chosen[3] > 1900


def test_requests_that_asked_for_no_drafts_keep_the_state_that_others_may_continue_from():
    assert Resting().chooser.choose(("round", 8), 0.0, 0.0) == 0


class Random:
    """Any number of drafts in any round, rests among them, and requests that rested are given drafts now and then."""

    chosen = 3

    def __init__(self, numbers, seed):
        self._rng, self._numbers, self._asked = np.random.default_rng(seed), numbers, 0

    @property
    def missed(self):
        self._asked += 1
        return 1e9 * (self._asked % 12 < 2)  # each step asks once or twice

    @property
    def resting(self):
        return self._rng.random() < 0.5

    def choose(self, group, share, able):
        return int(self._rng.choice(self._numbers))

    def expected(self):
        return {}

    def accepted(self, drafts, rows):
        pass

    def took(self, group, drafts, seconds):
        pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft,overlap,rounds", [("eagle3", True, 1), ("eagle3", False, 4), ("standalone", True, 4)])
def test_text_is_plain_whenever_rounds_rest_and_requests_draft_again(draft, overlap, rounds, monkeypatch):
    """Preemption for want of pages, shared prefixes and stops among them."""
    llm = engine(draft)
    monkeypatch.setattr(llm.engine, "chooser", Random((SKIP_DRAFTER, *llm.engine.runner.drafts), seed=rounds))
    before = llm.engine.stats()
    for scenario in lossless.SCENARIOS:
        assert llm.engine.flush_cache()
        monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, disable_overlap=not overlap))
        monkeypatch.setattr(llm.engine.scheduler, "rounds", rounds)
        batch, expected_outs = lossless.scenarios("qwen3")[scenario], lossless.plain("qwen3", scenario)
        for _ in range(3):  # the second and the third time from what is in the prefix tree
            outs = lossless.run(llm, batch)
            assert [(out.token_ids, out.text) for out in outs] == [(out.token_ids, out.text) for out in expected_outs]
            audit(llm.engine.scheduler)
        if draft == "eagle3":
            test_eagle.check_caches(llm)
    after = llm.engine.stats()
    gained = {key: after[key] - before[key] for key in ("rested_rounds_total", "preemptions_total")}
    assert gained["rested_rounds_total"] > 100 and gained["preemptions_total"] > 20
    if draft == "standalone":  # the target itself: each draft is right, if the cache is
        drafted, accepted = (
            sum(after[f"{x}_per_position"]) - sum(before[f"{x}_per_position"]) for x in ("drafted", "accepted")
        )
        assert drafted == accepted > 100
    assert llm.engine.flush_cache()
