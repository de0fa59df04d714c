"""Image processors as checkpoints publish them: from RGB pixels to a `Picture`, in numpy and Pillow.

Values equal those of transformers' processors with Pillow bit by bit. Its torchvision processors, which it prefers, may
differ by one step of 255 in resized pixels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.images.picture import Picture

MOST_ASPECT = 200  # times the shorter side that the longer one may have, of Qwen's
RESAMPLING = {2: "bilinear", 3: "bicubic"}


class Processor(Protocol):
    """Makes pictures for one checkpoint."""

    def tokens(self, height: int, width: int) -> int:
        """Rows of the prompt that a picture of this size fills. **Raises:** `RequestError` for one that can't be."""
        ...

    def within(self, tokens: int) -> Processor:
        """This processor, which makes larger pictures so small that they fill at most so many rows, if it can."""
        ...

    def __call__(self, rgb: np.ndarray) -> Picture:
        """Preprocess u8[height, width, 3]. **Raises:** `RequestError`, as `tokens`."""
        ...


@dataclass(frozen=True)
class Pixels:
    """Scale, mean and deviation of pixels, and how pictures are resized."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float
    resample: int

    def resized(self, rgb: np.ndarray, height: int, width: int) -> np.ndarray:
        """Values f32[3, height, width]."""
        if rgb.shape[:2] != (height, width):  # rows first, as torchvision; Pillow 13 does columns first at times
            rows = Image.fromarray(rgb).resize((width, len(rgb)), self.resample)
            rgb = np.asarray(rows.resize((width, height), self.resample))
        values = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)  # each step rounded as published
        out = np.empty((3, height, width), np.float32)
        for channel in range(3):
            normal = (values - np.float32(self.mean[channel])) / np.float32(self.std[channel])
            out[channel] = normal[rgb[:, :, channel]]
        return out


@dataclass(frozen=True)
class QwenProcessor:
    """Qwen2-VL's, Qwen3-VL's and Qwen3.5's: sides in multiples of `patch * merge`, as many as `least` to `most` pixels.

    Patches come in blocks of `merge * merge`, row by row within one; values of a patch are
    `[3, frames, patch, patch]`, each frame the same. A token is a block.
    """

    pixels: Pixels
    patch: int
    merge: int
    frames: int
    least: int
    most: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture is resized to. **Raises:** `RequestError`."""
        return fitted(height, width, self.patch * self.merge, self.least, self.most)

    def tokens(self, height: int, width: int) -> int:
        rows, columns = self.size(height, width)
        return rows * columns // (self.patch * self.merge) ** 2

    def within(self, tokens: int) -> QwenProcessor:
        return dataclasses.replace(self, most=min(self.most, tokens * (self.patch * self.merge) ** 2))

    def __call__(self, rgb: np.ndarray) -> Picture:
        values = self.pixels.resized(rgb, *self.size(*rgb.shape[:2]))
        return merged(np.broadcast_to(values, (self.frames, *values.shape)), self.patch, self.merge)


@dataclass(frozen=True)
class SquareProcessor:
    """Gemma 3's: every picture is resized to one size, whatever its aspect, and fills as many tokens.

    Patches come row by row; values of one are `[3, patch, patch]`, as its convolution's weight has them. The published
    processor gives the picture uncut.
    """

    pixels: Pixels
    height: int
    width: int
    patch: int
    fills: int

    def tokens(self, height: int, width: int) -> int:
        return self.fills

    def within(self, tokens: int) -> SquareProcessor:
        return self

    def __call__(self, rgb: np.ndarray) -> Picture:
        p, rows, columns = self.patch, self.height // self.patch, self.width // self.patch
        values = self.pixels.resized(rgb, self.height, self.width).reshape(3, rows, p, columns, p)
        pixels = values.transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3 * p * p)
        return _picture(pixels, (1, rows, columns), self.fills)


@dataclass(frozen=True)
class BlockProcessor:
    """Gemma 4's: the largest size of about the picture's aspect with at most `most` tokens, each of `pooled` x `pooled`
    patches.

    Patches come in blocks of a token, row by row within one; values of a patch are `[patch, patch, 3]`. The published
    processor gives patches row by row.
    """

    pixels: Pixels
    patch: int
    pooled: int
    most: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture is resized to."""
        step = self.patch * self.pooled
        ratio = math.sqrt(self.most * step**2 / (height * width))
        rows, columns = (math.floor(ratio * side / step) * step for side in (height, width))
        if not rows:
            return step, min(width // height, self.most) * step
        return (rows, columns) if columns else (min(height // width, self.most) * step, step)

    def tokens(self, height: int, width: int) -> int:
        return math.prod(self.size(height, width)) // (self.patch * self.pooled) ** 2

    def within(self, tokens: int) -> BlockProcessor:
        return dataclasses.replace(self, most=min(self.most, tokens))

    def __call__(self, rgb: np.ndarray) -> Picture:
        height, width = self.size(*rgb.shape[:2])
        p, k, rows, columns = self.patch, self.pooled, height // self.patch, width // self.patch
        values = self.pixels.resized(rgb, height, width).reshape(3, rows // k, k, p, columns // k, k, p)
        pixels = values.transpose(1, 4, 2, 5, 3, 6, 0).reshape(rows * columns, 3 * p * p)
        return _picture(pixels, (1, rows, columns), rows * columns // k**2)


def fitted(
    height: int, width: int, step: int, least: int, most: int, frames: int = 1, together: int = 1, what: str = "picture"
) -> tuple[int, int]:
    """The size that Qwen's processors resize to: sides in multiples of `step`, `least` to `most` pixels of all frames,
    of which `together` make one picture. **Raises:** `RequestError`."""
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise RequestError(
            f"the {what} is {width} x {height} pixels; the longer side may have at most {MOST_ASPECT} times the "
            "shorter one's"
        )
    rows, columns = round(height / step) * step, round(width / step) * step  # halves to even, as published
    pixels, all_frames = frames * height * width, round(frames / together) * together
    if all_frames * rows * columns > most:
        ratio = math.sqrt(pixels / most)
        rows = max(step, math.floor(height / ratio / step) * step)
        columns = max(step, math.floor(width / ratio / step) * step)
    elif all_frames * rows * columns < least:
        ratio = math.sqrt(least / pixels)
        rows, columns = math.ceil(height * ratio / step) * step, math.ceil(width * ratio / step) * step
    return rows, columns


def merged(values: np.ndarray, patch: int, merge: int) -> Picture:
    """Qwen's picture of frames f32[frames, 3, height, width]."""
    (frames, _, height, width), p, m = values.shape, patch, merge
    rows, columns = height // p, width // p
    values = values.reshape(frames, 3, rows // m, m, p, columns // m, m, p).transpose(2, 5, 3, 6, 1, 0, 4, 7)
    pixels = values.reshape(rows * columns, 3 * frames * p * p)
    return _picture(pixels, (1, rows, columns), rows * columns // m**2)


def _picture(pixels: np.ndarray, grid: tuple[int, int, int], tokens: int) -> Picture:
    content = hashlib.blake2b(np.asarray(grid, "<i8").tobytes(), digest_size=8)
    content.update(pixels)
    return Picture(pixels, grid, tokens, int.from_bytes(content.digest(), "little"))


QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GEMMA, GEMMA4 = ("gemma3",), ("gemma4",)
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def read_processor(hf: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Processor | None:
    """The image processor of a checkpoint; None for a model without vision.

    **Arguments:** `hf`: its config.json. `files`: by name, those there are of `preprocessor_config.json` and
    `processor_config.json`. Where they are silent, the family's published values hold.

    **Raises:** `ConfigError` naming file and key.
    """
    kind, vision = hf.get("model_type"), hf.get("vision_config")
    if kind not in (*QWEN, *GEMMA, *GEMMA4) or not isinstance(vision, Mapping):
        return None
    both = files.get("processor_config.json", {})
    given = both.get("image_processor") or files.get("preprocessor_config.json", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"processor_config.json: image_processor must be an object, got {shown(given)}")
    given = {key: value for key, value in given.items() if value is not None}
    normal = ("do_normalize",) if kind not in GEMMA4 else ()  # Gemma 4's may go without
    for key in ("do_resize", "do_rescale", "do_convert_rgb", *normal):
        if given.get(key, True) is not True:
            raise ConfigError(f"preprocessor_config.json: {key} {shown(given[key])} is not supported; it must be true")
    if kind in GEMMA4:
        return _gemma4(vision, given)
    return _gemma(hf, vision, given, both) if kind in GEMMA else _qwen(kind, vision, given)


def _qwen(kind: str, vision: Mapping[str, Any], given: Mapping[str, Any]) -> QwenProcessor:
    old = kind in ("qwen2_vl", "qwen2_5_vl")
    patch = positive(given, "patch_size", positive(vision, "patch_size", 14 if old else 16))
    merge = positive(given, "merge_size", positive(vision, "spatial_merge_size", 2))
    frames = positive(given, "temporal_patch_size", positive(vision, "temporal_patch_size", 2))
    size = given.get("size", {})
    if not isinstance(size, Mapping):
        raise ConfigError(f"preprocessor_config.json: size must be an object, got {shown(size)}")
    limits = (56 * 56, 28 * 28 * 1280) if old else (65536, 16777216)
    least = positive(given, "min_pixels", positive(size, "shortest_edge", limits[0]))
    most = positive(given, "max_pixels", positive(size, "longest_edge", limits[1]))
    if patch * merge > 1024 or most < (patch * merge) ** 2 or least > most or frames > 16:
        raise ConfigError(
            f"preprocessor_config.json: {least} to {most} pixels, patches of {patch}, merged {merge} by {merge}, and "
            f"{frames} frames don't fit together"
        )
    for key, name, ours in (
        ("patch_size", "patch_size", patch),
        ("merge_size", "spatial_merge_size", merge),
        ("temporal_patch_size", "temporal_patch_size", frames),
    ):
        if positive(vision, name, ours) != ours:
            raise ConfigError(f"preprocessor_config.json: {key} {ours} differs from config.json's {vision[name]}")
    return QwenProcessor(read_pixels(given, _CLIP if old else HALF, 3), patch, merge, frames, least, most)


def _gemma(
    hf: Mapping[str, Any], vision: Mapping[str, Any], given: Mapping[str, Any], both: Mapping[str, Any]
) -> SquareProcessor:
    if given.get("do_pan_and_scan"):
        raise ConfigError("preprocessor_config.json: do_pan_and_scan is not supported; it must be false")
    side = positive(vision, "image_size", 896)
    size = given.get("size", {"height": side, "width": side})
    if not isinstance(size, Mapping) or [size.get("height"), size.get("width")] != [side, side]:
        raise ConfigError(f"preprocessor_config.json: size must be config.json's image_size, {side}, got {shown(size)}")
    patch, fills = positive(vision, "patch_size", 14), positive(hf, "mm_tokens_per_image", 256)
    if side % patch or side > 4096:
        raise ConfigError(f"config.json: patch_size {patch} must divide image_size {side}, which is at most 4096")
    for at in (both, given):
        if positive(at, "image_seq_length", fills) != fills:
            raise ConfigError(f"image_seq_length {at['image_seq_length']} differs from mm_tokens_per_image, {fills}")
    return SquareProcessor(read_pixels(given, HALF, 2), side, side, patch, fills)


def _gemma4(vision: Mapping[str, Any], given: Mapping[str, Any]) -> BlockProcessor:
    patch, pooled = positive(vision, "patch_size", 16), positive(vision, "pooling_kernel_size", 3)
    for key, ours in (("patch_size", patch), ("pooling_kernel_size", pooled)):
        if positive(given, key, ours) != ours:
            raise ConfigError(f"preprocessor_config.json: {key} {given[key]} differs from config.json's {ours}")
    most = positive(given, "max_soft_tokens", 280)
    if patch * pooled > 1024 or most > 4096:
        raise ConfigError(
            f"preprocessor_config.json: {most} tokens of {pooled} x {pooled} patches of {patch} are too large"
        )
    plain = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    given = given if given.get("do_normalize") else {**given, **plain}
    return BlockProcessor(read_pixels(given, plain, 3), patch, pooled, most)


def read_pixels(given: Mapping[str, Any], published: Mapping[str, Any], resample: int) -> Pixels:
    """Read the keys about pixels of a processor's file. **Raises:** `ConfigError` naming the key."""
    resample = given.get("resample", resample)
    if resample not in RESAMPLING:
        raise ConfigError(
            f"preprocessor_config.json: resample must be 2 (bilinear) or 3 (bicubic), got {shown(resample)}"
        )
    values = []
    for key in ("image_mean", "image_std"):
        value = given.get(key, published[key])
        if not (isinstance(value, list) and len(value) == 3 and all(_is_number(each) for each in value)):
            raise ConfigError(f"preprocessor_config.json: {key} must be three numbers, got {shown(value)}")
        values.append(tuple(map(float, value)))
    if min(values[1]) <= 0:
        raise ConfigError(f"preprocessor_config.json: image_std must be above 0, got {shown(list(values[1]))}")
    scale = given.get("rescale_factor", 1 / 255)
    if not _is_number(scale) or scale <= 0:
        raise ConfigError(f"preprocessor_config.json: rescale_factor must be a number above 0, got {shown(scale)}")
    return Pixels(values[0], values[1], float(scale), resample)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6
