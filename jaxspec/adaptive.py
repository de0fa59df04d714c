"""How many drafts a round makes: chosen by the host before each round, none included. Host data only, no jax.

The number with the most expected tokens a second wins, by what a round of it takes at that batch size and by how often
drafts were accepted lately at each position. Both are known on the host anyway: times were measured at start, and they
and acceptance are brought up to date by the results that the engine reads. Nothing is waited for.

Invariant: a choice depends on rounds that were read before, never on a draft of the round that it is for. So sampled
text keeps the target's distribution: whether there is a draft j doesn't depend on the value drawn for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

# A program without its number of drafts, and how many requests it is for: those of a group can stand in for one another
Group = tuple[str, int]

MARGIN = 0.01  # by which more drafts must be faster before they are made; fewer need no margin
BUDGET = 0.005  # share of the time that trying other numbers may cost, if no draft of theirs is accepted
WINDOW = 1000  # verified positions over which acceptance is averaged
FIRST = 0.6  # acceptance of the first draft, before any was seen
PRIOR = 32  # how many observations the guess for a position counts as
AGAIN, ANOTHER = 1 / 8, 1 / 3  # shares of a round's delay by which all times move, and its number's own
OUTLIER = 2  # times the expected time: a round that took longer counts as that, since the host was held up
LEAST = 1 / 4  # of a time from the start: no round is expected to be faster


def rungs(drafts: int) -> tuple[int, ...]:
    """The numbers of drafts below `drafts` that rounds are compiled for, ascending: its half, half of that, ..., 0."""
    fewer = []
    while drafts:
        drafts //= 2
        fewer.append(drafts)
    return tuple(reversed(fewer))


class Times:
    """What the programs of a group take, in seconds, by their drafts.

    `table` was measured at start. A round of as many drafts as the one before it moves all numbers' times: a longer
    context or a busy host adds to each of them. A round of another number moves that one's own: wholly if it was
    faster, since a round can be held up but not sped up.
    """

    def __init__(self, table: Mapping[int, float]):
        self._table = dict(table)
        self._own = dict.fromkeys(table, 0.0)
        self._more = 0.0
        self._last: int | None = None

    def of(self, drafts: int) -> float:
        return max(self._table[drafts] + self._own[drafts] + self._more, LEAST * self._table[drafts])

    def all(self) -> dict[int, float]:
        return {drafts: self.of(drafts) for drafts in self._table}

    def see(self, drafts: int, seconds: float) -> None:
        late = min(seconds, OUTLIER * self.of(drafts)) - self.of(drafts)
        if drafts == self._last:
            self._more += AGAIN * late
        else:
            self._own[drafts] += late if late < 0 else ANOTHER * late
        self._last = drafts


class Chooser:
    """Chooses the number of drafts of each round, among those that its group of programs has.

    `longest[n]` is how many of n drafts can be accepted, n for a chain. `times`: for each group what its numbers of
    drafts take, in seconds. Each group has 0 and another number at least.

    A number's expected tokens follow from conditional acceptance by position: of the rows whose drafts before position
    j were accepted, those whose draft j was, too. A row without a draft there counts as one whose draft wasn't. A
    position that was hardly seen is taken to be like the one before it.

    Other numbers than the chosen one are tried now and then, in turn: acceptance shows in wider rounds alone, and times
    of rounds in themselves. As often as keeps the cost, should no draft be accepted, within `BUDGET` of the time.
    """

    def __init__(self, longest: Mapping[int, int], times: Mapping[Group, Mapping[int, float]]):
        self._longest = dict(longest)
        self._times = {group: Times(table) for group, table in times.items()}
        self._tried = [0.0] * max(longest.values())  # by position, over a window
        self._passed = [0.0] * max(longest.values())
        self._saved = 0.0  # seconds that may be spent on a try
        self._tries = 0
        self.chosen = max(longest)

    def choose(self, group: Group, share: float) -> int:
        """The number of drafts of the next round of this group. `share`: of its requests that may have drafts."""
        if not share:
            return 0
        times, tokens = self._times[group].all(), self.expected(share)
        speed = {n: tokens[n] / times[n] for n in times}
        best = max(speed, key=speed.get)
        if speed[best] > speed.get(self.chosen, 0.0) * (1 + MARGIN * (best > self.chosen)):
            self.chosen = best
        return self._explore(times, tokens[self.chosen])

    def expected(self, share: float = 1.0) -> dict[int, float]:
        """Tokens that a round yields a request, by its drafts."""
        rate, reach, tokens = FIRST, 1.0, [1.0]
        for tried, passed in zip(self._tried, self._passed, strict=True):
            rate = (passed + PRIOR * rate) / (tried + PRIOR)
            reach *= rate
            tokens.append(tokens[-1] + share * reach)
        return {n: tokens[longest] for n, longest in self._longest.items()}

    def accepted(self, drafts: int, rows: Counter[int]) -> None:
        """Note rounds of so many drafts: how many rows yielded how many tokens, 1 and up, the target's own included."""
        for j in range(self._longest[drafts]):
            tried = sum(count for tokens, count in rows.items() if tokens > j)
            passed = sum(count for tokens, count in rows.items() if tokens > j + 1)
            kept = min(1.0, max(WINDOW - tried, 0) / max(self._tried[j], 1e-9))
            self._tried[j] = kept * self._tried[j] + tried
            self._passed[j] = kept * self._passed[j] + passed

    def took(self, group: Group, drafts: int, seconds: float) -> None:
        """Note how long a program took, that had the device to itself."""
        self._times[group].see(drafts, seconds)

    def _explore(self, times: Mapping[int, float], tokens: float) -> int:
        """`chosen`, which yields so many `tokens`, or another number if enough time was saved up for it."""
        others = [n for n in times if n != self.chosen]
        n = others[self._tries % len(others)]
        loss = max(times[n] - times[self.chosen] / tokens, 0.0)  # it yields one token, which takes the chosen that long
        self._saved = min(self._saved + BUDGET * times[self.chosen], loss)
        if self._saved < loss:
            return self.chosen
        self._saved = 0.0
        self._tries += 1
        return n
