"""Chats with pictures among their texts: what is text, what is a picture, and what no model here takes."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image

from jaxspec.config.request import RequestError, shown

IMAGES = ("image_url", "image", "input_image", "image_pil")  # types of a part that is a picture
# What else a part may be for others, and what to send in its place.
AUDIO, VIDEO = ("audio", "its words as text"), ("video", "some of its frames as pictures")
OTHERS = {
    **dict.fromkeys(("input_audio", "audio", "audio_url"), AUDIO),
    **dict.fromkeys(("video_url", "video", "input_video"), VIDEO),
    **dict.fromkeys(("file", "input_file", "document"), ("a file", "its text, or its pages as pictures")),
}
ROLES = ("user", "tool")  # whose messages may have pictures
SPACES, URL_SAFE = b" \t\n\r\f\v", bytes.maketrans(b"-_", b"+/")  # of base64 in a URL
PIECE = 2**16  # bytes
_SOURCES = ("image", "image_url", "url", "path", "image_pil")


def separate(messages: Sequence[Any]) -> tuple[list[Any], list[tuple[str, Any]]]:
    """A chat with `{"type": "image"}` for each picture, and the pictures in order: the place of each, and its source.

    **Raises:** `RequestError` naming the part, for one that is neither a text nor a picture.
    """
    written, pictures = [], []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(_kind(part) in (*IMAGES, *OTHERS) for part in content):
            parts = []
            for place, part in enumerate(content):
                where = f"messages[{number}].content[{place}]"
                if (source := picture_of(part, where)) is not None:
                    pictures.append((where, source))
                    part = {"type": "image"}
                parts.append(part)
            check_role(message.get("role"), where := f"messages[{number}]", where)
            message = {**message, "content": parts}
        written.append(message)
    return written, pictures


def check_role(role: Any, where: str, param: str | None) -> None:
    """**Raises:** `RequestError` naming `param`, for a message that can't have pictures."""
    if role not in ROLES:
        raise RequestError(
            f"{where} is of role {shown(role)} and has a picture; only messages of {' and '.join(ROLES)} may", param
        )


def no_vision(why: str | None, where: str) -> RequestError:
    """The refusal of a picture by an engine that reads none, and `why`."""
    return RequestError(f"{where} is a picture, and {why}. Leave the picture out", where)


def named(error: RequestError, where: str) -> RequestError:
    """An error about a picture, with its place."""
    return error if error.param == where else RequestError(f"{where}: {error}", where, error.code)


def _unsupported(what: str, advice: str, where: str) -> RequestError:
    return RequestError(f"{where} is {what}, which is not supported; send {advice}", where)


def _kind(part: Any) -> str | None:
    return part.get("type") if isinstance(part, Mapping) and isinstance(part.get("type"), str) else None


def picture_of(part: Any, where: str) -> Any:
    """The source of a part's picture; None for a text. **Raises:** `RequestError` naming `where`, for anything else."""
    kind = _kind(part)
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} needs a string as its text, got {shown(part.get('text'))}", where)
        return None
    if kind in OTHERS:
        raise _unsupported(*OTHERS[kind], where)
    if kind not in IMAGES:
        given = f"type {shown(part.get('type'))}" if isinstance(part, Mapping) else shown(part)
        raise RequestError(f"{where} has {given}, which is not supported; send parts of type text or image_url", where)
    source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise RequestError(f'{where} has no picture; send {{"type": "image_url", "image_url": {{"url": ...}}}}', where)
    return source


def local_source(source: Any, where: str) -> Any:
    """A picture's source as `read_picture` takes it. A text is a data: URL, a file: URL or a path.

    **Raises:** `RequestError` naming `where`.
    """
    if isinstance(source, str):
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            return data_of(source, where)
        if scheme.startswith(("http://", "https://")):
            raise RequestError(
                f"{where}: pictures of the web are fetched by the server alone; give a path, an array, a PIL image or "
                "a data: URL",
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


def data_of(url: str, where: str) -> bytes:
    """Contents of a data: URL in base64. **Raises:** `RequestError` naming `where`."""
    head, comma, body = url.partition(",")
    kind, *options = head[len("data:") :].lower().split(";")
    for other, advice in (AUDIO, VIDEO):
        if kind.startswith(f"{other}/"):
            raise _unsupported(other, advice, where)
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
