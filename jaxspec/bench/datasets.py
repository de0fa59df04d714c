"""Prompts to send: random tokens, random tokens behind shared prefixes, an agent's questions, or those of a file.

Questions go through the model's chat template, on the server as offline. The files are the published ones, one JSON
object a line: Spec-Bench's `question.jsonl` (https://github.com/hemingkx/Spec-Bench; the first turn of each question,
categories in turn) and GSM8K's `test.jsonl` (https://github.com/openai/grade-school-math).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import agent
from jaxspec.bench.results import BenchError
from jaxspec.flags import natural, positive
from jaxspec.tokenizer import Tokenizer

SYNTHETIC = ("random", "shared-prefix")
DATASETS = (*SYNTHETIC, "agent", "spec-bench", "gsm8k")


@dataclass(frozen=True)
class Prompt:
    """Token ids, or a question for the chat template."""

    tokens: tuple[int, ...] | None = None
    question: str | None = None
    template: tuple[tuple[str, Any], ...] = ()  # chat template arguments
    tools: int = 0  # functions that the model may call

    def request(self) -> tuple[str, dict[str, Any]]:
        """Where to send it, and its part of the body."""
        if self.tokens is not None:
            return "/v1/completions", {"prompt": list(self.tokens)}
        body = {"messages": [{"role": "user", "content": self.question}]}
        body |= {"chat_template_kwargs": dict(self.template)} if self.template else {}
        return "/v1/chat/completions", body | ({"tools": _tools(self.tools)} if self.tools else {})

    def ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """Its token ids, as the server would make them. **Raises:** `BenchError` without the tokenizer it needs."""
        if self.tokens is not None:
            return list(self.tokens)
        if tokenizer is None:
            raise BenchError("questions need a model with a tokenizer; use --dataset random")
        messages = [{"role": "user", "content": self.question}]
        options = dict(self.template) | ({"tools": _tools(self.tools)} if self.tools else {})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)


def _tools(count: int) -> list[dict[str, Any]]:
    """Function definitions as OpenAI spells them."""
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    functions = [
        {"name": f"lookup_{i}", "description": "Look a place up.", "parameters": parameters} for i in range(count)
    ]
    return [{"type": "function", "function": function} for function in functions]


def add_arguments(
    parser: argparse.ArgumentParser, how_many: str = "for each load (four times the concurrency)"
) -> None:
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--dataset", choices=DATASETS, default="random", help="(%(default)s)")
    add("--data", type=Path, metavar="FILE", help="of spec-bench or gsm8k: the published .jsonl file")
    add("--num-prompts", type=positive, metavar="N", help=how_many)
    add("--prompt-len", type=positive, default=1024, metavar="TOKENS", help="random tokens in a prompt (%(default)s)")
    add("--prefix-len", type=natural, default=512, metavar="TOKENS", help="shared tokens before them (%(default)s)")
    add("--prefixes", type=positive, default=4, metavar="N", help="different shared prefixes (%(default)s)")
    add(
        "--output-len",
        type=positive,
        default=256,
        metavar="TOKENS",
        help="new tokens; at most, of questions (%(default)s)",
    )
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add(
        "--chat-template-kwargs",
        type=_mapping,
        default={},
        metavar="JSON",
        help="""for the template, such as '{"enable_thinking": false}'""",
    )
    add("--tools", type=natural, default=0, metavar="N", help="functions offered with each question (%(default)s)")


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""takes a JSON object such as '{{"enable_thinking": false}}', got {text!r}"""
        )
    return value


def check(args: argparse.Namespace) -> None:
    """**Raises:** `BenchError` for a file that `source` couldn't read, before a model is loaded for it."""
    if args.dataset not in SYNTHETIC:
        _read(args.dataset, args.data)


def source(args: argparse.Namespace, vocab: int) -> Callable[[int], list[Prompt]]:
    """A function that gives the next so many prompts. Random ones never come twice; a file starts over at its end.

    **Raises:** `BenchError` for a file that is missing or isn't what the dataset should be.
    """
    rng = np.random.default_rng(args.seed or 0)
    draw = lambda length: tuple(rng.integers(0, vocab, length).tolist())  # noqa: E731
    if args.dataset == "random":
        return lambda count: [Prompt(draw(args.prompt_len)) for _ in range(count)]
    if args.dataset == "shared-prefix":
        prefixes = [draw(args.prefix_len) for _ in range(args.prefixes)]
        return lambda count: [
            Prompt(prefix + draw(args.prompt_len)) for prefix in itertools.islice(itertools.cycle(prefixes), count)
        ]
    template = tuple(args.chat_template_kwargs.items())
    questions = itertools.cycle(
        [Prompt(question=q, template=template, tools=args.tools) for q in _read(args.dataset, args.data)]
    )
    return lambda count: list(itertools.islice(questions, count))


def _read(dataset: str, path: Path | None) -> list[str]:
    if dataset == "agent":
        return list(agent.questions())
    if path is None:
        raise BenchError(f"--dataset {dataset} needs its file: --data FILE.jsonl")
    read = {"spec-bench": _spec_bench, "gsm8k": _gsm8k}[dataset]
    try:
        questions = read([json.loads(line) for line in path.read_text().splitlines() if line.strip()])
    except OSError as error:
        raise BenchError(f"--data {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchError(f"--data {path} is not a {dataset} file ({type(error).__name__}: {error})") from error
    if not questions:
        raise BenchError(f"--data {path} has no questions")
    return questions


def _spec_bench(lines: list[dict]) -> list[str]:
    """First turns, one of each category in turn, so that any number of them is spread over all."""
    categories: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        categories[line["category"]].append(line["turns"][0])
    in_turn = itertools.zip_longest(*categories.values())
    return [question for each in in_turn for question in each if question is not None]


def _gsm8k(lines: list[dict]) -> list[str]:
    return [line["question"] for line in lines]
