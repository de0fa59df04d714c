"""A `pytorch_model.bin`: what `torch.save` writes, a zip of one pickle and the bytes of each storage. No torch needed.

Every storage lies inside the file and every tensor inside its storage before a byte of it is read. `BinFile` lists its
tensors as a handle of `safetensors.safe_open` does.
"""

from __future__ import annotations

import math
import mmap
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.stored import DTYPES, Computed, Stored
from jaxspec.checkpoint.tensor_pickle import SAVE_AGAIN, WRITE_JSON, View, ids, views
from jaxspec.config.json_values import shown

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes before the name of an entry; the lengths of name and extra field are its last four
_PICKLE_LIMIT = 2**24  # bytes: a tensor takes about 150
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"  # the pickled magic number, before torch 1.6


class Slice:
    """The shape and dtype of a tensor, as `safetensors` gives them without reading it."""

    def __init__(self, view: View):
        self._view = view

    def get_shape(self) -> list[int]:
        return list(self._view.shape)

    def get_dtype(self) -> str:
        return self._view.storage.dtype


class BinFile:
    """A mapped file and the tensors that its pickle describes. A context manager, as `safe_open` is."""

    advice: ClassVar[str] = SAVE_AGAIN  # on a file that is refused

    def __init__(self, file: Path):
        """**Raises:** `CheckpointError` for a file that is damaged, of the format before torch 1.6, or that holds
        anything but tensors; `OSError` if it can't be opened."""
        self.file = file
        with file.open("rb") as opened:
            start = opened.read(len(_LEGACY))
            if not start.startswith(_ZIP):
                raise CheckpointError(_not_a_zip(file, start, self.advice))
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            try:
                self._read(zipfile.ZipFile(opened))
            except CheckpointError:
                self._map.close()
                raise
            except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
                self._map.close()
                raise CheckpointError(_truncated(file, shown(error))) from error

    def _read(self, archive: zipfile.ZipFile) -> None:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{self.file} is a zip with {len(pickles)} entries called data.pkl, so torch.save didn't write it; a "
                "checkpoint has one. Download it again"
            )
        folder = pickles[0].removesuffix("data.pkl")
        if (order := entries.get(folder + "byteorder")) and self._bytes(order, 16) != b"little":
            raise CheckpointError(f"{self.file} was saved on a big-endian machine. {self.advice}")
        self._views = self._described(self._bytes(entries[pickles[0]], _PICKLE_LIMIT))
        self._starts = {
            key: self._storage(entries.get(f"{folder}data/{key}"), key, size)
            for key, size in self._storage_sizes().items()
        }

    def _described(self, pickled: bytes) -> dict[str, View]:
        return views(pickled, str(self.file))

    def _bytes(self, entry: zipfile.ZipInfo, limit: int) -> bytes:
        if entry.file_size > limit:
            raise CheckpointError(f"{self.file}: {entry.filename} has {entry.file_size:,} bytes, more than {limit:,}")
        start = self._start(entry)
        return self._map[start : start + entry.file_size]

    def _storage_sizes(self) -> dict[str, int]:
        """Bytes of each storage, by its key. Tensors that share one agree on what it is."""
        sizes: dict[str, int] = {}
        for view in self._views.values():
            size = view.storage.elements * DTYPES[view.storage.dtype].itemsize
            if sizes.setdefault(view.storage.key, size) != size:
                raise CheckpointError(f"{self.file}: storage {view.storage.key} has two sizes. Download it again")
        return sizes

    def _storage(self, entry: zipfile.ZipInfo | None, key: str, size: int) -> int:
        """Where a storage begins in the file."""
        held = 0 if entry is None else entry.file_size
        if held < size or entry is None:
            raise CheckpointError(
                f"{self.file}: storage {key!r:.40} holds {held:,} bytes where its tensors need {size:,}. Download it "
                "again"
            )
        return self._start(entry)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Where an entry's bytes begin. They are all in the file, as they are."""
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(
                f"{self.file}: {entry.filename!r:.80} is compressed or encrypted, which torch.save never does. "
                f"{self.advice}"
            )
        header = self._map[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + _LOCAL_HEADER + lengths
        if entry.header_offset < 0 or not header.startswith(_ZIP) or start + entry.file_size > len(self._map):
            raise CheckpointError(_truncated(self.file, f"{entry.filename!r:.80} lies outside it"))
        return start

    def __enter__(self) -> BinFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._map.close()

    def keys(self) -> list[str]:
        return list(self._views)

    def stored(self) -> dict[str, Stored | Computed]:
        """Tensors in the file's order, to be read when the file may be closed."""
        found: dict[str, Stored | Computed] = {}
        for name, view in sorted(self._views.items(), key=lambda each: self._start_of(each[1])):
            dtype, rows = DTYPES[view.storage.dtype], np.cumprod((1, *view.shape[:0:-1]))[::-1]
            if tuple(view.strides) == tuple(rows[len(rows) - len(view.shape) :]) or 0 in view.shape:
                found[name] = Stored(self.file, self._start_of(view), view.shape, dtype)
            else:
                size = math.prod(view.shape) * dtype.itemsize
                found[name] = Computed(size, partial(_read_apart, self.file, name))
        return found

    def _start_of(self, view: View) -> int:
        return self._starts[view.storage.key] + view.offset * DTYPES[view.storage.dtype].itemsize

    def get_slice(self, name: str) -> Slice:
        return Slice(self._views[name])

    def get_tensor(self, name: str) -> np.ndarray:
        """A copy, in C order."""
        view = self._views[name]
        dtype = DTYPES[view.storage.dtype]
        if 0 in view.shape:
            return np.zeros(view.shape, dtype)
        strides = [stride * dtype.itemsize for stride in view.strides]
        return np.ndarray(view.shape, dtype, self._map, self._start_of(view), strides).copy()


def _read_apart(file: Path, name: str) -> np.ndarray:
    with BinFile(file) as opened:
        return opened.get_tensor(name)


class _IdsFile(BinFile):
    """A file of one tensor, under the name "", or of one list, `listed`."""

    advice = WRITE_JSON
    listed: list[int] | None = None

    def _described(self, pickled):
        found = ids(pickled, str(self.file))
        if isinstance(found, View):
            return {"": found}
        self.listed = found
        return {}


def read_ids(file: Path) -> np.ndarray | list[int]:
    """The only tensor, or list of whole numbers, that `torch.save` wrote to a file, such as a token map.

    **Raises:** `CheckpointError` for a file that is damaged, of the format before torch 1.6, or that holds anything
    else; `OSError` if it can't be opened.
    """
    with _IdsFile(file) as opened:
        return opened.get_tensor("") if opened.listed is None else opened.listed


def _not_a_zip(file: Path, start: bytes, advice: str) -> str:
    if start == _LEGACY:
        return (
            f"{file} is in the format that torch.save wrote before version 1.6, one pickle without a zip. Only the zip "
            f"is read. {advice}"
        )
    return _truncated(file, "it doesn't begin as a zip does")


def _truncated(file: Path, problem: str) -> str:
    return (
        f"{file} ({file.stat().st_size:,} bytes) is truncated or not what torch.save writes: {problem}. Download it "
        "again"
    )
