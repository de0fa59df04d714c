"""The pictures and videos of a request, from what it sent to what the engine takes.

Invariant: nothing here runs on the event loop for long, and at most `FETCHES` files are fetched, `DECODERS` pictures
and one video read at once, whatever the number of requests.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError, shown
from jaxspec.images.chats import MOST_FRAMES, Media, data_of, frames_of, named, no_vision, path_of, too_many_frames
from jaxspec.images.image_reader import ImageReader
from jaxspec.images.picture import Picture, Video
from jaxspec.images.reading import MAX_FILE
from server.media.fetch import fetch
from server.workers import Workers

FETCHES, DECODERS = 8, 2
WEB = ("http://", "https://")

_fetchers = Workers(FETCHES, "jaxspec-fetch")
_decoders = Workers(DECODERS, "jaxspec-decode")
_videos = Workers(1, "jaxspec-decode-video")  # which take longer, so that pictures don't wait for them


@dataclass(frozen=True)
class MediaRules:
    """Where pictures and videos may come from, beside data: URLs, and how many of each a prompt may have."""

    domains: frozenset[str] = frozenset()
    folder: Path | None = None
    most: int = 16
    videos: int = 4


async def read_media(
    media: Sequence[Media], reader: ImageReader | None, why: str | None, rules: MediaRules, context: int
) -> list[Picture | Video]:
    """Fetch and read pictures and videos. `why`: why there is no `reader`.

    **Raises:** `RequestError` naming the part.
    """
    if media and reader is None:
        raise no_vision(why, media[0].where)
    _check_number([each for each in media if not each.video], "pictures", rules.most, "--limit-images-per-prompt")
    _check_number([each for each in media if each.video], "videos", rules.videos, "--limit-videos-per-prompt")
    room = context

    async def one(each: Media) -> Picture | Video:
        nonlocal room
        listed, size = isinstance(each.source, list), 0

        async def fetched(url: str) -> str | bytes:
            """Fetch a URL of the web; give any other as it is, for whoever decodes it."""
            url = url.strip()
            if not url[:8].lower().startswith(WEB):
                return url
            return await _fetchers.run(lambda _: counted(fetch(url, rules.domains)))

        def own(found: str | bytes) -> Any:
            return counted(_content(found, each, rules)) if isinstance(found, str) else found

        def counted(content: bytes | list[bytes]) -> bytes | list[bytes]:
            nonlocal size
            size += len(content)
            if listed and size > MAX_FILE:
                raise RequestError(f"the video's frames have more than {MAX_FILE} bytes together; send smaller ones")
            return content

        def read(check: Callable[[], None]) -> Picture | Video:
            check()
            return reader.read_media([*map(own, found)] if listed else own(found), each, room, check)

        try:
            if listed and len(each.source) > MOST_FRAMES:
                raise too_many_frames(len(each.source))
            found = await asyncio.gather(*map(fetched, each.source)) if listed else await fetched(each.source)
            read_one = await (_videos if each.video else _decoders).run(read)
        except RequestError as error:
            raise named(error, each.where) from error
        if (room := room - read_one.tokens) < 0:
            raise RequestError(
                f"{each.where}: the pictures so far take more than the {context} tokens of the context; send fewer or "
                "smaller ones",
                each.where,
                CONTEXT_EXCEEDED,
            )
        return read_one

    tasks = [asyncio.create_task(one(each)) for each in media]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _check_number(media: list[Media], what: str, most: int, flag: str) -> None:
    if len(media) > most:
        where = media[most].where
        raise RequestError(
            f"{where}: the prompt has {len(media)} {what}, at most {most} are allowed; the server's {flag} sets that",
            where,
        )


def _content(url: str, media: Media, rules: MediaRules) -> bytes | list[bytes]:
    """A file that isn't on the web; of a video perhaps its frames. **Raises:** `RequestError`."""
    scheme, whole = url[:8].lower(), media.video and not isinstance(media.source, list)
    if whole and (frames := frames_of(url, media.where)) is not None:
        return frames
    if scheme.startswith("data:"):
        return data_of(url, media.where, whole)
    if scheme.startswith("file:") or url.startswith("/"):
        return _file(path_of(url, media.where), rules.folder)
    what = "video" if media.video else "picture"
    raise RequestError(f"a {what} must be a data:, http:, https: or file: URL, got {shown(url)}")


def _file(path: Path, folder: Path | None) -> bytes:
    """A file below the allowed folder, wherever links lead. **Raises:** `RequestError`."""
    refusal = RequestError(
        f"the picture {shown(str(path))} is not in the server's --allowed-media-path; send it as a data: URL"
    )
    try:
        whole = path.resolve()
        if folder is None or not whole.is_relative_to(folder.resolve()):
            raise refusal
        file = os.open(whole, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise RequestError(f"the picture {shown(str(path))} is no regular file")
            return opened.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the picture {shown(str(path))} can't be read: {error}") from None
