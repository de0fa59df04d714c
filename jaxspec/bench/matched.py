"""The matched table of `jaxspec train compare`: drafters of several methods, trained alike and measured side by side.

Alike: the same target, texts, order of texts, seed and budget, each method's own loss and shape unless one is given.
They are then served by `bench accept`, at one number of drafts, after plain decoding.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxspec.bench.results import BenchError, Row

# Flags that the comparison itself has, or has no use for.
_SHARED = (
    "model", "data", "output", "steps", "minutes", "row-length", "seed", "dtype", "tp-size", "num-draft-tokens",
    "max-new-tokens", "num-samples", "no-evaluation", "no-plots",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A drafter as `--drafters` names it, and the command line that trains it."""

    name: str
    args: argparse.Namespace

    @property
    def draft(self) -> str:
        return f"{self.args.command}:{self.args.output / 'drafter'}"

    def facts(self) -> Row:
        """Size of its weights in MB, and the steps it was trained for."""
        size = (self.args.output / "drafter" / "model.safetensors").stat().st_size / 1e6
        last = (self.args.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return {"mb": size, "steps": json.loads(last)["step"]}


def contenders(
    args: argparse.Namespace, parse: Callable[[list[str]], argparse.Namespace], methods: Sequence[str]
) -> list[Contender]:
    """The drafters of `--drafters`, `NAME` or `NAME?flag=value&switch`, each with the shared settings.

    **Raises:** `BenchError` for a method that isn't known, a flag that all share, or two of one name. Exits, as the
    command line does, for a flag that the method doesn't have.
    """
    found = []
    for name in args.drafters:
        method, _, options = name.partition("?")
        if method not in methods:
            raise BenchError(f"--drafters {name}: {method!r} is no method of training; there are {', '.join(methods)}")
        folder = args.output / name.translate(str.maketrans("?&=:,/", "------"))
        extra = [text for option in filter(None, options.split("&")) for text in _flag(name, option)]
        required = ["--model", args.model, "--data", str(args.data), "--output", str(folder)]
        own = parse([method, *required, *args.budget, *extra])
        given = {option.partition("=")[0].replace("-", "_") for option in options.split("&")}
        shared = {key: value for key, value in vars(args).items() if value is not None and key in vars(own)}
        kept = given | {"command", "output", "data", "num_samples"}
        vars(own).update({key: value for key, value in shared.items() if key not in kept})
        own.no_evaluation = True
        found.append(Contender(name, own))
    if len({each.args.output for each in found}) < len(found):
        raise BenchError(f"--drafters {','.join(args.drafters)}: two of them have one name")
    return found


def _flag(name: str, option: str) -> list[str]:
    key, equals, value = option.partition("=")
    if key in _SHARED:
        raise BenchError(f"--drafters {name}: --{key} is the same for all drafters. Drop it there")
    return [f"--{key}={value}" if equals else f"--{key}"]


def listed(text: str) -> list[str]:
    """The drafters of a list. A comma before a letter divides two; others belong to a value, such as layers 0,2,3."""
    return re.split(",(?=[^0-9.-])", text)


def budget(text: str) -> list[str]:
    """The flag and value of a budget: minutes, such as 8m, or steps, such as 4000.

    **Raises:** `ValueError` for anything else.
    """
    minutes = text.endswith("m")
    value = float(text[:-1]) if minutes else int(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return ["--minutes" if minutes else "--steps", f"{value:g}" if minutes else str(value)]


def measure(args: argparse.Namespace, found: Sequence[Contender]) -> Path:
    """Serve all of them with `bench accept`; the JSON file of its rows. Its chart is beside it."""
    from jaxspec.bench.__main__ import main as bench

    file = args.output / "compare.json"
    flags = {"model": args.model, "dtype": args.dtype, "num-draft-tokens": args.num_draft_tokens, "json": file}
    flags |= {"concurrency": ",".join(map(str, args.requests)), "output-len": args.max_new_tokens, "seed": args.seed}
    flags |= {
        "tp-size": args.tp_size,
        "num-prompts": args.num_prompts,
        "plot": None if args.no_plots else args.output / "compare.svg",
    }
    argv = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    argv += [text for each in found for text in ("--draft", each.draft)]
    argv += [text for each in args.benchmark for text in ("--data", each)]
    argv += ["--batch-sizes", ",".join(map(str, args.requests)), "--draft-policy", "fixed"]  # a load, its programs
    bench(["accept", *argv, *(["--skip-warmup"] if jax.default_backend() == "cpu" else [])])
    return file


def table(rows: Sequence[Row], found: Sequence[Contender]) -> str:
    """Markdown: the drafters; tokens a round by data set and category; tokens a second and speed-up. Intervals are of
    95%, and the best of a line is bold."""
    mine = {each.name: [row for row in rows if row["draft"] == each.draft] for each in found}
    facts = [[each.name, f"{fact['mb']:.1f}", str(fact["steps"])] for each in found for fact in [each.facts()]]
    parts = {
        name: {(row["data"], part["category"]): part for row in own for part in row.get("parts", ())}
        for name, own in mine.items()
    }
    speeds = {name: {(row["data"], row["concurrency"]): row for row in own} for name, own in mine.items()}
    lengths = [
        [*key, *_best([parts[name].get(key) for name in mine], "tokens_per_round", "low", "high", "{:.2f}")]
        for key in dict.fromkeys(key for own in parts.values() for key in own)
    ]
    plain = {(row["data"], row["concurrency"]): row for row in rows if row["draft"] == "none"}
    faster = [
        [key[0], str(key[1]), f"{plain[key]['tokens_per_s']:.0f}",
         *_best([speeds[name].get(key) for name in mine], "speedup", "speedup_low", "speedup_high", "{:.2f}x",
                lambda row: f"{row['tokens_per_s']:.0f}, ")]
        for key in plain
    ]  # fmt: skip
    return "\n\n".join([
        _markdown(["drafter", "MB", "steps"], facts),
        "Tokens a round:",
        _markdown(["data", "category", *mine], lengths),
        "Tokens a second, and speed-up over plain decoding:",
        _markdown(["data", "requests", "plain", *mine], faster),
    ])  # fmt: skip


def _best(
    cells: Sequence[Row | None], key: str, low: str, high: str, form: str, before: Callable[[Row], str] = lambda row: ""
) -> list[str]:
    """A line's cells: each figure with its interval, the best in bold."""
    best = max((cell[key] or 0 for cell in cells if cell), default=0)

    def show(cell: Row | None) -> str:
        if cell is None or cell[key] is None:
            return "-"
        bold = "**" if cell[key] == best and len(cells) > 1 else ""
        around = "" if cell[low] is None else f" ({cell[low]:.2f} to {cell[high]:.2f})"
        return f"{before(cell)}{bold}{form.format(cell[key])}{bold}{around}"

    return [show(cell) for cell in cells]


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])
