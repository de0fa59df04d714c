"""Questions from files, with the fields that each benchmark's own file has."""

import gzip
import json

import pytest

from jaxspec.bench import questions
from jaxspec.bench.results import BenchError

CODE = "def add(a, b):\n"
CASES = {
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": CODE, "canonical_solution": "", "test": "", "entry_point": "add"},
        ["Python function", f"```python\n{CODE}"],
    ),
    "MBPP": (
        {"text": "Add two.", "code": "", "task_id": 1, "test_setup_code": "", "test_list": ["assert a", "assert b"],
         "challenge_test_list": []},
        ["Add two.", "assert a\nassert b"],
    ),
    "LiveCodeBench": (
        {"question_title": "T", "question_content": "Sum them.", "platform": "x", "question_id": "1", "contest_id": "2",
         "contest_date": "", "starter_code": CODE, "difficulty": "easy", "public_test_cases": "[]",
         "private_test_cases": "", "metadata": "{}"},
        ["Sum them.", f"```python\n{CODE}"],
    ),
    "MATH": (
        {"problem": "1+1?", "solution": "2", "answer": "2", "subject": "Algebra", "unique_id": "a"}, ["1+1?"],
    ),
    "GSM8K": ({"question": "1+1?", "answer": "#### 2"}, ["1+1?"]),
    "Alpaca": ({"instruction": "Name it.", "input": "A cat", "output": ""}, ["Name it.\n\nA cat"]),
    "ShareGPT": (
        {"id": "a", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]}, ["Hi?"],
    ),
    "file": ({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}, ["Write."]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_recognised_by_its_fields(name, tmp_path):
    row, wanted = CASES[name]
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    found, asked = questions.read(file)
    assert found == name and len(asked) == 2
    assert all(part in asked[0].text for part in wanted)
    assert asked[0].category == ("writing" if name == "file" else None)


def test_the_variants_of_a_format(tmp_path):
    file = tmp_path / "file.json"
    ask = lambda row: questions.read(file)[1][0].text if file.write_text(json.dumps([row])) else ""  # noqa: E731
    assert ask({"prompt": "Add.", "code": "", "task_id": 1, "test_imports": [], "test_list": ["t"]}).startswith("Add.")
    assert ask({"instruction": "Say.", "input": "", "output": ""}) == "Say."
    assert ask({"uid": "1", "category": "hard", "turns": [{"content": "Arena."}]}) == "Arena."
    assert ask({"turns": ["DeepSpec's."]}) == "DeepSpec's."
    assert ask({"question_content": "Sum.", "starter_code": ""}) == "Sum."


def test_a_gzipped_file_and_categories_in_turn(tmp_path):
    file = tmp_path / "q.jsonl.gz"
    rows = [{"category": c, "turns": [f"{c}{i}"]} for c, n in (("qa", 3), ("math", 1)) for i in range(n)]
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    name, asked = questions.read(file)
    assert name == "q" and [each.text for each in asked] == ["qa0", "math0", "qa1", "qa2"]


def test_conversations_without_a_question_and_an_answer_are_skipped(tmp_path):
    file = tmp_path / "sharegpt.json"
    ask, answer = {"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}
    file.write_text(json.dumps([{"conversations": each} for each in ([], [answer, ask], [ask], [ask, answer])]))
    assert [each.text for each in questions.read(file, "sharegpt")[1]] == ["Hi?"]
    file.write_text('{"conversations": []}')
    with pytest.raises(BenchError, match="has no questions"):
        questions.read(file)


@pytest.mark.parametrize("data, message", [
    (b'{"other": 1}\n', "has the fields other, which is no known format. Known formats .*gsm8k: question, answer"),
    (b"[1, 2]", "has the fields of no object"),
    (b"not json", "holds no JSON objects"),
    (b"\xff\xfe", "can't decode"),
    (b"\n", "has no questions"),
    (b'{"turns": []}', "is not a spec-bench file: entry 1 .*IndexError"),
    (b'{"question": "a", "answer": ""}\n{"question": 1, "answer": ""}', "not a GSM8K file: entry 2 .*isn't text"),
    (b'{"question": "a", "answer": ""}\n7', "not a GSM8K file: entry 2 .*TypeError"),
])  # fmt: skip
def test_a_file_that_is_none_of_them(data, message, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(BenchError, match=f"(?s)--data .*x.jsonl.*{message}"):
        questions.read(tmp_path / "x.jsonl")
