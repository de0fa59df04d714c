"""Scores of a model's answers with drafts and without; or quantisation's effect on its texts, each format beside none.

Offline, real weights. With --task the answers to GSM8K's questions are scored, as lm_eval does it: 5 examples before
each question, greedy, 256 new tokens. Plain decoding comes first, then each --draft, at each --tp-size and
--concurrency. `strict` and `flexible` are lm_eval's scores with 95% intervals, `same text` the share of answers that
are the first row's to the last token. With --wording boxed questions go through the chat template, with the words of
DFlash's sweep; `boxed` is the score of what the box holds. The examples are the first questions of --shots, which would
be GSM8K's train.jsonl, or else of --data, whose questions they are no longer. --samples writes each answer, and what
was found in it.

Without --task, the model answers each question greedily, unquantised and with each of --formats:

    weights       --quantization fp8
    activations   the same, --fp8-activations on
    int4          --quantization int4
    nvfp4         --quantization nvfp4
    kv            --kv-cache-dtype fp8
    weights+kv    both

Question and unquantised answer are then scored as one prompt, by the programs that serve. `perplexity` is of the
question's tokens, `of the answer` of the answer's. `agree` is the share of the answer's tokens that are the format's
own first choice after the same text. `same text` is the share of answers that are equal to the end. With --draft, the
answers are drafted: tokens a round, with 95% intervals over prompts.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import acceptance, answers, datasets, engines, gsm8k, plots, scored, traffic
from jaxspec.bench.acceptance import Counts
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts
from jaxspec.config.flags import add_value, natural, positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine

UNQUANTISED = "unquantised"
FORMATS: dict[str, dict[str, str]] = {
    "weights": {"quantization": "fp8", "fp8_activations": "off"},
    "activations": {"quantization": "fp8", "fp8_activations": "on"},
    "int4": {"quantization": "int4"},
    "nvfp4": {"quantization": "nvfp4"},
    "kv": {"kv_cache_dtype": "fp8"},
    "weights+kv": {"quantization": "fp8", "fp8_activations": "off", "kv_cache_dtype": "fp8"},
}
COLUMNS = (
    Column("format", "format", "<12", 12),
    Column("prompts", "prompts"),
    Column("perplexity", "perplexity", ".3f"),
    Column("answer_perplexity", "of the answer", ".3f"),
    Column("agree", "agree", ".2%"),
    Column("same", "same text", ".1%"),
    *acceptance.COLUMNS,
)
TABLES = (Table("accuracy: scores, or formats against the unquantised model", (*scored.COLUMNS, *COLUMNS)),)


def formats(text: str) -> list[str]:
    """The names in --formats.

    **Raises:** `argparse.ArgumentTypeError` for one that isn't known.
    """
    names = text.split(",")
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FORMATS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    datasets.add_arguments(parser, "in all (200; of a task, all)", positive)
    group = parser.add_argument_group("scores")
    group.add_argument("--task", choices=gsm8k.TASKS, help="score the answers to this benchmark, whose file is --data")
    said = "examples before each question, or the question alone in the words of DFlash's sweep (%(default)s)"
    group.add_argument("--wording", choices=("shots", "boxed"), default="shots", help=said)
    add_value(group, "--num-shots", natural, 5, "N", "examples before each question")
    add_value(group, "--shots", Path, None, "FILE", "the examples' file (the first questions of --data)")
    add_value(group, "--samples", Path, None, "FILE", "write every answer here, with what was found in it")
    every = ",".join(FORMATS)
    parser.add_argument("--formats", type=formats, default=every, metavar="F,F,...", help="(%(default)s)")
    most = "most at once; several only with --task (%(default)s)"
    parser.add_argument("--concurrency", type=counts("1,8"), default="32", metavar="N,N,...", help=most)
    answers.add_arguments(parser, several=False)
    parser.set_defaults(dataset="spec-bench")


def run(args: argparse.Namespace, result: Result) -> None:
    """Score a task, or compare formats.

    **Raises:** `BenchError` for flags that don't go together; `DataError` for a file of prompts that can't be read; as
    `engines.start`.
    """
    if args.task:
        scored.run(args, result)
        return
    if args.temperature:
        raise BenchError(f"accuracy compares greedy texts, and --temperature is {args.temperature}; drop it")
    if len(args.concurrency) > 1 or len(args.tp_size) > 1:
        raise BenchError("formats are compared at one --concurrency and one --tp-size; --task takes several")
    datasets.check(args)
    _compare(args, result)


def _compare(args: argparse.Namespace, result: Result) -> None:
    """Answer and score, unquantised first."""
    (concurrency,) = args.concurrency
    prompts: list[list[int]] = []
    texts: list[list[int]] = []  # the unquantised model's answers
    for name in (UNQUANTISED, *args.formats):
        scored: Row = {}
        for draft in args.draft or ["none"]:
            engine = engines.start(_options(args, name, draft), result, concurrency)
            if not prompts:
                asked = datasets.source(args, engine.model_config.vocab_size)(args.num_prompts or 200)
                prompts = [question.ids(engine.tokenizer) for question in asked]
            wanted = SamplingParams(temperature=0.0, max_tokens=args.output_len)
            drafted = traffic.afresh(engine, prompts, wanted, concurrency, f"{name}, {draft}")
            texts = texts or [answer.token_ids for answer in drafted]
            scored = scored or _scores(engine, prompts, texts, concurrency)
            row: Row = {"format": name, "draft": draft, "prompts": len(prompts), **scored}
            row["same"] = float(np.mean([a.token_ids == text for a, text in zip(drafted, texts, strict=True)]))
            if engine.runner.width > 1:
                found = acceptance.figures((Counts.of(answer.metrics) for answer in drafted), args.seed or 0)
                row |= {key: found[key] for key in ("tokens_per_round", "low", "high", "positions")}
            result.add(row)
            del engine
            gc.collect()  # its memory is the next one's


def _options(args: argparse.Namespace, name: str, draft: str) -> argparse.Namespace:
    """The command line with a format and a drafter in it. A drafter's own weights stay as they are."""
    options, exact = engines.with_drafter(args, draft, *args.tp_size), {"quantization": None, "fp8_activations": "off"}
    vars(options).update(exact | {"kv_cache_dtype": "auto"} | FORMATS.get(name, {}))
    return options


def _scores(engine: Engine, prompts: list[list[int]], texts: list[list[int]], concurrency: int) -> Row:
    """Perplexity of prompts and texts, and how many of the texts' tokens are the likeliest where they stand."""
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    sums, counts, agreed = np.zeros(2), np.zeros(2, int), 0
    scored = traffic.afresh(engine, whole, wanted, concurrency, "scored")
    for prompt, tokens, answer in zip(prompts, whole, scored, strict=True):
        assert answer.prompt_logprobs is not None
        for place, entry in enumerate(answer.prompt_logprobs[1:], 1):
            assert entry is not None
            part = int(place >= len(prompt))
            sums[part] -= entry.logprob
            counts[part] += 1
            agreed += part and entry.top[0][0] == tokens[place]
    perplexity = np.exp(sums / np.maximum(counts, 1))
    return {
        "perplexity": float(perplexity[0]),
        "answer_perplexity": float(perplexity[1]),
        "agree": agreed / max(counts[1], 1),
        "tokens": counts.tolist(),
    }


def plot(document: Document, figure: Any) -> None:
    """Agreement and tokens a round by format; or scores and speed-up."""
    if document["arguments"].get("task"):
        scored.plot(document, figure)
        return
    agree_axes, round_axes = figure.subplots(1, 2)
    rows = document["rows"]
    for draft in dict.fromkeys(row["draft"] for row in rows):
        mine = [row for row in rows if row["draft"] == draft]
        names = [row["format"] for row in mine]
        round_axes.plot(range(len(mine)), [row.get("tokens_per_round") or 1.0 for row in mine], "o-", label=draft)
        plots.rotated(round_axes, names)
    first = [row for row in rows if row["draft"] == rows[0]["draft"]]
    agree_axes.bar(range(len(first)), [row["agree"] for row in first])
    plots.rotated(agree_axes, [row["format"] for row in first])
    agree_axes.set(ylabel="tokens of the unquantised answer that are first choice")
    round_axes.set(ylabel="tokens a round")
    round_axes.legend()
