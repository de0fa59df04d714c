"""The host benchmark measures the loop that it says it measures: the real one, with all requests running."""

import functools
import json

import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import host
from jaxspec.scheduling.audit import audit
from tests.support.sample import rare

TINY = ["--prompt-tokens", "20", "--new-tokens", "12", "--context-length", "128", "--rounds", "40"]


@functools.cache
def shared_engine():
    return host.make_engine(arguments("--requests", "3"))


def arguments(*extra):
    parser = bench.argparse.ArgumentParser()
    host.add_arguments(parser)
    return parser.parse_args([*TINY, *extra])


def test_the_command_prints_a_row_per_number_of_requests_and_writes_the_figures(tmp_path, capsys):
    assert bench.main(["host", *TINY, "--requests", "1,3", "--json", str(tmp_path / "host.json")]) == 0
    report = json.loads((tmp_path / "host.json").read_text())
    assert [row["requests"] for row in report["rows"]] == [1, 3]
    assert report["arguments"]["rounds"] == 40 and report["facts"]["width"] == 5
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["host", "requests", "1", "3"]
    assert [line.split()[5] for line in lines[2:]] == [f"{row['total']['median_ms']:.3f}" for row in report["rows"]]
    for row in report["rows"]:
        parts = sum(row[phase]["mean_ms"] for phase in host.PHASES)
        assert parts == pytest.approx(row["total"]["mean_ms"])
        assert all(row[phase]["mean_ms"] > 0 for phase in host.FIGURES)
        assert row["total"]["p99_ms"] >= row["total"]["median_ms"]


@pytest.mark.parametrize("sampled", [False, rare(True)])
def test_requests_run_their_course_through_the_real_loop(sampled):
    engine = host.make_engine(arguments("--requests", "3", "--sampled")) if sampled else shared_engine()
    load = host.Load(engine, 20, 12, sampled)
    load.measure(3, rounds=40)
    stats = engine.stats()
    kind = "round_sampled" if sampled else "round_greedy"
    assert stats["dispatches"][kind] >= stats["rounds_total"] >= 90  # 50 to settle, 40 measured
    assert stats["verify_rounds_total"] > 2 * stats["rounds_total"]  # all three took part nearly always
    assert 2.0 < stats["avg_spec_accept_length"] < 4.0  # one to five tokens, evenly
    assert stats["requests_total"]["length"] > 20
    assert stats["requests_total"]["abort"] == 3  # what still ran at the end
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
    audit(engine.scheduler)


def test_a_finished_request_got_every_token_it_asked_for():
    engine, gained = shared_engine(), {}
    for number, limit in enumerate((1, 7)):
        params = host.SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        engine.add(engine.prepare(list(b"hello"), params, str(number)))
    while engine.busy:
        for delta in engine.step():
            gained[delta.request_id] = gained.get(delta.request_id, "") + delta.text
    assert {name: len(text) for name, text in gained.items()} == {"0": 1, "1": 7}


def test_more_weights_reach_the_program_with_more_layers():
    """Dispatch costs depend on the number of arguments, so none may be optimised away."""
    counts = []
    for engine in (shared_engine(), host.make_engine(arguments("--requests", "3", "--layers", "3"))):
        runner = engine.runner
        program = runner.programs._program("round_greedy", 3, runner.state)
        kept = len(host.jax.tree.leaves(program.input_shardings[0]))
        counts.append(kept)
        assert kept >= len(host.jax.tree.leaves((runner.model.params, runner.state)))
    assert counts[1] > counts[0]


@pytest.mark.parametrize("extra, said", [
    (["--requests", "0,2"], "takes a list like 1,8,32 of integers from 1 on"),
    (["--requests", "many"], "takes a list like 1,8,32 of integers from 1 on"),
    (["--new-tokens", "200"], "exceed --context-length 128"),
    (["--model", "no-such-model"], "no-such-model"),
    (["--tp-size", "2"], "--tp-size 2 is more than this host has, 1 device (cpu)"),
])  # fmt: skip
def test_options_that_cannot_work_are_usage_errors(extra, said, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["host", *TINY, *extra])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
