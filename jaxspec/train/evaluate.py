"""Tokens a round, by category and by draft position, measured by serving: the engine itself, greedy.

Prompts are texts that training held out, or files that `jaxspec.text.prompts` reads.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.config.request import SamplingParams
from jaxspec.engine.llm import LLM
from jaxspec.text.prompts import Prompt
from jaxspec.train.data import Text, TrainError


@dataclass(frozen=True)
class Figures:
    """Figures of one category. `accepted[i]` is the share of rounds that accepted draft i and all before it."""

    category: str
    prompts: int
    rounds: int
    accept_length: float  # tokens a round, bonus included
    accepted: tuple[float, ...]


def evaluate(llm: LLM, prompts: dict[str, list[list[int]]], max_tokens: int) -> list[Figures]:
    """Generate greedily for the prompts (token ids) of each category; figures by category, then of all together.

    Prompts that leave no room for the answer in the context are left out, and that is said.

    **Raises:** `TrainError` if no prompt is short enough for an answer.
    """
    longest = llm.engine.config.context_length - max_tokens
    figures, before = [], _totals(llm)
    start = before
    for category, each in tqdm(prompts.items(), desc="evaluating", unit="category"):
        fitting = [prompt for prompt in each if len(prompt) <= longest]
        if short := len(each) - len(fitting):
            tqdm.write(
                f"{category}: {short} prompts left out, longer than {longest} tokens (--context-length)", sys.stderr
            )
        if fitting:
            llm.generate(fitting, SamplingParams(temperature=0.0, max_tokens=max_tokens))
            after = _totals(llm)
            figures.append(_figures(category, len(fitting), before, after))
            before = after
    if not figures:
        raise TrainError(f"no prompt has at most {longest} tokens, so none leaves room for {max_tokens} new ones")
    return [*figures, _figures("all", sum(f.prompts for f in figures), start, before)]


def held_out_prompts(texts: Sequence[Text]) -> dict[str, list[list[int]]]:
    """Prompts of the target's first answer in each text, by category."""
    grouped: dict[str, list[list[int]]] = defaultdict(list)
    for text in texts:
        if text.answers:
            grouped[text.category].append(text.tokens[: text.answers[0][0]].tolist())
    return dict(grouped)


def chat_prompts(llm: LLM, prompts: Sequence[Prompt], most: int | None = None) -> dict[str, list[list[int]]]:
    """The first turns, through the chat template, by category; at most so many of each."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise TrainError(f"{llm.engine.runner.model.name} has no tokenizer to read prompts with")
    grouped: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in prompts:
        if most is None or len(grouped[prompt.category]) < most:
            ids = tokenizer.apply_chat_template(prompt.opening(1), add_generation_prompt=True)
            grouped[prompt.category].append(ids)
    return dict(grouped)


def table(figures: Sequence[Figures]) -> str:
    """Markdown: a line a category."""
    positions = len(figures[0].accepted)
    head = ["category", "prompts", "rounds", "tokens a round", *(f"draft {i + 1}" for i in range(positions))]
    rows = [
        [f.category, str(f.prompts), str(f.rounds), f"{f.accept_length:.2f}", *(f"{x:.2f}" for x in f.accepted)]
        for f in figures
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def save(figures: Sequence[Figures], path: Path, facts: dict[str, Any]) -> None:
    record = {"facts": facts, "categories": [f.__dict__ for f in figures]}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def _totals(llm: LLM) -> dict[str, Any]:
    stats = llm.engine.stats()
    return {
        "rounds": stats["verify_rounds_total"],
        "tokens": stats["verified_tokens_total"],
        "accepted": stats["accepted_per_position"],
    }


def _figures(category: str, prompts: int, before: dict[str, Any], after: dict[str, Any]) -> Figures:
    rounds = max(after["rounds"] - before["rounds"], 1)
    accepted = [(b - a) / rounds for a, b in zip(before["accepted"], after["accepted"], strict=True)]
    length = (after["tokens"] - before["tokens"]) / rounds
    return Figures(category, prompts, rounds, length, tuple(accepted))
