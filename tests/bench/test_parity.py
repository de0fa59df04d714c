"""Parity: texts that agree are said to, and a difference is found with its margin."""

import json

import numpy as np
import pytest

import jaxspec
from jaxspec.bench import parity
from jaxspec.bench.__main__ import main
from jaxspec.bench.results import BenchError


def test_in_float32_nothing_differs(tiny, tmp_path, capsys):
    out = tmp_path / "parity.json"
    lengths = ["--prompt-len", "24", "--output-len", "24", "--num-prompts", "5"]
    options = ["--draft", "ngram", "--dataset", "random", *lengths, "--concurrency", "4"]
    assert main(["parity", *tiny, *options, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["run"], row["prompts"], row["differ"]) for row in rows] == [
        ("plain, 1 at once", 5, 0),
        ("ngram, 4 at once", 5, 0),
    ]
    assert rows[1]["accept_length"] >= 1
    assert "0.0%" in capsys.readouterr().out


def test_a_first_difference_and_its_margin(tiny):
    model = jaxspec.load_model(tiny[1], progress=False)
    prompt, text = [5, 6, 7], [1, 2, 3, 4]
    at, margin = parity._first_difference(model, prompt, text, [1, 2, 9, 4])
    values = np.asarray(jaxspec.logits(model, [[*prompt, 1, 2]])[0, -1])
    assert at == 2
    assert margin == pytest.approx(abs(values[3] - values[9]), abs=1e-4)
    with pytest.raises(BenchError, match="2 tokens long"):
        parity._first_difference(model, prompt, text, [1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "--draft is none"), (["--draft", "ngram", "--temperature", "1"], "--temperature is 1.0")],
)
def test_what_parity_cannot_compare(tiny, capsys, options, message):
    with pytest.raises(SystemExit):
        main(["parity", *tiny, "--dataset", "random", *options])
    assert message in capsys.readouterr().err


def test_a_missing_file_is_told_before_a_model_is_loaded(capsys):
    with pytest.raises(SystemExit):
        main(["parity", "--model", "/nowhere", "--draft", "ngram"])
    assert "--dataset spec-bench needs its file: --data FILE.jsonl" in capsys.readouterr().err


def test_the_help_tells_paritys_own_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["parity", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "from the config alone (default: auto)" in told and "--num-prompts N in all (200)" in told
