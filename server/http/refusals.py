"""The log of requests that were refused or failed: a line each, and no more lines than a disk can bear.

Invariant: a line is one line, of at most a few hundred characters, whatever the client sent.
"""

from __future__ import annotations

import asyncio
import json
import logging

log = logging.getLogger("jaxspec.server")

LINES = 60  # in each PERIOD
PERIOD = 60.0  # seconds
MAX_LINE = 300  # characters of a message; 100 of a path


class Refusals:
    """Logs responses of status 400 and above: `LINES` in each `PERIOD`, then how many more there were."""

    def __init__(self) -> None:
        self._logged = self._suppressed = 0
        self._ends: asyncio.TimerHandle | None = None

    def note(self, status: int, asked: str, request_id: str, body: bytes) -> None:
        """Log a response. `asked` is its request's method and path, `body` OpenAI's error object."""
        if self._ends is None:
            self._ends = asyncio.get_running_loop().call_later(PERIOD, self._end)
        if self._logged == LINES:
            self._suppressed += 1
            return
        self._logged += 1
        level = logging.WARNING if status >= 500 else logging.INFO
        message, field = _cause(body)
        log.log(
            level,
            "%d %s%s: %s (request id %s)",
            status,
            safe(asked, 100),
            f", field {safe(field, 100)}" if field else "",
            safe(message, MAX_LINE),
            request_id,
        )

    def _end(self) -> None:
        if self._suppressed:
            log.warning("%d more requests were refused or failed within %g s", self._suppressed, PERIOD)
        self._logged = self._suppressed = 0
        self._ends = None


def safe(text: str, limit: int) -> str:
    """`text` on one line, without what a terminal would act on, cut to `limit` characters."""
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def _cause(body: bytes) -> tuple[str, str | None]:
    """Message and field of an error body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error["param"]
    except (ValueError, KeyError, TypeError):
        return "", None
