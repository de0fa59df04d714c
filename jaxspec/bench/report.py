"""Markdown from the JSON files of a folder: each with the command that made it, the machine, tables and notes.

The pages of docs/measurements/ embed what this prints. A PNG beside a JSON file, of the same name, is linked. With
--plot, the decode results are drawn in one chart, a curve for each file: where one drafter overtakes another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench import plots
from jaxspec.bench.results import BenchError, Document, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="that holds what --json wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw decode results here, as PNG (needs matplotlib)")


def run(folder: Path, tables: Mapping[str, Sequence[Table]], plot: Path | None = None) -> None:
    """Print the report. `tables` are those of each benchmark, by its name; `plot` is the chart to draw.

    Files that hold no result, such as a training run's recipe, are left out and named on stderr.

    **Raises:** `BenchError` for a folder without results, or without those to draw.
    """
    if plot is not None:
        plots.check(plot)
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise BenchError(f"{folder} has no .json files; make some with --json {folder / 'decode.json'}")
    parts, decoding, others = [], {}, []
    for path in paths:
        try:
            document = json.loads(path.read_text())
            parts.append(section(path, document, tables[document["benchmark"]]))
            if document["benchmark"] == "decode":
                decoding[path.stem] = document
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            others.append(f"{path} is not a benchmark's result ({type(error).__name__}: {error})")
    if not parts:
        raise BenchError(others[0])
    print("\n\n".join(parts))
    if others:
        print("\n".join(f"left out: {other}" for other in others), file=sys.stderr)
    if plot is not None and not decoding:
        raise BenchError(f"--plot draws decode results, and {folder} has none")
    if plot is not None:
        plots.draw(lambda _, figure: compare(decoding, figure), next(iter(decoding.values())), plot)


def compare(documents: Mapping[str, Document], figure: Any) -> None:
    """Round time and tokens per second against the number of requests, a curve for each document, overlap on."""
    time_axes, rate_axes = figure.subplots(1, 2)
    x = set()
    for name, document in documents.items():
        rows = [row for row in document["rows"] if row["overlap"] == "on" and row["ms_per_round"]]
        plots.curve(time_axes, rows, "concurrency", "ms_per_round", label=name)
        plots.curve(rate_axes, rows, "concurrency", "tokens_per_s", label=name)
        x.update(row["concurrency"] for row in rows)
    plots.against(time_axes, sorted(x), "requests", "ms per round")
    plots.against(rate_axes, sorted(x), "requests", "tokens per second")


def section(path: Path, document: Document, tables: Sequence[Table]) -> str:
    """One document as markdown."""
    parts = [f"### {path.stem}", f"    {document['command']}", _where(document)]
    rows = document["rows"]
    parts += [f"{table.title}:\n\n{table.markdown(rows)}" for table in tables if table.lines(rows)]
    if document["notes"]:
        parts.append("\n".join(f"- {note}" for note in document["notes"]))
    if (image := path.with_suffix(".png")).exists():
        parts.append(f"![{path.stem}]({image.name})")
    return "\n\n".join(parts)


def _where(document: Document) -> str:
    facts = document["facts"]
    versions = facts["versions"]
    parts = [
        ", ".join(facts.get("devices", ())),
        f"{facts['cores']} cores",
        f"Python {versions['python']}",
        f"jax {versions['jax']}",
        f"commit {facts['commit'] or 'unknown'}",
        facts["time"],
    ]
    if "ready_s" in facts:
        parts.append(f"ready in {facts['ready_s']:.1f} s")
    return ", ".join(part for part in parts if part) + "."
