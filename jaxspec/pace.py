"""How many prompt tokens fit between two rounds, so that requests that run aren't held up for longer than they may.

Learned from the results that the engine reads anyway, while the device has no pause. Host data only, no jax.
"""

from __future__ import annotations

from typing import NamedTuple

AGAIN = 1 / 8  # share of a difference by which what is expected falls, or a round's time moves
OUTLIER = 2  # times what is expected: what took longer counts as that, since the host was held up


class Behind(NamedTuple):
    """What was dispatched since the round before: prompt tokens, and when the first of it was, in seconds."""

    prompts: int
    began: float


class Pace:
    """`most`: seconds between two rounds at most, None for no limit; times of rounds and prompts are learned then, too.

    A token's time rises at once with what is seen, since a long prompt's later tokens take longer, and falls slowly.
    """

    def __init__(self, most: float | None):
        self._most = most
        self._round: float | None = None
        self._token: float | None = None
        self._behind = Behind(0, 0.0)
        self._read_at = 0.0

    def prompts(self, tokens: int, now: float) -> None:
        """Note a program of so many prompt tokens that is about to be dispatched."""
        behind = self._behind
        self._behind = Behind(behind.prompts + tokens, behind.began if behind.prompts else now)

    def round(self, now: float) -> Behind:
        """Note that a round is about to be dispatched; what it is behind of."""
        behind, self._behind = self._behind, Behind(0, 0.0)
        return behind if behind.prompts else Behind(0, now)

    def read(self, behind: Behind, now: float) -> None:
        """Note that a round's result is there."""
        took, self._read_at = now - max(self._read_at, behind.began), now
        if not behind.prompts:
            expected = took if self._round is None else self._round
            self._round = expected + AGAIN * (min(took, OUTLIER * expected) - expected)
            return
        each = max(took - (self._round or 0.0), 0.0) / behind.prompts
        expected = each if self._token is None else self._token
        each = min(each, OUTLIER * expected)
        self._token = max(each, expected + AGAIN * (each - expected))

    def tokens(self) -> int | None:
        """Prompt tokens that may be computed between two rounds; None: as many as one likes, or nothing is known."""
        if self._most is None or not self._token:
            return None
        return max(int((self._most - (self._round or 0.0)) / self._token), 0)
