"""Scores of a task's answers, with drafts and without, beside their speed: the part of `bench accuracy` with --task."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from jaxspec.bench import acceptance, answers, gsm8k, plots
from jaxspec.bench.answers import PLAIN, Benchmark, Run
from jaxspec.bench.datasets import WORDINGS
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, check_writable
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.text.prompts import Prompt, in_turn

COLUMNS = (
    Column("draft", "draft", "<24", 24),
    Column("tp_size", "devices"),
    Column("concurrency", "requests"),
    *(
        column
        for name in gsm8k.EXTRACTIONS
        for column in (
            Column(name, name, ".1%"),
            Column(f"{name}_low", "low", ".1%", 5),
            Column(f"{name}_high", "high", ".1%", 5),
        )
    ),
    Column("tokens_per_s", "tok/s", ".1f"),
    *acceptance.SPEEDUP,
)


def run(args: argparse.Namespace, result: Result) -> None:
    """Answer and score: plain decoding first, then each drafter.

    **Raises:** `BenchError` or `DataError` for files or flags that don't do, before a model is loaded; as
    `engines.start`.
    """
    if args.data is None:
        raise BenchError(f"--task {args.task} needs its file: --data test.jsonl")
    if args.samples is not None:
        check_writable("--samples", args.samples)
    boxed = args.wording == "boxed"
    asked, shots = gsm8k.questions(args.data, args.shots, 0 if boxed else args.num_shots)
    asked = in_turn(asked)[: args.num_prompts]
    drafts = answers.drafters(argparse.Namespace(**vars(args) | {"draft": args.draft or [PLAIN]}), plain=True)
    names = [name for name in gsm8k.EXTRACTIONS if boxed or name != "boxed"]
    stops = () if boxed else gsm8k.STOPS
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, stop=stops)

    def prepare(engine: Engine) -> list[Benchmark]:
        if engine.tokenizer is None:
            raise BenchError("a task needs a model with a tokenizer")
        chat = lambda one: [{"role": "user", "content": one.turns[0] + WORDINGS["boxed"]}]  # noqa: E731
        ids = [
            answers.chat_ids(engine, args, chat(one)) if boxed else engine.tokenizer.encode(gsm8k.text(one, shots))
            for one in asked
        ]
        return [Benchmark.that_fit(engine, args.task, asked, ids, args.output_len, result)]

    runs: list[Run] = []
    plain: dict[tuple[int, int], Row] = {}
    records = []
    for each in answers.sweep(args, drafts, params, result, prepare):
        samples = _samples(each, names)
        row = each.row | _scores(samples, names)
        row |= acceptance.speedup(plain.setdefault((each.tp_size, each.concurrency), row), row, args.seed or 0)
        runs.append(each)
        row["same"] = float(np.mean([a == b for a, b in zip(_tokens(each), _tokens(runs[0]), strict=True)]))
        found = acceptance.figures(each.counted() if each.drafts else (), args.seed or 0)
        row |= {key: found[key] for key in ("tokens_per_round", "low", "high", "positions")}
        result.add(row)
        of = {"draft": each.draft, "tp_size": each.tp_size, "concurrency": each.concurrency}
        records += [of | sample for sample in samples]
        if args.samples is not None:
            gsm8k.write_samples(args.samples, records)


def _tokens(run: Run) -> list[list[int]]:
    return [replies[0].token_ids for replies in run.answers]


def _samples(run: Run, names: list[str]) -> list[dict[str, Any]]:
    asked: list[Prompt] = run.benchmark.asked
    return [gsm8k.sample(i, asked[i], replies[0].text, names) for i, replies in enumerate(run.answers)]


def _scores(samples: list[dict[str, Any]], names: list[str]) -> Row:
    row: Row = {}
    for name in names:
        right = sum(sample["right"][name] for sample in samples)
        low, high = gsm8k.interval(right, len(samples))
        row |= {name: right / len(samples), f"{name}_low": low, f"{name}_high": high}
    return row


def plot(document: Document, figure: Any) -> None:
    """Scores with their intervals, and the speed-up, by drafter and concurrency."""
    score_axes, speed_axes = figure.subplots(1, 2)
    rows = document["rows"]
    names = [name for name in gsm8k.EXTRACTIONS if name in rows[0]]
    x = np.arange(len(rows))
    for i, name in enumerate(names):
        at = x + (i - (len(names) - 1) / 2) * 0.8 / len(names)
        heights = np.array([row[name] for row in rows])
        around = [heights - [row[f"{name}_low"] for row in rows], [row[f"{name}_high"] for row in rows] - heights]
        score_axes.bar(at, heights, 0.8 / len(names), yerr=around, capsize=2, label=name)
    plots.rotated(score_axes, [f"{row['draft']}, {row['concurrency']} at once" for row in rows])
    score_axes.set(ylabel="share of right answers, 95% intervals", ylim=(0, None))
    score_axes.legend()
    for draft in dict.fromkeys(row["draft"] for row in rows):
        plots.with_interval(speed_axes, [r for r in rows if r["draft"] == draft], "concurrency", "speedup", label=draft)
    plots.against(speed_axes, [row["concurrency"] for row in rows], "requests", "speed-up, 95% intervals")
