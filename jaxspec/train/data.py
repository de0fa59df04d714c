"""Training data: texts with the target's answers, as token ids. Prompts are read by `jaxspec.text.prompts`.

A file of texts has one JSON object a line: `{"tokens": [ids], "answers": [[begin, end], ...], "category": "..."}`.
The target wrote the tokens within `answers`. Only these are trained on, since only these are drafted.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxspec.text.prompts import GZIP, NOT_JSON

HELD_OUT = 50  # one text in so many is kept for evaluation
MOST_HELD_OUT = 200


class TrainError(ValueError):
    """Data, options or an output folder that can't be trained with. Names the file and line, or the flag."""


@dataclass(frozen=True, eq=False)
class Text:
    """A conversation with the target's answers. `answers` are [begin, end) of what the target wrote."""

    tokens: Int[np.ndarray, " n"]
    answers: tuple[tuple[int, int], ...]
    category: str = "other"

    def line(self) -> str:
        record = {"tokens": self.tokens.tolist(), "answers": self.answers, "category": self.category}
        return json.dumps(record, separators=(",", ":")) + "\n"


def holds_texts(path: Path) -> bool:
    """Whether a file is one of ours, with token ids in it."""
    named = Path(path.name.removesuffix(".gz")).suffix == ".jsonl"  # prompts may be in Parquet
    first = next(_lines(path), None) if named else None
    return first is not None and '"tokens"' in first[1][:20]


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
        raise TrainError(f"too few texts ({len(texts)}): one is held out for evaluation. Give more prompts")
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
        with path.open("rb") as file:
            opened = gzip.open if file.read(len(GZIP)) == GZIP else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield from ((n, line.rstrip("\n")) for n, line in enumerate(file, 1) if line.strip())
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TrainError(f"--data {path}: {getattr(error, 'strerror', None) or error}") from error


def _records(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except NOT_JSON as error:
            raise TrainError(f"{path}, line {number} isn't JSON: {error}") from error
        if not isinstance(record, dict):
            raise TrainError(f"{path}, line {number} must be a JSON object, got {type(record).__name__}")
        yield number, record


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
    return Text(ids, spans, str(record.get("category", "other")))
