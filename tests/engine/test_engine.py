"""The engine's invariants, each under a load of every kind of request at once.

Engines are few and shared, since compiling is what these tests cost. `idle` checks that a test leaves nothing behind.
"""

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, StructuredOutput
from jaxspec.config.request import Delta, RequestError
from jaxspec.engine.engine import InFlight
from jaxspec.engine.llm import CompletionBuilder
from jaxspec.scheduling.audit import audit
from tests.support.engines import (
    CONTEXT,
    COUNT_UP,
    DRAFTERS,
    MEANINGS,
    OPTIONS,
    PAGE,
    SELF,
    SHARED,
    VOCAB,
    assert_own,
    checkpoint,
    engine,
    expected_meanings,
    idle,
    mixed_load,
    params,
    said,
    set_overlap,
    set_rounds,
    tokens,
    uncompiled,
    unharmed,
)
from tests.support.sample import rare, some


# A draft model's texts are in test_lossless.py, its samples in tests/rounds.
@pytest.fixture(params=["ngram", rare(SELF)])
def llm(request):
    llm = engine(request.param)
    yield llm
    set_overlap(llm, True)
    set_rounds(llm, 1)
    idle(llm.engine)


# -- one round stale, never wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("llm", ["ngram", rare(SELF)], indirect=True)
def test_overlap_changes_nothing_but_time(llm):
    check_overlap(llm, (1,))


@pytest.mark.exhaustive
def test_overlap_of_four_rounds_changes_nothing_but_time(llm):
    check_overlap(llm, (1, 4))


def check_overlap(llm, numbers):
    outs = {}
    for rounds, on in itertools.product(numbers, (True, False)):
        set_overlap(llm, on)
        set_rounds(llm, rounds)
        before = llm.engine.stats()
        outs[on, rounds] = [said(out) for out in llm.generate(*mixed_load())]
        after = llm.engine.stats()
        assert after["preemptions_total"] > before["preemptions_total"]
        dispatched = Counter(after["dispatches"]) - Counter(before["dispatches"])
        assert (rounds > 1) == any(program.startswith("rounds_") for program in dispatched)
        assert llm.engine.flush_cache()
    assert all(out == outs[True, 1] for out in outs.values())


@pytest.mark.parametrize("llm", ["ngram", rare(SELF)], indirect=True)
def test_held_rounds_and_short_prompts_change_nothing_but_time(llm, monkeypatch):
    core, outs, rounds = llm.engine, {}, {}
    compiled = core.stats()["compiles_total"]
    monkeypatch.setattr("jaxspec.scheduling.scheduler.CROWD", 1)
    for held, between in ((0, None), (256, None), (0, 16), (256, 100)):
        monkeypatch.setattr(core.scheduler, "held_tokens", held)
        monkeypatch.setattr(core.prefill_budget, "tokens", lambda between=between: between)
        before = core.counts.totals["rounds"]
        outs[held, between] = [said(out) for out in llm.generate(*mixed_load())]
        rounds[held, between] = core.counts.totals["rounds"] - before
        assert core.flush_cache()
    assert all(out == outs[0, None] for out in outs.values())
    assert rounds[256, None] < rounds[0, None] < rounds[0, 16]
    assert core.config.skip_warmup or core.stats()["compiles_total"] == compiled


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("overlap,waste", [(True, 1), (False, 0)])
def test_a_request_wastes_at_most_one_program(monkeypatch, overlap, waste, rounds):
    llm = engine("ngram")
    set_overlap(llm, overlap)
    set_rounds(llm, rounds)
    ran = []
    dispatch = llm.engine.runner.round
    monkeypatch.setattr(llm.engine.runner, "round", lambda *a: ran.append(a[3]) or dispatch(*a))

    def wasted(**settings):
        ran.clear()
        (out,) = llm.generate([tokens(20)], params(**settings))
        assert out.finish_reason == ("stop" if "stop_token_ids" in settings else "length")
        used = out.metrics.verify_rounds
        while ran and used > 0:
            used -= ran.pop(0)
        return len(ran)

    assert wasted(stop_token_ids=list(range(0, VOCAB, 12))) == waste
    assert wasted() in (0, waste)
    assert wasted(speculative=False) == 0  # that many rounds are needed, and not one more
    assert wasted(max_tokens=1) == 0 and not ran  # the prefill says it all
    set_overlap(llm, True)
    set_rounds(llm, 1)
    idle(llm.engine)


# -- batch-independent sampling ----------------------------------------------------------------------------------------


def test_a_seed_gives_its_text_in_any_company(llm):
    prompt, settings = tokens(25), params(temperature=1.0, seed=21, max_tokens=60)
    alone, other = (llm.generate([prompt], dataclasses.replace(settings, seed=seed))[0] for seed in (21, 22))
    assert said(alone) != said(other)

    company = [tokens(40, 1), tokens(33, 2), tokens(50, 3)]
    ways = [settings, *(params(temperature=t, seed=s, max_tokens=60) for t, s in ((0.0, 1), (1.0, 2), (0.5, 3)))]
    first = llm.generate([prompt, *company], ways)
    last = llm.generate([*company, prompt], [*ways[1:], settings])
    assert said(first[0]) == said(last[3]) == said(alone)
    assert [said(out) for out in first[1:]] == [said(out) for out in last[:3]]
    assert any(out.metrics.preemptions for out in (*first, *last))


def test_a_preempted_request_keeps_its_text(llm):
    prompts = [tokens(n, 4) for n in (30, 41, 48)]
    settings = [params(temperature=1.0, seed=s, max_tokens=70) for s in range(3)]
    together = llm.generate(prompts, settings)
    assert together[2].metrics.preemptions > 0, "the youngest should have lost its pages"
    for out, prompt, each in zip(together, prompts, settings, strict=True):
        assert said(llm.generate([prompt], each)[0]) == said(out)


def test_texts_are_the_same_whoever_is_preempted_by_priority():
    llm = LLM(checkpoint(), "ngram", schedule_policy="priority-high-first", num_draft_tokens=3, **SHARED)
    core = llm.engine
    core.runner.programs = engine("ngram").engine.runner.programs  # the same, compiled
    set_rounds(llm, 1)
    prompts = [tokens(n, 5) for n in (20, 21, 22, 23)]
    each = params(temperature=1.0, seed=3, max_tokens=30)
    alone = [said(llm.generate([prompt], each)[0]) for prompt in prompts]
    got = {}

    def send(prompt, priority):
        request = core.prepare(prompt, each, priority=priority)
        core.add(request)
        got[request.id] = CompletionBuilder(0)

    def step():
        for delta in core.step():
            got[delta.request_id].take(delta)

    for prompt in prompts[:3]:  # as many as there are slots
        send(prompt, 0)
    for _ in range(6):
        step()
    send(prompts[3], 1)
    while core.busy:
        step()
    assert [builder.completion.token_ids for builder in got.values()] == [text[0][0] for text in alone]
    assert [builder.metrics.preemptions > 0 for builder in got.values()] == [False, False, True, False]
    idle(core)


def test_completion_i_is_drawn_with_seed_plus_i(llm):
    (out,) = llm.generate([tokens(18)], params(temperature=1.0, seed=40, n=3))
    assert len({tuple(c.token_ids) for c in out.completions}) == 3
    for i, completion in enumerate(out.completions):
        (alone,) = llm.generate([tokens(18)], params(temperature=1.0, seed=40 + i))
        assert alone.token_ids == completion.token_ids


def test_no_seed_draws_a_new_one(llm):
    first, second = llm.generate([tokens(18)] * 2, params(temperature=1.0, max_tokens=30))
    assert first.token_ids != second.token_ids


# -- the fast path ran -------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive  # test_soak.py has it under load, the test below of the programs' names
def test_nothing_compiles_after_warm_up():
    llm = engine("ngram", warm=True)
    before = llm.engine.stats()["compiles_total"]
    prompts, settings = mixed_load()
    llm.generate(prompts, settings)
    for rounds, count in itertools.product((1, 4), (1, 2, 3)):  # in programs of each mode
        set_rounds(llm, rounds)
        llm.generate(prompts[:count], params())
        llm.generate(prompts[:count], params(temperature=1.0))
        llm.generate(prompts[:count], params(logprobs=1))
        for settings in ({}, {"temperature": 1.0}, {"logprobs": 1}):
            llm.generate(prompts[:count], params(structured=StructuredOutput(choice=["this", "that"]), **settings))
        llm.engine.flush_cache()
    set_rounds(llm, 1)
    stats = llm.engine.stats()
    assert stats["preemptions_total"] > 0
    assert stats["compiles_total"] == before
    idle(llm.engine)


def test_a_warm_up_makes_every_program_that_a_load_asks_for(monkeypatch):
    llm = engine("ngram")
    llm.generate(*mixed_load())
    set_rounds(llm, 4)
    llm.generate([tokens(9)], params())
    set_rounds(llm, 1)
    asked = set(llm.engine.runner.programs._compiled)
    made = uncompiled(monkeypatch)
    LLM(checkpoint(), "ngram", **SHARED | {"num_draft_tokens": 3, "skip_warmup": False})
    assert len(asked) > 8 and asked <= set(made)
    idle(llm.engine)


def test_a_prompt_that_fills_the_context_is_scored():
    llm = engine("ngram")
    prompt, settings = tokens(CONTEXT, 7), {"max_tokens": 1, "prompt_logprobs": 1}
    with pytest.raises(RequestError, match=f"maximum context length is {CONTEXT}"):
        llm.generate([prompt], params(**settings))
    whole, shorter = llm.generate([prompt, prompt[:-1]], params(**settings, no_tokens=True))
    assert len(whole.prompt_logprobs) == CONTEXT and whole.prompt_logprobs[-1].token_id == prompt[-1]
    for found, expected in zip(whole.prompt_logprobs[1:-1], shorter.prompt_logprobs[1:], strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert_own(llm.engine.runner.model, [whole])
    idle(llm.engine)


def test_each_program_counts_its_dispatches():
    llm = engine("ngram")

    def gained(prompt, **settings):
        before = Counter(llm.engine.stats()["dispatches"])
        (out,) = llm.generate([prompt], params(max_tokens=6, speculative=False, **settings))
        llm.engine.flush_cache()
        assert out.metrics.verify_rounds == 5
        return Counter(llm.engine.stats()["dispatches"]) - before

    # max_tokens=6 without drafts: one token from the prefill, five rounds
    assert gained(tokens(30)) == {"admit": 1, "prefill": 1, "first_greedy": 1, "round_greedy": 5}
    sampled = gained(tokens(129), temperature=1.0)
    assert sampled == {"admit": 1, "prefill": 3, "first_sampled": 1, "round_sampled": 5}
    assert gained(tokens(130), prompt_logprobs=0) == {"admit": 1, "score": 3, "first_greedy": 1, "round_greedy": 5}
    assert gained(tokens(1), logprobs=0) == {"admit": 1, "prefill": 1, "first_logprobs": 1, "round_logprobs": 5}
    set_rounds(llm, 4)
    assert gained(tokens(30)) == {"admit": 1, "prefill": 1, "first_greedy": 1, "rounds_greedy": 1, "round_greedy": 1}
    set_rounds(llm, 1)


def test_a_batch_runs_in_the_cheapest_mode_that_serves_it():
    llm = engine("ngram")
    plain, sampled, reported = params(), params(temperature=1.0, seed=1), params(logprobs=1, max_tokens=30)
    before = Counter(llm.engine.stats()["dispatches"])
    llm.generate([tokens(9), tokens(10)], [plain, sampled])
    counts = Counter(llm.engine.stats()["dispatches"]) - before
    assert not counts["round_logprobs"] and counts["round_sampled"]
    llm.generate([tokens(9), tokens(10), tokens(11)], [plain, sampled, reported])
    assert Counter(llm.engine.stats()["dispatches"])["round_logprobs"] > before["round_logprobs"]
    idle(llm.engine)


# -- pages balance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("llm,seed", some([("ngram", 0), ("ngram", 2)], DRAFTERS, range(3)), indirect=["llm"])
def test_pages_balance_after_finishes_aborts_and_preemptions(llm, seed):
    rng, core = random.Random(seed), llm.engine
    prompts, settings = mixed_load()
    before = Counter(core.stats()["requests_total"])
    order = rng.sample(range(len(prompts)), len(prompts))
    while order or core.busy:
        for _ in range(rng.randint(0, 3)):
            if order:
                i = order.pop()
                core.add(core.prepare(prompts[i], settings[i]))
        if core.requests and rng.random() < 0.2:
            deltas = core.abort(rng.choice(list(core.requests)))
            assert deltas and all(delta.finish_reason == "abort" for delta in deltas)
        core.step()
        audit(core.scheduler)
    counts = Counter(core.stats()["requests_total"]) - before
    assert counts["abort"] and counts["length"]
    assert sum(counts.values()) == sum(s.n for s in settings)


def test_pages_balance_when_a_prompt_is_aborted_halfway(llm):
    core = llm.engine
    for name, length in (("halfway", 130), ("waiting", 20)):
        core.add(core.prepare(tokens(length), params(), name))
    core.step()
    assert core.scheduler.prefilling and core.scheduler.waiting
    for name in ("halfway", "waiting"):
        (delta,) = core.abort(name)
        assert delta.finish_reason == "abort" and not delta.token_ids
        audit(core.scheduler)
    assert core.abort("nobody") == []


class Slow:
    """A program's result that comes when someone waits for it."""

    def __init__(self, waited, ready=False):
        self.waited, self.ready = waited, ready

    def is_ready(self):
        return self.ready

    def __array__(self, dtype=None, copy=None):
        self.waited.append(self)
        return np.zeros(1)


def test_a_step_returns_what_is_there_before_it_waits_again(llm, monkeypatch):
    """A round's tokens don't wait for the prompts behind it, and nothing is dispatched before they are read, too."""
    core, waited = llm.engine, []
    results = [Slow(waited), Slow(waited, ready=True), Slow(waited), Slow(waited)]
    read = lambda program, result, deltas: deltas.append(Delta(program.result, 0, "", []))  # noqa: E731
    core._in_flight.extend(InFlight(read, result, []) for result in results)
    core._due = 3
    monkeypatch.setattr(core.scheduler, "plan", None)  # not called
    assert [delta.request_id for delta in core.step()] == results[:2] == waited
    assert [delta.request_id for delta in core.step()] == [results[2]]
    monkeypatch.undo()
    assert [delta.request_id for delta in core.step()] == [results[3]] and not core.busy


@pytest.mark.parametrize("program", ["prefill", "first", "round", "admit"])
def test_a_failed_call_leaves_the_engine_clean(monkeypatch, program):
    """An interrupt between plan and dispatch: pages that were promised keys must not be believed."""

    def fail(*_):
        raise KeyboardInterrupt

    llm = engine("ngram")
    with unharmed(llm) as again, monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.runner, program, fail)
        again()


# -- cached equals cold ------------------------------------------------------------------------------------------------


def test_a_cached_prefix_continues_as_a_cold_start(llm):
    """Each turn's prompt is the last turn's prompt and output, which end at every offset within a page."""
    whole = tokens(20, 5)
    for extra in range(1, PAGE + 1):
        (out,) = llm.generate([whole], params(max_tokens=extra))
        whole = whole + out.token_ids
        (warm,) = llm.generate([whole], params(max_tokens=24))
        assert warm.metrics.cached_tokens >= len(whole) - 2 - PAGE
        llm.engine.flush_cache()
        (cold,) = llm.generate([whole], params(max_tokens=24))
        assert cold.metrics.cached_tokens == 0
        assert said(warm) == said(cold)
        assert warm.metrics.verify_rounds == cold.metrics.verify_rounds  # the drafter's cache was as good as cold, too


def test_self_draft_accepts_everything_after_a_prefix_hit():
    """Only if the draft model's keys were committed for every cached position does it agree with the target."""
    llm = engine(SELF)
    for overlap in (True, False):
        set_overlap(llm, overlap)
        for length, first in itertools.product(range(33, 33 + PAGE), (3, 5, 9)):  # 1 + 4 and 1 + 8: whole rounds
            prompt = tokens(length, first)
            (out,) = llm.generate([prompt], params(max_tokens=first))
            (out,) = llm.generate([prompt + out.token_ids + [first]], params(max_tokens=17))
            assert out.metrics.cached_tokens >= 32
            assert out.metrics.accept_length == 4.0
            llm.engine.flush_cache()
    set_overlap(llm, True)
    idle(llm.engine)


@pytest.mark.parametrize("n", [rare(1), 3, rare(5)])
def test_self_draft_accepts_everything(n):
    if n == 3:
        llm = engine(SELF)
    else:
        options = OPTIONS | {"max_running_requests": 1, "num_draft_tokens": n}
        llm = LLM(checkpoint(), f"standalone:{checkpoint()}", **options)
    cases = (1, 0.0), (33, 0.0), (64, 1.0)
    for length, temperature in cases if n == 1 else cases[:2]:  # sampled rounds take longest to compile
        settings = params(temperature=temperature, seed=6, max_tokens=50)
        (out,) = llm.generate([tokens(length, 6)], settings)
        assert out.metrics.accept_length == n + 1
        assert out.metrics.verify_rounds == -(-49 // (n + 1))
    stats = llm.engine.stats()
    assert len(stats["drafted_per_position"]) == n
    idle(llm.engine)


# -- speculation means what plain decoding means -----------------------------------------------------------------------


def test_special_tokens_kept_by_name_are_in_the_text():
    kept = params(kept_special_tokens=["<|im_start|>"], logit_bias={257: 100.0}, max_tokens=3, logprobs=0)
    skipped = dataclasses.replace(kept, kept_special_tokens=())
    found = [out.text for out in engine("none").generate([tokens(9)] * 2, [kept, skipped])]
    assert found == ["<|im_start|>" * 3, ""]


@pytest.mark.parametrize("draft", [rare("ngram"), rare(SELF), COUNT_UP])  # whose drafts stand where it counts
def test_penalties_bias_stops_and_logprobs_mean_the_same_with_drafts(draft):
    llm, (settings, expected) = engine(draft), expected_meanings()
    outs = llm.generate([tokens(35, 8)] * len(settings), settings)
    for out, want, meaning in zip(outs, expected, MEANINGS, strict=True):
        assert said(out) == said(want), meaning
        assert [e.token_id for e in out.logprobs] == out.token_ids
        for got, due in zip(out.logprobs, want.logprobs, strict=True):
            assert got.logprob == pytest.approx(due.logprob, abs=1e-4)
            assert [v for _, v in got.top] == pytest.approx([v for _, v in due.top], abs=1e-4)
    assert max(out.metrics.accept_length for out in outs) > 1.3, "nothing was drafted right, so nothing was tested"
    idle(llm.engine)


def test_min_tokens_and_stops_do_what_they_say():
    early, word, run, *_ = expected_meanings()[1][6:]
    assert early.token_ids == [10] * 6 + [9]
    assert word.finish_reason == "stop" and len(word.token_ids) in (5, 6)
    assert (run.text, len(run.token_ids), run.finish_reason) == ("", 6, "stop")
    kept, token, special = expected_meanings()[1][-3:]
    assert (kept.text, kept.token_ids, kept.finish_reason) == ("A" * 6, run.token_ids, "stop")
    assert token.text == "CCCCB", "the stop token's text"
    assert special.text == "<|endoftext|>" * 3


def test_logprobs_are_those_of_the_logits():
    llm, prompt = engine("ngram"), tokens(130, 9)
    outs = llm.generate([prompt, prompt[:33], prompt[:1]], params(logprobs=5, prompt_logprobs=3, max_tokens=12))
    texts = [out.prompt_token_ids + out.token_ids for out in outs]
    padded = [text + [0] * (len(texts[0]) - len(text)) for text in texts]
    of_all = np.asarray(jaxspec.logits(llm.engine.runner.model, padded), np.float64)
    for out, whole, logits in zip(outs, texts, of_all, strict=True):
        length = len(out.prompt_token_ids)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == length
        rows = zip([*out.prompt_logprobs[1:], *out.logprobs], logprobs, whole[1:], strict=False)
        for i, (entry, row, token) in enumerate(rows):
            best = np.sort(row)[::-1][: 3 if i < length - 1 else 5]
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token], abs=1e-4)
            assert [v for _, v in entry.top] == pytest.approx(best, abs=1e-4)
            assert [row[t] for t, _ in entry.top] == pytest.approx(best, abs=1e-4)
    idle(llm.engine)


def test_requests_without_speculation_run_among_those_with_it():
    llm, bias = engine("ngram"), {65: 100.0}
    settings = [params(max_tokens=30, logit_bias=bias, speculative=s) for s in (True, False)]
    drafted, plain = llm.generate([tokens(10), tokens(10)], settings)
    assert said(drafted) == said(plain)
    assert plain.metrics.accept_length == 1.0 and plain.metrics.verify_rounds == 29
    assert drafted.metrics.accept_length > 2.5
    idle(llm.engine)


def test_a_requests_figures_add_up():
    llm, bias = engine(COUNT_UP), {65 + i: 100.0 - 5 * i for i in range(9)}
    before = llm.engine.stats()
    reported = {"max_tokens": 30, "logprobs": 0}  # by a program that is there
    settings = params(logit_bias=bias, repetition_penalty=2.0, n=2, **reported)
    (out,) = llm.generate([tokens(10)], settings)
    (plain,) = llm.generate([tokens(10)], params(speculative=False, **reported))
    after, metrics = llm.engine.stats(), out.metrics
    drafted, accepted = (
        [b - a for a, b in zip(before[key], after[key], strict=True)]
        for key in ("drafted_per_position", "accepted_per_position")
    )
    assert len(metrics.acceptance_histogram) == 4 and sum(metrics.acceptance_histogram) == drafted[0] > 0
    assert metrics.drafted_tokens == sum(drafted)
    assert sum(j * count for j, count in enumerate(metrics.acceptance_histogram)) == sum(accepted) > 0
    assert metrics.verified_tokens == metrics.verify_rounds + sum(accepted)
    assert (plain.metrics.drafted_tokens, plain.metrics.acceptance_histogram) == (0, [0] * 4)
    assert 0 <= metrics.queue <= metrics.ttft <= metrics.latency
    steps = {key: np.subtract(after["step_tokens"][key], before["step_tokens"][key]) for key in ("counts", "sum")}
    cached = after["cached_tokens_total"] - before["cached_tokens_total"]
    assert steps["sum"] == 30 - cached + metrics.output_tokens + plain.metrics.output_tokens
    idle(llm.engine)


def test_ngram_drafts_where_text_repeats_and_not_elsewhere():
    llm = engine("ngram")
    (out,) = llm.generate([tokens(10)], params(max_tokens=40, logit_bias={65: 12.0, 66: 12.0}))
    assert out.metrics.accept_length > 1.5
    before = llm.engine.stats()["drafted_per_position"]
    llm.generate([list(range(100, 160))], params(max_tokens=1))
    assert llm.engine.stats()["drafted_per_position"] == before
    idle(llm.engine)
