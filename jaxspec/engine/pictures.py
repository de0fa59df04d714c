"""Pictures on the device: programs of the vision tower, and which rows of `State.pictures` hold whose embeddings.

A picture is read before the first prompt chunk that has a row of it, and stays until others need its rows, the least
recently used first. Programs run in the order of dispatch, so rows may have another owner the moment after a prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.checkpoint import Model
from jaxspec.compiling.executable_store import Executables
from jaxspec.compiling.tower_programs import TowerPrograms
from jaxspec.decoder.towers import places
from jaxspec.images.image_reader import ImageReader
from jaxspec.images.picture import Picture
from jaxspec.models.vision import Tower
from jaxspec.pallas.attention.picture_attention import QUERIES
from jaxspec.rounds.packing import PictureRows
from jaxspec.scheduling.sequence import Chunk, SequenceState

MOST_PATCHES = 1 << 14  # of a program, and so of a picture
BESIDE_ROUNDS = 1 << 12  # of a program that rounds shouldn't wait for: 1,024 x 1,024 pixels, 22 ms on an H200
CACHED = 4096  # rows for embeddings beside those that a prefill needs at least


def refusal(model: Model, chunk: int, hosts: bool) -> str | None:
    """Why an engine reads no pictures, if it doesn't. `chunk`: most tokens of a prompt's chunk. `hosts`: it has
    several."""
    if (tower := model.config.tower) is None:
        return (
            f"{model.name} (model_type {model.config.model_type}) is served as its text model; Qwen3.5, "
            "Qwen3-VL, Gemma 3 and Gemma 4 checkpoints with their vision tower read pictures"
        )
    if chunk < tower.at_once:
        return (
            f"a picture's {tower.at_once} tokens don't fit in a chunk of {chunk}; start the server with a "
            f"--chunked-prefill-size of at least {tower.at_once}"
        )
    return "a model on several hosts serves text alone; use --nnodes 1" if hosts else None


def bounded(reader: ImageReader, tower: Tower) -> ImageReader:
    """A checkpoint's reader, which makes pictures so small that a program takes them."""
    return reader.within(tower.at_once if tower.mutual else MOST_PATCHES // tower.per_token)


def rows_for(tower: Tower, chunk: int) -> int:
    """Rows of pictures that an engine has: those of a whole chunk, and of a picture that goes beyond either end."""
    return chunk + 2 * MOST_PATCHES // tower.per_token + CACHED


def tower_workspace(tower: Tower, itemsize: int) -> int:
    """Bytes that the largest program is estimated to need beside its operands and results.

    Scores of some patches with all and their softmax, and a layer's activations.
    """
    scores = tower.heads * QUERIES * MOST_PATCHES * (4 + itemsize)
    kept = tower.columns // tower.out - 1  # layers whose results go to mergers of their own
    return scores + MOST_PATCHES * itemsize * ((4 + kept) * tower.width + tower.mlp)


class PictureReader:
    """Reads pictures into `rows` rows, each picture once while it is there.

    `mesh`: of an engine on several devices. Each has the whole tower, `params`, and reads all pictures, in the time of
    one and without a sum. `alone`: each picture has a program of its size to itself, so that its embeddings have the
    same bits whatever is read beside it. `store`: of programs.
    """

    def __init__(
        self,
        tower: Tower,
        params: Any,
        rows: int,
        mesh: Mesh | None = None,
        alone: bool = False,
        store: Executables | None = None,
    ):
        self.tower, self._params, self._size, self._alone = tower, params, rows, alone
        self.programs = TowerPrograms(tower, params, rows, tower.sizes(MOST_PATCHES), mesh, store)
        self.encoded = 0  # pictures that the tower read
        self.forget()

    def fill(self, params: Any) -> None:
        """Read pictures with these parameters from now on; those of others are held no more."""
        if params is not self._params:
            self._params = params
            self.forget()

    def forget(self) -> None:
        """Hold no picture, as rows of a new state don't."""
        self._held: OrderedDict[int, list[int]] = OrderedDict()  # by key, least recently used first
        self._free = list(range(self._size))

    def read(
        self, held: Float[Array, "n d"], pictures: list[Picture], kept: set[int]
    ) -> tuple[Float[Array, "n d"], list[list[int]]] | None:
        """Have all of `pictures` in rows of `held`: these, and each picture's rows.

        `kept`: keys whose rows must not be given away; those of `pictures` are added. None, and nothing done, if there
        is no room beside those.
        """
        wanted = {picture.key: picture for picture in pictures}
        fixed = kept | wanted.keys()
        missing = [picture for key, picture in wanted.items() if key not in self._held]
        lost = [key for key in self._held if key not in fixed]
        if sum(p.tokens for p in missing) > len(self._free) + sum(len(self._held[key]) for key in lost):
            return None
        for picture in missing:
            while picture.tokens > len(self._free):
                self._free += self._held.pop(lost.pop(0))
            self._held[picture.key] = [self._free.pop() for _ in range(picture.tokens)]
        for key in wanted:
            self._held.move_to_end(key)
        kept |= wanted.keys()
        for several in _together(missing, 0 if self._alone else MOST_PATCHES):
            held = self._encode(held, several)
        return held, [self._held[picture.key] for picture in pictures]

    def unread(self, seq: SequenceState, most: int) -> list[Picture]:
        """Pictures that aren't held, of a prompt's next chunk of up to `most` tokens."""
        placed = seq.pictures.overlapping(seq.computed, seq.computed + most + 1) if seq.pictures else []
        return list({each.picture.key: each.picture for each in placed if each.picture.key not in self._held}.values())

    def read_ahead(self, held: Float[Array, "n d"], seq: SequenceState, most: int) -> Float[Array, "n d"]:
        """Read the first of `unread`, in one program that rounds may wait for."""
        kept = {each.picture.key for each in seq.pictures.overlapping(seq.computed, seq.computed + most + 1)}
        first = _together(self.unread(seq, most), 0 if self._alone else BESIDE_ROUNDS)[0]
        return self.read(held, first, kept)[0]  # there is room for those of a whole chunk

    def of_chunks(
        self, held: Float[Array, "n d"], chunks: Sequence[Chunk]
    ) -> tuple[Float[Array, "n d"], list[PictureRows | None]]:
        """Have all pictures in chunks in rows of `held`, those of as many chunks as there is room for: `held`, and of
        each chunk its pictures' rows."""
        read, kept = [], set()
        for chunk in chunks:
            placed = chunk.seq.pictures
            if placed is None:
                read.append(None)
                continue
            own = placed.overlapping(chunk.start, chunk.start + chunk.count + 1)  # a drafter reads the next token
            found = self.read(held, [each.picture for each in own], kept)
            if found is None:
                break
            held, rows = found
            by_place = {each.start + i: row for each, at in zip(own, rows, strict=True) for i, row in enumerate(at)}
            read.append(PictureRows(placed, by_place))
        return held, read

    def _encode(self, held: Float[Array, "n d"], pictures: list[Picture]) -> Float[Array, "n d"]:
        count = sum(len(picture.pixels) for picture in pictures)
        size = next(size for size in self.programs.sizes if size >= count)
        pixels = [picture.pixels for picture in pictures]
        if count < size:
            pixels.append(np.zeros((size - count, self.tower.patch), np.float32))
        alone = len(pixels) == 1  # a copy of 25 MB takes 10 ms
        pixels = np.asarray(pixels[0], np.float32) if alone else np.concatenate(pixels, dtype=np.float32)
        into = np.full(size // self.tower.per_token, self._size, np.int32)  # out of range: padding's rows are dropped
        rows = [row for picture in pictures for row in self._held[picture.key]]
        into[: len(rows)] = rows
        self.encoded += len(pictures)
        patches = places(self.tower, [picture.grid for picture in pictures], size)
        return self.programs.get(size, held.dtype)(self._params, held, pixels, patches, into)

    @property
    def workspace_bytes(self) -> int:
        """Memory that the largest program needs beside its operands and results: an estimate until it is compiled."""
        if (largest := self.programs.largest) is not None:
            return largest.memory_analysis().temp_size_in_bytes
        return tower_workspace(self.tower, jax.tree.leaves(self._params)[0].dtype.itemsize)


def _together(pictures: list[Picture], most: int) -> list[list[Picture]]:
    """Pictures of each program, in order: one, or as many as have at most so many patches."""
    groups: list[list[Picture]] = []
    for picture in pictures:
        if groups and sum(len(each.pixels) for each in groups[-1]) + len(picture.pixels) <= most:
            groups[-1].append(picture)
        else:
            groups.append([picture])
    return groups
