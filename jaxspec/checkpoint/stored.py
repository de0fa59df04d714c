"""Tensors of files, found but not read yet, and the threads that read several of them at once (`Readers`)."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.check import CheckpointError

DTYPES = {  # as safetensors name them
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
PIECE = 2**24  # bytes that a thread reads at once


@dataclass(frozen=True)
class Stored:
    """A tensor that a file has in C order from byte `start` on. A slice of its first axis is one, too."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | tuple[slice]) -> Stored:
        (rows,) = key if isinstance(key, tuple) else (key,)
        first, stop, _ = rows.indices(len(self))
        each = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, start=self.start + first * each, shape=(max(stop - first, 0), *self.shape[1:]))

    def read(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        with self.file.open("rb", buffering=0) as file:
            self.read_piece(file, as_bytes(out), 0)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read().astype(dtype or self.dtype, copy=False)

    def read_piece(self, file: BinaryIO, out: memoryview, offset: int) -> None:
        """Fill `out` with the tensor's bytes from `offset` on. **Raises:** `CheckpointError` if the file ends."""
        file.seek(self.start + offset)
        while len(out):
            if not (count := file.readinto(out)):
                raise CheckpointError(f"{self.file} is truncated: it ends at byte {file.tell():,}. Download it again")
            out = out[count:]


@dataclass(frozen=True)
class Computed:
    """A tensor that is made of bytes of a file. `nbytes`: of the host's memory, meanwhile."""

    nbytes: int
    read: Callable[[], np.ndarray]


class Shared:
    """Tensors that are made together, once, when the first of them is read; each is given away."""

    def __init__(self, make: Callable[[], dict[str, np.ndarray]]):
        self._make, self._guard = make, threading.Lock()
        self._made: dict[str, np.ndarray] = {}

    def take(self, part: str) -> np.ndarray:
        with self._guard:
            if part not in self._made:
                self._made = self._make()
            return self._made.pop(part)


class Readers:
    """Threads that read tensors, each a piece at a time. A context manager: at its end the files are closed."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, "jaxspec-reader")
        self._own, self._open = threading.local(), contextlib.ExitStack()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.close()

    def read(self, tensors: Iterable[Any]) -> list[Any]:
        """The arrays of tensors, read beside one another; arrays stay as they are."""
        begun = []
        for tensor in tensors:
            if isinstance(tensor, Stored):
                begun.append((out := np.empty(tensor.shape, tensor.dtype), self._begin(out, tensor)))
            else:
                begun.append((tensor, [self._pool.submit(tensor.read)] if isinstance(tensor, Computed) else []))
        done = [(tensor, [each.result() for each in pieces]) for tensor, pieces in begun]
        return [pieces[0] if isinstance(tensor, Computed) else tensor for tensor, pieces in done]

    def concatenated(self, tensors: Sequence[Any]) -> np.ndarray:
        """Tensors behind one another along the first axis, read to where they stay."""
        if not all(isinstance(tensor, Stored) and tensor.dtype == tensors[0].dtype for tensor in tensors):
            return np.concatenate(self.read(tensors))
        lengths = [len(tensor) for tensor in tensors]
        out = np.empty((sum(lengths), *tensors[0].shape[1:]), tensors[0].dtype)
        places = np.split(out, np.cumsum(lengths)[:-1])
        for piece in [p for place, tensor in zip(places, tensors, strict=True) for p in self._begin(place, tensor)]:
            piece.result()
        return out

    def _begin(self, out: np.ndarray, tensor: Stored) -> list[Future]:
        whole = as_bytes(out)
        return [
            self._pool.submit(self._read_piece, tensor, whole[offset : offset + PIECE], offset)
            for offset in range(0, len(whole), PIECE)
        ]

    def _read_piece(self, tensor: Stored, out: memoryview, offset: int) -> None:
        files = self._own.__dict__.setdefault("files", {})  # a thread's own, since a file has one position
        if (file := files.get(tensor.file)) is None:
            file = files[tensor.file] = self._open.enter_context(tensor.file.open("rb", buffering=0))
        tensor.read_piece(file, out, offset)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order."""
    return memoryview(array.reshape(-1).view(np.uint8))
