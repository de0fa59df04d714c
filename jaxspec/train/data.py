"""Training data: prompts from files, and texts with the target's answers, as token ids.

A file of texts has one JSON object a line: `{"tokens": [ids], "answers": [[begin, end], ...], "category": "..."}`.
The target wrote the tokens within `answers`. Only these are trained on, since only these are drafted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

HELD_OUT = 50  # one text in so many is kept for evaluation
MOST_HELD_OUT = 200
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # ShareGPT's names
_SHAPES = '"messages", "conversations", "turns", "prompt" or "question"'


class TrainError(ValueError):
    """Data, options or an output folder that can't be trained with. Names the file and line, or the flag."""


@dataclass(frozen=True)
class Prompt:
    """A conversation without its answers: an optional system message, and the user's turns."""

    turns: tuple[str, ...]
    system: str | None = None
    category: str = "all"

    def opening(self, turns: int) -> list[dict[str, str]]:
        """The messages before the first answer, up to so many of the user's turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [{"role": "user", "content": turn} for turn in self.turns[:turns]]


@dataclass(frozen=True, eq=False)
class Text:
    """A conversation with the target's answers. `answers` are [begin, end) of what the target wrote."""

    tokens: Int[np.ndarray, " n"]
    answers: tuple[tuple[int, int], ...]
    category: str = "all"

    def line(self) -> str:
        record = {"tokens": self.tokens.tolist(), "answers": self.answers, "category": self.category}
        return json.dumps(record, separators=(",", ":")) + "\n"


def read_prompts(path: Path) -> list[Prompt]:
    """Conversations of a `.jsonl` file, or of a `.json` one with a list of them; or one prompt a line of any other.

    A record has `messages` (OpenAI's) or `conversations` (ShareGPT's), whose assistant turns are dropped, or `turns`
    (Spec-Bench's), or a single `prompt` or `question`. Its `category` is kept; without one, it is the file's name.

    **Raises:** `TrainError` naming file and line.
    """
    if path.suffix == ".json":
        return [_prompt(record, path.stem, f"{path}, record {number}") for number, record in _array(path)]
    lines = _lines(path)
    if path.suffix == ".jsonl":
        return [_prompt(record, path.stem, f"{path}, line {number}") for number, record in _records(path, lines)]
    prompts = [line for _, line in lines]
    if prompts and _is_json(prompts[0]):
        raise TrainError(
            f"{path} begins as JSON does, and would be read as a prompt a line. Call it .jsonl if it has an object a "
            "line, or .json if it is a list"
        )
    return [Prompt((line,), category=path.stem) for line in prompts]


def _array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        records = json.loads("\n".join(line for _, line in _lines(path)))
    except json.JSONDecodeError as error:
        more = ". Call it .jsonl if it has an object a line" if error.msg == "Extra data" else ""
        raise TrainError(f"{path} isn't JSON: {error.msg}{more}") from error
    if not isinstance(records, list):
        raise TrainError(f"{path} must be a JSON list of objects, got {type(records).__name__}")
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise TrainError(f"{path}, record {number} must be a JSON object, got {type(record).__name__}")
        yield number, record


def _is_json(line: str) -> bool:
    """Whether a line is a list or an object, or the beginning of one over several lines."""
    if line.strip() in ("[", "{", "[{"):
        return True
    try:
        return isinstance(json.loads(line), list | dict)
    except ValueError:
        return False


def holds_texts(path: Path) -> bool:
    """Whether a file is one of ours, with token ids in it."""
    first = next(_lines(path), None)
    return path.suffix == ".jsonl" and first is not None and '"tokens"' in first[1][:20]


def read_texts(path: Path, vocab_size: int) -> list[Text]:
    """**Raises:** `TrainError` naming file and line, or if the target wrote none of it."""
    texts = [_text(record, vocab_size, f"{path}, line {n}") for n, record in _records(path, _lines(path))]
    if not any(text.answers for text in texts):
        raise TrainError(f"{path} has no answer tokens to train on. Make it again with this target")
    return texts


def split(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and texts held out: one in `HELD_OUT`, at least one and at most `MOST_HELD_OUT`.

    **Raises:** `TrainError` for fewer than two texts.
    """
    if len(texts) < 2:
        raise TrainError(f"{len(texts)} texts are too few: one is held out for evaluation. Give more prompts")
    held = set(range(0, len(texts), HELD_OUT)[:MOST_HELD_OUT])
    return [t for i, t in enumerate(texts) if i not in held], [texts[i] for i in sorted(held)]


def count(texts: list[Text], vocab_size: int) -> Int[np.ndarray, " v"]:
    """How often each token stands in the answers."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        for begin, end in text.answers:
            counts += np.bincount(text.tokens[begin:end], minlength=vocab_size)
    return counts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((n, line.rstrip("\n")) for n, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"--data {path}: {getattr(error, 'strerror', None) or error}") from error


def _records(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TrainError(f"{path}, line {number} isn't JSON: {error}") from error
        if not isinstance(record, dict):
            raise TrainError(f"{path}, line {number} must be a JSON object, got {type(record).__name__}")
        yield number, record


def _prompt(record: dict[str, Any], name: str, where: str) -> Prompt:
    category = str(record.get("category") or name)
    for key in ("messages", "conversations"):
        if key in record:
            return _conversation(record[key], key, category, where)
    turns = record.get("turns", [record[k] for k in ("prompt", "question") if k in record][:1])
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise TrainError(f"{where} must have {_SHAPES}, with text in it; it has {', '.join(record) or 'nothing'}")
    return Prompt(tuple(turns), category=category)


def _conversation(messages: Any, key: str, category: str, where: str) -> Prompt:
    try:
        pairs = [(m.get("role") or m["from"], m["content"] if "content" in m else m["value"]) for m in messages]
    except (TypeError, AttributeError, KeyError) as error:
        raise TrainError(f"{where}: each of {key} needs role and content, or from and value ({error!r})") from error
    pairs = [(_ROLES.get(role, role), text) for role, text in pairs]
    if bad := [text for _, text in pairs if not isinstance(text, str)]:
        raise TrainError(f"{where}: a message's content must be text, got {bad[0]!r}")
    turns = tuple(text for role, text in pairs if role == "user" and text)
    if not turns:
        raise TrainError(f"{where}: {key} has no message of the user's")
    return Prompt(turns, next((text for role, text in pairs if role == "system"), None), category)


def _text(record: dict[str, Any], vocab_size: int, where: str) -> Text:
    tokens, answers = record.get("tokens"), record.get("answers")
    try:
        ids = np.array(tokens, np.int32)
        spans = tuple((int(begin), int(end)) for begin, end in answers)
    except (TypeError, ValueError, OverflowError) as error:
        raise TrainError(f'{where} must have "tokens", a list of ids, and "answers", a list of [begin, end]') from error
    if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise TrainError(f"{where}: tokens must be ids from 0 to {vocab_size - 1}: it was made with another model")
    if bad := [span for span in spans if not 0 < span[0] <= span[1] <= len(ids)]:
        raise TrainError(
            f"{where}: answers has {list(bad[0])}; the text has tokens 0 to {len(ids)}, the first a prompt's"
        )
    return Text(ids, spans, str(record.get("category", "all")))
