"""The benchmarks that run an engine, through the command, on a tiny model: what they measured is what they say."""

import json

import numpy as np
import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import decode, prefill
from tests.bench.fake_engine import Clock, FakeEngine


def command(path, *argv):
    """Run a benchmark; its document."""
    assert bench.main([*argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def decoded(tiny, tmp_path_factory):
    """A decode benchmark with everything on. Its drafts are right by decree, then wrong by decree."""
    argv = ["decode", *tiny, "--draft", "ngram", "--accept-rates", "1,0.5,0", "--concurrency", "1,3"]
    argv += ["--prompt-len", "20", "--output-len", "100", "--overlap", "both", "--back-to-back"]
    serve, overlapped = decode.Load.run, []

    def run(self, *args):
        overlapped.append(not self._engine.config.disable_overlap)
        return serve(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.Load, "run", run)
        document = command(tmp_path_factory.mktemp("decode") / "decode.json", *argv)
    assert overlapped == [False, False, True, True] * 2  # without warm-up each runs twice
    return document


def test_decode_runs_every_load_with_overlap_off_and_on(decoded):
    assert [(row["concurrency"], row["overlap"]) for row in decoded["rows"]] == [
        (1, "off"),
        (1, "on"),
        (3, "off"),
        (3, "on"),
    ]
    for off, on in zip(decoded["rows"][::2], decoded["rows"][1::2], strict=True):
        assert off["overlap_gain"] is None and on["overlap_gain"] == off["mean_ms"] / on["mean_ms"] - 1
    assert not decoded["notes"]


def test_decode_accepts_at_the_rates_given(decoded):
    assert decoded["facts"]["width"] == 4 and decoded["facts"]["expected_accept_length"] == 2.5
    for row in decoded["rows"]:
        assert 2.0 < row["accept_length"] < 3.0  # the first draft always, the second half the time, the third never
        assert row["tokens_per_s"] == pytest.approx(
            row["concurrency"] * row["accept_length"] / row["mean_ms"] * 1e3, rel=0.05
        )


def test_decode_counts_its_floor_at_the_context_it_had(decoded):
    for row in decoded["rows"]:
        assert 40 < row["context"] < 110  # 20 of prompt, and half of those generated meanwhile
        assert row["floor_ms"] == row["bytes"] / 4.3e12 * 1e3  # nothing here is bound by arithmetic
        assert row["ratio"] == row["ms_per_round"] / row["floor_ms"] > 1


def test_decode_times_the_program_by_itself_and_nothing_is_compiled_meanwhile(decoded):
    for row in decoded["rows"]:
        assert row["program_ms"] > 0 and row["engine_overhead"] == row["mean_ms"] / row["program_ms"] - 1
        assert row["compiles"] == 0 and row["preemptions"] == 0


def test_decode_says_when_there_was_nothing_to_time(tiny, tmp_path):
    argv = ["decode", *tiny, "--draft", "none", "--concurrency", "3", "--prompt-len", "30", "--output-len", "6"]
    document = command(tmp_path / "x.json", *argv)
    assert document["rows"][0]["ms_per_round"] is None and document["rows"][0]["run_tokens_per_s"] > 0
    assert "raise --output-len 6" in document["notes"][0]


def test_prefill(tiny, tmp_path):
    argv = ["prefill", *tiny, "--lengths", "20,64", "--batched-tokens", "128", "--repeats", "3"]
    document = command(tmp_path / "x.json", *argv)
    short, long = document["rows"]
    assert (short["length"], short["batch"], long["length"], long["batch"]) == (20, 6, 64, 2)
    for row in document["rows"]:
        assert 0 < row["floor_ms"] < row["ttft_min_ms"] <= row["ttft_ms"] <= row["ttft_max_ms"]
        assert sorted(row["ttft_each_ms"])[1] == row["ttft_ms"]
        assert row["batch_ratio"] == pytest.approx(row["batch_floor_tokens_per_s"] / row["batch_tokens_per_s"])
    assert not document["notes"]


def test_prefill_times_each_prompt_from_when_it_was_queued(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(prefill, "time", clock)
    engine = FakeEngine(clock)  # half a second, and one more for each prompt before
    times = prefill.Prompts(engine, np.random.default_rng(0)).serve(3, 10)
    assert times == pytest.approx([0.5, 1.5, 2.5])
    assert engine.totals["generation_tokens"] == 3 and {len(prompt) for prompt in engine.prompts} == {10}


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--draft", "none", "--accept-rates", "0.5"], "--accept-rates needs a drafter"),
        (["--profile"], "--profile lists GPU kernels, and this is a cpu"),
        (["--accept-rates", "0.5,1.5"], "of numbers from 0 to 1"),
        (["--concurrency", "4", "--max-running-requests", "2"], "--max-running-requests 2 is less than 4 at once"),
        (["--prompt-len", "250", "--output-len", "50"], "256"),
        (["--page-size", "0"], "--page-size"),
    ],
)
def test_what_cannot_work_is_a_usage_error(tiny, argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["decode", *tiny, "--concurrency", "1", *argv])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
