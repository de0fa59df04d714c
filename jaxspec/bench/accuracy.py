"""Effect of FP8 on a model's texts: perplexity, greedy agreement and its drafters' acceptance, each format beside none.

Offline, real weights. The model answers each question greedily, unquantised and with each of --formats:

    weights       --quantization fp8
    activations   the same, --fp8-activations on
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
from typing import Any

import numpy as np

from jaxspec.bench import acceptance, datasets, engines, traffic
from jaxspec.bench.acceptance import Counts
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table
from jaxspec.config.flags import positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine

UNQUANTISED = "unquantised"
FORMATS: dict[str, dict[str, str]] = {
    "weights": {"quantization": "fp8", "fp8_activations": "off"},
    "activations": {"quantization": "fp8", "fp8_activations": "on"},
    "kv": {"kv_cache_dtype": "fp8"},
    "weights+kv": {"quantization": "fp8", "fp8_activations": "off", "kv_cache_dtype": "fp8"},
}
COLUMNS = (
    Column("format", "format", "<12", 12),
    Column("draft", "draft", "<24", 24),
    Column("prompts", "prompts"),
    Column("perplexity", "perplexity", ".3f"),
    Column("answer_perplexity", "of the answer", ".3f"),
    Column("agree", "agree", ".2%"),
    Column("same", "same text", ".1%"),
    *acceptance.COLUMNS,
)
TABLES = (Table("accuracy: formats of weights and cache against the unquantised model", COLUMNS),)


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
    datasets.add_arguments(parser, "in all (200)", positive)
    add = parser.add_argument
    every = ",".join(FORMATS)
    add("--formats", type=formats, default=every, metavar="F,F,...", help="(%(default)s)")
    add("--draft", action="append", metavar="D", help="a drafter that drafts the answers; several are measured (none)")
    add("--concurrency", type=positive, default=32, metavar="N", help="most at once (%(default)s)")
    without = ("draft", "quantization", "fp8_activations", "kv_cache_dtype")
    engines.add_arguments(parser, without=without, load_format="auto")
    parser.set_defaults(dataset="spec-bench", num_prompts=200)


def run(args: argparse.Namespace, result: Result) -> None:
    """Answer and score, unquantised first.

    **Raises:** `BenchError` with a temperature, or for a file of prompts that can't be read; as `engines.start`.
    """
    if args.temperature:
        raise BenchError(f"accuracy compares greedy texts, and --temperature is {args.temperature}; drop it")
    datasets.check(args)
    prompts: list[list[int]] = []
    texts: list[list[int]] = []  # the unquantised model's answers
    for name in (UNQUANTISED, *args.formats):
        scored: Row = {}
        for draft in args.draft or ["none"]:
            engine = engines.start(_options(args, name, draft), result, args.concurrency)
            if not prompts:
                asked = datasets.source(args, engine.model_config.vocab_size)(args.num_prompts)
                prompts = [question.ids(engine.tokenizer) for question in asked]
            wanted = SamplingParams(temperature=0.0, max_tokens=args.output_len)
            answers = traffic.afresh(engine, prompts, wanted, args.concurrency, f"{name}, {draft}")
            texts = texts or [answer.token_ids for answer in answers]
            scored = scored or _scores(engine, prompts, texts, args.concurrency)
            row: Row = {"format": name, "draft": draft, "prompts": len(prompts), **scored}
            row["same"] = float(np.mean([a.token_ids == text for a, text in zip(answers, texts, strict=True)]))
            if engine.runner.width > 1:
                found = acceptance.figures((Counts.of(answer.metrics) for answer in answers), args.seed or 0)
                row |= {key: found[key] for key in ("tokens_per_round", "low", "high", "positions")}
            result.add(row)
            del engine
            gc.collect()  # its memory is the next one's


def _options(args: argparse.Namespace, name: str, draft: str) -> argparse.Namespace:
    """The command line with a format and a drafter in it. A drafter's own weights stay as they are."""
    options, exact = engines.with_drafter(args, draft), {"quantization": None, "fp8_activations": "off"}
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
    """Agreement and tokens a round by format."""
    agree_axes, round_axes = figure.subplots(1, 2)
    rows = document["rows"]
    for draft in dict.fromkeys(row["draft"] for row in rows):
        mine = [row for row in rows if row["draft"] == draft]
        names = [row["format"] for row in mine]
        round_axes.plot(names, [row.get("tokens_per_round") or 1.0 for row in mine], "o-", label=draft)
    first = [row for row in rows if row["draft"] == rows[0]["draft"]]
    agree_axes.bar([row["format"] for row in first], [row["agree"] for row in first])
    agree_axes.set(ylabel="tokens of the unquantised answer that are first choice")
    round_axes.set(ylabel="tokens a round")
    round_axes.legend()
