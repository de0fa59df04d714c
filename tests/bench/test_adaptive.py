"""Adaptive drafting beside fixed numbers of drafts: all settings see the same loads, and tokens are those imposed."""

import argparse
import dataclasses
import json
from collections import Counter

import pytest

from jaxspec import defaults
from jaxspec.bench import __main__ as bench
from jaxspec.bench import adaptive


def test_a_run_compares_every_setting_and_compiles_nothing_later(tiny, tmp_path, capsys):
    model = tiny[: tiny.index("--context-length")]
    args = [*model, "--draft", "ngram", "--prompt-len", "8", "--concurrency", "2", "--seconds", "0.05", "--turns", "1",
            "--learn", "0.05", "--num-continuous-decode-steps", "1", "--chunked-prefill-size", "32",
            "--accept-rates", "0.5", "--accept-rates", "0.5/1", "--rise-and-fall", "0.1"]  # fmt: skip
    assert bench.main(["adaptive", *args, "--json", str(tmp_path / "a.json")]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    steady, mixed, *moving = document["rows"]
    assert document["notes"] == [] and [row["kind"] for row in moving] == ["rise and fall"] * 2
    assert list(steady["settings"]) == ["plain", "0", "1", "auto"]
    assert steady["rates"] == "0.5" and mixed["rates"] == "0.5 / 1"
    for row, length in ((steady, 1.5), (mixed, 1.75)):  # of two requests, one has each of the mixed rates
        each = row["settings"]
        assert set(each["1"]["rounds_by_drafts"]) == {"1"} and set(each["0"]["rounds_by_drafts"]) == {"0"}
        seconds = each["1"]["ms_per_round"] / 1e3
        assert each["1"]["tokens_per_s"] == pytest.approx(2 * length / seconds)
        assert each["plain"]["tokens_per_s"] == pytest.approx(2e3 / each["plain"]["ms_per_round"])
        assert row["against_best"] == pytest.approx(row["auto"] / max(each[n]["tokens_per_s"] for n in "01") - 1) or (
            row["against_best"] == pytest.approx(row["against_plain"])
        )
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
    free, always = (adaptive.Setting({adaptive.REST: 0, 0: 0, 3: 3}, times, n) for n in (None, 3))
    for chooser in (free, always):
        chooser.took(group, adaptive.REST, 1.0)  # of the setting before
    for _ in range(9):
        assert always.choose(group, 1.0) == 3
        always.accepted(3, Counter({1: 8}))
    assert free.choose(group, 1.0) == 0


@pytest.mark.exhaustive
def test_tokens_of_drafts_that_are_shared_out_are_counted(tiny, tmp_path, monkeypatch):
    """One request accepts both of its drafts and the other none: of two rows for drafts, the former gets both."""
    monkeypatch.setattr(defaults, "CPU", dataclasses.replace(defaults.CPU, some_drafts=True))
    model = tiny[: tiny.index("--context-length")]
    args = [*model, "--draft", "ngram", "--draft-policy", "ragged", "--prompt-len", "8", "--concurrency", "2",
            "--seconds", "0.2", "--turns", "1", "--learn", "0.05", "--num-continuous-decode-steps", "1",
            "--chunked-prefill-size", "32", "--accept-rates", "0,0/1,1"]  # fmt: skip
    assert bench.main(["adaptive", *args, "--json", str(tmp_path / "a.json")]) == 0
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    shared = row["settings"]["1"]
    rows_a_second = 2e3 / shared["ms_per_round"]
    assert 1.9 * rows_a_second < shared["tokens_per_s"] <= 2.01 * rows_a_second
