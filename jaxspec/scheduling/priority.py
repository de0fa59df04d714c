"""Whose priority is next: lower values first, and within a priority clients in equal shares (`fair_share`).

Waiting lifts: the request that has waited longest lifts its priority by one each `AGING_SECONDS`, so nothing starves.
Time in which a request runs doesn't count. An admitted request keeps the level that it was lifted to, its `rank`, and
gives way to waiting requests whose own priority is below that, never to an equal one. Host data only, no jax.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from jaxspec.scheduling.fair_share import FairShare
from jaxspec.scheduling.sequence import SequenceState, Status

AGING_SECONDS = 60.0  # of waiting that lift a priority by one
KEPT = 64  # priorities that nobody has, after which their shares are dropped


class PriorityQueue:
    """The sequences that wait, by priority. It takes the place of a `FairShare`, which has one priority."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._shares: dict[int, FairShare] = {}
        self._clock, self._waiting = clock, 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(*(self._shares[priority] for priority in sorted(self._shares)))

    def add(self, seq: SequenceState) -> None:
        """Queue a new sequence behind others of its client and priority."""
        if len(self._shares) >= KEPT:
            self._shares = {priority: share for priority, share in self._shares.items() if share}
        seq.since = self._clock()
        self._waiting += 1
        self._share(seq).add(seq)

    def set_back(self, seq: SequenceState) -> None:
        """Queue a sequence that was preempted: before all of its priority that weren't, and lifted as it was."""
        seq.since = self._clock() - (seq.priority - seq.rank) * AGING_SECONDS
        self._waiting += 1
        self._share(seq).set_back(seq)

    def remove(self, seq: SequenceState) -> None:
        self._waiting -= 1
        self._share(seq).remove(seq)

    def charge(self, seq: SequenceState, tokens: int) -> None:
        """Note that so many tokens of this prompt, which `next` gave, are about to be computed."""
        self._share(seq).charge(seq, tokens)

    def next(self, unfinished: Sequence[SequenceState], admits: bool) -> SequenceState | None:
        """The sequence whose prompt is next, as `FairShare.next` chooses it within the priority that is lowest once
        lifted. One that waits gets its rank."""
        now, found = self._clock(), []
        for priority in {*self._shares, *(seq.priority for seq in unfinished)}:
            own = [seq for seq in unfinished if seq.priority == priority]
            share = self._shares.get(priority, FairShare())
            if (seq := share.next(own, admits)) is not None:
                waited = now - min((first.since for first in share.firsts()), default=now) if admits else 0.0
                found.append((min(priority - waited / AGING_SECONDS, *(each.rank for each in own), priority), seq))
        if not found:
            return None
        rank, seq = min(found, key=lambda each: (each[0], each[1].priority))
        if seq.status is Status.WAITING:
            seq.rank = rank
        return seq

    def _share(self, seq: SequenceState) -> FairShare:
        return self._shares.setdefault(seq.priority, FairShare())
