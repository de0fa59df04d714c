"""The script that gathers the shipped drafters' prompts: what it takes of each collection, and what it leaves out."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from jaxspec.text.prompts import read

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
        "UD_German-GSD/de_gsd-ud-dev.conllu": "# sent_id = 1\n# text = Es regnet in Bonn.\n1\tEs\tes\n\n",
    }
    articles = {
        "digitalgov.gov/content/news/2015/02/a.md": "---\ntitle: A\n---\n"
        + "{{< img >}}See [the list](http://b.gov) &amp; more. "
        + "An office of the government has news. " * 20,
        "18f.gsa.gov/content/posts/short.md": "---\ntitle: B\n---\nToo short to ask about.",
    }
    for name, text in files.items() | articles.items():
        path = tmp_path / "collections" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    passages = tmp_path / "collections/lost-in-the-middle/qa_data/nq-open-oracle.jsonl.gz"
    passages.parent.mkdir(parents=True)
    records = [
        {"question": question, "ctxs": [{"title": "Song", "text": f"{singer} sang it."}]}
        for question, singer in (("who sang the song", "Ann"), ("who sang it", "Bob"))
    ]
    passages.write_bytes(gzip.compress(lines(*records).encode()))
    german = tmp_path / "collections/dataset/data/task1/raw/train.de.gz"
    german.parent.mkdir(parents=True)
    german.write_bytes(gzip.compress("Ein Hund läuft.\n".encode()))
    (tmp_path / "bench.jsonl").write_text(lines({"turns": ["Who sang it?"]}, {"turns": ["who is it"]}))

    command = [sys.executable, SCRIPT, tmp_path / "collections", tmp_path / "out.jsonl", "--without"]
    subprocess.run([*command, tmp_path / "bench.jsonl"], check=True, capture_output=True)
    prompts = read(tmp_path / "out.jsonl")[1]
    kinds = Counter(prompt.category for prompt in prompts)
    about = kinds.pop("summary") - 1 + kinds.pop("extraction")  # of one article, in different words or the same
    assert 2 <= about <= 3
    german = kinds.pop("translation")  # a sentence twice, in different words or the same, and a caption
    assert 2 <= german <= 3
    assert kinds == {
        "word problem": 1,
        "instruction": 2,
        "task": 1,
        "coding": 2,
        "question": 1,
        "passages": 2,
    }
    texts = {
        kind: [prompt.turns[0] for prompt in prompts if prompt.category == kind] for kind in (*kinds, "translation")
    }
    assert texts["question"][0].lower().rstrip("?") == "who won"
    assert {"Reverse a list\n[1, 2]", "Add numbers"} == set(texts["coding"])
    translated = "\n".join(texts["translation"])
    assert "Ein Hund läuft." in translated and "Es regnet in Bonn." in translated
    everything = "\n".join(prompt.turns[0] for prompt in prompts)
    assert (
        "Summarize: long ago" in everything and "See the list & more." in everything and "Too short" not in everything
    )
    for text in texts["passages"]:
        assert "Song Ann sang it." in text and text.splitlines()[-1].lower().rstrip("?") == "who sang the song"
