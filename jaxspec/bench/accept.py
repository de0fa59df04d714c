"""Tokens a round of one drafter or several, by benchmark and by position, and the speed-up over plain decoding.

Offline, real weights. Each --draft has an engine of its own, and before them all plain decoding, unless --no-plain says
that acceptance alone is wanted. Each serves every --data file's questions through the chat template, at each
--concurrency. In between prefixes are forgotten, and drafters forget other requests unless --keep-memory. With --turns
all, a conversation's later turns are asked, too, each after the model's answer to the one before.

Tokens a round are all tokens of verify rounds over all rounds, the bonus included. Intervals hold 95% of 2,000
bootstrap samples of the prompts. `accepted` is, of all rounds, the share in which draft i and all before it stood, so
that 1 and these shares add up to tokens a round. Acceptance is measured at the first concurrency; speed-up is of output
tokens a second, prompts included. A DFlash and an EAGLE-3 drafter compare only at the same number of drafts.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import acceptance, answers, datasets, plots
from jaxspec.bench.answers import PLAIN, Benchmark, Run
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts
from jaxspec.config.flags import positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.text import prompts as files


def _by_category(row: Row) -> list[Row]:
    of = {"draft": row["draft"], "data": row["data"]}
    parts = row.get("parts", [])
    return [of | part | {"positions_text": " / ".join(f"{x:.2f}" for x in part["positions"])} for part in parts]


def _named(draft: str) -> str:
    """A drafter without the folders that its own lies in."""
    return re.sub(r"(?<![^:+])(?:~|\.{0,2})/(?:[^:+?]*/)?([^/:+?]+)/?", r"\1", draft)


@dataclass(frozen=True)
class PaperTable(Table):
    """A line for each drafter and a column for each benchmark, in markdown, as papers print tokens a round."""

    def lines(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row.get("parts")]

    def plain(self, rows: list[Row]) -> str:
        return f"{self.title}\n{self.markdown(rows)}"

    def markdown(self, rows: list[Row]) -> str:
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for row in self.lines(rows):
            found[row["draft"]][row["data"]] = row["tokens_per_round"] or 0.0
        names = list(dict.fromkeys(name for line in found.values() for name in line))
        best = {name: max(line.get(name, 0.0) for line in found.values()) for name in names}

        def show(name: str, tokens: float | None) -> str:
            bold = "**" if len(found) > 1 and tokens == best[name] else ""
            return "-" if tokens is None else f"{bold}{tokens:.2f}{bold}"

        body = [["drafter", *names], ["---"] * (1 + len(names))]
        body += [[_named(draft), *(show(name, line.get(name)) for name in names)] for draft, line in found.items()]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in body)


DRAFT, DATA = Column("draft", "draft", "<24", 24), Column("data", "data", "<16", 16)
SPEEDS = (
    *(DRAFT, DATA),
    Column("drafts", "drafts"),
    Column("tp_size", "devices"),
    Column("concurrency", "requests"),
    Column("prompts", "prompts"),
    Column("output_tokens", "tokens"),
    Column("tokens_per_s", "tok/s", ".1f"),
    *acceptance.SPEEDUP,
    *acceptance.COLUMNS,
)
CATEGORIES = (
    *(DRAFT, DATA),
    Column("category", "category", "<16", 16),
    Column("prompts", "prompts"),
    Column("rounds", "rounds"),
    *acceptance.COLUMNS,
    Column("positions_text", "accepted", "<1", 1),
)
TABLES = (
    Table("accept: speed against plain decoding", SPEEDS),
    Table("acceptance by category", CATEGORIES, _by_category),
    PaperTable("tokens a round", ()),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    formats = "GSM8K, MATH, HumanEval, MBPP, LiveCodeBench, Alpaca, ShareGPT, MT-Bench, Spec-Bench, SPEED-Bench"
    add("--data", action="append", required=True, metavar="[NAME=]FILE", help=f"{formats} as published, or chats")
    add("--num-prompts", type=positive, metavar="N", help="of each file, spread over its categories (all)")
    datasets.add_category_argument(parser)
    datasets.add_wording_argument(parser)
    add("--turns", choices=("first", "all"), default="first", help="of each conversation (%(default)s)")
    add("--concurrency", type=counts("1,8,32"), default="1", metavar="N,N,...", help="most at once (%(default)s)")
    add("--output-len", type=positive, default=256, metavar="TOKENS", help="new tokens at most (%(default)s)")
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--no-plain", action="store_true", help="measure acceptance alone, without plain decoding to compare with")
    datasets.add_template_argument(parser)
    answers.add_arguments(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure plain decoding, then each drafter.

    **Raises:** `BenchError` or `DataError` for files that can't be compared or read, before a model is loaded; as
    `engines.start`.
    """
    asked = dict(_read(args, data) for data in args.data)
    if len(asked) < len(args.data):
        raise BenchError("two --data files have one name; tell them apart with --data NAME=FILE")
    drafts = answers.drafters(args, not args.no_plain)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len)

    def prepare(engine: Engine) -> list[Benchmark]:
        ids = {name: [answers.chat_ids(engine, args, p.opening()) for p in each] for name, each in asked.items()}
        fit = lambda name: Benchmark.that_fit(engine, name, asked[name], ids[name], args.output_len, result)  # noqa: E731
        return [fit(name) for name in asked]

    plain: dict[tuple[int, str, int], Row] = {}
    for each in answers.sweep(args, drafts, params, result, prepare):
        row = _row(args, each)
        if not args.no_plain:
            first = plain.setdefault((each.tp_size, each.benchmark.name, each.concurrency), row)
            row |= acceptance.speedup(first, row, args.seed or 0)
        result.add(row)


def _read(args: argparse.Namespace, data: str) -> tuple[str, list[files.Prompt]]:
    """Name and questions of NAME=FILE, or of a file that names itself."""
    name, equals, path = data.partition("=")
    found, asked = files.read(Path(path if equals else data))
    words, turns = datasets.WORDINGS[args.wording], None if args.turns == "all" else 1
    chosen = files.in_turn(asked, args.category)[: args.num_prompts]
    chosen = [replace(each, turns=tuple(turn + words for turn in each.turns[:turns])) for each in chosen]
    return name if equals else found, chosen


def _row(args: argparse.Namespace, run: Run) -> Row:
    """Figures of one benchmark at one concurrency; `parts`, by category, at the first concurrency."""
    row, seed = dict(run.row), args.seed or 0
    if not run.drafts:
        return row | {"tokens_per_round": None, "low": None, "high": None}
    counted = run.counted()
    whole = acceptance.figures(counted, seed)
    row |= {key: whole[key] for key in ("tokens_per_round", "low", "high", "rounds")}
    if run.concurrency == args.concurrency[0] and run.tp_size == args.tp_size[0]:
        categories = [prompt.category for prompt in run.benchmark.asked]
        names = list(dict.fromkeys(categories))
        row["parts"] = [{"category": "all"} | whole]
        if len(names) > 1:
            for name in names:
                mine = [each for each, category in zip(counted, categories, strict=True) if category == name]
                row["parts"].append({"category": name} | acceptance.figures(mine, seed))
    return row


def plot(document: Document, figure: Any) -> None:
    """Tokens a round by benchmark, acceptance by position, and speed-up by concurrency; 95% intervals."""
    length_axes, position_axes, speed_axes = figure.subplots(1, 3)  # a drafter has one colour in all three
    rows = document["rows"]
    drafts = [draft for draft in dict.fromkeys(row["draft"] for row in rows) if draft != PLAIN]
    names = list(dict.fromkeys(row["data"] for row in rows))
    for i, draft in enumerate(drafts):
        mine, label = [row for row in rows if row["draft"] == draft], _named(draft)
        wholes = {row["data"]: row["parts"][0] for row in mine if row.get("parts")}
        x = np.arange(len(wholes)) + (i - (len(drafts) - 1) / 2) * 0.8 / len(drafts)
        colour = f"C{i}"
        heights = np.array([whole["tokens_per_round"] or 0.0 for whole in wholes.values()])
        ends = [[whole[end] or height for whole, height in zip(wholes.values(), heights, strict=True)]
                for end in ("low", "high")]  # fmt: skip
        around = np.abs(np.array(ends) - heights)
        length_axes.bar(x, heights, 0.8 / len(drafts), yerr=around, capsize=2, label=label, color=colour)
        rounds = np.array([whole["rounds"] for whole in wholes.values()])
        shares = np.array([whole["positions"] for whole in wholes.values()])
        position_axes.plot(range(1, shares.shape[1] + 1), rounds @ shares / rounds.sum(), "o-", color=colour)
        if speeds := _mean_speedups(mine):
            plots.with_interval(speed_axes, speeds, "concurrency", "speedup", color=colour)
    plots.rotated(length_axes, names)
    length_axes.set(ylabel="tokens a round")
    position_axes.set(xlabel="draft", ylabel="share of rounds that accept it", ylim=(0, 1))
    plots.whole(position_axes.xaxis)
    speed_axes.axhline(1.0, color="k", linestyle="--")
    plots.against(speed_axes, [row["concurrency"] for row in rows], "requests", "speed-up over plain, geometric mean")
    plots.legend_below(figure, length_axes)


def _mean_speedups(rows: list[Row]) -> list[Row]:
    """Geometric means over benchmarks, by concurrency. Their intervals are as wide as independent ones make them."""
    found = []
    for n in dict.fromkeys(row["concurrency"] for row in rows):
        mine = [row for row in rows if row["concurrency"] == n and row.get("speedup") is not None]
        if not mine:
            continue
        mean = np.log([row["speedup"] for row in mine]).mean()
        row: Row = {"concurrency": n, "speedup": float(np.exp(mean))}
        if all(each.get("speedup_low") for each in mine):
            for end in ("low", "high"):
                off = np.log([each[f"speedup_{end}"] / each["speedup"] for each in mine])
                row[f"speedup_{end}"] = float(np.exp(mean + np.sign(off.sum()) * np.sqrt((off**2).sum()) / len(off)))
        found.append(row)
    return found
