"""The pictures of a request, from what it sent to what the engine takes.

Invariant: nothing here runs on the event loop for long, and at most `FETCHES` and
`DECODERS` pictures are fetched and read at once, whatever the number of requests.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError, shown
from jaxspec.images.chats import data_of, named, no_vision, path_of
from jaxspec.images.image_reader import ImageReader
from jaxspec.images.picture import Picture
from jaxspec.images.reading import MAX_FILE
from server.media.fetch import fetch
from server.workers import Workers

FETCHES, DECODERS = 8, 2
WEB = ("http://", "https://")

_fetchers = Workers(FETCHES, "jaxspec-fetch")
_decoders = Workers(DECODERS, "jaxspec-decode")


@dataclass(frozen=True)
class MediaRules:
    """Where pictures may come from, beside data: URLs, and how many a prompt may have."""

    domains: frozenset[str] = frozenset()
    folder: Path | None = None
    most: int = 16


async def read_pictures(
    sources: Sequence[tuple[str, str]], reader: ImageReader | None, why: str | None, rules: MediaRules, context: int
) -> list[Picture]:
    """Fetch and read pictures, each given by its place in the request and its URL. `why`: why there is no `reader`.

    **Raises:** `RequestError` naming the place.
    """
    if sources and reader is None:
        raise no_vision(why, sources[0][0])
    if len(sources) > rules.most:
        where = sources[rules.most][0]
        raise RequestError(
            f"{where}: the prompt has {len(sources)} pictures, at most {rules.most} are allowed; the server's "
            "--limit-images-per-prompt sets that",
            where,
        )
    room = context

    async def one(where: str, url: str) -> Picture:
        nonlocal room
        url = url.strip()

        def read(check: Callable[[], None]) -> Picture:
            check()
            return reader.read(_content(url, where, rules) if fetched is None else fetched, room)

        try:
            from_web = url[:8].lower().startswith(WEB)
            fetched = await _fetchers.run(lambda _: fetch(url, rules.domains)) if from_web else None
            picture = await _decoders.run(read)
        except RequestError as error:
            raise named(error, where) from error
        if (room := room - picture.tokens) < 0:
            raise RequestError(
                f"{where}: the pictures so far take more than the {context} tokens of the context; send fewer or "
                "smaller ones",
                where,
                CONTEXT_EXCEEDED,
            )
        return picture

    tasks = [asyncio.create_task(one(*source)) for source in sources]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _content(url: str, where: str, rules: MediaRules) -> bytes:
    """A picture's file, which isn't on the web. **Raises:** `RequestError`."""
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return data_of(url, where)
    if scheme.startswith("file:") or url.startswith("/"):
        return _file(path_of(url, where), rules.folder)
    raise RequestError(f"a picture must be a data:, http:, https: or file: URL, got {shown(url)}")


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
