"""Questions from files in the formats in which benchmarks are published, recognised by their fields.

A file holds one JSON object a line, or one list of them, and may be gzipped. The question is what the file says: only
HumanEval's bare functions get a sentence, and where a question has several parts, they are joined. Of several turns the
first is asked, as DeepSpec's evaluation does.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench.results import BenchError

Line = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A question, and its category if the file has any."""

    text: str
    category: str | None = None


@dataclass(frozen=True)
class Format:
    """`title`: the benchmark's name in tables; None if files of several have this format. `fields`: all that a line has
    in this format and in none before it. `text`: the question of a line; None: it has none, and is skipped."""

    title: str | None
    fields: tuple[str, ...]
    text: Callable[[Line], str | None]


def _human_eval(line: Line) -> str:
    return f"Complete this Python function, and answer with its whole code:\n\n```python\n{line['prompt']}\n```"


def _mbpp(line: Line) -> str:
    tests = "\n".join(line["test_list"])
    task = line["text"] if "text" in line else line["prompt"]  # the sanitized file calls it prompt
    return f"{task}\nYour code should pass these tests:\n\n{tests}"


def _live_code_bench(line: Line) -> str:
    start = line.get("starter_code")
    return line["question_content"] + (f"\n\nBegin with this code:\n\n```python\n{start}\n```" if start else "")


def _alpaca(line: Line) -> str:
    return f"{line['instruction']}\n\n{line['input']}" if line.get("input") else line["instruction"]


def _first_turn(line: Line) -> str:
    first = line["turns"][0]
    return first["content"] if isinstance(first, dict) else first  # Arena-Hard's are objects


def _first_of_a_conversation(line: Line) -> str | None:
    """ShareGPT's file also has conversations without an answer, or that go on from a page before: they are skipped."""
    turns = line["conversations"]
    return turns[0]["value"] if len(turns) > 1 and turns[0]["from"] in ("human", "user") else None


FORMATS = {
    "humaneval": Format("HumanEval", ("task_id", "prompt", "entry_point"), _human_eval),
    "mbpp": Format("MBPP", ("task_id", "test_list"), _mbpp),
    "livecodebench": Format("LiveCodeBench", ("question_content",), _live_code_bench),
    "spec-bench": Format(None, ("turns",), _first_turn),  # and MT-Bench, Arena-Hard, DeepSpec's eval_datasets
    "sharegpt": Format("ShareGPT", ("conversations",), _first_of_a_conversation),
    "alpaca": Format("Alpaca", ("instruction",), _alpaca),
    "math": Format("MATH", ("problem",), lambda line: line["problem"]),
    "gsm8k": Format("GSM8K", ("question", "answer"), lambda line: line["question"]),
}


def read(path: Path, format_name: str | None = None) -> tuple[str, list[Question]]:
    """The name of a file's benchmark (else the file's own), and its questions, one of each category in turn, so that
    any number of them is spread over all. `format_name` None recognises the format.

    **Raises:** `BenchError` for a file that is missing, has no questions, or is in no known format.
    """
    lines = _lines(path)
    if not lines:
        raise BenchError(f"--data {path} has no questions")
    found = FORMATS[format_name] if format_name else _recognise(path, lines[0])
    categories: dict[str | None, list[Question]] = defaultdict(list)
    for number, line in enumerate(lines, 1):
        try:
            text, category = found.text(line), line.get("category") if found.title is None else None
            if text is None:
                continue
            if not isinstance(text, str) or not isinstance(category, str | None):
                raise TypeError("a question or a category isn't text")
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            name = format_name or found.title or "spec-bench"
            raise BenchError(
                f"--data {path} is not a {name} file: entry {number} has no {', '.join(found.fields)} as it should "
                f"({type(error).__name__}: {error})"
            ) from error
        categories[category].append(Question(text, category))
    if not categories:
        raise BenchError(f"--data {path} has no questions")
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*categories.values()))
    return found.title or path.name.split(".")[0], [question for question in in_turn if question is not None]


def _lines(path: Path) -> list[Line]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BenchError(f"--data {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise BenchError(f"--data {path} holds no JSON objects, one a line or in a list: {error}") from error


def _recognise(path: Path, line: Line) -> Format:
    fields = set(line) if isinstance(line, dict) else set()
    for found in FORMATS.values():
        if fields >= set(found.fields):
            return found
    known = "; ".join(f"{name}: {', '.join(found.fields)}" for name, found in FORMATS.items())
    raise BenchError(
        f"--data {path} has the fields {', '.join(sorted(fields)) or 'of no object'}, which is no known format. Known "
        f"formats have the fields {known}"
    )
