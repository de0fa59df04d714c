"""Videos of any source as frames of RGB pixels, decoded one after the other.

Invariant: one decoded frame is held at a time, and no video is decoded for longer than `MAX_SECONDS` of its thread's
processor time, however busy the host is.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.config.request import RequestError
from jaxspec.images.reading import (
    BROKEN,
    MAX_MEMORY,
    WEBP,
    check_size,
    open_file,
    read_file,
    read_picture,
    rgb_of,
)

MAX_SECONDS = 20.0  # of processor time that decoding may take
# Bytes for each pixel of an animation: what a decoder holds of earlier frames, too, and a frame in RGB.
ANIMATIONS = {"GIF": 16, WEBP: 28, "PNG": 22}
MAX_PIXELS = 2**29  # of all frames of an animation
LEAST_PIXELS = 2**16  # that each counts for
ALLOWED = "MP4, WebM or AVI, an animated GIF, WebP or PNG, or a list of frames"
STILL = 10.0  # frames a second of an animation that says no time, as browsers show it
FRAMES_HELD = 27  # bytes for each pixel: 16 frames that a decoder may refer to, and one in RGB


@dataclass(frozen=True)
class Clip:
    """A video before any frame of it is chosen.

    - `count`, `rate`: its frames, and how many are shown in a second. None: they were chosen by whoever sent them.
    - `decode`: gives the frames with these numbers, which ascend: u8[height, width, 3] of one size.
    """

    count: int
    rate: float | None
    decode: Callable[[Sequence[int]], Iterator[np.ndarray]]


def open_clip(source: Any, check: Callable[[], None] = lambda: None) -> Clip:
    """Open a video.

    **Arguments:** `source`: a file's bytes, its path, a list of frames as `read_picture` takes them, or an array
    u8[frames, height, width, 3]. `check` is called before each frame, and may raise.

    **Raises:** `RequestError` for anything that is no video, is damaged, or is larger than allowed.
    """
    end = time.thread_time() + MAX_SECONDS

    def go_on() -> None:
        check()
        if time.thread_time() > end:
            raise RequestError(f"the video takes longer to decode than {MAX_SECONDS:g} seconds; send a shorter one")

    if isinstance(source, np.ndarray) and source.ndim == 4:
        source = list(source)
    if isinstance(source, list | tuple):
        return _listed(source, go_on)
    if isinstance(source, str | os.PathLike):
        source = read_file(Path(source), "video")
    if not isinstance(source, bytes | bytearray):
        raise RequestError(
            f"a video must be the bytes of a file, its path, a list of frames or an array, got {type(source).__name__}"
        )
    kind = _container(bytes(source[:64]))
    return _animation(source, go_on) if kind is None else _contained(source, kind, go_on)


def _one_size(frames: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    first = None
    for number, frame in enumerate(frames):
        first = first or frame.shape
        if frame.shape != first:
            (height, width, _), (h, w, _) = first, frame.shape
            raise RequestError(f"frame {number} of the video is {w} x {h} pixels, the first is {width} x {height}")
        yield frame


def _listed(frames: Sequence[Any], go_on: Callable[[], None]) -> Clip:
    def read(number: int) -> np.ndarray:
        go_on()
        try:
            return read_picture(frames[number])
        except RequestError as error:
            raise RequestError(f"frame {number} of the video: {error}") from error

    return Clip(len(frames), None, lambda numbers: _one_size(map(read, numbers)))


def _animation(content: bytes, go_on: Callable[[], None]) -> Clip:
    def shown() -> Iterator[Image.Image]:
        with open_file(content, "video", tuple(ANIMATIONS), ALLOWED) as image:
            check_size(*(size := image.size), ANIMATIONS[image.format], "video")
            most = MAX_PIXELS // max(math.prod(size), LEAST_PIXELS)
            said = 0 if image.format == "GIF" else image.n_frames  # a GIF's are known once all of it is read
            for number in itertools.count():
                go_on()
                if max(said, number) > most:
                    raise RequestError(
                        f"the video has more than the {most} frames of {size[0]} x {size[1]} pixels that are allowed; "
                        "send a shorter or smaller one"
                    )
                try:
                    image.seek(number)
                    image.load()
                except EOFError:
                    return
                except (*BROKEN, zlib.error, MemoryError) as error:
                    raise RequestError(f"the video is damaged: {str(error)[:100]}") from error
                yield image

    def decode(numbers: Sequence[int]) -> Iterator[np.ndarray]:
        wanted = set(numbers)
        last = max(wanted)
        for number, image in enumerate(itertools.islice(shown(), last + 1)):
            if number in wanted:
                yield rgb_of(image)

    times = [image.info.get("duration") or 0 for image in shown()]
    seconds = sum(times) / 1000
    return Clip(len(times), len(times) / seconds if seconds > 0 else STILL, lambda numbers: _one_size(decode(numbers)))


def _container(start: bytes) -> str | None:
    """FFmpeg's name of a container; None for others."""
    if start[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mp4"
    if start.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    return "avi" if start[:4] == b"RIFF" and start[8:12] == b"AVI " else None


def _contained(content: bytes, kind: str, go_on: Callable[[], None]) -> Clip:
    """A video in a container, by PyAV. The container is the one that its first bytes say: others, such as playlists,
    may name files and URLs."""
    try:
        import av
    except ImportError:
        raise RequestError(
            f"the video is {kind}, and no decoder is installed; run `pip install 'jaxspec[video]'` on the server's "
            "host, or send frames"
        ) from None

    def decoded(step: Callable[[Any, Any], Iterator[Any]]) -> Iterator[Any]:
        try:
            with av.open(io.BytesIO(content), format=kind) as container:
                if not container.streams.video:
                    raise RequestError("the video's file has no video in it")
                stream = container.streams.video[0]
                codec = stream.codec_context
                codec.thread_count = 1  # each thread would hold frames of its own
                codec.options = {"max_pixels": str(MAX_MEMORY // FRAMES_HELD)}
                check_size(codec.width, codec.height, FRAMES_HELD, "video")
                for each in step(container, stream):
                    go_on()
                    yield each
        except (av.FFmpegError, *BROKEN, MemoryError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the video is damaged or of no codec that is supported: {str(error)[:100]}") from error

    def decode(numbers: Sequence[int]) -> Iterator[np.ndarray]:
        wanted = set(numbers)
        last = max(wanted)
        frames = decoded(lambda container, stream: container.decode(stream))
        for number, frame in enumerate(itertools.islice(frames, last + 1)):
            if number in wanted:
                check_size(frame.width, frame.height, FRAMES_HELD, "video")
                yield frame.to_ndarray(format="rgb24")

    count, rate = 0, None
    for packet in decoded(lambda container, stream: container.demux(stream)):
        count += packet.size > 0
        rate = rate or packet.stream.average_rate or packet.stream.guessed_rate
    return Clip(count, float(rate or STILL), lambda numbers: _one_size(decode(numbers)))
