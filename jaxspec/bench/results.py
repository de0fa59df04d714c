"""A benchmark's result: rows of figures and the facts they depend on, as a table, as JSON, as markdown.

Invariant: a row is on stdout and in the JSON file as soon as it is measured, so an interrupted run keeps every finished
row. Reports and plots are made from that document alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxspec
from jaxspec.config.flags import checked

Row = dict[str, Any]
Document = dict[str, Any]  # benchmark, command, arguments, facts, rows, notes

PACKAGES = ("jax", "jaxlib", "numpy", "transformers")


class BenchError(ValueError):
    """A benchmark that can't be run as asked. Says what to change."""


@dataclass(frozen=True)
class Column:
    """A figure of a row: its key there, what to call it, a format spec, and how wide to print it at least."""

    key: str
    title: str
    spec: str = ""
    width: int = 8

    def show(self, row: Row) -> str:
        value = row.get(self.key)
        return "-" if value is None else format(value, self.spec)

    def align(self, text: str) -> str:
        return text.rjust(max(self.width, len(self.title)))


@dataclass(frozen=True)
class Table:
    """One view of the rows. `expand` turns a row of figures into the lines of this table that it makes.

    A column whose key no line has is left out: that figure wasn't asked for.
    """

    title: str
    columns: tuple[Column, ...]
    expand: Callable[[Row], list[Row]] = lambda row: [row]

    def lines(self, rows: list[Row]) -> list[Row]:
        return [line for row in rows for line in self.expand(row)]

    def shown(self, lines: list[Row]) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if any(c.key in line for line in lines))

    def plain(self, rows: list[Row]) -> str:
        """Aligned text: the title, a line of column titles, the lines."""
        lines = self.lines(rows)
        columns = self.shown(lines)
        return "\n".join([self.title, self.head(columns), *(self.text(columns, line) for line in lines)])

    def head(self, columns: tuple[Column, ...]) -> str:
        return "  ".join(c.align(c.title) for c in columns)

    def text(self, columns: tuple[Column, ...], line: Row) -> str:
        return "  ".join(c.align(c.show(line)) for c in columns)

    def markdown(self, rows: list[Row]) -> str:
        lines = self.lines(rows)
        columns = self.shown(lines)
        body = [[c.title for c in columns], ["---"] * len(columns)]
        body += [[c.show(line).strip() for c in columns] for line in lines]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in body)


class Result:
    """The document of one run as it grows. `path` None keeps it in memory."""

    def __init__(self, benchmark: str, argv: list[str], args: argparse.Namespace, table: Table, path: Path | None):
        self.table, self._path = table, path
        self.document: Document = {
            "benchmark": benchmark,
            "command": shlex.join(["python", "-m", "jaxspec.bench", *argv]),
            "arguments": {name: _plain(value) for name, value in vars(args).items()},
            "facts": _facts(),
            "rows": [],
            "notes": [],
        }
        self._columns: tuple[Column, ...] = ()

    @property
    def rows(self) -> list[Row]:
        return self.document["rows"]

    def fact(self, **facts: Any) -> None:
        """Note what all rows depend on, or what holds for the whole run."""
        self.document["facts"] |= facts

    def add(self, row: Row) -> None:
        """Take a row: print its lines, under the titles if it is the first, and save."""
        self.rows.append(row)
        table, lines = self.table, self.table.expand(row)
        if not self._columns:
            self._columns = table.shown(lines)
            print(f"{table.title}\n{table.head(self._columns)}")
        for line in lines:
            print(table.text(self._columns, line), flush=True)
        self.save()

    def note(self, text: str) -> None:
        """Add a sentence that whoever reads the rows must know."""
        self.document["notes"].append(text)
        print(text, flush=True)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.document, indent=1) + "\n")


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write the rows' numbers and texts as CSV, a column for each that any row has; lists and tables stay in JSON."""
    flat = [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in flat for key in row)))
        writer.writeheader()
        writer.writerows(flat)


def check_writable(flag: str, path: Path) -> None:
    """**Raises:** `BenchError` for a file that can't be written, before there is anything to write."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise BenchError(f"{flag} {path} can't be written: {error.strerror}") from error
    if not there:
        path.unlink()


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: there is no infinity in it."""
    return str(value) if isinstance(value, Path) or value == float("inf") else value


def _facts() -> dict[str, Any]:
    """The machine and the code, without touching the device: a server may be about to take its memory."""
    root = Path(jaxspec.__file__).resolve().parent.parent
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(root),
        "cores": os.cpu_count(),
        "versions": {
            "jaxspec": jaxspec.__version__,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in PACKAGES},
        },
    }


def _commit(root: Path) -> str | None:
    """The checked-out commit, marked if files differ from it; None outside a repository."""
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def device_facts() -> dict[str, Any]:
    """The devices that jax sees here, and the platform's version."""
    devices = jax.devices()
    return {
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in devices],
        "platform": getattr(devices[0].client, "platform_version", "").replace("\n", "; "),
    }


def memory_growth(before: dict[str, int]) -> Row:
    """Since `memory_facts` said so: by how many MB the memory in use, and the most that ever was, have grown.

    None where the device doesn't say.
    """
    grown = {key: (size - before[key]) / 1e6 for key, size in memory_facts().items()}
    return {"in_use_growth_mb": grown.get("bytes_in_use"), "peak_growth_mb": grown.get("peak_bytes_in_use")}


def memory_facts() -> dict[str, int]:
    """Bytes of device memory in use now and at most so far; empty where the device doesn't say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return {key: stats[key] for key in ("bytes_limit", "bytes_in_use", "peak_bytes_in_use") if key in stats}


def numbers(kind: type, low: float, high: float, example: str) -> Callable[[str], list]:
    """An argparse type for a comma-separated list of numbers from `low` to `high`."""
    what, most = "integers" if kind is int else "numbers", f" to {high:g}" if high < float("inf") else " on"
    return checked(
        lambda text: [kind(part) for part in text.split(",")],
        f"takes a list like {example} of {what} from {low:g}{most}",
        lambda values: all(low <= value <= high for value in values),
    )


def counts(example: str) -> Callable[[str], list[int]]:
    """An argparse type for a list of positive integers."""
    return numbers(int, 1, float("inf"), example)
