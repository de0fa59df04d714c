"""Tokens a round of one drafter or several, by benchmark and by position, and the speed-up over plain decoding.

Offline, real weights. Each --draft has an engine of its own, and before them all plain decoding, unless --no-plain says
that acceptance alone is wanted. Each serves every --data file's questions through the chat template, at each
--concurrency. Prefixes are forgotten in between.

Tokens a round are all tokens of verify rounds over all rounds, the bonus included. Intervals hold 95% of 2,000
bootstrap samples of the prompts. `accepted` is, of all rounds, the share in which draft i and all before it stood, so
that 1 and these shares add up to tokens a round. Acceptance is measured at the first concurrency; speed-up is of output
tokens a second, prompts included. A DFlash and an EAGLE-3 drafter compare only at the same number of drafts.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench import acceptance, datasets, engines, plots, questions, traffic
from jaxspec.bench.acceptance import Counts
from jaxspec.bench.client import Reply
from jaxspec.bench.datasets import Prompt
from jaxspec.bench.questions import Question
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts
from jaxspec.config.flags import positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine

PLAIN = "none"


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
    Column("concurrency", "requests"),
    Column("prompts", "prompts"),
    Column("output_tokens", "tokens"),
    Column("tokens_per_s", "tok/s", ".1f"),
    Column("speedup", "speed-up", ".2f"),
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
    add("--draft", action="append", metavar="D", help="a drafter, as the server takes it; several are compared (auto)")
    formats = "GSM8K, MATH, HumanEval, MBPP, LiveCodeBench, Alpaca, MT-Bench, Spec-Bench"
    add("--data", action="append", required=True, metavar="[NAME=]FILE", help=f"{formats} as published")
    add("--num-prompts", type=positive, metavar="N", help="of each file, spread over its categories (all)")
    add("--concurrency", type=counts("1,8,32"), default="1", metavar="N,N,...", help="most at once (%(default)s)")
    add("--output-len", type=positive, default=256, metavar="TOKENS", help="new tokens at most (%(default)s)")
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--no-plain", action="store_true", help="measure acceptance alone, without plain decoding to compare with")
    datasets.add_template_argument(parser)
    engines.add_arguments(parser, without=("draft",), load_format="auto")


@dataclass(frozen=True)
class Benchmark:
    """A file's questions as token ids."""

    name: str
    prompts: list[Prompt]
    categories: list[str | None]


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure plain decoding, then each drafter.

    **Raises:** `BenchError` for a file that can't be read, before a model is loaded; as `engines.start`.
    """
    files = [_read(data) for data in args.data]
    if len({name for name, _ in files}) < len(files):
        raise BenchError("two --data files have one name; tell them apart with --data NAME=FILE")
    drafts = list(dict.fromkeys(args.draft or ["auto"]))
    if not args.no_plain:
        drafts = [PLAIN, *(draft for draft in drafts if draft != PLAIN)]
    for draft in drafts:
        engines.check(engines.with_drafter(args, draft))
    plain: dict[tuple[str, int], float] = {}
    bar = tqdm(total=len(drafts) * len(args.concurrency) * len(files), desc="accept", unit="load", disable=None)
    for draft in drafts:
        engine = engines.start(engines.with_drafter(args, draft), result, max(args.concurrency))
        benchmarks = [_prepare(engine, args, name, each[: args.num_prompts], result) for name, each in files]
        for concurrency in args.concurrency:
            if engine.config.skip_warmup:
                _serve(engine, args, benchmarks[0].prompts[:concurrency], concurrency)
            for benchmark in benchmarks:
                load = f"{draft}, {benchmark.name}, {concurrency} at a time"
                bar.set_postfix_str(load)
                compiled = engine.stats()["compiles_total"]
                row = _row(engine, args, benchmark, concurrency)
                row |= {"draft": draft, "drafts": engine.runner.draft.drafter.num_draft_tokens}
                if draft == PLAIN:
                    plain[benchmark.name, concurrency] = row["tokens_per_s"]
                if not args.no_plain:
                    row["speedup"] = row["tokens_per_s"] / plain[benchmark.name, concurrency]
                result.add(row)
                if missed := engine.stats()["compiles_total"] - compiled:
                    result.note(f"{load}: programs compiled meanwhile: {missed}; its speed includes that")
                bar.update()
        del engine
        gc.collect()  # its memory is the next one's
    bar.close()


def _read(data: str) -> tuple[str, list[Question]]:
    """Name and questions of NAME=FILE, or of a file that names itself."""
    name, equals, path = data.partition("=")
    found, asked = questions.read(Path(path if equals else data))
    return name if equals else found, asked


def _prepare(engine: Engine, args: argparse.Namespace, name: str, asked: list[Question], result: Result) -> Benchmark:
    """**Raises:** `BenchError` if no question leaves room for an answer."""
    template = tuple(args.chat_template_kwargs.items())
    ids = [Prompt(question=each.text, template=template).ids(engine.tokenizer) for each in asked]
    room = engine.config.context_length - args.output_len
    fitting = [i for i, tokens in enumerate(ids) if len(tokens) <= room]
    if not fitting:
        raise BenchError(
            f"no question of {name} leaves room for {args.output_len} new tokens in a context of "
            f"{engine.config.context_length}; raise --context-length or lower --output-len"
        )
    left = f"{len(ids) - len(fitting)} of {len(ids)} questions of {name} are left out: too long for the context"
    if len(fitting) < len(ids) and left not in result.document["notes"]:
        result.note(left)
    return Benchmark(name, [Prompt(tuple(ids[i])) for i in fitting], [asked[i].category for i in fitting])


def _serve(engine: Engine, args: argparse.Namespace, prompts: list[Prompt], concurrency: int) -> list[Reply]:
    engine.flush_cache()
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output_len)
    return traffic.serve(engine, traffic.Load.closed(prompts, concurrency, params))


def _row(engine: Engine, args: argparse.Namespace, benchmark: Benchmark, concurrency: int) -> Row:
    """Figures of one benchmark at one concurrency; `parts`, by category, at the first concurrency."""
    replies = _serve(engine, args, benchmark.prompts, concurrency)
    seconds = max(reply.ended for reply in replies) - min(reply.sent for reply in replies)
    tokens = sum(reply.output_tokens for reply in replies)
    row: Row = {"data": benchmark.name, "concurrency": concurrency, "prompts": len(replies), "output_tokens": tokens}
    row |= {"seconds": seconds, "tokens_per_s": tokens / seconds, "speedup": None}
    if not engine.runner.width > 1:
        return row | {"tokens_per_round": None, "low": None, "high": None}
    counted = [Counts.of(reply.metrics) for reply in replies]
    seed = args.seed or 0
    whole = acceptance.figures(counted, seed)
    row |= {key: whole[key] for key in ("tokens_per_round", "low", "high", "rounds")}
    if concurrency == args.concurrency[0]:
        names = list(dict.fromkeys(benchmark.categories))
        row["parts"] = [{"category": "all"} | whole]
        if len(names) > 1:
            for name in names:
                mine = [each for each, category in zip(counted, benchmark.categories, strict=True) if category == name]
                row["parts"].append({"category": name or "-"} | acceptance.figures(mine, seed))
    return row


def plot(document: Document, figure: Any) -> None:
    """Tokens a round by benchmark with intervals, acceptance by position, and speed-up by concurrency."""
    length_axes, position_axes, speed_axes = figure.subplots(1, 3)
    rows = document["rows"]
    drafts = [draft for draft in dict.fromkeys(row["draft"] for row in rows) if draft != PLAIN]
    names = list(dict.fromkeys(row["data"] for row in rows))
    for i, draft in enumerate(drafts):
        mine = [row for row in rows if row["draft"] == draft]
        wholes = {row["data"]: row["parts"][0] for row in mine if row.get("parts")}
        x = np.arange(len(wholes)) + (i - (len(drafts) - 1) / 2) * 0.8 / len(drafts)
        heights = np.array([whole["tokens_per_round"] or 0.0 for whole in wholes.values()])
        ends = [[whole[end] or height for whole, height in zip(wholes.values(), heights, strict=True)]
                for end in ("low", "high")]  # fmt: skip
        around = np.abs(np.array(ends) - heights)
        length_axes.bar(x, heights, 0.8 / len(drafts), yerr=around, capsize=2, label=draft)
        rounds = np.array([whole["rounds"] for whole in wholes.values()])
        shares = np.array([whole["positions"] for whole in wholes.values()])
        position_axes.plot(range(1, shares.shape[1] + 1), rounds @ shares / rounds.sum(), "o-", label=draft)
        speeds = defaultdict(list)
        for row in mine:
            if row["speedup"] is not None:
                speeds[row["concurrency"]].append(row["speedup"])
        if speeds:
            mean = [float(np.exp(np.mean(np.log(each)))) for each in speeds.values()]
            speed_axes.plot(list(speeds), mean, "o-", label=draft)
    length_axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    length_axes.set(ylabel="tokens a round, 95% intervals")
    position_axes.set(xlabel="draft", ylabel="accepted with all before it, of all rounds", ylim=(0, 1))
    for axes in (length_axes, position_axes):
        axes.legend()
    speed_axes.axhline(1.0, color="k", linestyle="--", label="plain")
    plots.against(speed_axes, [row["concurrency"] for row in rows], "requests", "speed-up, geometric mean")
