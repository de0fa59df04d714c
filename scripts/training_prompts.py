"""Prompts to train the demo model's drafters on, out of five public collections.

    for repo in openai/grade-school-math yizhongw/self-instruct sahil280114/codealpaca \\
            google-research-datasets/natural-questions multi30k/dataset; do
        git clone --depth 1 https://github.com/$repo collections/${repo##*/}
    done
    python scripts/training_prompts.py collections prompts.jsonl --without question.jsonl test.jsonl

Only questions are taken, never answers: the model writes its own. `--without` names benchmarks, none of whose prompts
may be among these. The result is shuffled, so any part of it is a sample of all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LONGEST = 4500  # characters: some 1,000 tokens
TASKS = "self-instruct/data/finetuning/t0_train_50k/data_per_template"
SUMMARIES = r"(cnn_dailymail|xsum|multi_news|samsum|gigaword)_"
READING = r"(adversarial_qa|quoref|duorc|ropes|wiki_hop|dream|cosmos_qa|sciq|quartz|wiki_bio|imdb)_"
TRANSLATE = (  # of captions in German
    "Translate German to English: {}",
    "Translate German to English: {}",
    "Translate to English: {}",
    "Translate this sentence into English: {}",
    "What does this mean in English? {}",
    "Please translate the following German text to English.\n\n{}",
)
MOST = {"summary": 6000, "context": 8000, "task": 5000, "translation": 6000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", type=Path, help="folder with clones of the five repositories")
    parser.add_argument("output", type=Path, help="the .jsonl file to write")
    parser.add_argument("--without", type=Path, nargs="*", default=[], metavar="FILE", help="benchmarks, as .jsonl")
    args = parser.parse_args()
    rng = random.Random(0)
    barred = {_key(text) for path in args.without for text in _benchmark(path)}
    kinds: dict[str, dict[str, str]] = {}
    for kind, prompt in _prompts(args.collections, rng):
        prompt = prompt.strip()
        if 3 < len(prompt) <= LONGEST and not any(_key(line) in barred for line in (prompt, *prompt.splitlines())):
            kinds.setdefault(kind, {})[_key(prompt)] = prompt
    chosen = []
    for kind, unique in kinds.items():
        prompts = list(unique.values())
        rng.shuffle(prompts)
        chosen += [{"prompt": prompt, "category": kind} for prompt in prompts[: MOST.get(kind)]]
    rng.shuffle(chosen)
    args.output.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in chosen), encoding="utf-8")
    print(len(chosen), "prompts:", dict(Counter(one["category"] for one in chosen)))


def _key(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def _records(path: Path) -> Iterator[dict]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _benchmark(path: Path) -> Iterator[str]:
    for record in _records(path):
        yield from record.get("turns") or [record["question"]]


def _prompts(folder: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Pairs of category and prompt."""
    for record in _records(folder / "grade-school-math/grade_school_math/data/train.jsonl"):
        yield "word problem", record["question"]
    for name in ("dev", "efficientqa.dev.1.1", "efficientqa.test.1.1"):
        for record in _records(folder / f"natural-questions/nq_open/NQ-open.{name}.jsonl"):
            question = record["question"]
            yield "question", (question[:1].upper() + question[1:] + "?") if rng.random() < 0.7 else question
    for name in ("code_alpaca_2k", "new_codealpaca"):
        for record in json.loads((folder / f"codealpaca/data/{name}.json").read_text(encoding="utf-8")):
            yield "coding", "\n".join(part for part in (record["instruction"], record["input"]) if part)
    with gzip.open(folder / "dataset/data/task1/raw/train.de.gz", "rt", encoding="utf-8") as file:
        for sentence in file:
            yield "translation", rng.choice(TRANSLATE).format(sentence.strip())
    for record in _records(folder / "self-instruct/human_eval/user_oriented_instructions.jsonl"):
        yield "instruction", "\n".join((record["instruction"], record["instances"][0]["input"]))
    for record in _records(folder / "self-instruct/data/seed_tasks.jsonl"):
        yield "instruction", "\n".join((record["instruction"], record["instances"][0]["input"]))
    for path in sorted((folder / TASKS).glob("*.jsonl")):
        matches = {"summary": SUMMARIES, "context": READING}
        kind = next((kind for kind, pattern in matches.items() if re.match(pattern, path.name)), "task")
        for record in _records(path):
            yield kind, record["prompt"]


if __name__ == "__main__":
    main()
