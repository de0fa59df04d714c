"""The script that gathers the shipped drafters' prompts: what it takes of each collection, and what it leaves out."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

from jaxspec.train.data import read_prompts

SCRIPT = Path(__file__).parents[2] / "scripts" / "training_prompts.py"
TASKS = "self-instruct/data/finetuning/t0_train_50k/data_per_template"


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_prompts_are_gathered_without_those_of_benchmarks(tmp_path):
    files = {
        "grade-school-math/grade_school_math/data/train.jsonl": lines({"question": "Tom has 3 pens. How many?"}),
        "self-instruct/data/seed_tasks.jsonl": lines({"instruction": "Write a poem", "instances": [{"input": ""}]}),
        "self-instruct/human_eval/user_oriented_instructions.jsonl": lines(
            {"instruction": "Sort these", "instances": [{"input": "b, a"}]}
        ),
        f"{TASKS}/xsum_summarize_DOC.jsonl": lines(
            {"prompt": "Summarize: long ago"}, {"prompt": "Summarize: long ago"}
        ),
        f"{TASKS}/quoref_Find_Answer.jsonl": lines({"prompt": "A passage\nWho is it?"}, {"prompt": "x" * 5000}),
        f"{TASKS}/glue_qqp_answer.jsonl": lines({"prompt": "Are these the same?"}),
        "codealpaca/data/code_alpaca_2k.json": json.dumps([{"instruction": "Reverse a list", "input": "[1, 2]"}]),
        "codealpaca/data/new_codealpaca.json": json.dumps([{"instruction": "Add numbers", "input": ""}]),
        "natural-questions/nq_open/NQ-open.dev.jsonl": lines({"question": "who sang it"}, {"question": "who won"}),
        "natural-questions/nq_open/NQ-open.efficientqa.dev.1.1.jsonl": "",
        "natural-questions/nq_open/NQ-open.efficientqa.test.1.1.jsonl": "",
    }
    for name, text in files.items():
        path = tmp_path / "collections" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    german = tmp_path / "collections/dataset/data/task1/raw/train.de.gz"
    german.parent.mkdir(parents=True)
    german.write_bytes(gzip.compress("Ein Hund läuft.\n".encode()))
    (tmp_path / "bench.jsonl").write_text(lines({"turns": ["Who sang it?"]}, {"turns": ["who is it"]}))

    command = [sys.executable, SCRIPT, tmp_path / "collections", tmp_path / "out.jsonl", "--without"]
    subprocess.run([*command, tmp_path / "bench.jsonl"], check=True, capture_output=True)
    prompts = read_prompts(tmp_path / "out.jsonl")
    assert sorted(prompt.category for prompt in prompts) == sorted(
        ["word problem", "instruction", "instruction", "summary", "task", "coding", "coding", "question", "translation"]
    )
    texts = {prompt.category: prompt.turns[0] for prompt in prompts}
    assert texts["question"].lower().rstrip("?") == "who won"
    assert texts["summary"] == "Summarize: long ago"
    assert "Ein Hund läuft." in texts["translation"]
    assert {"Reverse a list\n[1, 2]", "Add numbers"} == {p.turns[0] for p in prompts if p.category == "coding"}
