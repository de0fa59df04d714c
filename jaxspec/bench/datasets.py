"""Prompts to send: random tokens, by themselves, behind shared prefixes or in conversations that grow, an agent's
questions, or those of a file.

Questions go through the model's chat template, on the server as offline. The files are the published ones, such as
Spec-Bench's `question.jsonl` (https://github.com/hemingkx/Spec-Bench) and GSM8K's `test.jsonl`
(https://github.com/openai/grade-school-math); `jaxspec.text.prompts` reads them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import agent
from jaxspec.bench.results import BenchError
from jaxspec.config.flags import add_value, checked, natural, positive
from jaxspec.config.request import SamplingParams
from jaxspec.text import prompts as files
from jaxspec.text.prompts import Message
from jaxspec.text.tokenizer import Tokenizer

SYNTHETIC = ("random", "shared-prefix", "conversations")
DATASETS = (*SYNTHETIC, "agent", *files.FORMATS)
# What follows a question: nothing, or the words of DFlash's and SGLang's sweeps.
WORDINGS = {"none": "", "boxed": "\nPlease reason step by step, and put your final answer within \\boxed{}."}


class Lengths(str):
    """Numbers of tokens: 1024, 256-2048 (each as likely), or several of these by weight, 64-512:9,8192:1.

    **Raises:** `ValueError` for anything else.
    """

    def __init__(self, text: str):
        parts = [part.partition(":") for part in text.split(",")]
        weights = [float(weight) if colon else 1.0 for _, colon, weight in parts]
        self._ranges = [tuple(map(int, (each.split("-") * 2)[:2])) for each, *_ in parts]
        weighed = all(0 < weight < math.inf for weight in weights)
        if not (weighed and all(1 <= low <= high for low, high in self._ranges)):
            raise ValueError(text)
        self._shares = [weight / sum(weights) for weight in weights]

    @property
    def most(self) -> int:
        return max(high for _, high in self._ranges)

    def draw(self, rng: np.random.Generator) -> int:
        """One of them; without drawing where there is one alone."""
        at = rng.choice(len(self._shares), p=self._shares) if len(self._shares) > 1 else 0
        low, high = self._ranges[at]
        return low if low == high else int(rng.integers(low, high + 1))


lengths = checked(Lengths, "takes tokens, a range, or several by weight, such as 1024, 256-2048 or 64-512:9,8192:1")


@dataclass(frozen=True)
class Prompt:
    """Token ids, or messages for the chat template. `output_len`: its new tokens at most, None: the load's."""

    tokens: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    template: tuple[tuple[str, Any], ...] = ()  # chat template arguments
    tools: int = 0  # functions that the model may call
    output_len: int | None = None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Give a load's params this prompt's own number of new tokens."""
        return params if self.output_len is None else replace(params, max_tokens=self.output_len)

    def request(self) -> tuple[str, dict[str, Any]]:
        """Where to send it, and its part of the body."""
        if self.tokens is not None:
            return "/v1/completions", {"prompt": list(self.tokens)}
        body = {"messages": list(self.messages)}
        body |= {"chat_template_kwargs": dict(self.template)} if self.template else {}
        return "/v1/chat/completions", body | ({"tools": _tools(self.tools)} if self.tools else {})

    def ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """Its token ids, as the server would make them. **Raises:** `BenchError` without the tokenizer it needs."""
        if self.tokens is not None:
            return list(self.tokens)
        if tokenizer is None:
            raise BenchError("questions need a model with a tokenizer; use --dataset random")
        options = dict(self.template) | ({"tools": _tools(self.tools)} if self.tools else {})
        return tokenizer.apply_chat_template(list(self.messages), add_generation_prompt=True, **options)


def _tools(count: int) -> list[dict[str, Any]]:
    """Function definitions as OpenAI spells them."""
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    functions = [
        {"name": f"lookup_{i}", "description": "Look a place up.", "parameters": parameters} for i in range(count)
    ]
    return [{"type": "function", "function": function} for function in functions]


def add_arguments(
    parser: argparse.ArgumentParser,
    how_many: str = "for each load (four times the concurrency)",
    tokens: Callable[[str], Any] = lengths,
) -> None:
    """`tokens`: the type of `--prompt-len` and `--output-len`, `positive` where they are one number."""
    spread = "; 256-2048 or 64-512:9,8192:1 are drawn" if tokens is lengths else ""
    group = parser.add_argument_group("prompts")
    add, value = group.add_argument, partial(add_value, group)
    add("--dataset", choices=DATASETS, default="random", help="(%(default)s)")
    value("--data", Path, None, "FILE", "of a dataset with questions: the published file")
    add_category_argument(group)
    value("--num-prompts", positive, None, "N", how_many)
    of_prompts = f"random tokens in a prompt (%(default)s{spread})"
    add("--prompt-len", type=tokens, default="1024", metavar="TOKENS", help=of_prompts)
    value("--prefix-len", natural, 512, "TOKENS", "shared tokens before them")
    value("--prefixes", positive, 4, "N", "different shared prefixes, or conversations")
    value("--turns", positive, 8, "N", "prompts of a conversation, each --prompt-len longer than the one before")
    of_answers = f"new tokens; at most, of questions (%(default)s{spread})"
    add("--output-len", type=tokens, default="256", metavar="TOKENS", help=of_answers)
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add_template_argument(group)
    value("--tools", natural, 0, "N", "functions offered with each question")


def add_category_argument(group: argparse._ActionsContainer) -> None:
    said = "only questions of these categories, such as SPEED-Bench's coding"
    group.add_argument("--category", type=lambda text: text.split(","), default=[], metavar="C,C,...", help=said)


def add_wording_argument(group: argparse._ActionsContainer) -> None:
    said = "what follows a question; boxed: reason step by step, and put the answer in a box (%(default)s)"
    group.add_argument("--wording", choices=WORDINGS, default="none", help=said)


def add_template_argument(group: argparse._ActionsContainer) -> None:
    example = """such as '{"enable_thinking": false}'"""
    mapping = checked(json.loads, f"takes a JSON object {example}", lambda value: isinstance(value, dict))
    said = f"for the template, {example}"
    group.add_argument("--chat-template-kwargs", type=mapping, default={}, metavar="JSON", help=said)


def check(args: argparse.Namespace) -> None:
    """**Raises:** as `source` for a file that it couldn't read, before a model is loaded for it; `BenchError` for flags
    that the dataset has no use for."""
    unread = {"--data": args.data, "--category": args.category}
    unread |= {"--tools": args.tools, "--chat-template-kwargs": args.chat_template_kwargs}
    of_files = ("--data", "--category") if args.dataset == "agent" else tuple(unread)
    if args.dataset not in files.FORMATS and (given := [name for name in of_files if unread[name]]):
        raise BenchError(
            f"--dataset {args.dataset} has no use for {given[0]}: leave it out, or name a file's format by --dataset, "
            f"one of {', '.join(files.FORMATS)}"
        )
    if args.dataset not in SYNTHETIC:
        _read(args)


def longest(args: argparse.Namespace) -> tuple[int, int]:
    """The most tokens of a prompt that is made here, and of its answer; 0 for a file's prompts, which vary."""
    if args.dataset not in SYNTHETIC:
        return 0, args.output_len.most
    prompts = args.turns if args.dataset == "conversations" else 1
    prefix = 0 if args.dataset == "random" else args.prefix_len
    return prefix + prompts * args.prompt_len.most, args.output_len.most


def params(args: argparse.Namespace) -> SamplingParams:
    """Sampling of a load whose prompts don't say otherwise: random ones run to their full length."""
    synthetic = args.dataset in SYNTHETIC
    return SamplingParams(temperature=args.temperature, max_tokens=args.output_len.most, ignore_eos=synthetic)


def source(args: argparse.Namespace, vocab: int) -> Callable[[int], list[Prompt]]:
    """A function that gives the next so many prompts. Random ones never come twice; a file starts over at its end.

    **Raises:** `BenchError` without a file; `DataError` for one that isn't what the dataset should be.
    """
    rng = np.random.default_rng(args.seed or 0)
    random = lambda length: tuple(rng.integers(0, vocab, length).tolist())  # noqa: E731
    many = lambda tokens: tokens.draw(rng) if isinstance(tokens, Lengths) else tokens  # noqa: E731

    def prompts(tokens: Iterable[tuple[int, ...]], count: int) -> list[Prompt]:
        return [Prompt(each, output_len=many(args.output_len)) for each in itertools.islice(tokens, count)]

    def conversations() -> Iterator[tuple[int, ...]]:
        """A turn of each conversation, then the next one of each; after the last turn other conversations begin."""
        while True:
            texts = [random(args.prefix_len)] * args.prefixes
            for turn in range(args.turns * args.prefixes):
                i = turn % args.prefixes
                texts[i] += random(many(args.prompt_len))
                yield texts[i]

    if args.dataset == "conversations":
        return partial(prompts, conversations())
    if args.dataset in SYNTHETIC:
        shared = args.dataset == "shared-prefix"
        prefixes = [random(args.prefix_len) for _ in range(args.prefixes)] if shared else [()]
        behind = lambda: (prefix + random(many(args.prompt_len)) for prefix in itertools.cycle(prefixes))  # noqa: E731
        return lambda count: prompts(behind(), count)
    template = tuple(args.chat_template_kwargs.items())
    asked = itertools.cycle(
        [Prompt(messages=tuple(each.opening()), template=template, tools=args.tools) for each in _read(args)]
    )
    return lambda count: [replace(one, output_len=many(args.output_len)) for one in itertools.islice(asked, count)]


def _read(args: argparse.Namespace) -> list[files.Prompt]:
    if args.dataset == "agent":
        return [files.Prompt((question,)) for question in agent.questions()]
    if args.data is None:
        raise BenchError(f"--dataset {args.dataset} needs its file: --data FILE.jsonl")
    return files.in_turn(files.read(args.data, args.dataset)[1], args.category)
