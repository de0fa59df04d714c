"""Checkpoints that are published for embeddings or for scores, and how these come from a forward pass.

Sentence Transformers' files say it of embeddings (`modules.json`, `1_Pooling/config.json`). Of scores a config.json
does, by vLLM's `classifier_from_token`, or the name: Qwen3-Reranker has no file about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.check import CheckpointError, read_json
from jaxspec.config.json_values import shown

FILES = ("modules.json", "1_Pooling/config.json")
LAST, MEAN, YES_NO = KINDS = ("last", "mean", "yes-no")
_MODES = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}  # theirs
_RERANKER = re.compile(r"qwen3(-vl)?-reranker", re.IGNORECASE)


@dataclass(frozen=True)
class Pooling:
    """How a model's one result of a text is computed.

    `kind`: "last" and "mean" are embeddings: the final norm's output of the last token, or the mean over all. "yes-no"
    is a score: the probability of the second of `answers`, of these two, as the text's next token. `normalized`:
    embeddings are divided by their length.
    """

    kind: str
    normalized: bool = True
    answers: tuple[str, str] = ("no", "yes")

    @property
    def embeds(self) -> bool:
        return self.kind != YES_NO


def read(folder: Path, hf: dict[str, Any], name: str) -> Pooling | None:
    """The pooling of a model folder whose config.json holds `hf`; None for a model that generates text.

    **Raises:** `CheckpointError` for files that can't be read, and for another pooling.
    """
    modules, pooling = (folder / each for each in FILES)
    if pooling.is_file():
        told = read_json(pooling)
        modes = [mode for mode in (told.get("pooling_mode"),) if isinstance(mode, str)] or [
            key.removeprefix("pooling_mode_") for key, value in told.items() if value is True and "pooling_mode_" in key
        ]
        if len(modes) != 1 or modes[0] not in _MODES:
            raise CheckpointError(
                f"{pooling} pools by {', '.join(modes) or 'nothing'}; supported are lasttoken and mean. --pooling last "
                "or mean overrides it, and --pooling none serves the model as a generator"
            )
        steps = read_json(modules, list) if modules.is_file() else [{"type": "Normalize"}]
        types = [str(step.get("type")) for step in steps if isinstance(step, dict)]
        return Pooling(_MODES[modes[0]], any(each.endswith("Normalize") for each in types))
    if (answers := hf.get("classifier_from_token")) is not None:
        if not (isinstance(answers, list) and len(answers) == 2 and all(isinstance(each, str) for each in answers)):
            raise CheckpointError(f"config.json: classifier_from_token must be two tokens, got {shown(answers)}")
        return Pooling(YES_NO, answers=tuple(answers))
    return Pooling(YES_NO) if _RERANKER.search(name) else None
