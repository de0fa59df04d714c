"""GSM8K as lm_eval asks and scores it (its task `gsm8k`, version 3), and with the words of DFlash's sweep.

`shots`: worked examples, then `Question: ...` and `Answer:` as a text to go on with, no chat template. `boxed`: the
question alone through the chat template, and the wish for a box around the answer.

An answer is right if the number found in it equals the solution's, commas, dollar signs, a last full stop and case
aside, and all before `#### `. `strict` takes the first number after `#### `; `flexible` the last number of all; `boxed`
what the last box holds. GSM8K-Platinum has the same form, with solutions that were checked again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.results import BenchError
from jaxspec.text.prompts import DataError, Prompt, read

TASKS = "gsm8k", "gsm8k_platinum"
STOPS = "Question:", "</s>", "<|im_end|>"  # that end an answer to `shots`
INVALID = "[invalid]"  # of lm_eval, where there is no number
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_SPACES = re.compile(r"\{,\}|\\[,!]")  # of LaTeX, between thousands


def strict(text: str) -> str:
    """The number after the first `#### `."""
    found = _STRICT.search(text)
    return found[1] if found else INVALID


def flexible(text: str) -> str:
    """The last number, as lm_eval's pattern sees one."""
    return next(reversed(_NUMBER.findall(text)), INVALID)


def boxed(text: str) -> str:
    r"""The last number in the last `\boxed{}`; units and LaTeX around it don't matter."""
    boxes = _BOX.findall(text)
    return flexible(_SPACES.sub("", boxes[-1])) if boxes else INVALID


EXTRACTIONS: dict[str, Callable[[str], str]] = {"strict": strict, "flexible": flexible, "boxed": boxed}


def right(found: str, solution: str) -> bool:
    """Whether what an extraction found is the solution's number."""
    return _plain(found) == _plain(solution)


def _plain(text: str) -> str:
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):  # one after the other, as lm_eval does
        text = re.sub(pattern, "", text)
    return text.lower()


def questions(path: Path, shots: Path | None, count: int) -> tuple[list[Prompt], list[Prompt]]:
    """A file's questions, and the worked examples before them: the first of `shots`, or else of the same file. An
    example is no question any longer, in whichever file it stands.

    **Raises:** `DataError` for a file that isn't GSM8K's; `BenchError` for too few examples.
    """
    asked = _solved(path)
    known = asked if shots is None else _solved(shots)
    if len(known) < count:
        raise BenchError(f"{shots or path} has {len(known)} questions, too few for --num-shots {count}")
    solved = {each.turns for each in known[:count]}
    if not (left := [each for each in asked if each.turns not in solved]):
        raise BenchError(f"each question of {path} is one of the {count} examples; lower --num-shots")
    return left, known[:count]


def _solved(path: Path) -> list[Prompt]:
    asked = read(path, "gsm8k")[1]
    for number, prompt in enumerate(asked, 1):
        if "#### " not in (prompt.solution or ""):
            raise DataError(f"--data {path}: the answer of question {number} doesn't end in #### and a number")
    return asked


def text(prompt: Prompt, shots: Sequence[Prompt]) -> str:
    """Question and examples as lm_eval writes them."""
    said = lambda prompt: f"Question: {prompt.turns[0]}\nAnswer:"  # noqa: E731
    return "".join(f"{said(each)} {each.solution}\n\n" for each in shots) + said(prompt)


def interval(right: int, of: int) -> tuple[float, float]:
    """The 95% interval of a share by Wilson, which is one at 0 and 1 too, and holds the share whatever is rounded."""
    z, share = 1.959964, right / of
    middle, width = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + (z / of / 2) ** 2)
    return min((middle - width) / (1 + z * z / of), share), max((middle + width) / (1 + z * z / of), share)


def sample(index: int, prompt: Prompt, answer: str, extractions: Sequence[str]) -> dict[str, Any]:
    """An answer's record: what each extraction found, and whether it is right."""
    found = {name: EXTRACTIONS[name](answer) for name in extractions}
    return {
        "index": index,
        "question": prompt.turns[0],
        "solution": prompt.solution,
        "answer": answer,
        "found": found,
        "right": {name: right(value, prompt.solution or "") for name, value in found.items()},
    }


def write_samples(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
