"""Requests whose rounds skipped the drafter (`SKIP_DRAFTER`): it missed some of their text, so they have no drafts.

They have drafts again after a preemption, which computes their text anew, for the drafter too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxspec.scheduling.draft_count import SKIP_DRAFTER, Chooser, Group
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import SequenceState

EACH = 1e-3  # seconds that a preemption takes besides: the host's, and of programs that aren't full


def choose(chooser: Chooser, group: Group, seqs: Sequence[SequenceState], reach: int) -> int:
    """The number of drafts of these requests' next round, noted in them if it rests. `reach`: the drafter's."""
    able = [seq for seq in seqs if seq.owner.request.params.speculative]
    share = sum(seq.drafter_seen is None for seq in able) / len(seqs)
    drafts = chooser.choose(group, share, len(able) / len(seqs))
    for seq in seqs if drafts == SKIP_DRAFTER else ():
        if seq.drafter_seen is None:
            # As of a request that leaves. What the host hasn't read doesn't count.
            seq.drafter_seen = len(seq.tokens) - max(reach, 2)
    return drafts


def renew(chooser: Chooser | None, scheduler: Scheduler, token: float, read: Callable[[], None]) -> None:
    """Preempt requests that rested, once drafts would have saved what it takes to compute their text anew.

    `token`: seconds that one of a prompt takes, which come in whole blocks. `read`: reads all results in flight.
    """
    scheduler.resting = chooser is not None and chooser.resting
    if chooser is None or not chooser.missed or not (due := _due(scheduler)):
        return
    block = scheduler.block
    anew = sum(-(-_anew(scheduler, seq) // block) * block for seq in due)
    if chooser.missed < token * anew + EACH * len(due):
        return
    read()
    for seq in _due(scheduler):  # some have ended
        scheduler.preempt(seq)


def _due(scheduler: Scheduler) -> list[SequenceState]:
    """Requests, youngest first, that can still become longer by as many tokens as would have to be computed anew."""
    rested = (seq for seq in reversed(scheduler.running) if seq.drafter_seen is not None)
    able = (seq for seq in rested if seq.owner.request.params.speculative)
    return [seq for seq in able if seq.limit - len(seq.tokens) >= _anew(scheduler, seq)]


def _anew(scheduler: Scheduler, seq: SequenceState) -> int:
    """Tokens of a request that are computed anew before it drafts again."""
    return max(len(seq.tokens) - seq.drafter_seen, min(scheduler.recent, len(seq.tokens)))
