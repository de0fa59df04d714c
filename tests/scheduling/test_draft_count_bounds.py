"""Adaptive drafting's promise, simulated: near plain decoding and the best number, with times as a busy host sees them.

Programs of eight rounds, so that a try costs as much. Some results are read late. Requests that rested have no drafts,
until their text is computed anew.
"""

from collections import Counter

import numpy as np
import pytest

from jaxspec.scheduling.draft_count import SKIP_DRAFTER, Chooser
from tests.scheduling.test_draft_count import TIMES, expected, rates, seconds
from tests.scheduling.test_skipped_drafts import KEPT, TOKEN
from tests.support.sample import one_in, rare

# ms of a round of the demo with EAGLE-3, one H100, `bench adaptive`
DEMO = {
    1: {SKIP_DRAFTER: 0.546, 0: 0.574, 1: 0.603, 3: 0.703},
    8: {SKIP_DRAFTER: 0.567, 0: 0.594, 1: 0.661, 3: 0.883},
    32: {SKIP_DRAFTER: 0.732, 0: 0.767, 1: 1.051, 3: 1.342},
    128: {SKIP_DRAFTER: 1.507, 0: 1.570, 1: 1.727, 3: 2.171},
}
ROUNDS = 8  # of a program
LATE = 0.3  # of a program's time, at most
ACCEPTANCE = {
    "1.05": rates(1.05, 3),
    "1.2": np.array([0.17, 0.15, 0.15]),
    "1.4": rates(1.4, 3),
    "1.9": np.array([0.55, 0.45, 0.4]),
    "3": rates(3.0, 3),
    "mixed": np.array([[0.17, 0.15, 0.15], [1.0, 1.0, 1.0]]),
}


def times_of(name, requests):
    if name == "demo":
        return {n: ms / 1e3 for n, ms in DEMO[requests].items()}
    table = seconds(name, requests)
    return {SKIP_DRAFTER: table[0], **table, 0: table[0] * KEPT[requests]}


class Busy:
    """A load on a busy host. `late`: the share of results that are read late. `off`: by how much a time at start is too
    long on average. `news`: the share of requests that come in a round, in place of others."""

    def __init__(self, name, requests, late=0.1, off=0.0, news=0.0, seed=0):
        self.rng, self.requests, self.times = np.random.default_rng(seed), requests, times_of(name, requests)
        self.late, self.news, self.token = late, news, TOKEN if name == "EAGLE-3" else TOKEN / 15
        self.share, self.behind, self.delay = 1.0, 0.0, 0.0
        table = {n: ROUNDS * s * (1 + self.rng.exponential(off)) for n, s in self.times.items()}
        self.chooser = Chooser({0: 0, 1: 1, 3: 3}, {("rounds", requests): table})

    def yielded(self, acceptance, drafts):
        rows, kinds = Counter(), np.atleast_2d(acceptance)
        for one in kinds:
            left = int(self.requests * self.share) * ROUNDS // len(kinds)
            for j in range(drafts):
                stay = int(self.rng.binomial(left, one[j]))
                rows[j + 1] += left - stay
                left = stay
            rows[drafts + 1] += left
        return rows

    def run(self, acceptance, lasts):
        """Tokens a second a request over so many seconds."""
        spent, tokens, chosen, group = 0.0, 0.0, Counter(), ("rounds", self.requests)
        while spent < lasts:
            anew = self.token * self.requests * self.behind
            if self.chooser.missed and self.chooser.missed >= anew:
                self.share, self.behind, spent = 1.0, 0.0, spent + anew
            drafts = self.chooser.choose(group, self.share, 1.0)
            took = ROUNDS * self.times[drafts]
            before, self.delay = self.delay, took * self.rng.uniform(0, LATE) * (self.rng.random() < self.late)
            self.chooser.took(group, drafts, max(took * self.rng.normal(1, 0.01) + self.delay - before, 1e-5))
            if drafts > 0:
                self.chooser.accepted(drafts, self.yielded(acceptance, drafts))
            gained = self.share * (expected(acceptance, max(drafts, 0)) - 1)
            spent, tokens, chosen[drafts] = spent + took, tokens + ROUNDS * (1 + gained), chosen[drafts] + 1
            self.share *= drafts != SKIP_DRAFTER
            self.behind += ROUNDS * (1 - self.share)
            self.share += ROUNDS * self.news * (1 - self.share)
        return tokens / spent, chosen

    def check(self, acceptance, plain, best):
        self.run(acceptance, 2.0)
        speed, chosen = self.run(acceptance, 12.0)
        of = {n: expected(acceptance, max(n, 0)) / s for n, s in self.times.items()}
        assert speed >= (1 - plain) * of[SKIP_DRAFTER], (speed / of[SKIP_DRAFTER], chosen)
        assert speed >= (1 - best) * max(of.values()), (speed / max(of.values()), chosen)


SIZES = [("EAGLE-3", n) for n in TIMES["EAGLE-3"]] + [("demo", n) for n in DEMO]


@pytest.mark.parametrize("length,name,requests,news", one_in(2, list(ACCEPTANCE), SIZES, [0.0]) + [
    rare(length, *size, 1 / 256) for size in SIZES for length in ACCEPTANCE
])  # fmt: skip
def test_both_bounds_are_kept_at_any_acceptance(name, requests, length, news):
    """The bounds, and half a percent for a time that is short beside the rests."""
    Busy(name, requests, news=news).check(ACCEPTANCE[length], plain=0.015, best=0.035)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name,requests", SIZES)
@pytest.mark.parametrize("length", ACCEPTANCE)
@pytest.mark.parametrize("late,off", [(0.3, 0.0), (0.1, 0.1)])
def test_no_host_and_no_start_makes_it_much_slower_than_plain(name, requests, length, late, off):
    for seed in range(3):
        Busy(name, requests, late, off, seed=seed).check(ACCEPTANCE[length], plain=0.06, best=0.12)
