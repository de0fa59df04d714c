"""Prompts from files, in the formats in which benchmarks and chats are published, recognised by their fields.

A file holds one JSON object a line, or one list of them, gzipped or not; or it is SPEED-Bench's Parquet; any other text
is a prompt a line. A prompt is what the file says: only HumanEval's bare functions get a sentence, and where a question
has several parts, they are joined. Answers in a file are never taken for a model's own.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Message = dict[str, str]

USER, SYSTEM = ("user", "human"), ("system", "developer")
GZIP = b"\x1f\x8b"  # such a file begins with
NOT_JSON = ValueError, RecursionError  # the second: nested too deeply
# What SPEED-Bench has in place of texts whose licences don't let it contain them.
STUB = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class DataError(ValueError):
    """A file of prompts that can't be read. Names the file and the entry."""


@dataclass(frozen=True)
class Prompt:
    """A conversation without its answers: an optional system message, and the user's turns.

    `solution`: the answer that a benchmark's file gives, to score others by.
    """

    turns: tuple[str, ...]
    system: str | None = None
    category: str = "all"
    solution: str | None = None

    def opening(self, turns: int = 1) -> list[Message]:
        """The messages before the first answer, up to so many of the user's turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [{"role": "user", "content": turn} for turn in self.turns[:turns]]


@dataclass(frozen=True)
class Format:
    """`title`: the benchmark's name in tables; None if files of several have this format. `fields`: all that a line has
    in this format and in none before it. `turns`: a line's turns, or what a `Prompt` has; None: it is skipped."""

    title: str | None
    fields: tuple[str, ...]
    turns: Callable[[Line], str | list[str] | Prompt | None]


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


def _turns(line: Line) -> list[str]:
    return [turn["content"] if isinstance(turn, dict) else turn for turn in line["turns"]]  # Arena-Hard's are objects


def _text(content: Any) -> Any:
    """A message's content, its text parts joined as the server joins them."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _said(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Who said what, in OpenAI's names or ShareGPT's; None for answers, which may be calls without a text."""
    said = []
    for each in messages:
        role, text = each.get("role") or each["from"], None
        if role in USER + SYSTEM:
            text = _text(each["content"] if "content" in each else each["value"])
        said.append((role, text))
    return said


def _chat(said: list[tuple[str, Any]]) -> Prompt:
    turns = tuple(text for role, text in said if role in USER and text not in ("", None))
    return Prompt(turns, next((text for role, text in said if role in SYSTEM), None))


def _conversation(line: Line) -> Prompt | None:
    """ShareGPT's file also has conversations without the user's words, or that go on from a page before: they are
    skipped."""
    said = _said(line["conversations"])
    first = next((role for role, _ in said if role not in SYSTEM), None)
    chat = _chat(said)
    return chat if first in USER and chat.turns else None


def _asked(line: Line) -> str | list[str] | Prompt:
    """A `prompt` may be a chat, as in TRL's and verl's files."""
    prompt = line["prompt"]
    chat = isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)
    return _chat(_said(prompt)) if chat else prompt


FORMATS = {
    "humaneval": Format("HumanEval", ("task_id", "prompt", "entry_point"), _human_eval),
    "mbpp": Format("MBPP", ("task_id", "test_list"), _mbpp),
    "livecodebench": Format("LiveCodeBench", ("question_content",), _live_code_bench),
    "speed-bench": Format("SPEED-Bench", ("turns", "category", "sub_category"), _turns),
    "spec-bench": Format(None, ("turns",), _turns),  # and MT-Bench, Arena-Hard, DeepSpec's eval_datasets
    "messages": Format(None, ("messages",), lambda line: _chat(_said(line["messages"]))),  # OpenAI's
    "sharegpt": Format("ShareGPT", ("conversations",), _conversation),
    "alpaca": Format("Alpaca", ("instruction",), _alpaca),
    "math": Format("MATH", ("problem",), lambda line: line["problem"]),
    "gsm8k": Format("GSM8K", ("question", "answer"), lambda line: line["question"]),
    "question": Format(None, ("question",), lambda line: line["question"]),
    "prompt": Format(None, ("prompt",), _asked),
}


def read(path: Path, format_name: str | None = None, flag: str = "--data") -> tuple[str, list[Prompt]]:
    """The name of a file's benchmark (else the file's own), and its prompts in the file's order. `format_name` None
    recognises each entry's format. A prompt without a category has the name for one.
    `flag`: which names the file, for errors.

    **Raises:** `DataError` for a file that is missing, has no prompts, or an entry in no known format.
    """
    name, title, prompts, given = path.name.split(".")[0], None, [], f"{flag} {path}"
    for place, entry in _entries(path, given):
        where = f"{given}, {place}"
        if isinstance(entry, str):
            prompts.append(Prompt((entry,), category=name))
            continue
        found = _recognise(entry, where, format_name)
        prompt, title = _prompt(found, entry, where, format_name), title or found.title or name
        if prompt is not None:
            prompts.append(replace(prompt, category=str(entry.get("category") or title)))
    if not prompts:
        raise DataError(f"{given} has no prompts")
    return title or name, prompts


def in_turn(prompts: Sequence[Prompt], only: Sequence[str] = ()) -> list[Prompt]:
    """One prompt of each category in turn, so that any number of them is spread over all; of the categories in `only`,
    if there are any.

    **Raises:** `DataError` for a category that no prompt has.
    """
    categories: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        categories[prompt.category].append(prompt)
    if unknown := [name for name in only if name not in categories]:
        raise DataError(f"--category {unknown[0]} is in no file of --data; there are {', '.join(sorted(categories))}")
    chosen = [categories[name] for name in only or categories]
    return [prompt for prompt in itertools.chain.from_iterable(itertools.zip_longest(*chosen)) if prompt is not None]


def _entries(path: Path, given: str) -> Iterator[tuple[str, Any]]:
    """Each entry of a file, an object or a line of text, and its place. `given`: the flag and the file, for errors."""
    if path.suffix == ".parquet":
        yield from ((f"row {number}", row) for number, row in enumerate(_rows(path, given), 1))
        return
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{given}: {getattr(error, 'strerror', None) or error}") from error
    whole = text.replace("\r\n", "\n").split("\n")  # other separators that Python knows may stand in a JSON string
    lines = [(f"line {number}", line) for number, line in enumerate(whole, 1) if line.strip()]
    first = lines[0][1].strip() if lines else ""
    named = Path(path.name.removesuffix(".gz")).suffix in (".json", ".jsonl")
    if first.startswith("[") and (named or first in ("[", "[{") or _object(text)):
        try:
            yield from ((f"entry {number}", entry) for number, entry in enumerate(json.loads(text), 1))
        except NOT_JSON as error:
            raise DataError(f"{given} begins as a JSON list does, and isn't JSON: {error}") from error
    elif named or first == "{" or _object(first):
        for place, line in lines:
            try:
                yield place, json.loads(line)
            except NOT_JSON as error:
                raise DataError(f"{given}, {place} isn't JSON: {error}. Give an object a line, or a list") from error
    else:
        yield from lines


def _object(text: str) -> bool:
    """Whether a text is a JSON object, or a list of them."""
    try:
        value = json.loads(text)
    except NOT_JSON:
        return False
    return isinstance(value[0] if isinstance(value, list) and value else value, dict)


def _rows(path: Path, given: str) -> list[Line]:
    """**Raises:** `DataError` without the library that reads Parquet, or for a file that it can't read."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{given}: reading Parquet needs pyarrow: install it with pip install pyarrow") from error
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError(f"{given}: {getattr(error, 'strerror', None) or error}") from error


def _recognise(line: Any, where: str, format_name: str | None) -> Format:
    if not isinstance(line, dict):
        raise DataError(f"{where} must be a JSON object, got {type(line).__name__}")
    for name, found in FORMATS.items():
        here = line.keys() >= set(found.fields) and line[found.fields[0]] is not None  # joined tables have nulls
        if here and name == (format_name or name):
            return found
    if format_name is not None:
        fields = ", ".join(FORMATS[format_name].fields)
        raise DataError(f"{where} is not in the format {format_name}: it must have {fields}, and has {_names(line)}")
    known = "; ".join(f"{name}: {', '.join(found.fields)}" for name, found in FORMATS.items())
    raise DataError(f"{where} has the fields {_names(line)}, which is no known format. Known formats have {known}")


def _names(line: Line) -> str:
    return ", ".join(sorted(name for name, value in line.items() if value is not None)) or "none"


def _prompt(found: Format, line: Line, where: str, format_name: str | None) -> Prompt | None:
    try:
        read = found.turns(line)
        if read is None or isinstance(read, Prompt):
            prompt = read
        else:
            solution = line.get("answer") if "question" in line else None
            turns = tuple(read) if isinstance(read, list) else (read,)
            prompt = Prompt(turns, solution=solution if isinstance(solution, str) else None)
        texts = () if prompt is None else (*prompt.turns, prompt.system or "", prompt.solution or "")
        if bad := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"text is wanted, not {bad[0]!r}")
        "".join(texts).encode()  # half a surrogate pair is no text
    except (KeyError, TypeError, IndexError, AttributeError, UnicodeEncodeError) as error:
        name = format_name or found.title or found.fields[0]
        raise DataError(
            f"{where} is not in the format {name}: it has no {', '.join(found.fields)} as it should "
            f"({type(error).__name__}: {error})"
        ) from error
    if prompt is not None and not any(prompt.turns):
        raise DataError(f"{where}: {found.fields[0]} has no words of the user's")
    if any(STUB in text for text in texts):
        raise DataError(
            f"{where} is a stub of SPEED-Bench's: fill the file with its texts by ModelOpt's "
            "examples/specdec_bench/prepare_data.py first"
        )
    return prompt
