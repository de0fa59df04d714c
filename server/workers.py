"""A few threads for work that takes long, and that nobody may want any more once it is its turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Abandoned(Exception):
    """Whoever asked for this work has left."""


class Workers:
    """At most `count` pieces of work at once; others wait, first come first served.

    Work whose caller was cancelled never starts, or ends at its next check.
    """

    def __init__(self, count: int, name: str):
        self._threads = ThreadPoolExecutor(count, name)

    async def run[T](self, work: Callable[[Callable[[], None]], T]) -> T:
        """Call `work` in a thread with a function that it should call now and then, which raises `Abandoned` once the
        caller has left."""
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise Abandoned

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, check)
        finally:
            left.set()
