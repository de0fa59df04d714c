"""Adaptive drafting beside fixed numbers of drafts: all settings see the same loads, and tokens are those imposed."""

import argparse
import dataclasses
import json
from collections import Counter
from statistics import median

import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import adaptive
from jaxspec.bench.meter import Meter
from jaxspec.engine import defaults


@pytest.mark.exhaustive
def test_a_run_compares_every_setting_and_compiles_nothing_later(tiny, tmp_path, capsys):
    model = tiny[: tiny.index("--context-length")]
    args = [*model, "--draft", "ngram", "--prompt-len", "8", "--concurrency", "2", "--output-len", "40", "--turns", "2",
            "--learn", "0.05", "--num-continuous-decode-steps", "1", "--chunked-prefill-size", "32",
            "--accept-rates", "0.5", "--accept-rates", "0.5/1", "--rise-and-fall", "0.1"]  # fmt: skip
    assert bench.main(["adaptive", *args, "--json", str(tmp_path / "a.json")]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    steady, mixed, *moving = document["rows"]
    (note,) = document["notes"]  # no program was compiled, and no request ended
    assert note.startswith("the load neither rose nor fell from 2 requests")
    assert [row["kind"] for row in moving] == ["rise and fall"] * 2
    assert list(steady["settings"]) == ["plain", "0", "1", "plain again", "auto"]
    assert steady["rates"] == "0.5" and mixed["rates"] == "0.5 / 1"
    for row, length in ((steady, 1.5), (mixed, 1.75)):  # of two requests, one has each of the mixed rates
        each = row["settings"]
        assert set(each["1"]["rounds_by_drafts"]) == {"1"} and set(each["0"]["rounds_by_drafts"]) == {"0"}
        seconds = each["1"]["ms_per_round"] / 1e3
        assert each["1"]["tokens_per_s"] == pytest.approx(2 * length / seconds)
        assert each["plain"]["tokens_per_s"] == pytest.approx(2e3 / each["plain"]["ms_per_round"])
        plain = [speed for name in ("plain", "plain again") for speed in each[name]["turns"]]
        assert len(plain) == 4 and row["plain"] == pytest.approx(median(plain))
        assert row["spread"] == pytest.approx((max(plain) - min(plain)) / row["plain"])
        best = max(row["plain"], *(each[n]["tokens_per_s"] for n in "01"))
        assert row["against_best"] == pytest.approx(row["auto"] / best - 1)
    assert set(document["facts"]["round_times"]["round_greedy 2"]) == {"0", "1"}
    assert "while requests become more and fewer" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "0.5,", "2", "0.5/", "a"])
def test_rates_must_be_numbers_from_0_to_1(text):
    with pytest.raises(argparse.ArgumentTypeError, match="takes rates from 0 to 1"):
        adaptive.rates(text)
    assert adaptive.rates("0.5,0.25/1,1") == [[0.5, 0.25], [1.0, 1.0]]


def test_a_drafter_must_be_named(tiny, capsys):
    with pytest.raises(SystemExit):
        bench.main(["adaptive", *tiny[:2], "--draft", "none", "--accept-rates", "0.5"])
    assert "--draft none: adaptive drafting needs a drafter" in capsys.readouterr().err


def test_a_fixed_number_is_kept_whatever_is_faster():
    group, times = ("round", 8), {("round", 8): {0: 1.0, 3: 9.0}}
    free, always = (adaptive.Setting({adaptive.SKIP_DRAFTER: 0, 0: 0, 3: 3}, times, n) for n in (None, 3))
    for chooser in (free, always):
        chooser.took(group, adaptive.SKIP_DRAFTER, 1.0)  # of the setting before
    for _ in range(9):
        assert always.choose(group, 1.0) == 3
        always.accepted(3, Counter({1: 8}))
    assert free.choose(group, 1.0) == 0


def test_a_choice_is_judged_by_median_rounds_and_pays_for_its_tries_and_all_else():
    """Take 10 rounds: one tried three drafts and two rested; one was held up, which isn't the choice's fault."""
    settings = {}
    for name, took in {"plain": {-1: [1.0, 1.0, 9.0]}, "0": {0: [1.2]}, "3": {3: [2.0]}, "auto": {0: [5.0]}}.items():
        meter = Meter(None, {})
        meter.took, meter.rounds, meter.tokens = took, Counter({max(n, 0): 10 for n in took}), 10.0
        settings[name] = None, meter
    settings["plain"][1].rested = 10
    auto = settings["auto"][1]
    auto.rounds, auto.rested, auto.tokens, auto.other = Counter({0: 9, 3: 1}), 2, 12.0, 0.5
    row = adaptive._by_choice(settings)
    assert row["choice_plain"] == row["choice_best"] == pytest.approx(12 / (2 * 1.0 + 7 * 1.2 + 2.0 + 0.5) - 1)


@pytest.mark.exhaustive
def test_tokens_of_drafts_that_are_shared_out_are_counted(tiny, tmp_path, monkeypatch):
    """One request accepts both of its drafts and the other none: of two rows for drafts, the former gets both."""
    monkeypatch.setattr(defaults, "CPU", dataclasses.replace(defaults.CPU, some_drafts=True))
    model = tiny[: tiny.index("--context-length")]
    args = [*model, "--draft", "ngram", "--draft-policy", "ragged", "--prompt-len", "8", "--concurrency", "2",
            "--output-len", "100", "--turns", "1", "--learn", "0.05", "--num-continuous-decode-steps", "1",
            "--chunked-prefill-size", "32", "--accept-rates", "0,0/1,1"]  # fmt: skip
    assert bench.main(["adaptive", *args, "--json", str(tmp_path / "a.json")]) == 0
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    shared = row["settings"]["1"]
    rows_a_second = 2e3 / shared["ms_per_round"]
    assert 1.9 * rows_a_second < shared["tokens_per_s"] <= 2.01 * rows_a_second
