"""The GGUF container: metadata and the tensor list of a single-file model, read from a memory map.

The `gguf` package's own reader builds several Python objects per array element, which is seconds for a vocabulary; this
one reads the same header in a fraction of that. Dequantisation stays the package's. No read goes past the file's end.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from jaxspec.checkpoint.check import CheckpointError, refuse_stand_in
from jaxspec.config.json_values import shown

_SCALARS = GGUFReader.gguf_scalar_to_np  # numpy's types by GGUF's
_VERSIONS = (2, 3)
_MAX_AXES, _MAX_NESTING = 4, 8


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place in the file. `shape` is row-major (numpy's order, `[out, in]`); `offset` from the start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of the stored bytes: as `shape`, with the last axis packed into quantisation blocks."""
        block, size = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block * size)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata (key -> value) and tensors (name -> place).

    **Raises:** `CheckpointError` if the file isn't GGUF, has a version or tensor type that isn't supported, or ends
    before the last tensor does, or if its header has nonsense in it.
    """
    try:
        data = _map(path)
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}") from error
    cursor = _Cursor(path, data, 4)
    if (version := cursor.scalar("<u4")) not in _VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} (or big-endian); supported: {_VERSIONS}, little-endian")
    tensor_count, key_count = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.value_type())
    places = [cursor.place() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
        raise CheckpointError(f"{path}: general.alignment must be a positive integer, got {shown(alignment)}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in places}
    end = max((t.offset + t.nbytes for t in tensors.values()), default=0)
    if end > data.size:
        raise CheckpointError(f"{path} is truncated: {data.size:,} bytes of at least {end:,}. Download it again")
    return metadata, tensors


def _map(path: Path) -> np.ndarray:
    refuse_stand_in(path)
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
    data = np.memmap(path, np.uint8, "r")
    if bytes(data[:4]) != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}. Download it again")
    return data


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has type {kind}, which the gguf package doesn't know"
        ) from error
    block, size = GGML_QUANT_SIZES[kind]
    if not 1 <= len(shape) <= _MAX_AXES or min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has the shape {shown(shape)}; allowed are 1 to {_MAX_AXES} axes, the last a "
            f"multiple of {block}, the block of {kind.name}"
        )
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // block * size)


class _Cursor:
    """Reads values one after another; the only code that touches the header's bytes."""

    def __init__(self, path: Path, data: np.ndarray, position: int):
        self.path, self.position = path, position
        self._data = memoryview(data)

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise CheckpointError(f"{self.path} is truncated: its header ends in mid-value. Download it again")
        taken, self.position = self._data[self.position : end], end
        return taken

    def scalar(self, dtype: Any) -> Any:
        return self.scalars(dtype, 1)[0]

    def scalars(self, dtype: Any, count: int) -> list[Any]:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize * count), dtype).tolist()

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8))  # numpy would cost ten times this, 100,000 times over
        return str(self._take(length), "utf-8", "replace")

    def value_type(self) -> GGUFValueType:
        kind = self.scalar("<u4")
        try:
            return GGUFValueType(kind)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: unknown metadata type {kind}; the file is damaged") from error

    def value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        if depth == _MAX_NESTING:
            raise CheckpointError(f"{self.path}: its metadata has lists nested more than {_MAX_NESTING} deep")
        kind, count = self.value_type(), self.scalar("<u8")
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind], count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self.string(), self.scalar("<u4")
        shape = tuple(reversed(self.scalars("<u8", axes)))  # as many as the file has room for
        return name, shape, self.scalar("<u4"), self.scalar("<u8")
