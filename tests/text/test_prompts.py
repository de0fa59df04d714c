"""Prompts from files, with the fields that each benchmark's own file has, and what is said of others."""

import gzip
import json
import sys
from types import ModuleType

import pytest

from jaxspec.text.prompts import STUB, DataError, Prompt, in_turn, read

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
    "SPEED-Bench": (
        {"question_id": "a", "category": "coding", "sub_category": "x", "turns": ["Write.", "Again."], "source": "s",
         "src_id": "1", "difficulty": "", "multiturn": True}, ["Write."],
    ),
    "file": ({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}, ["Write."]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_recognised_by_its_fields(name, tmp_path):
    row, wanted = CASES[name]
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    found, prompts = read(file)
    assert found == name and len(prompts) == 2
    assert all(part in prompts[0].turns[0] for part in wanted)
    assert prompts[0].category == row.get("category", name)
    assert prompts[0].turns[1:] == (("Again.",) if "turns" in row else ())
    assert prompts[0].solution == ("#### 2" if name == "GSM8K" else None)


def test_the_variants_of_a_format(tmp_path):
    file = tmp_path / "file.json"
    ask = lambda row: read(file)[1][0].turns[0] if file.write_text(json.dumps([row])) else ""  # noqa: E731
    assert ask({"prompt": "Add.", "code": "", "task_id": 1, "test_imports": [], "test_list": ["t"]}).startswith("Add.")
    assert ask({"instruction": "Say.", "input": "", "output": ""}) == "Say."
    assert ask({"uid": "1", "category": "hard", "turns": [{"content": "Arena."}]}) == "Arena."
    assert ask({"turns": ["DeepSpec's."]}) == "DeepSpec's."
    assert ask({"question_content": "Sum.", "starter_code": ""}) == "Sum."


def test_a_file_may_mix_formats_and_keeps_its_order(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "not the model's"},
        {"role": "user", "content": "Why?"},
    ]
    lines = [
        {"messages": messages, "category": "chat"},
        {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]},
        {"turns": ["C", "D"]},
        {"prompt": "E"},
        {"question": "F"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    name, prompts = read(file)
    assert name == "mine" and {each.category for each in prompts[1:]} == {"mine"}
    assert [each.turns for each in prompts] == [("Hi", "Why?"), ("A",), ("C", "D"), ("E",), ("F",)]
    assert prompts[0].category == "chat" and prompts[0].opening(2) == [messages[i] for i in (0, 1, 3)]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt"])
def test_a_list_is_known_by_its_contents(tmp_path, indent, suffix):
    file = tmp_path / f"share.{suffix}"
    records = [{"conversations": [{"from": "human", "value": "A"}]}, {"prompt": "B", "category": "b"}]
    file.write_text(json.dumps(records, indent=indent))
    assert [(each.turns, each.category) for each in read(file)[1]] == [(("A",), "ShareGPT"), (("B",), "b")]


def test_chats_have_parts_calls_and_developers_and_joined_tables_have_nulls(tmp_path):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    calls = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    chat = [{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}, calls]
    lines = [
        {"messages": chat, "prompt": None},
        {"prompt": chat[:2]},  # as TRL and verl have it
        {"messages": None, "conversations": None, "prompt": "A", "category": None},
        {"turns": ["B"], "category": "c", "sub_category": None},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read(file)[1]
    assert [(each.system, each.turns) for each in prompts[:2]] == [("Be.", ("Hi\nyou",))] * 2
    assert [each.turns for each in prompts[2:]] == [("A",), ("B",)]


def test_lines_end_at_newlines_alone(tmp_path):
    """U+0085, U+2028 and others, at which Python's `splitlines` cuts, stand in JSON strings as they are."""
    text = "a\x0b\x0c\x1c\x85b\u2028c\u2029d"
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" + '{"prompt": "e"}')
    assert [each.turns for each in read(tmp_path / "x.jsonl")[1]] == [(text,), ("e",)]


def test_any_other_text_is_a_prompt_a_line(tmp_path):
    words = ["[INST] a prompt of words", "[1, 2] is a list?", "{x}"]
    (tmp_path / "words.txt").write_text("\r\n\n".join(words), newline="")
    assert [each.turns[0] for each in read(tmp_path / "words.txt")[1]] == words


def test_a_gzipped_file_and_categories_in_turn(tmp_path):
    file = tmp_path / "q.jsonl.gz"
    rows = [{"category": c, "turns": [f"{c}{i}"]} for c, n in (("qa", 3), ("math", 1)) for i in range(n)]
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    name, prompts = read(file)
    (tmp_path / "q.jsonl").write_bytes(file.read_bytes())
    assert read(tmp_path / "q.jsonl") == (name, prompts), "its first bytes say that it is gzipped"
    turns = lambda some: [each.turns[0] for each in some]  # noqa: E731
    assert name == "q" and turns(prompts) == ["qa0", "qa1", "qa2", "math0"]
    assert turns(in_turn(prompts)) == ["qa0", "math0", "qa1", "qa2"]
    assert turns(in_turn(prompts, ["math"])) == ["math0"]
    with pytest.raises(DataError, match="--category maths is in no file of --data; there are math, qa"):
        in_turn(prompts, ["math", "maths"])


@pytest.mark.parametrize("name, data, said", [
    ("a.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, "while decompressing"),
    ("a.json", b"[" * 99999, "begins as a JSON list does, and isn't JSON: maximum recursion"),
    ("a.jsonl", b'{"prompt":' * 99999, "line 1 isn't JSON: maximum recursion"),
    ("a.jsonl", rb'{"prompt":"\ud800"}', "line 1 is not in the format .* surrogates not allowed"),
])  # fmt: skip
def test_files_that_are_broken(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        read(tmp_path / name)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, text in (("a.jsonl", '{"prompt": "a"}'), ("a.txt", "a"), ("a.json", '[{"prompt": "a"}]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [each.turns for each in read(tmp_path / name)[1]] == [("a",)]


def test_conversations_that_begin_with_an_answer_are_skipped(tmp_path):
    file = tmp_path / "sharegpt.json"
    ask, answer = {"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}
    told = {"from": "system", "value": "Be."}
    mute = [{"from": "human", "value": ""}, answer]
    chats = [], [answer, ask], mute, [told], [told, ask], [ask, answer]
    file.write_text(json.dumps([{"conversations": each} for each in chats]))
    assert [(each.turns, each.system) for each in read(file, "sharegpt")[1]] == [(("Hi?",), "Be."), (("Hi?",), None)]
    file.write_text('{"conversations": []}')
    with pytest.raises(DataError, match="has no prompts"):
        read(file)


def test_parquet_is_read_where_pyarrow_is(tmp_path, monkeypatch):
    rows = [{"turns": ["Write."], "category": "coding", "sub_category": "x"}]
    table, fake = type("Table", (), {"to_pylist": lambda self: rows}), ModuleType("pyarrow")
    fake.ArrowException, fake.parquet = ValueError, ModuleType("parquet")
    fake.parquet.read_table = lambda path: table()
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    file = tmp_path / "test.parquet"
    assert read(file) == ("SPEED-Bench", [Prompt(("Write.",), category="coding")])
    rows.append({"turns": [f"{STUB} USING SPECDEC_BENCH"], "category": "qa", "sub_category": "x"})
    with pytest.raises(DataError, match=r"row 2 is a stub of SPEED-Bench's: .*prepare_data\.py"):
        read(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs pyarrow: install it with pip install pyarrow"):
        read(file)


@pytest.mark.parametrize("data, message", [
    (b'{"other": 1}\n', "line 1 has the fields other, which is no known format. Known .*gsm8k: question, answer"),
    (b"[1, 2]", "entry 1 must be a JSON object, got int"),
    (b"[", "begins as a JSON list does, and isn't JSON"),
    (b"{", "line 1 isn't JSON"),
    (b"not json", "line 1 isn't JSON"),
    (b"\xff\xfe", "can't decode"),
    (b"\n", "has no prompts"),
    (b'{"turns": []}', "line 1: turns has no words of the user's"),
    (b'{"turns": 3}', "line 1 is not in the format turns: it has no turns as it should .TypeError"),
    (b'{"question": "a", "answer": ""}\n\n{"question": 1, "answer": ""}', "line 3 is not in the format GSM8K: .*not 1"),
    (b'{"question": "a", "answer": ""}\n7', "line 2 must be a JSON object, got int"),
    (b'{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: messages has no words of the user's"),
    (b'{"messages": [{"role": "user"}]}', "line 1 is not in the format messages"),
    (b'{"prompt": null, "messages": null}', "line 1 has the fields none, which is no known format"),
    (b'{"prompt": [{"role": "assistant", "content": "x"}]}', "line 1: prompt has no words of the user's"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "text is wanted, not .*image_url"),
    (b'{"messages": "x"}', "line 1 is not in the format messages"),
    (b'{"messages": [{"role": "user", "content": [1]}]}', r"text is wanted, not \[1\]"),
])  # fmt: skip
def test_a_file_that_is_none_of_them(data, message, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=f"(?s)--data .*x.jsonl.*{message}"):
        read(tmp_path / "x.jsonl")


def test_a_format_that_is_asked_for(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"question": "a GSM8K line"}')
    with pytest.raises(DataError, match="line 1 is not in the format spec-bench: it must have turns, and has question"):
        read(file, "spec-bench")
