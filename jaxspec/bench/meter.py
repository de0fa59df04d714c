"""Tokens a second of an engine's rounds at imposed acceptance, and what the rounds were."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import median

from jaxspec.bench.results import Row
from jaxspec.engine.engine import Engine
from jaxspec.scheduling.draft_count import SKIP_DRAFTER


class Meter:
    """Tokens that an engine's rounds yield at the imposed rates, and what the rounds were."""

    def __init__(self, engine: Engine, lengths: dict[int, float]):
        """`lengths`: tokens that a round yields a request, by its drafts. Those of rounds that it lacks are counted."""
        self._engine, self.lengths = engine, lengths
        self.tokens, self.seconds, self.rested, self.other = 0.0, 0.0, 0, 0.0
        self.rounds: Counter[int] = Counter()
        self.turns: list[float] = []  # tokens a second of each
        # Seconds a round of each step, by its drafts or `SKIP_DRAFTER`.
        self.took: dict[int, list[float]] = defaultdict(list)

    def turn(self, length: int) -> None:
        """Step until requests have so many more tokens each, on average."""
        totals, tokens, seconds = self._engine.counts.totals, self.tokens, self.seconds
        until = totals["verified_tokens"] + length * len(self._engine.scheduler.running)
        while totals["verified_tokens"] < until and self._engine.busy:
            self.step()
        self.turns.append((self.tokens - tokens) / (self.seconds - seconds))

    def run(self, seconds: float, seen: Callable[[float, int], None]) -> None:
        """Step for so long. `seen`: told of each step's tokens and its drafts."""
        until = self.seconds + seconds
        while self.seconds < until:
            self.step(seen)

    def step(self, seen: Callable[[float, int], None] | None = None) -> None:
        """One step reads one program, whose rounds have one number of drafts."""
        engine, began = self._engine, time.perf_counter()
        before, rounds, share = Counter(engine.counts.totals), Counter(engine.counts.rounds_by_drafts), self._share()
        engine.step()
        seconds = time.perf_counter() - began
        moved = Counter(engine.counts.rounds_by_drafts) - rounds
        gained = lambda what: engine.counts.totals[what] - before[what]  # noqa: E731
        for n, count in moved.items():
            tokens = gained("verify_rounds") * (1 + share * (self.lengths[n] - 1)) if n in self.lengths else 0.0
            tokens = tokens or gained("verified_tokens")
            self.tokens += tokens
            self.rounds[n] += count
            self.took[SKIP_DRAFTER if gained("rested_rounds") else n].append(seconds / count)
            if seen is not None:
                seen(tokens, n)
        self.other += 0.0 if moved else seconds
        self.seconds += seconds
        self.rested += gained("rested_rounds")

    def _share(self) -> float:
        """Of the requests that run, those that may have drafts, since none of their rounds rested."""
        running = self._engine.scheduler.running
        return sum(seq.drafter_seen is None for seq in running) / max(len(running), 1)

    def figures(self) -> Row:
        rounds = max(self.rounds.total(), 1)
        speed = median(self.turns) if self.turns else self.tokens / self.seconds
        return {
            "tokens_per_s": speed,
            "turns": self.turns,
            "ms_per_round": self.tokens / rounds / speed * 1e3,
            "median_ms": {n: median(took) * 1e3 for n, took in sorted(self.took.items())},
            "drafts": sum(n * count for n, count in self.rounds.items()) / rounds,
            "rounds_by_drafts": dict(sorted(self.rounds.items())),
            "rested_rounds": self.rested,
        }
