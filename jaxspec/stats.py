"""The decode log line: how the rounds since the last line went."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.engine import Engine

log = logging.getLogger("jaxspec")


class DecodeLog:
    """Writes a line every `interval` rounds, and one for the rest when the engine falls idle. 0 writes none."""

    def __init__(self, interval: int):
        self.interval = interval
        self._rounds = 0
        self._rows = 0
        self._since = 0.0
        self._before: Counter = Counter()

    def count(self, rows: int, started: float) -> None:
        """Note a round of `rows` live requests, dispatched at `started`."""
        if not rows:
            return  # a round that ran past the end of all its requests
        if not self._rounds:
            self._since = max(self._since, started)  # idle time doesn't count
        self._rounds += 1
        self._rows += rows

    def due(self, idle: bool) -> bool:
        return bool(self.interval and self._rows and (idle or self._rounds >= self.interval))

    def write(self, engine: Engine) -> None:
        totals, before, now = engine.totals, self._before, time.monotonic()
        gained = {key: totals[key] - before[key] for key in ("generation_tokens", "verify_rounds", "verified_tokens")}
        used = 1 - engine.scheduler.free_pages / (engine.runner.plan.num_pages - 1)
        log.info(
            "decode: running %d, waiting %d, pages in use %.0f%%, accept len %.2f, %.1f tok/s",
            len(engine.scheduler.running),
            len(engine.scheduler.waiting),
            100 * used,
            gained["verified_tokens"] / max(gained["verify_rounds"], 1),
            gained["generation_tokens"] / max(now - self._since, 1e-9),
        )
        self._rounds = self._rows = 0
        self._since, self._before = now, Counter(totals)
