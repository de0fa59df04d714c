"""GSM8K: what is found in answers and what is right, item by item as lm_eval; questions as lm_eval writes them."""

import json
from pathlib import Path

import pytest

from jaxspec.bench import gsm8k
from jaxspec.bench.__main__ import main
from jaxspec.bench.results import BenchError
from jaxspec.text.prompts import DataError, Prompt

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/gsm8k.json").read_text())
ROWS = [{"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(6)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("item", GOLDEN["items"], ids=lambda item: repr(item["text"]))
def test_extractions_and_scores_are_lm_evals(item):
    for name in ("strict", "flexible"):
        found = gsm8k.EXTRACTIONS[name](item["text"])
        assert [found, gsm8k.right(found, GOLDEN["answer"])] == item[name]


@pytest.mark.parametrize("text, found", [
    (r"so \boxed{72}.", "72"),
    (r"first \boxed{7}, no, \boxed{1,234} dollars, or 8", "1,234"),
    (r"\boxed{x = -5}", "-5"),
    (r"\boxed{42\%}", "42"),
    ("the answer is 72", gsm8k.INVALID),
    (r"\boxed{}", gsm8k.INVALID),
    (r"\boxed{5\text{ apples}}", "5"),
    (r"\boxed {\text{\$1{,}000}}", "$1000"),
    (r"\boxed{7} or \boxed{8", "7"),
])  # fmt: skip
def test_boxes(text, found):
    assert gsm8k.boxed(text) == found


def test_questions_as_lm_eval_writes_them(file):
    asked, shots = gsm8k.questions(file, None, 2)
    assert len(asked) == 4 and gsm8k.text(asked[0], shots) == (
        "Question: 0 + 0?\nAnswer: It is 0.\n#### 0\n\nQuestion: 1 + 1?\nAnswer: It is 2.\n#### 2\n\n"
        "Question: 2 + 2?\nAnswer:"
    )
    assert gsm8k.questions(file, file, 2) == (asked, shots), "no example is asked, whichever file it is from"
    for path in (None, file):
        with pytest.raises(BenchError, match="is one of the 6 examples; lower --num-shots"):
            gsm8k.questions(file, path, 6)
    with pytest.raises(BenchError, match="6 questions, too few for --num-shots 7"):
        gsm8k.questions(file, None, 7)
    file.write_text('{"question": "a", "answer": "4"}')
    with pytest.raises(DataError, match="question 1 doesn't end in ####"):
        gsm8k.questions(file, None, 0)


def test_intervals_of_shares():
    low, high = gsm8k.interval(50, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))  # Wilson's, from tables
    assert gsm8k.interval(0, 20)[1] == pytest.approx(0.1611, abs=1e-4) and gsm8k.interval(0, 20)[0] == pytest.approx(0)
    assert gsm8k.interval(20, 20)[1] == pytest.approx(1)
    shares = [(right, of) for of in range(1, 99) for right in (0, of)]
    assert all(low <= right / of <= high for right, of in shares for low, high in [gsm8k.interval(right, of)])


def test_scores_with_drafts_are_those_without(tiny, file, tmp_path, capsys):
    out, samples = tmp_path / "score.json", tmp_path / "samples.jsonl"
    flags = ["--task", "gsm8k", "--data", str(file), "--num-shots", "2", "--output-len", "12", "--concurrency", "4"]
    assert main(["accuracy", *tiny, "--draft", "ngram", *flags, "--json", str(out), "--samples", str(samples)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["draft"] for row in rows] == ["none", "ngram"]
    assert {row["same"] for row in rows} == {1.0} and {row["prompts"] for row in rows} == {4}
    assert len({(row["strict"], row["flexible"], row["flexible_high"]) for row in rows}) == 1
    assert rows[1]["speedup_low"] <= rows[1]["speedup"] <= rows[1]["speedup_high"] and rows[1]["tokens_per_round"] >= 1
    written = [json.loads(line) for line in samples.read_text().splitlines()]
    assert (
        len(written) == 8
        and written[0]["question"] == "2 + 2?"
        and written[0]["found"].keys() == {"strict", "flexible"}
    )
    assert rows[0]["flexible"] == sum(each["right"]["flexible"] for each in written[:4]) / 4
    assert "flexible" in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [
    ([], "--task gsm8k needs its file: --data test.jsonl"),
    (["--data", "nowhere.jsonl"], "No such file"),
])  # fmt: skip
def test_what_cannot_be_scored(tiny, capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["accuracy", *tiny, "--task", "gsm8k", *flags])
    assert message in capsys.readouterr().err


def test_the_words_of_a_sweep():
    record = gsm8k.sample(3, Prompt(("q",), solution="#### 5"), r"\boxed{5}", ["flexible", "boxed"])
    assert record["right"] == {"flexible": True, "boxed": True} and record["index"] == 3
