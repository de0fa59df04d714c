"""The matched table of `jaxspec train compare`: drafters of several methods, trained alike and measured side by side.

Alike: the same target, texts, order of texts, seed and budget, each method's own loss and shape unless one is given.
Each is then served by `bench accept`, at one number of drafts, and so is plain decoding. Training and measurement leave
their results in the drafter's folder, so processes may share the work.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxspec.bench import accept, acceptance, plots
from jaxspec.bench.answers import PLAIN, compiling
from jaxspec.bench.results import BenchError, Document, Row

# Flags that the comparison itself has, or has no use for.
_SHARED = (
    "model", "data", "output", "steps", "minutes", "row-length", "seed", "dtype", "tp-size", "num-draft-tokens",
    "max-new-tokens", "num-samples", "no-evaluation", "no-plots",
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A drafter as `--drafters` names it, and the command line that trains it; or plain decoding."""

    name: str
    args: argparse.Namespace

    @classmethod
    def of_plain(cls, args: argparse.Namespace) -> Contender:
        return cls(PLAIN, argparse.Namespace(command=PLAIN, output=args.output / PLAIN))

    @property
    def plain(self) -> bool:
        return self.name == PLAIN

    @property
    def draft(self) -> str:
        return PLAIN if self.plain else f"{self.args.command}:{self.args.output / 'drafter'}"

    @property
    def weights(self) -> Path:
        return self.args.output / "drafter" / "model.safetensors"

    def facts(self) -> Row:
        """Size of its weights in MB, and the steps it was trained for."""
        last = (self.args.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return {"mb": self.weights.stat().st_size / 1e6, "steps": json.loads(last)["step"]}


def contenders(
    args: argparse.Namespace, parse: Callable[[list[str]], argparse.Namespace], methods: Sequence[str]
) -> list[Contender]:
    """The drafters of `--drafters`, `NAME` or `NAME?flag=value&switch`, each with the shared settings.

    **Raises:** `BenchError` for a method that isn't known, a flag that all share, or two of one name. Exits, as the
    command line does, for a flag that the method doesn't have.
    """
    found = []
    for name in args.drafters:
        if name == PLAIN and args.until == "served":
            found.append(Contender.of_plain(args))
            continue
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


def command(args: argparse.Namespace, each: Contender) -> list[str]:
    """The command line of the benchmark that serves it."""
    flags = {"draft": each.draft, "model": args.model, "dtype": args.dtype, "num-prompts": args.num_prompts}
    flags |= {"concurrency": ",".join(map(str, args.requests)), "output-len": args.max_new_tokens, "seed": args.seed}
    flags |= {"tp-size": args.tp_size, "num-draft-tokens": args.num_draft_tokens, "draft-policy": "fixed"}
    flags |= {"batch-sizes": flags["concurrency"]}  # a load, its programs
    argv = [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]
    argv += [text for each in args.benchmark for text in ("--data", each)]
    switches = {"--disable-structured-output": True, "--no-plain": not each.plain}
    switches |= {"--skip-warmup": jax.default_backend() == "cpu"}
    return ["accept", *argv, *(name for name, given in switches.items() if given)]


def report(args: argparse.Namespace, documents: Sequence[Document], found: Sequence[Contender]) -> str:
    """The table, how it was made and what may mislead in it, which is written to `compare.md`, beside its figures and
    its chart. Plain decoding is the first of the documents."""
    plain = {(row["data"], row["concurrency"]): row for row in documents[0]["rows"]}
    methods = [each.args.command for each in found]
    names = {each.draft: each.args.command if methods.count(each.args.command) == 1 else each.name for each in found}
    rows, notes = [], []
    for document in documents:
        for row in document["rows"]:
            row |= acceptance.speedup(plain[row["data"], row["concurrency"]], row, args.seed)
            rows.append(row | {"draft": names.get(row["draft"], row["draft"])})
        draft, alone = document["rows"][0]["draft"], compiling(document["rows"])
        notes += [note.replace(draft, names.get(draft, draft)) for note in document["notes"] if note != alone]
    notes += filter(None, [compiling(rows)])
    whole = documents[0] | {"rows": rows, "notes": notes}
    (args.output / "compare.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if not args.no_plots:
        plots.draw(accept.plot, whole, args.output / "compare.svg")
    text = "\n\n".join([table(rows, names, found), said(args, documents, found), *(f"{note}." for note in notes)])
    (args.output / "compare.md").write_text(text + "\n", encoding="utf-8")
    return text


def said(args: argparse.Namespace, documents: Sequence[Document], found: Sequence[Contender]) -> str:
    """How the figures were made, in the sentences that a paper needs below its table."""
    each = [document["facts"] for document in documents]
    devices = _all(", ".join(facts["devices"]) + f" ({facts.get('cores')} CPU cores)" for facts in each)
    versions = _all(f"jaxspec {f['commit']}, jax {f.get('versions', {}).get('jax')}" for f in each)
    runs = {drafter.name: json.loads((drafter.args.output / "run.json").read_text())["settings"] for drafter in found}
    texts = _all(f"{run.get('texts')} texts (sha256 {str(run.get('data_sha256'))[:12]})" for run in runs.values())
    kinds = _all(f"{drafter.args.batch_size} rows of {drafter.args.row_length} tokens" for drafter in found)
    questions = {row["data"]: row["prompts"] for row in documents[0]["rows"]}
    asked = ", ".join(f"{count} of {name}" for name, count in questions.items())
    flag, value = args.budget
    dtypes = _all(facts.get("dtype", "a dtype that wasn't noted") for facts in each)
    return " ".join([
        f"Target: {args.model}, served in {dtypes} on {devices}; {versions}.",
        f"Training: {value} {flag.lstrip('-')} a drafter, in batches of {kinds}, on {texts}; seed {args.seed}.",
        f"Serving: {args.num_draft_tokens} drafts a round, greedy, at most {args.max_new_tokens} new tokens; "
        f"questions: {asked}.",
        "Tokens a round are of verify rounds, the bonus included, at the first number of requests. Tokens a second are "
        "output tokens, prompts' time included. In parentheses: 95% intervals, by 2,000 bootstrap samples of the "
        "prompts; one prompt has none. They don't cover another training seed or another run's timing.",
    ])  # fmt: skip


def _all(values: Iterable[str]) -> str:
    """The values that differ: one where all that the table is of were made alike."""
    return " / ".join(dict.fromkeys(values))


def table(rows: Sequence[Row], names: Mapping[str, str], found: Sequence[Contender]) -> str:
    """Markdown: the drafters; tokens a round by data set and category; tokens a second and speed-up. Intervals are of
    95%, and the best of a line is bold. `names`: what `rows` call the drafters, by `Contender.draft`."""
    mine = {name: [row for row in rows if row["draft"] == name] for name in names.values()}
    facts = [[each.name, f"{fact['mb']:.1f}", str(fact["steps"])] for each in found for fact in [each.facts()]]
    parts = {
        name: {(row["data"], part["category"]): part for row in own for part in row.get("parts", ())}
        for name, own in mine.items()
    }
    speeds = {name: {(row["data"], row["concurrency"]): row for row in own} for name, own in mine.items()}
    prompts = {key: part["prompts"] for own in parts.values() for key, part in own.items()}
    lengths = [
        [*key, str(prompts[key]),
         *_best([parts[name].get(key) for name in mine], "tokens_per_round", "low", "high", "{:.2f}")]
        for key in dict.fromkeys(key for own in parts.values() for key in own)
    ]  # fmt: skip
    plain = {(row["data"], row["concurrency"]): row for row in rows if row["draft"] == PLAIN}
    faster = [
        [key[0], str(key[1]), _speed(plain[key]),
         *_best([speeds[name].get(key) for name in mine], "speedup", "speedup_low", "speedup_high", "{:.2f}x",
                lambda row: f"{_speed(row)}, ")]
        for key in plain
    ]  # fmt: skip
    return "\n\n".join([
        _markdown(["drafter", "MB", "steps"], facts),
        "Tokens a round:",
        _markdown(["data", "category", "prompts", *mine], lengths),
        "Tokens a second, and speed-up over plain decoding:",
        _markdown(["data", "requests", "plain", *mine], faster),
    ])  # fmt: skip


def _speed(row: Row) -> str:
    """Tokens a second, in three digits or more."""
    return f"{row['tokens_per_s']:{'.0f' if row['tokens_per_s'] >= 100 else '.3g'}}"


def _best(
    cells: Sequence[Row | None], key: str, low: str, high: str, form: str, before: Callable[[Row], str] = lambda row: ""
) -> list[str]:
    """A line's cells: each figure with its interval, the best in bold."""
    figures = {cell[key] for cell in cells if cell and cell[key] is not None}
    best = max(figures) if len(figures) > 1 else None  # where all are alike, none is the best

    def show(cell: Row | None) -> str:
        if cell is None or cell[key] is None:
            return "-"
        bold = "**" if cell[key] == best else ""
        around = "" if cell[low] is None else f" ({cell[low]:.2f} to {cell[high]:.2f})"
        return f"{before(cell)}{bold}{form.format(cell[key])}{bold}{around}"

    return [show(cell) for cell in cells]


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])
