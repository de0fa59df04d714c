"""Whose prompt is computed next: clients have prompt tokens computed in equal shares, and each its requests in order.

Weighted fair queueing with equal weights: a client's tag is how many tokens it has had, and the client with the least
goes next. One that comes, or comes back, starts at the share that each of the others has had by then, so nobody saves
up a share while sending nothing. With one client this is first come, first served. Host data only, no jax.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

from jaxspec.scheduling.sequence import SequenceState

KEPT = 1024  # tags of clients that send nothing, after which they are dropped


class FairShare:
    """The sequences that wait, by client."""

    def __init__(self):
        self._queues: dict[str, deque[SequenceState]] = {}  # none of them empty
        self._had: dict[str, float] = {}
        self._share = 0.0  # what each client has had that was there all along
        self._arrivals = self._waiting = 0
        self._clients = 1  # that have prompts to compute

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[SequenceState]:
        """All of them, in order of arrival, those that were set back first."""
        return iter(sorted(chain(*self._queues.values()), key=lambda seq: (not seq.preemptions, seq.arrival)))

    def add(self, seq: SequenceState) -> None:
        """Queue a new sequence behind its client's others."""
        if len(self._had) >= KEPT + len(self._queues):
            self._had = {client: had for client, had in self._had.items() if client in self._queues}
        if seq.client not in self._queues:
            self._had[seq.client] = max(self._had.get(seq.client, 0.0), self._share)
        seq.arrival = self._arrivals
        self._arrivals += 1
        self._queue(seq).append(seq)

    def set_back(self, seq: SequenceState) -> None:
        """Queue a sequence that was preempted: before all that weren't, and before those that were and came later."""
        queue = self._queue(seq)
        queue.insert(sum(each.preemptions > 0 and each.arrival < seq.arrival for each in queue), seq)

    def _queue(self, seq: SequenceState) -> deque[SequenceState]:
        self._waiting += 1
        return self._queues.setdefault(seq.client, deque())

    def firsts(self) -> Iterator[SequenceState]:
        """The first of each client."""
        return (queue[0] for queue in self._queues.values())

    def remove(self, seq: SequenceState) -> None:
        self._queues[seq.client].remove(seq)
        self._waiting -= 1
        if not self._queues[seq.client]:
            del self._queues[seq.client]

    def next(self, unfinished: Sequence[SequenceState], admits: bool) -> SequenceState | None:
        """The sequence whose prompt is next: one of the `unfinished`, at most one a client, or, if one can be admitted,
        the first of a client that has none of those. It stays where it is."""
        busy = {seq.client for seq in unfinished}
        waiting = [queue[0] for client, queue in self._queues.items() if client not in busy]
        self._clients = len(unfinished) + len(waiting)
        turn = lambda seq: (not seq.preemptions, self._had.get(seq.client, self._share), seq.arrival)  # noqa: E731
        return min((*unfinished, *(waiting if admits else ())), key=turn, default=None)

    def charge(self, seq: SequenceState, tokens: int) -> None:
        """Note that so many tokens of this prompt, which `next` gave, are about to be computed."""
        self._had[seq.client] = self._had.get(seq.client, self._share) + tokens
        self._share += tokens / self._clients
