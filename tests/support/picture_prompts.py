"""Prompts with pictures of tests/golden/pictures, and `video` with the video of tests/golden/videos.npz."""

import functools
import zlib
from pathlib import Path

import numpy as np

from jaxspec.images.picture import Picture, PlacedPicture, Prompt

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "pictures"
PROMPTS = ("one", "other", "two", "first", "long")
DEEP = ("qwen3_vl", "qwen3_vl_moe")  # whose pictures also add to the first layers' rows
FAMILIES = ("qwen3_5", "gemma3", "gemma4", "gemma4_e", *DEEP)  # four patches a token, in all
USED = {"one": (0,), "other": (2,), "two": (0, 1), "first": (1,), "long": (0, 1)}
IMAGES, VIDEOS = 60, 63  # the placeholders' ids
WITH_VIDEO = ("qwen3_5", "qwen3_vl")


@functools.cache
def expected(family: str = "qwen3_5"):
    videos = np.load(GOLDEN.parent / "videos.npz")
    own = {f"video_{name.partition('.')[2]}": videos[name] for name in videos if name.startswith(f"{family}.")}
    return dict(np.load(GOLDEN / f"{family}.npz")) | own


@functools.cache
def video(family: str = "qwen3_5") -> list[Picture]:
    (count, *grid), all_pixels = expected(family)["video_grid"].tolist(), expected(family)["video_pixels"]
    parts = np.split(all_pixels, count)
    return [Picture(part, (1, *grid), len(part) // 4, zlib.crc32(part.tobytes()), True) for part in parts]


@functools.cache
def picture(i: int, family: str = "qwen3_5") -> Picture:
    pixels, grid = expected(family)[f"pixels_{i}"], tuple(map(int, expected(family)[f"grid_{i}"]))
    return Picture(pixels, grid, grid[1] * grid[2] // 4, zlib.crc32(pixels.tobytes()))


def prompt(name: str, family: str = "qwen3_5") -> Prompt:
    ids = expected(family)[f"{name}_ids"].tolist()
    own = VIDEOS if name == "video" else IMAGES
    begins = [at for at, token in enumerate(ids) if token == own and (at == 0 or ids[at - 1] != own)]
    pictures = video(family) if name == "video" else [picture(i, family) for i in USED[name]]
    return Prompt(ids, tuple(map(PlacedPicture, pictures, begins)))
