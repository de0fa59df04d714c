"""Markdown from the JSON files of a folder: each with the command that made it, the machine, tables and notes.

docs/performance.md embeds what this prints. A PNG beside a JSON file, of the same name, is linked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxspec.bench.results import BenchError, Document, Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="that holds what --json wrote")


def run(folder: Path, tables: Mapping[str, Sequence[Table]]) -> None:
    """Print the report. `tables` are those of each benchmark, by its name.

    **Raises:** `BenchError` for a folder without results, or a file that holds none.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise BenchError(f"{folder} has no .json files; make some with --json {folder / 'decode.json'}")
    parts = []
    for path in paths:
        try:
            document = json.loads(path.read_text())
            parts.append(section(path, document, tables[document["benchmark"]]))
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} is not a benchmark's result ({type(error).__name__}: {error})") from error
    print("\n\n".join(parts))


def section(path: Path, document: Document, tables: Sequence[Table]) -> str:
    """One document as markdown."""
    parts = [f"### {path.stem}", f"    {document['command']}", _where(document)]
    parts += [table.markdown(document["rows"]) for table in tables]
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
