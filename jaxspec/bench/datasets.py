"""Prompts to send: random tokens, random tokens behind shared prefixes, an agent's questions, or those of a file.

Questions go through the model's chat template, on the server as offline. The files are the published ones, such as
Spec-Bench's `question.jsonl` (https://github.com/hemingkx/Spec-Bench) and GSM8K's `test.jsonl`
(https://github.com/openai/grade-school-math); `questions` reads them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import agent, questions
from jaxspec.bench.results import BenchError
from jaxspec.flags import natural, positive
from jaxspec.tokenizer import Tokenizer

SYNTHETIC = ("random", "shared-prefix")
DATASETS = (*SYNTHETIC, "agent", *questions.FORMATS)


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
    add("--data", type=Path, metavar="FILE", help="of a dataset with questions: the published file")
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
    add_template_argument(group)
    add("--tools", type=natural, default=0, metavar="N", help="functions offered with each question (%(default)s)")


def add_template_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--chat-template-kwargs",
        type=_mapping,
        default={},
        metavar="JSON",
        help="""for the template, such as '{"enable_thinking": false}'""",
    )


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
    asked = itertools.cycle(
        [Prompt(question=text, template=template, tools=args.tools) for text in _read(args.dataset, args.data)]
    )
    return lambda count: list(itertools.islice(asked, count))


def _read(dataset: str, path: Path | None) -> list[str]:
    if dataset == "agent":
        return list(agent.questions())
    if path is None:
        raise BenchError(f"--dataset {dataset} needs its file: --data FILE.jsonl")
    return [question.text for question in questions.read(path, dataset)[1]]
