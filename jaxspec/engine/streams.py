"""How threads hand results to callers that wait on event loops."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("jaxspec")


@dataclass(eq=False, slots=True)
class Stream:
    """A caller that waits for the engine. `begun`: the engine has taken the request; earlier deltas were another
    request's with the same id. `sent` is counted by the engine's thread, `taken` by the caller's. `member`: of several
    engines, the one that serves it, `name` the request's id."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue
    begun: bool = False
    sent: int = 0
    taken: int = 0
    member: Any = None
    name: str = ""


def wake(loop: asyncio.AbstractEventLoop, batch: list[tuple[asyncio.Queue, Any]]) -> None:
    """Put an item into each of these queues of a loop, from any thread, with one wake-up. A closed loop gets none."""

    def put():
        for deltas, item in batch:
            deltas.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop was closed with its callers; nobody is listening
        log.debug("dropped %d deltas of a closed event loop", len(batch))
