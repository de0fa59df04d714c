"""Imposed acceptance: golden curves, means and rates, under everybody's names."""

import argparse

import pytest

from jaxspec.bench import forced, imposed
from jaxspec.bench.results import BenchError


def rates(drafts, *flags):
    parser = argparse.ArgumentParser()
    imposed.add_arguments(parser)
    found = imposed.imposed(parser.parse_args(flags))
    return found and list(found.of(drafts))


@pytest.mark.parametrize("length, drafts, expected", [
    ("2.6", 3, [1.0, 0.6, 0.0]), ("1.0", 3, [0, 0, 0]), ("4", 3, [1, 1, 1]), ("3.5", 4, [1, 1, 0.5, 0]),
])  # fmt: skip
def test_a_mean_has_vllms_schedule_under_every_name(length, drafts, expected, monkeypatch):
    expected = pytest.approx(expected)
    assert rates(drafts, "--accept", length) == expected
    assert rates(drafts, "--synthetic-acceptance-length", length) == expected
    assert rates(drafts) is None
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", length)
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_METHOD", "match-expected")
    assert rates(drafts) == expected
    assert rates(2, "--accept-rates", "0.5,0.25") == [0.5, 0.25]  # a flag comes first
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")
    assert rates(drafts) is None


def test_vllms_rates_are_of_a_draft_and_all_before_it():
    assert rates(3, "--synthetic-acceptance-rates", "0.8,0.4,0") == pytest.approx([0.8, 0.5, 0.0])
    assert rates(3, "--synthetic-acceptance-rates", "0.8,0,0") == pytest.approx([0.8, 0.0, 0.0])


def test_every_golden_curve_gives_its_length():
    for name, curve in imposed.golden().items():
        for thinking in curve.keys() - {"file"}:
            for drafts, length in enumerate(curve[thinking], 1):
                if length:
                    found = rates(drafts, "--accept", f"golden:{name}:{thinking}")
                    assert forced.expected_length(found) == pytest.approx(length)
    assert forced.expected_length(rates(3, "--accept", "golden:qwen3.5-397b")) == pytest.approx(3.39)


@pytest.mark.parametrize("flags, message", [
    (["--accept", "golden:qwen9"], "is no golden curve; there are deepseek-v4-pro,"),
    (["--accept", "golden:glm-5.2:off"], "glm-5.2 is measured with thinking on"),
    (["--accept", "golden:glm-5.2:file"], "glm-5.2 is measured with thinking on"),
    (["--accept", "0.5"], "takes golden:NAME or mean tokens a round of at least 1"),
    (["--synthetic-acceptance-rates", "0.5,0.6"], "that don't rise"),
    (["--accept", "2", "--accept-rates", "0.5"], "not allowed with"),
])  # fmt: skip
def test_flags_that_mean_nothing(flags, message, capsys):
    with pytest.raises(SystemExit):
        rates(3, *flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags, drafts, message", [
    (["--accept", "5"], 3, "--accept 5: a round of 3 drafts has 1 to 4 tokens"),
    (["--accept", "golden:qwen3.8-27b"], 2, "golden:qwen3.8-27b is measured with 3 drafts, not 2"),
    (["--accept", "golden:qwen3.5-397b"], 9, "is measured with 1, 2, 3, 4, 5, 6, 7, 8 drafts, not 9"),
])  # fmt: skip
def test_lengths_that_so_many_drafts_cannot_have(flags, drafts, message):
    with pytest.raises(BenchError, match=message):
        rates(drafts, *flags)


@pytest.mark.parametrize("name, value, message", [
    ("SGLANG_SIMULATE_ACC_LEN", "x", "SGLANG_SIMULATE_ACC_LEN=x must be a number"),
    ("SGLANG_SIMULATE_ACC_METHOD", "multinomial", "SGLANG_SIMULATE_ACC_METHOD=multinomial isn't known here"),
])  # fmt: skip
def test_an_environment_that_means_nothing(name, value, message, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(BenchError, match=message):
        rates(3)
