"""Does a checkpoint hold exactly the tensors that its config calls for? The headers answer, before any data is read.

One message reports everything that is wrong, because fixing names one failed load at a time is misery.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.models.weights import Param

_SHOWN = 12  # lines of one kind in a message
_HASHES = r"ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))"
_HARMLESS = re.compile(rf".*\.(rotary_emb\.inv_freq|{_HASHES})")  # recomputed from the config; see `ngrams`
_LFS = b"version https://git-lfs"  # what a pointer begins with: a clone without Git LFS has it in a large file's place


class CheckpointError(ValueError):
    """A model that can't be found, read, or fitted to its config. Says what was tried and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """Entry of one tensor in a file's header.

    `shape` is Hugging Face's, `[out, in]`; `nbytes` as stored; `dtype` as safetensors name it, if the file does.
    """

    shape: tuple[int, ...]
    nbytes: int
    dtype: str = ""


def refuse_stand_in(file: Path) -> None:
    """**Raises:** `CheckpointError` where a Git LFS pointer, or a link to nothing, stands in a file's place."""
    if file.is_symlink() and not file.exists():
        raise CheckpointError(f"{file} is a link to {file.readlink()}, a file that is gone. Download it again")
    if not file.is_file():
        return
    with file.open("rb") as opened:
        start = opened.read(len(_LFS))
    if start == _LFS:
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in {file.parent}")


def read_json(file: Path, kind: type = dict) -> Any:
    """**Raises:** `CheckpointError` if the file can't be read or doesn't hold a JSON object, or the other `kind`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"can't read {file}: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {file}: {error}") from error
    if not isinstance(value, kind):
        wanted = "array" if kind is list else "object"
        raise CheckpointError(f"{file} must hold a JSON {wanted}, found {type(value).__name__}")
    return value


def check(params: Iterable[Param], found: Mapping[str, TensorInfo], where: str) -> None:
    """**Raises:** `CheckpointError` listing every missing, unexpected and misshapen tensor of `found`."""
    wanted = {name: shape for param in params for name, shape in param.stored().items()}
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted and not _ignorable(name)]
    misshapen = [name for name in wanted if name in found and found[name].shape != wanted[name]]
    total = len(missing) + len(unexpected) + len(misshapen)
    if not total:
        return
    # A misspelt name is among the unexpected ones, if there are any.
    candidates = unexpected or list(found)
    lines = [
        *_cut("missing", missing, lambda name: _missing_line(name, wanted[name], candidates)),
        *_cut("misshapen", misshapen, lambda name: f"{name}: found {_shape(found[name].shape)}, "
              f"expected {_shape(wanted[name])}"),
        *_cut("unexpected", unexpected, lambda name: f"{name} {_shape(found[name].shape)}"),
    ]  # fmt: skip
    raise CheckpointError(
        f"{where}: {total} tensor{'s do' if total > 1 else ' does'} not fit the model's config "
        f"({len(missing)} missing, {len(misshapen)} misshapen, {len(unexpected)} unexpected)\n  " + "\n  ".join(lines)
    )


def _ignorable(name: str) -> bool:
    # Tied checkpoints often carry a copy of the embedding as lm_head; untied ones declare it, so it isn't unexpected.
    return name == "lm_head.weight" or _HARMLESS.fullmatch(name) is not None


def _cut(kind: str, names: list[str], describe) -> list[str]:
    lines = [f"{kind} {describe(name)}" for name in names[:_SHOWN]]
    return lines + [f"{kind} ... and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)


def _missing_line(name: str, shape: tuple[int, ...], candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"{name} {_shape(shape)}" + (f"; nearest name found: {near[0]}" if near else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
