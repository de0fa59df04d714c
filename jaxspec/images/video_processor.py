"""Qwen3-VL's video processor, as Qwen3.5 has it: from a clip's frames to pictures of two frames each.

Values equal those of transformers' processor but for resized pixels, which it resizes with torchvision: they may differ
by one step of 255.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.config.json_values import positive, positive_float
from jaxspec.config.options import ConfigError
from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError
from jaxspec.images.picture import Video
from jaxspec.images.processors import HALF, Pixels, QwenProcessor, fitted, merged, read_pixels
from jaxspec.images.video import Clip

FILES = "video_preprocessor_config.json", "preprocessor_config.json"


@dataclass(frozen=True)
class VideoProcessor:
    """Chooses frames, resizes all of them to one size, and makes a picture of each `frames`.

    `least`, `most`: pixels of all frames. `rate`: frames chosen of a second, `fewest` to `many` in all. `each`: tokens
    of a frame at most, if frames are capped. `limit`: tokens that a picture may have.
    """

    pixels: Pixels
    patch: int
    merge: int
    frames: int
    least: int
    most: int
    rate: float
    fewest: int
    many: int
    each: int | None
    limit: int | None = None

    def sampled(self, clip: Clip) -> tuple[list[int], float]:
        """Numbers of a clip's frames, and how many of it are shown in a second. **Raises:** `RequestError`."""
        if clip.rate is None and clip.count > self.many:
            raise RequestError(f"the video has {clip.count} frames, at most {self.many} are allowed; send fewer")
        if clip.count < self.frames:
            raise RequestError(f"the video has {clip.count} frames, at least {self.frames} are needed; send a picture")
        if clip.rate is None:
            return list(range(clip.count)), self.rate
        count = min(max(int(clip.count / clip.rate * self.rate), self.fewest), self.many, clip.count)
        return np.linspace(0, clip.count - 1, count).round().astype(int).tolist(), clip.rate

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The size that each of `count` frames is resized to. **Raises:** `RequestError`."""
        step, most = self.patch * self.merge, self.most
        if self.each is not None:
            most = max(min(self.each * step**2, most // count), int(self.least * 1.05)) * count
        if self.limit is not None:
            most = min(most, self.limit * step**2 * count)
        if min(height, width) < step:
            scale = max(step / height, step / width)
            height, width = int(height * scale), int(width * scale)
        return fitted(height, width, step, self.least, most, count, self.frames, "video")

    def __call__(self, clip: Clip, room: int) -> Video:
        """Preprocess a clip that may fill at most `room` rows, which is checked once its first frame is decoded.

        **Raises:** `RequestError`.
        """
        chosen, rate = self.sampled(clip)
        pairs, resized, size = [], [], None
        for frame in clip.decode(chosen):
            size = size or self._within(room, len(chosen), *frame.shape[:2])
            resized.append(self.pixels.resized(frame, *size))
            if len(resized) == self.frames:
                pairs.append(merged(np.stack(resized), self.patch, self.merge))
                resized.clear()
        if len(pairs) * self.frames + len(resized) < len(chosen):
            raise RequestError(f"the video has fewer than the {clip.count} frames that its file says")
        if resized:  # the last frame fills up, as published
            resized += resized[-1:] * (self.frames - len(resized))
            pairs.append(merged(np.stack(resized), self.patch, self.merge))
        ends = [*chosen, *chosen[-1:] * (-len(chosen) % self.frames)]
        middles = np.reshape(ends, (-1, self.frames))[:, [0, -1]].mean(1) / rate
        return Video(tuple(dataclasses.replace(pair, video=True) for pair in pairs), tuple(middles.tolist()))

    def _within(self, room: int, count: int, height: int, width: int) -> tuple[int, int]:
        size = self.size(count, height, width)
        if (tokens := -(-count // self.frames) * math.prod(size) // (self.patch * self.merge) ** 2) > room:
            raise RequestError(
                f"the video takes {tokens} tokens, {count} frames of {size[1]} x {size[0]} pixels, and the context has "
                f"room for {room}; send a shorter or smaller one",
                code=CONTEXT_EXCEEDED,
            )
        return size


def read_video_processor(images: QwenProcessor, files: Mapping[str, Mapping[str, Any]]) -> VideoProcessor:
    """The video processor of a checkpoint whose pictures have `images`. Where its files are silent, the published
    values hold. **Raises:** `ConfigError` naming file and key."""
    both = files.get("processor_config.json", {})
    name = next((name for name in FILES if name in files), FILES[0])
    given = files.get(name, {})
    if "video_processor" in both:
        given, name = both["video_processor"], "processor_config.json"
    if not isinstance(given, Mapping) or not isinstance(size := given.get("size") or {}, Mapping):
        raise ConfigError(f"{name}: the video processor and its size must be objects")
    given = {key: value for key, value in given.items() if value is not None}
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames"):
        if given.get(key, True) is not True:
            raise ConfigError(f"{name}: {key} {given[key]!r} is not supported for videos; it must be true")
    own = {"patch_size": images.patch, "merge_size": images.merge, "temporal_patch_size": images.frames}
    for key, ours in own.items():
        if positive(given, key, ours) != ours:
            raise ConfigError(f"{name}: {key} {given[key]} differs from the {ours} of pictures")
    least, most = positive(size, "shortest_edge", 128 * 32**2), positive(size, "longest_edge", 768 * 32**2)
    fewest, many = positive(given, "min_frames", 4), positive(given, "max_frames", 768)
    if least > most or fewest > many:
        raise ConfigError(f"{name}: {least} to {most} pixels and {fewest} to {many} frames don't fit together")
    each = positive(given, "max_video_tokens", 768) if given.get("cap_pixels_per_frame") else None
    rate = positive_float(given, "fps", 2.0)
    return VideoProcessor(read_pixels(given, HALF, 3), *own.values(), least, most, rate, fewest, many, each)
