"""Does greedy text change with a drafter, or in other batches, against plain decoding? And how near were the ties?

Offline, real weights. Every prompt is decoded plainly, all at once; then again at a quarter of that concurrency, which
changes only the batches; then with the drafter. In exact arithmetic all three agree. In bfloat16, other batch sizes
take other kernels that round differently, so a near-tie between two tokens may turn. `differ` counts the texts in which
one did. `margin` is the distance between the two tokens of a first difference, in the model's own float32 logits
computed from the common text alone. A drafter that broke the text would show margins beyond rounding.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.bench import datasets, engines, plots, traffic
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table
from jaxspec.checkpoint import Model
from jaxspec.config.flags import positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.functional import logits

COLUMNS = (
    Column("run", "run", width=24),
    Column("prompts", "prompts"),
    Column("differ", "differ"),
    Column("rate", "rate", ".1%"),
    Column("first", "first at, median", ".0f"),
    Column("margin_median", "margin, median", ".3f"),
    Column("margin_max", "most", ".3f"),
    Column("accept_length", "accept len", ".2f"),
)
TABLES = (Table("parity: greedy text against plain decoding", COLUMNS),)
LENGTH_STEP = 256  # margins are computed at multiples of this length, so that few programs are compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    datasets.add_arguments(parser, "in all (200)", positive)
    parser.add_argument("--concurrency", type=positive, default=32, metavar="N", help="most at once (%(default)s)")
    engines.add_arguments(parser, load_format="auto")
    parser.set_defaults(dataset="spec-bench", num_prompts=200)


def run(args: argparse.Namespace, result: Result) -> None:
    """Decode three times and compare.

    **Raises:** `BenchError` without a drafter, with a temperature, or for a file of prompts that can't be read.
    """
    if args.draft == "none":
        raise BenchError("parity compares a drafter with plain decoding; --draft is none. Name one, such as ngram")
    if args.temperature:
        raise BenchError(f"parity compares greedy texts, and --temperature is {args.temperature}; drop it")
    datasets.check(args)
    engine = engines.start(engines.with_drafter(args, "none"), result, args.concurrency)
    questions = datasets.source(args, engine.model_config.vocab_size)(args.num_prompts)
    prompts = [prompt.ids(engine.tokenizer) for prompt in questions]
    texts = _decode(engine, prompts, args.output_len, args.concurrency)
    fewer = max(args.concurrency // 4, 1)
    runs = [(f"plain, {fewer} at once", _decode(engine, prompts, args.output_len, fewer), None)]
    del engine
    gc.collect()  # its memory is the next one's
    engine = engines.start(args, result, args.concurrency)
    drafted = _decode(engine, prompts, args.output_len, args.concurrency)
    runs.append((f"{args.draft}, {args.concurrency} at once", drafted, engine.stats()["avg_spec_accept_length"]))
    model = engine.runner.model
    del engine
    gc.collect()
    for name, others, accept_length in runs:
        differ = [(p, a, b) for p, a, b in zip(prompts, texts, others, strict=True) if a != b]
        row: Row = {"run": name, "prompts": len(prompts), "differ": len(differ), "rate": len(differ) / len(prompts)}
        if accept_length is not None:
            row["accept_length"] = accept_length
        if differ:
            first, margins = zip(*(_first_difference(model, *case) for case in tqdm(differ, desc=name)), strict=True)
            row |= {"first": float(np.median(first)), "margins": sorted(margins)}
            row |= {"margin_median": float(np.median(margins)), "margin_max": max(margins)}
        result.add(row)


def _decode(engine: Engine, prompts: list[list[int]], output_len: int, concurrency: int) -> list[list[int]]:
    """Greedy tokens for each prompt, `concurrency` at a time, nothing shared between runs."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len)
    replies = traffic.afresh(engine, prompts, params, concurrency, f"{concurrency} at once")
    return [reply.token_ids for reply in replies]


def _first_difference(model: Model, prompt: list[int], text: list[int], other: list[int]) -> tuple[int, float]:
    """The first position at which two texts differ, and how far apart their tokens' logits are there."""
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    if at == len(text) or at == len(other):
        raise BenchError(f"one text is the beginning of the other, {at} tokens long; both should end alike")
    known = prompt + text[:at]
    padded = np.zeros((1, -(-len(known) // LENGTH_STEP) * LENGTH_STEP), np.int32)
    padded[0, : len(known)] = known
    values = np.asarray(jax.device_get(logits(model, padded)[0, len(known) - 1]), np.float64)
    return at, float(abs(values[text[at]] - values[other[at]]))


def plot(document: Document, figure: Any) -> None:
    """Each run's margins, smallest first."""
    axes = figure.subplots()
    for row in document["rows"]:
        margins = row.get("margins", [])
        axes.plot(range(1, len(margins) + 1), margins, "o-", label=f"{row['run']}: {row['differ']} differ")
    axes.set(xlabel="texts that differ", ylabel="margin of the first difference, logits")
    plots.from_zero(axes)
    plots.whole(axes.xaxis)
    axes.legend()
