"""Acceptance by benchmark, category and position: the figures, their intervals, and the command."""

import json

import numpy as np
import pytest

from jaxspec.bench import accept, acceptance, answers
from jaxspec.bench.__main__ import main
from jaxspec.bench.acceptance import Counts
from jaxspec.config.request import RequestMetrics

OPTIONS = ["--num-prompts", "4", "--output-len", "16", "--concurrency", "4"]


def test_counts_of_a_request():
    metrics = RequestMetrics(verify_rounds=10, verified_tokens=17, acceptance_histogram=[2, 3, 0, 1])
    assert Counts.of(metrics) == Counts(10, 16 + 1, (4, 1, 1))
    assert Counts.of(metrics, metrics) == Counts(20, 34, (8, 2, 2))


def test_figures_are_ratios_of_sums():
    row = acceptance.figures([Counts(10, 20, (8, 2)), Counts(30, 40, (10, 0)), Counts(0, 0, (0, 0))])
    assert (row["prompts"], row["rounds"], row["tokens_per_round"]) == (2, 40, 1.5)
    assert row["positions"] == [18 / 40, 2 / 40] and len(row["position_intervals"]) == 2
    assert row["low"] == pytest.approx(4 / 3) and row["high"] == 2.0  # two prompts: one of them twice
    alone = acceptance.figures([Counts(10, 20, (8, 2))])
    assert (alone["tokens_per_round"], alone["low"], alone["high"]) == (2.0, None, None)
    assert acceptance.figures([])["tokens_per_round"] is None
    json.dumps(alone, allow_nan=False)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Prompts of different difficulty: bootstrap over rounds would be far too narrow."""
    rng = np.random.default_rng(0)
    inside, trials = 0, 80
    for trial in range(trials):
        rounds = rng.integers(20, 60, 40)
        means = rng.normal(2.5, 0.4, 40)
        row = acceptance.figures([Counts(int(n), round(n * m), ()) for n, m in zip(rounds, means, strict=True)], trial)
        inside += row["low"] <= 2.5 <= row["high"]
    assert 0.85 < inside / trials < 0.99


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    spec = [{"question_id": i, "category": c, "turns": [f"{c}{i} ab ab ab"]} for i in range(3) for c in ("qa", "rag")]
    math = [{"question": f"{i}+{i}?", "answer": "#### 2"} for i in range(5)]
    paths = []
    for name, rows in (("bench", spec), ("math", math)):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def test_a_drafter_is_compared_with_plain_decoding(tiny, files, tmp_path, capsys):
    out = tmp_path / "accept.json"
    data = ["--data", f"Mine={files[0]}", "--data", str(files[1])]
    assert main(["accept", *tiny, "--draft", "ngram", *data, *OPTIONS, "--json", str(out)]) == 0
    printed, rows = capsys.readouterr().out, json.loads(out.read_text())["rows"]
    assert [(row["draft"], row["data"]) for row in rows] == [
        (draft, data) for draft in ("none", "ngram") for data in ("Mine", "GSM8K")
    ]
    assert {row["prompts"] for row in rows} == {4} and all(row["speedup"] == 1.0 for row in rows[:2])
    mine, math = rows[2:]
    assert mine["speedup"] == pytest.approx(mine["tokens_per_s"] / rows[0]["tokens_per_s"])
    assert [part["category"] for part in mine["parts"]] == ["all", "qa", "rag"]
    assert [part["category"] for part in math["parts"]] == ["all"]
    whole, *parts = mine["parts"]
    assert whole["rounds"] == sum(part["rounds"] for part in parts)
    assert whole["tokens_per_round"] == pytest.approx(1 + sum(whole["positions"]))
    assert whole["low"] <= whole["tokens_per_round"] <= whole["high"]
    assert "| drafter | Mine | GSM8K |" in printed and "| ngram | " in printed
    assert "acceptance by category" in printed
    assert main(["report", str(tmp_path)]) == 0
    assert "| drafter | Mine | GSM8K |" in capsys.readouterr().out


def test_a_drafter_forgets_the_load_before_unless_it_is_to_remember(tiny, files, tmp_path):
    out, found = tmp_path / "accept.json", []
    pool = "suffix?max_requests=8&max_response=64&max_matches=16"  # rounds look through all of it
    options = [*tiny, "--draft", pool, "--no-plain", "--data", f"A={files[1]}", "--data", f"B={files[1]}", *OPTIONS]
    for extra in ([], ["--keep-memory"]):
        assert main(["accept", *options, *extra, "--json", str(out)]) == 0
        found.append([row["tokens_per_round"] for row in json.loads(out.read_text())["rows"]])
    fresh, kept = found
    assert fresh[0] == fresh[1] < kept[1]


@pytest.mark.parametrize("extra, message", [
    (["--data", "nowhere.jsonl"], "No such file"),
    (["--data", "A={0}", "--data", "A={1}"], "two --data files have one name"),
    (["--data", "{0}", "--output-len", "250"], "no question of bench leaves room for 250 new tokens"),
])  # fmt: skip
def test_what_cannot_be_measured(tiny, files, capsys, extra, message):
    with pytest.raises(SystemExit):
        main(["accept", *tiny, "--draft", "ngram", "--no-plain", *(each.format(*files) for each in extra)])
    assert message in capsys.readouterr().err


def test_a_drafter_that_is_misspelt_is_named_before_anything_is_measured(tiny, files, capsys, monkeypatch):
    monkeypatch.setattr(answers.engines, "start", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(SystemExit):
        main(["accept", *tiny, "--draft", "ngram", "--draft", "nagram", "--data", str(files[0])])
    assert "--draft nagram is no method" in capsys.readouterr().err


def test_the_papers_table_marks_the_best_and_leaves_gaps():
    """And names a drafter without the folders that its own lies in."""
    row = lambda draft, data, tokens: {"draft": draft, "data": data, "tokens_per_round": tokens, "parts": [{}]}  # noqa: E731
    rows = [
        row("R/a", "X", 2.0),
        row("R/a", "Y", 3.0),
        row("suffix+eagle3:/x/y/b?topk=1", "X", 2.5),
        {"draft": "none", "data": "X"},
    ]
    assert accept.TABLES[2].markdown(rows).splitlines() == [
        "| drafter | X | Y |",
        "| --- | --- | --- |",
        "| R/a | 2.00 | **3.00** |",
        "| suffix+eagle3:b?topk=1 | **2.50** | - |",
    ]
