"""Chats with pictures and videos among their texts: what is text, what is either, and what no model here takes."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image

from jaxspec.config.request import RequestError, shown

IMAGES = ("image_url", "image", "input_image", "image_pil")  # types of a part that is a picture
VIDEOS = ("video_url", "video")
# What else a part may be for others, and what to send in its place.
AUDIO = ("audio", "its words as text")
OTHERS = {
    **dict.fromkeys(("input_audio", "audio", "audio_url"), AUDIO),
    "input_video": ("a video of type input_video", "it as video_url"),
    **dict.fromkeys(("file", "input_file", "document"), ("a file", "its text, or its pages as pictures")),
}
SPACES, URL_SAFE = b" \t\n\r\f\v", bytes.maketrans(b"-_", b"+/")  # of base64 in a URL
PIECE = 2**16  # bytes
MOST_RATE = 240  # frames a second
MOST_FRAMES = 768  # that a request lists
FRAMES = "data:video/jpeg;base64,"  # then each frame in base64, with commas between, as vLLM has them
_SOURCES = {False: ("image", "image_url", "url", "path", "image_pil"), True: ("video", "video_url", "url", "path")}


@dataclass(frozen=True)
class Media:
    """A picture or video of a request, and the part of the request that it is. `rate`: frames of a second of a video,
    where the request says."""

    where: str
    source: Any
    video: bool = False
    rate: float | None = None

    @property
    def part(self) -> dict[str, str]:
        """Part that a chat template sees."""
        return {"type": "video" if self.video else "image"}


def separate(messages: Sequence[Any]) -> tuple[list[Any], list[Media]]:
    """A chat with `{"type": "image"}` for each picture, `{"type": "video"}` for each video, and these in order.

    **Raises:** `RequestError` naming the part, for one that is neither a text, nor a picture, nor a video.
    """
    written, found = [], []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(_kind(part) in (*IMAGES, *VIDEOS, *OTHERS) for part in content):
            parts = []
            for place, part in enumerate(content):
                where = f"messages[{number}].content[{place}]"
                if (media := media_of(part, where)) is not None:
                    found.append(media)
                    part = media.part
                parts.append(part)
            message = {**message, "content": parts}
        written.append(message)
    return written, found


def no_vision(why: str | None, where: str) -> RequestError:
    """The refusal of a picture by an engine that reads none, and `why`."""
    return RequestError(f"{where} is a picture or video, and {why}. Leave it out", where)


def named(error: RequestError, where: str) -> RequestError:
    """An error about a picture, with its place."""
    return error if error.param == where else RequestError(f"{where}: {error}", where, error.code)


def _unsupported(what: str, advice: str, where: str) -> RequestError:
    return RequestError(f"{where} is {what}, which is not supported; send {advice}", where)


def _kind(part: Any) -> str | None:
    return part.get("type") if isinstance(part, Mapping) and isinstance(part.get("type"), str) else None


def media_of(part: Any, where: str) -> Media | None:
    """A part's picture or video; None for a text. **Raises:** `RequestError` naming `where`, for anything else."""
    kind = _kind(part)
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} needs a string as its text, got {shown(part.get('text'))}", where)
        return None
    if kind in OTHERS:
        raise _unsupported(*OTHERS[kind], where)
    if kind not in (*IMAGES, *VIDEOS):
        given = f"type {shown(part.get('type'))}" if isinstance(part, Mapping) else shown(part)
        raise RequestError(
            f"{where} has {given}, which is not supported; send parts of type text, image_url or video_url", where
        )
    video = kind in VIDEOS
    source = next((part[name] for name in _SOURCES[video] if part.get(name) is not None), None)
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        what, name = ("video", "video_url") if video else ("picture", "image_url")
        raise RequestError(f'{where} has no {what}; send {{"type": "{name}", "{name}": {{"url": ...}}}}', where)
    rate = part.get("fps") if video else None
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= MOST_RATE):
        raise RequestError(f"{where}: fps must be a number above 0 and at most {MOST_RATE}, got {shown(rate)}", where)
    return Media(where, source, video, rate)


def local_media(media: Media) -> Any:
    """The source as `read_picture`, or `open_clip`, takes it. A text is a data: URL, a file: URL or a path.

    **Raises:** `RequestError` naming the part.
    """
    if not media.video:
        return local_source(media.source, media.where)
    source = media.source
    if isinstance(source, np.ndarray):
        return source
    if isinstance(source, list | tuple):
        return [local_source(frame, media.where) for frame in source]
    return frames_of(source, media.where) or local_source(source, media.where, True)


def local_source(source: Any, where: str, video: bool = False) -> Any:
    """Make of a picture's source, or of a video's that is one file, what `local_media` gives."""
    if isinstance(source, str):
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            return data_of(source, where, video)
        if scheme.startswith(("http://", "https://")):
            raise RequestError(
                f"{where}: what is on the web is fetched by the server alone; give a path, an array, a PIL image or a "
                "data: URL",
                where,
            )
        return path_of(source, where)
    if isinstance(source, bytes | bytearray | os.PathLike | np.ndarray | Image.Image):
        return source
    raise RequestError(
        f"{where}: a picture must be a path, bytes, an array, a PIL image or a data: URL, got {type(source).__name__}",
        where,
    )


def path_of(text: str, where: str) -> Path:
    """The path that a file: URL or a path names. **Raises:** `RequestError` naming `where`."""
    if not text.lower().startswith("file:"):
        return Path(text)
    url = urlsplit(text)
    if url.netloc not in ("", "localhost"):
        raise RequestError(
            f"{where}: a file: URL must name a file of this host, got the host {shown(url.netloc)}", where
        )
    return Path(unquote(url.path))


def frames_of(url: Any, where: str) -> list[bytes] | None:
    """Frames of a data: URL that has some; None for any other source. **Raises:** as `data_of`."""
    if not isinstance(url, str) or url[: len(FRAMES)].lower() != FRAMES:
        return None
    if (count := url.count(",", len(FRAMES)) + 1) > MOST_FRAMES:
        raise too_many_frames(count)
    return [data_of(f"data:image/jpeg;base64,{frame}", where) for frame in url[len(FRAMES) :].split(",")]


def too_many_frames(count: int) -> RequestError:
    """The refusal of a list of `count` frames."""
    return RequestError(f"the video has {count} frames, at most {MOST_FRAMES} are allowed; send fewer")


def data_of(url: str, where: str, video: bool = False) -> bytes:
    """Contents of a data: URL in base64. **Raises:** `RequestError` naming `where`."""
    head, comma, body = url.partition(",")
    kind, *options = head[len("data:") :].lower().split(";")
    if kind.startswith("audio/"):
        raise _unsupported(*AUDIO, where)
    if kind.startswith("video/") and not video:
        raise RequestError(f"{where} is a video; send it in a part of type video_url", where)
    if not comma or "base64" not in (option.strip() for option in options):
        raise RequestError(f"{where}: a data: URL must begin as data:image/png;base64, and have base64 after it", where)
    try:
        packed = _unescaped(body.encode("ascii")).translate(URL_SAFE, SPACES).rstrip(b"=")
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except ValueError as error:
        raise RequestError(f"{where}: the data: URL isn't valid base64: {str(error)[:100]}", where) from None


def _unescaped(text: bytes) -> bytes:
    """Text with its percent escapes resolved, piece by piece: at once they would take ten times its memory."""
    made, start = [], 0
    while b"%" in text and start < len(text):
        end = start + PIECE
        if (cut := text.rfind(b"%", end - 2, end)) >= 0:
            end = cut  # before an escape that goes on in the next piece
        made.append(unquote_to_bytes(text[start:end]))
        start = end
    return b"".join(made) or text
