"""Ctrl-C, while a step of an engine must not be cut short."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Delays the effect of a Ctrl-C (SIGINT's handler) until `deliver`: in the midst of a step it could lose the state
    that a program has just been given. A second Ctrl-C isn't delayed.

    Python interrupts the main thread alone, so in others there is nothing to delay.
    """

    def __enter__(self) -> Interrupts:
        self._held: tuple[Any, ...] | None = None
        self._handler = signal.getsignal(signal.SIGINT)
        self._holds = threading.current_thread() is threading.main_thread() and callable(self._handler)
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def _hold(self, *received: Any) -> None:
        if self._held is not None:
            self.deliver()
        self._held = received

    def deliver(self) -> None:
        """Deliver the delayed interrupt, if there is one."""
        received, self._held = self._held, None
        if received is not None:
            self._handler(*received)
