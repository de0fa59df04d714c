"""Ctrl-C and SIGTERM end a command where it can go on from: between two steps, or behind texts that were written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C or a SIGTERM, and in words what it left."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stop:
    """Notes the signals that would interrupt the main thread, for the end of a step. A second one isn't delayed."""

    def __enter__(self) -> Stop:
        self.asked = False
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._handlers = {number: signal.getsignal(number) for number in signals}
        for number, handler in self._handlers.items():
            if callable(handler):
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            if callable(handler):
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.asked:
            self._handlers[number](number, frame)
        self.asked = True
