"""Tells once if far fewer drafts are accepted than the drafter's card says: pure counting, no jax.

A round with d drafts is compared with what the card's figure makes of d drafts, so that short rounds aren't held
against the drafter. Of several figures on a card the lowest counts, so that chat isn't held against mathematics.
"""

from __future__ import annotations

import logging
import math

from jaxspec.drafters.registry import Known

log = logging.getLogger("jaxspec")

ROUNDS = 200  # between looks; fewer say nothing
REQUESTS = 8  # one odd text says nothing either
FAR = 1 / 3  # of the drafts that the card promises: chat has this much less than mathematics in published tables
SIGMAS = 3.0  # of the mean, by the normal approximation over rounds


class Watch:
    """Counts rounds until they show that acceptance is far below the card's, then warns and counts no more.

    Of two drafters in one (`suffix+eagle3`) the card is the second's, and rounds of both count: a lookup's drafts are
    taken where more of them are expected to be accepted, so both together have no less than the second alone.
    """

    def __init__(self, name: str, target: str, card: Known | None):
        """`name`: what --draft says. `card` None, or without figures, watches nothing."""
        self.name, self.target = (card and card.source) or name, target
        self._figure = card.least if card and card.drafts else None
        self._rounds = self._requests = self._gained = self._squares = 0
        self._promised = 0.0
        self._by_drafts: list[float] = []
        if self._figure is not None:
            rate = constant_rate(self._figure[1], card.drafts)
            self._by_drafts = [sum(rate**i for i in range(1, d + 1)) for d in range(card.drafts + 1)]

    def count(self, accepted: int, drafted: int, first: bool) -> None:
        """Take a round of a request: tokens it yielded, drafts it verified, whether it is the request's first."""
        if not drafted or not self._by_drafts:
            return
        gained = accepted - 1
        self._rounds += 1
        self._requests += first
        self._gained += gained
        self._squares += gained * gained
        self._promised += self._by_drafts[min(drafted, len(self._by_drafts) - 1)]
        if not self._rounds % ROUNDS and self._requests >= REQUESTS:
            self._look()

    def _look(self) -> None:
        n = self._rounds
        mean = self._gained / n
        error = SIGMAS * math.sqrt(max(self._squares / n - mean * mean, 0.0) / n)
        promised = self._promised / n
        if mean + error >= FAR * promised:
            return
        what, tokens = self._figure
        self._by_drafts = []
        log.warning(
            "drafter %s for %s: %.2f tokens a round over %d rounds (at most %.2f), where its card says %.2f (%s), "
            "which is %.2f at the drafts of these rounds. Likely reasons: another revision of the target than the "
            "drafter was trained for; a quantised target; a missing or different chat template, or thinking on; other "
            "languages or kinds of text; a high temperature. --draft none may be faster",
            self.name, self.target, 1 + mean, n, 1 + mean + error, tokens, what, 1 + promised,
        )  # fmt: skip


def constant_rate(tokens: float, drafts: int) -> float:
    """The acceptance of each draft, given all before it, that makes so many tokens a round of so many drafts."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(drafts + 1)) < tokens else (low, rate)
    return (low + high) / 2
