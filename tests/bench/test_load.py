"""The load benchmark on a tiny engine, and where time went by recordings that are written down."""

import json

import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import load, spent
from jaxspec.engine.timeline import Program, Recording, Step


def program(kind, size, rows, began, ended, tokens=0, called=None):
    return Program(kind, size, rows, tokens, rows, 0, began if called is None else called, began, ended)


def recording(*programs, steps=()):
    return Recording(0.0, 100.0, list(programs), list(steps), {}, False)


def test_seconds_go_to_what_they_were_spent_on():
    told = spent.figures(
        recording(
            program("prefill", 4, 3, 0.0, 2.0, tokens=150),
            program("first_greedy", 2, 2, 2.0, 2.5),
            program("round_greedy", 8, 4, 2.5, 3.5),
            program("round_greedy", 8, 8, 3.5, 5.0),
            program("round_greedy", 8, 8, 5.5, 7.0),  # half a second after the one before
            steps=[Step(0.0, 1.0, 150, 0), Step(1.0, 3.0, 0, 4), Step(3.0, 3.1, 0, 0), Step(3.1, 6.0, 0, 16)],
        ),
        block=64,
        burst=1,
    )
    assert (told["prompt_s"], told["first_s"], told["round_s"], told["few_s"]) == (2.0, 0.5, 4.0, 1.0)
    assert told["device_s"] == 7.0 and told["idle_s"] == pytest.approx(0.5) and told["idle_share"] == 0.5 / 7
    assert (told["rounds"], told["few_rounds"], told["prompt_programs"], told["rounds_behind_prompts"]) == (3, 1, 1, 1)
    assert told["padded_tokens_share"] == (256 - 150) / 256
    assert told["padded_rows_share"] == pytest.approx(4 / 24)
    assert told["full_round_ms"] == 1500 and told["rows"] == pytest.approx(20 / 3)
    assert told["rounds_alone_s"] == 20 / 8 * 1.5
    assert told["tokens_per_step"] == 20 / 3


def test_a_program_of_several_rounds_counts_as_that_many():
    told = spent.figures(recording(program("rounds_greedy", 8, 8, 0.0, 4.0)), block=64, burst=4)
    assert (told["rounds"], told["full_round_ms"], told["rounds_alone_s"]) == (4, 1000, 4.0)


def test_bins_share_out_each_moment():
    told = spent.bins(
        recording(
            program("prefill", 1, 1, 0.0, 1.0),
            program("round_greedy", 4, 1, 1.0, 2.0),
            program("round_greedy", 4, 4, 3.0, 4.0),
            steps=[Step(0.0, 3.9, 0, 8)],
        )
    )
    moment = lambda seconds: {name: told["shares"][name][int(seconds / 4 * spent.BINS)] for name in spent.LANES}  # noqa: E731
    for seconds, lane in ((0.5, "prompts"), (1.5, spent.FEW), (2.5, spent.IDLE), (3.5, spent.MANY)):
        assert moment(seconds) == pytest.approx(dict.fromkeys(spent.LANES, 0) | {lane: 1.0}, abs=1e-3)
    assert sum(told["tokens_per_s"]) * 4 / spent.BINS == pytest.approx(8)


def test_a_closed_loop_and_arrivals(tiny, tmp_path, capsys):
    argv = ["load", *tiny, "--concurrency", "3", "--request-rate", "90%", "--num-prompts", "7", "--draft", "ngram"]
    argv += ["--num-draft-tokens", "2", "--accept-rates", "0.5,0.5", "--prompt-len", "20-40:3,90:1"]
    argv += ["--output-len", "6-12", "--disable-structured-output", "--trace", str(tmp_path / "traces")]
    assert bench.main([*argv, "--json", str(tmp_path / "x.json")]) == 0
    document = json.loads((tmp_path / "x.json").read_text())
    loop, arrivals = document["rows"]
    for row in (loop, arrivals):
        assert row["completed"] == 7 and 7 * 6 <= row["output_tokens"] <= 7 * 12
        assert row["prefilled_tokens"] == row["prompt_tokens"] and 1 < row["accept_length"] < 3
        assert 0 < row["itl_p99_ms"] <= row["stall_ms"] * 1.001 and 0 <= row["idle_share"] < 1
        assert row["prompt_s"] + row["first_s"] + row["round_s"] + row["idle_s"] == pytest.approx(row["device_s"])
        assert row["most_rows"] <= 3 and row["prompts_alone_s"] > 0
    assert loop["of_parts"] == loop["device_s"] / (loop["prompts_alone_s"] + loop["rounds_alone_s"])
    assert arrivals["of_parts"] is None and "90% of the loop" in arrivals["load"]
    assert document["facts"]["expected_accept_length"] == 1.75
    assert len(list((tmp_path / "traces").iterdir())) == 2
    assert "where the device's time went" in capsys.readouterr().out


def test_without_warm_up_no_compiling_counts_as_prompts(tiny, monkeypatch):
    measure, compiled = load.alone_seconds, []

    def watched(engine, prompts, tokens, params):
        before = engine.stats()["compiles_total"]
        seconds = measure(engine, prompts, tokens, params)
        if tokens:
            compiled.append(engine.stats()["compiles_total"] - before)
        return seconds

    monkeypatch.setattr(load, "alone_seconds", watched)
    assert tiny[-1] == "--few-programs"  # left out: one program would do for all prompts
    argv = ["load", *tiny[:-1], "--concurrency", "1", "--num-prompts", "6", "--prompt-len", "20", "--output-len", "4"]
    assert (
        bench.main(
            [*argv, "--max-running-requests", "6", "--disable-structured-output", "--chunked-prefill-size", "256"]
        )
        == 0
    )
    assert compiled == [0]


@pytest.mark.parametrize("text", ["0", "x", "70%,", "-5"])
def test_rates_that_say_nothing_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        bench.main(["load", "--request-rate", text])
    assert "requests a second or shares" in capsys.readouterr().err


def test_rates_are_numbers_or_shares():
    assert load._rates("5,70%") == ["5", "70%"]
