"""Prompts to train the demo model's drafters on, out of ten public collections.

    for repo in openai/grade-school-math yizhongw/self-instruct sahil280114/codealpaca \\
            google-research-datasets/natural-questions multi30k/dataset nelson-liu/lost-in-the-middle \\
            GSA/digitalgov.gov 18F/18f.gsa.gov UniversalDependencies/UD_German-GSD \\
            UniversalDependencies/UD_German-PUD; do
        git clone --depth 1 https://github.com/$repo collections/${repo##*/}
    done
    python scripts/training_prompts.py collections prompts.jsonl --without question.jsonl test.jsonl

Only questions and texts to ask about are taken, never answers: the model writes its own. T0's prompts have the same few
hundred articles and passages in many wordings, so longer texts come from elsewhere as well: passages of Wikipedia with
a question, articles by offices of the US government, German sentences of news. `--without` names benchmarks, none of
whose prompts may be among these. The result is shuffled, so any part of it is a sample of all.
"""

from __future__ import annotations

import argparse
import gzip
import html
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
TRANSLATE = (  # from German
    "Translate German to English: {}",
    "Translate German to English: {}",
    "Translate to English: {}",
    "Translate this sentence into English: {}",
    "What does this mean in English? {}",
    "Please translate the following German text to English.\n\n{}",
)
ABOUT = {  # an article
    "summary": (
        "Summarize: {}",
        "Summarize: {}",
        "Summarize the following article.\n\n{}",
        "{}\n\nSummarize this in a few sentences.",
        "{}\n\nTL;DR:",
        "Write a short summary of this text for someone who is in a hurry:\n\n{}",
    ),
    "extraction": (
        "{}\n\nWhat are the main points?",
        "{}\n\nList the people and organizations that are mentioned above.",
        "What is this text about? Answer in one sentence.\n\n{}",
        "Extract all numbers and dates from this text, and say what each of them stands for:\n\n{}",
        "Read this:\n\n{}\n\nWhat should a reader remember of it, and why?",
        "Suggest a title for the following text.\n\n{}",
    ),
}
MOST = {"task": 5000, "translation": 9000}
MOST_OF_T0 = {"summary": 6000, "context": 8000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", type=Path, help="folder with clones of the ten repositories")
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
    return map(json.loads, _lines(path))


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def _benchmark(path: Path) -> Iterator[str]:
    for record in _records(path):
        yield from record.get("turns") or [record["question"]]


def _prompts(folder: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Pairs of category and prompt."""
    for record in _records(folder / "grade-school-math/grade_school_math/data/train.jsonl"):
        yield "word problem", record["question"]
    for name in ("dev", "efficientqa.dev.1.1", "efficientqa.test.1.1"):
        for record in _records(folder / f"natural-questions/nq_open/NQ-open.{name}.jsonl"):
            yield "question", _asked(record["question"], rng)
    for name in ("code_alpaca_2k", "new_codealpaca"):
        for record in json.loads((folder / f"codealpaca/data/{name}.json").read_text(encoding="utf-8")):
            yield "coding", "\n".join(part for part in (record["instruction"], record["input"]) if part)
    for sentence in _german(folder, rng):
        yield "translation", rng.choice(TRANSLATE).format(sentence)
    for text in _articles(folder):
        for kind in ("summary", rng.choice(("summary", "extraction")), "extraction"):
            yield kind, rng.choice(ABOUT[kind]).format(_beginning(text, rng.randint(800, LONGEST - 200)))
    for prompt in _passages(folder, rng):
        yield "passages", prompt
    for record in _records(folder / "self-instruct/human_eval/user_oriented_instructions.jsonl"):
        yield "instruction", "\n".join((record["instruction"], record["instances"][0]["input"]))
    for record in _records(folder / "self-instruct/data/seed_tasks.jsonl"):
        yield "instruction", "\n".join((record["instruction"], record["instances"][0]["input"]))
    for kind, prompts in _tasks(folder).items():
        rng.shuffle(prompts)
        yield from ((kind, prompt) for prompt in prompts[: MOST_OF_T0.get(kind)])


def _tasks(folder: Path) -> dict[str, list[str]]:
    """T0's prompts by category, each once and none too long."""
    kinds: dict[str, dict[str, str]] = {}
    for path in sorted((folder / TASKS).glob("*.jsonl")):
        matches = {"summary": SUMMARIES, "context": READING}
        kind = next((kind for kind, pattern in matches.items() if re.match(pattern, path.name)), "task")
        for record in _records(path):
            if len(record["prompt"]) <= LONGEST:
                kinds.setdefault(kind, {})[_key(record["prompt"])] = record["prompt"]
    return {kind: list(prompts.values()) for kind, prompts in kinds.items()}


def _german(folder: Path, rng: random.Random) -> Iterator[str]:
    """Sentences of news and encyclopedias, twice, and for the rest captions, one or several of them."""
    lines = [line for path in sorted(folder.glob("UD_German-*/*.conllu")) for line in _lines(path)]
    sentences = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    yield from sentences * 2
    with gzip.open(folder / "dataset/data/task1/raw/train.de.gz", "rt", encoding="utf-8") as file:
        captions = [line.strip() for line in file]
    rng.shuffle(captions)
    for start in range(0, min(3 * (MOST["translation"] - 2 * len(sentences)), len(captions)), 3):
        yield " ".join(captions[start : start + rng.choice((1, 1, 2, 3))])


def _articles(folder: Path) -> Iterator[str]:
    """Articles in Markdown, as plain text."""
    paths = [
        *(folder / "digitalgov.gov/content/news").rglob("*.md"),
        *(folder / "18f.gsa.gov/content/posts").rglob("*.md"),
    ]
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8").partition("---\n")[2].partition("---\n")[2]
        text = re.sub(
            r"\{\{.*?\}\}|\{%.*?%\}|<[^>]*>|!\[[^]]*\]\([^)]*\)", "", text, flags=re.DOTALL
        )  # templates, images
        text = html.unescape(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))  # of links, the words
        text = re.sub(r"[ \t]+", " ", re.sub(r"\n\s*\n", "\n\n", text)).strip()
        if len(text) > 600:
            yield text


def _beginning(text: str, most: int) -> str:
    """Whole paragraphs, or else as many characters."""
    return text[:most].rpartition("\n\n")[0] or text[:most] if len(text) > most else text


def _passages(folder: Path, rng: random.Random) -> Iterator[str]:
    """Questions behind the passage of Wikipedia that answers them, and some that don't."""
    with gzip.open(folder / "lost-in-the-middle/qa_data/nq-open-oracle.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    passages = [f"{r['ctxs'][0]['title']} {r['ctxs'][0]['text']}" for r in records]
    for record, passage in zip(records, passages, strict=True):
        for others in (rng.randint(0, 3), rng.randint(4, 7)):
            shown = [passage, *rng.sample(passages, min(others, len(passages)))]
            rng.shuffle(shown)
            yield "\n".join([*shown, _asked(record["question"], rng)])[-LONGEST:]


def _asked(question: str, rng: random.Random) -> str:
    """Write a question as people write it, or as they type it."""
    return (question[:1].upper() + question[1:] + "?") if rng.random() < 0.7 else question


if __name__ == "__main__":
    main()
