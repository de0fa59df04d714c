"""Programs that the engine has dispatched and not read yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxspec.config.request import Delta
from jaxspec.rounds.programs import GREEDY
from jaxspec.scheduling.draft_count import Group
from jaxspec.scheduling.prefill_budget import Behind
from jaxspec.scheduling.sequence import Chunk, Sequence


@dataclass(slots=True)
class Flight:
    """A dispatched program whose result hasn't been read, and how to read it: `read(flight, result, deltas)`."""

    read: Callable[[Flight, np.ndarray, list[Delta]], None]
    result: jax.Array
    rows: list[tuple[Sequence, int]]  # with the epoch at dispatch: a later one means the row is nobody's
    mode: str = GREEDY
    chunk: Chunk | None = None  # the part of a prompt that was scored
    drafts: int = 0  # of a round
    group: Group | None = None  # of a round whose drafts were chosen, and may tell how to choose
    behind: Behind | None = None  # of a round: what was dispatched since the one before it
    started: float = field(default_factory=time.monotonic)  # seconds
