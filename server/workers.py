"""Threads for work beside the event loop, which nobody may want any more once it is its turn.

`Workers` do pieces of work that take long. `Together` does short ones of many callers at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any


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


class Together[A, B]:
    """Calls `work` in a thread with the pieces of all who wait, at most `most`, and gives each its result.

    While a call runs, others gather for the next. So a burst costs few hand-overs between threads, each of which takes
    longer than a short piece of work. If a call fails, each of its pieces is tried alone and fails alone.
    """

    def __init__(self, work: Callable[[list[A]], list[B]], most: int, name: str):
        self._work, self._most = work, most
        self._waiting: queue.SimpleQueue[tuple[A, asyncio.Future[B]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    async def run(self, piece: A) -> B:
        """The result of one piece. **Raises:** what `work` raises for it."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        result = asyncio.get_running_loop().create_future()
        self._waiting.put((piece, result))
        return await result

    def _run(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while len(taken) < self._most and not self._waiting.empty():  # nobody else takes
                taken.append(self._waiting.get())
            pieces, results = zip(*taken, strict=True)
            self._deliver(results, self._results([*pieces], results))

    def _results(self, pieces: list[A], results: tuple[asyncio.Future[B], ...]) -> list[B | Exception | None]:
        """The result of each piece, or its error; None for a piece that nobody waits for any more."""
        wanted = [i for i, result in enumerate(results) if not result.cancelled()]
        found: list[B | Exception | None] = [None] * len(pieces)
        try:
            done = self._work([pieces[i] for i in wanted]) if wanted else []
        except Exception as error:
            done = [error] if len(wanted) == 1 else [self._results([pieces[i]], (results[i],))[0] for i in wanted]
        for i, one in zip(wanted, done, strict=True):
            found[i] = one
        return found

    @staticmethod
    def _deliver(results: tuple[asyncio.Future[B], ...], found: list[B | Exception | None]) -> None:
        """Hand results over with one wake-up per event loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[B], Any]]] = defaultdict(list)
        for result, one in zip(results, found, strict=True):
            batches[result.get_loop()].append((result, one))
        for loop, batch in batches.items():
            with suppress(RuntimeError):  # the loop was closed with its callers
                loop.call_soon_threadsafe(_settle, batch)


def _settle(batch: list[tuple[asyncio.Future, Any]]) -> None:
    for result, one in batch:
        if result.done():  # its caller has left
            continue
        if isinstance(one, Exception):
            result.set_exception(one)
        else:
            result.set_result(one)
