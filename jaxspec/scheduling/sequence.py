"""The scheduler's data: a sequence, the chunks of its prefill, and the plan of a step. No jax.

The engine reads tokens off a sequence, the runner slots and blocks off a chunk; only the scheduler changes them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxspec.images.placement import Placement
from jaxspec.scheduling.host_tier import Load
from jaxspec.scheduling.prefix_cache import Node

NO_STATE = -1  # as a state slot: none


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class SequenceState:
    """One completion in the making.

    **Arguments:**

    - `tokens`: the prompt and those generated tokens that the host has read; `prompt_len` of them are the prompt's.
    - `limit`: how many tokens in all it may reach, as `Scheduler.check` returned.
    - `owner`: the engine's record; the scheduler never looks at it.
    - `score`: log-probabilities of the prompt are requested, so all of it is computed: no cached prefix, chunks of at
      most `score_tokens`, each alone in its prefill. Cleared by the engine once it has them.
    - `stepwise`: no program runs several of its rounds.
    - `fixed_drafts`: it never goes without drafts, as asked or because a seed's text depends on them.
    - `overridden`: for prompt positions whose embedding isn't their token's, a key of what it is instead, 64 bits.
    - `whole`: spans of the prompt, start and end, of which a chunk has all or none: their rows see one another.
    - `pictures`: those of the prompt; the scheduler never looks at them.
    - `client`: a key of whom it is for; prompts are computed in equal shares for all clients (`fair_share`).
    - `priority`: lower values first (`priority`); all are 0 where the scheduler goes by arrival.
    - `salt`: a key of what else its keys and values depend on, 64 bits; 0: of nothing else.
    - `adapter`: the one that it is computed with, in a place that it holds while admitted (`adapter_places`), or None.
    - `drafter_seen`: positions that the drafter has seen, if it missed what came then; None: it misses nothing. Set by
      the engine, and at admission.

    The rest is the scheduler's: `slot` and `pages` while admitted; `computed`, positions whose KV was cached or has
    been dispatched as prefill; `cached`, tokens found in the prefix tree and on the host when first admitted,
    `from_host` of them there and `from_disk` on its disk; `load`, what still comes from the host; `in_flight`, rounds
    not read yet, of which the first token is one; `epoch`, which changes when slot and pages are lost, so that older
    results are recognised; `arrival`, its number in the order of arrival; `since`, when it came, later by as long as it
    ran; `rank`, the priority that it was lifted to when it was admitted; `replayed`, tokens that were read before a
    preemption and aren't again yet, and `lost`, all that had been; `source`, the snapshot that the first chunk starts
    from; `points`, positions where snapshots are due.
    """

    tokens: list[int] = field(repr=False)
    prompt_len: int
    limit: int
    owner: Any = field(default=None, repr=False)
    score: bool = False
    stepwise: bool = False
    fixed_drafts: bool = False
    overridden: Mapping[int, int] = field(default_factory=dict, repr=False)
    salt: int = 0
    whole: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    adapter: Any = field(default=None, repr=False)
    pictures: Placement | None = field(default=None, repr=False)
    client: str = ""
    priority: int = 0
    drafter_seen: int | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list, repr=False)
    computed: int = 0
    cached: int = 0
    from_host: int = 0
    from_disk: int = 0
    load: Load | None = field(default=None, repr=False)
    in_flight: int = 0
    epoch: int = 0
    arrival: int = 0
    since: float = 0.0
    rank: float = 0.0
    replayed: int = 0
    lost: list[int] = field(default_factory=list, repr=False)
    status: Status = Status.WAITING
    preemptions: int = 0
    node: Node | None = field(default=None, repr=False)  # how far its pages are published; None: they must not be
    source: int | None = field(default=None, repr=False)
    points: list[int] = field(default_factory=list, repr=False)

    @property
    def keys(self) -> list[int]:
        """For each token, the number by which the prefix tree knows it and all that its page depends on there."""
        if not (self.overridden or self.salt):
            return self.tokens
        keys = [self.overridden.get(at, token) for at, token in enumerate(self.tokens)]
        keys[0] |= self.salt << 64  # all other pages are behind the first one
        return keys


class Chunk(NamedTuple):
    """Prefill of `seq.tokens[start : start + count]`.

    `source` is the snapshot's state slot that it starts from; None: it continues from the chunk before, or from
    nothing. `keeps` are the positions, in order, at which the state is kept, and the state slots for that.
    """

    seq: SequenceState
    start: int
    count: int
    source: int | None = None
    keeps: tuple[tuple[int, int], ...] = ()

    def blocks(self, size: int) -> list[tuple[int, int, int, int]]:
        """Split into blocks of up to `size` tokens: start, count, state slots to start from and for a snapshot."""
        own, blocks, end = self.seq.slot, [], self.start + self.count
        source = self.source if self.source is not None else own if self.start else NO_STATE
        for stop, keep in (*self.keeps, (end, NO_STATE)):
            start = blocks[-1][0] + blocks[-1][1] if blocks else self.start
            for at in range(start, stop, size):
                count = min(size, stop - at)
                blocks.append((at, count, source, keep if at + count == stop else NO_STATE))
                source = own
        return blocks


class Plan(NamedTuple):
    """Programs to dispatch: set up the slots of `admit`; one program for all of `prefill`; one for the first tokens of
    `first`, whose prompts that completes; then one that runs `rounds` rounds of `rows`, one after the other.

    Of `admit`, those whose status is LOADING wait for pages from the host, and have no prefill yet. `reads` is the
    prompt some of whose pictures are to be read in place of prefill.

    `drain`: pages ran out while results are unread. Nothing else is in the plan: read them all, then plan again.
    """

    admit: list[SequenceState]
    prefill: list[Chunk]
    first: list[SequenceState]
    rows: list[SequenceState]
    rounds: int = 1
    drain: bool = False
    reads: SequenceState | None = None
