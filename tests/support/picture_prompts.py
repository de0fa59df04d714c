"""Prompts with pictures of tests/golden/pictures."""

import functools
import zlib
from pathlib import Path

import numpy as np

from jaxspec.images.picture import Picture, PlacedPicture, Prompt

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "pictures"
PROMPTS = ("one", "other", "two", "first", "long")
DEEP = ("qwen3_vl", "qwen3_vl_moe")  # whose pictures also add to the first layers' rows
FAMILIES = ("qwen3_5", "gemma3", *DEEP)  # four patches a token, in all
USED = {"one": (0,), "other": (2,), "two": (0, 1), "first": (1,), "long": (0, 1)}
IMAGES = 60  # the placeholder's id


@functools.cache
def expected(family: str = "qwen3_5"):
    return dict(np.load(GOLDEN / f"{family}.npz"))


@functools.cache
def picture(i: int, family: str = "qwen3_5") -> Picture:
    pixels, grid = expected(family)[f"pixels_{i}"], tuple(map(int, expected(family)[f"grid_{i}"]))
    return Picture(pixels, grid, grid[1] * grid[2] // 4, zlib.crc32(pixels.tobytes()))


def prompt(name: str, family: str = "qwen3_5") -> Prompt:
    ids = expected(family)[f"{name}_ids"].tolist()
    begins = [at for at, token in enumerate(ids) if token == IMAGES and (at == 0 or ids[at - 1] != IMAGES)]
    return Prompt(ids, tuple(PlacedPicture(picture(i, family), at) for i, at in zip(USED[name], begins, strict=True)))
