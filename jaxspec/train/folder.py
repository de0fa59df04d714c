"""An output folder: one process at a time works in it, and what was made in it says by which settings."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec.train.data import TrainError


@contextmanager
def held(folder: Path, wait: bool = False) -> Iterator[None]:
    """Make the folder and keep other processes out of it meanwhile. `wait`: until one that is at work there has ended.

    **Raises:** `TrainError` if one is at work there and this doesn't `wait`, or for a path in it that can't be read or
    written.
    """
    make(folder)
    try:
        with (folder / "lock").open("a") as file:
            _lock(folder, file, wait)
            yield
    except OSError as error:
        path = Path(error.filename).resolve() if isinstance(error.filename, str) else None
        if path is None or folder.resolve() not in path.parents:
            raise
        raise TrainError(f"--output {folder}: {path.name}: {error.strerror}") from error


def make(folder: Path) -> None:
    """**Raises:** `TrainError` for a path that can't be a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise TrainError(f"--output {folder} must be a folder, and {error.filename} is a file") from error
    except OSError as error:
        raise TrainError(f"--output {folder}: {error.strerror}") from error


def _lock(folder: Path, file: Any, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise TrainError(f"--output {folder}: another process is training in this folder, or writing texts") from error
    except OSError as error:  # a file system without locks
        print(f"--output {folder} can't be locked ({error.strerror}): let no other process work there", file=sys.stderr)


def read(file: Path, flag: str = "--output") -> Any:
    """Read a file of `write`. **Raises:** `TrainError` for a file that isn't whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainError(f"{flag} {file.parent}: {file.name} isn't JSON ({error}). Name another folder") from error


def write(file: Path, record: Any) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def as_stored(facts: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are read again."""
    return json.loads(json.dumps(facts, default=str))


def agree(folder: Path, what: str, theirs: Any, ours: dict[str, Any], later: Container[str] = ()) -> None:
    """Compare settings that the folder records with those that are given; `later`: those that aren't known yet.

    **Raises:** `TrainError` naming those that differ. `what`: the folder's contents, were they not ours.
    """
    if not isinstance(theirs, dict):
        raise TrainError(f"--output {folder} holds settings that aren't ours: {theirs!r}. Name another folder")
    names = [name for name in sorted({*ours, *theirs}) if name not in later]
    if other := [name for name in names if ours.get(name) != theirs.get(name)]:
        shown = ", ".join(f"{name} {theirs.get(name)!r}, not {ours.get(name)!r}" for name in other[:5])
        raise TrainError(
            f"--output {folder} holds {what}: it has {shown}. Name another folder, or repeat the flags that it was "
            "made with to resume it"
        )


def fingerprint(path: Path) -> str:
    """Hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
