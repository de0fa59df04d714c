"""Which rounds count: those in which all requests decode, and nothing else happens. With a clock of their own."""

import numpy as np
import pytest

from jaxspec.bench import steady
from tests.bench.fake_engine import Clock, FakeEngine


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(steady, "time", clock)
    return clock


def run(engine, count=4, prompt_len=50, output_len=60):
    return steady.Load(engine, np.random.default_rng(0), count, prompt_len).run(output_len)


def test_prefills_and_the_ends_of_requests_are_no_part_of_a_round(clock):
    row = run(FakeEngine(clock))
    assert row["ms_per_round"] == pytest.approx(10) and row["mean_ms"] == pytest.approx(10)
    assert row["tokens_per_s"] == pytest.approx(4 / 0.010)
    assert row["accept_length"] == 1.0
    assert 50 < row["context"] < 50 + 60
    # 4 prefills of a second and 62 rounds: the last request starts in step 4 and gains 59 tokens after its first
    assert row["run_tokens_per_s"] == pytest.approx(4 * 60 / (4 + 0.01 * (3 + 59)))


def test_the_median_is_of_rounds_and_the_mean_of_their_whole_time(clock):
    row = run(FakeEngine(clock, slow={20: 0.1, 21: 0.1}))
    assert row["ms_per_round"] == pytest.approx(10)
    assert row["mean_ms"] == pytest.approx(10 + 200 / row["rounds"])
    assert row["p99_ms"] > 100


def test_a_program_of_several_rounds_counts_as_that_many(clock):
    row = run(FakeEngine(clock, burst=4), output_len=100)
    assert row["rounds"] % 4 == 0
    assert row["ms_per_round"] == pytest.approx(10) and row["mean_ms"] == pytest.approx(10)


def test_drafts_that_are_accepted_yield_more_tokens_in_the_same_time(clock):
    row = run(FakeEngine(clock, gain=3, width=4), output_len=200)
    assert row["accept_length"] == 3.0
    assert row["tokens_per_s"] == pytest.approx(4 * 3 / 0.010)


def test_the_context_is_the_mean_of_the_rounds_that_were_timed(clock):
    engine = FakeEngine(clock)
    row = run(engine, count=1, prompt_len=50, output_len=41)
    # the first token comes in step 1, two more steps settle, and the last round is two tokens short of the end
    assert row["rounds"] == 38 - 3
    assert row["context"] == pytest.approx(50 + (3 + 38) / 2)
    assert len(engine.prompts) == 1 and len(engine.prompts[0]) == 50


def test_too_little_to_time_gives_no_figures(clock):
    row = run(FakeEngine(clock), count=8, output_len=12)
    assert row["ms_per_round"] is None and row["tokens_per_s"] is None and row["context"] is None
    assert row["run_tokens_per_s"] > 0


def test_every_run_has_prompts_of_its_own(clock):
    engine = FakeEngine(clock)
    one = steady.Load(engine, np.random.default_rng(0), 3, 50)
    one.run(20)
    one.run(20)
    assert len({tuple(prompt) for prompt in engine.prompts}) == 6
