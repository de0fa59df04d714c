"""How many drafts a round makes: chosen by the host before each round, none included. Host data only, no jax.

The number with the most expected tokens a second wins, by what a round of it takes at that batch size and by how often
drafts were accepted lately at each position. Both are known on the host anyway: times were measured at start, and they
and acceptance are brought up to date by the results that the engine reads. Nothing is waited for.

A drafter's state is kept up in rounds without drafts, which costs time. Once none has been chosen for a while, rounds
*rest*: they are plain decoding's, and the drafter misses what the requests in them get. Those have no drafts from then
on. After a time, rounds without drafts keep the state of new requests up again, on which drafts are tried.

Invariant: a choice depends on rounds that were read before, never on a draft of the round that it is for. So sampled
text keeps the target's distribution: whether there is a draft j doesn't depend on the value drawn for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from statistics import median

# A program without its number of drafts, and how many requests it is for: those of a group can stand in for one another
Group = tuple[str, int]

MARGIN = 0.01  # by which more drafts must be faster before they are made, or a rest before one begins
LEAVE = 0.005  # by which plain decoding must be faster than drafts that are made; fewer drafts need no margin
BUDGET = 0.005  # share of the time that trying other numbers may cost
SELDOM = 10  # a number is tried once in so many rounds at most
MIN_RELATIVE_SPEED = 1 / 2  # of the fastest number's: one that is expected to have it is tried before any round rests
MIN_SAMPLES = 3  # rounds of a number after which its time is known
WINDOW = 1000  # verified positions over which acceptance is averaged, or
PROGRAMS = 8  # rounds' programs, if those have more
FIRST = 0.6  # acceptance of the first draft, before any was seen
PRIOR = 32  # how many observations the guess for a position counts as
DELAYS = 9  # of rounds of the usual number, whose median delay is that of all
TRIES = 9  # of a number, whose median delay is its own
USUAL = 16  # rounds of another number in a row, after which it is the usual one: those after a change may be slow
RETRY_DEVIATION = 0.1  # share of a number's time by which a try may be off before another one follows at once
OUTLIER = 2  # times the expected time: a round that took longer counts as that, since the host was held up
SKIP_DRAFTER = -1  # as a number of drafts: none, and the drafter's state isn't kept up
SETTLED = 0.5  # seconds without drafts, of a whole batch that might have some, after which rounds rest
KEEPING = 0.005  # share of the time that keeping up a drafter's state between rests, and trying drafts then, may cost
LEAST = 1 / 4  # of a time from the start: no round is expected to be faster


def rungs(drafts: int) -> tuple[int, ...]:
    """The numbers of drafts below `drafts` that rounds are compiled for, ascending: its half, half of that, ..., 0."""
    fewer = []
    while drafts:
        drafts //= 2
        fewer.append(drafts)
    return tuple(reversed(fewer))


class Times:
    """Expected seconds of a group's programs, by their drafts.

    `table` was measured at start. Rounds of the usual number move all numbers' times: a longer context or a busy host
    adds to each of them. Rounds of another number move that one's own, which is the median of its last `TRIES`; the
    start's counts as two of them. A result that was read late makes a round seem long and the next one short, so one
    alone says little.

    More drafts take no less time: the start may have been held up, but no round is too fast. A rest isn't tried while
    drafts are made. So until rounds have rested it is taken to save what it did at start, of the time that rounds
    without drafts take.
    """

    def __init__(self, table: Mapping[int, float]):
        numbers = sorted(table)
        self._table = {n: min(table[m] for m in numbers[i:]) for i, n in enumerate(numbers)}
        self._own = dict.fromkeys(table, 0.0)
        self._seen = {drafts: deque([0.0, 0.0], TRIES) for drafts in table}
        self._delays, self._more = deque([0.0, 0.0], DELAYS), 0.0
        self._usual: int | None = None
        self._last, self._row = SKIP_DRAFTER, 0  # the number before, and how often it came in a row
        self._rounds: Counter[int] = Counter()
        self.rested = False  # often enough to know what a rest takes

    def of(self, drafts: int) -> float:
        own = self._own[0 if drafts == SKIP_DRAFTER and not self.rested else drafts]
        return max(self._table[drafts] + own + self._more, LEAST * self._table[drafts])

    def all(self) -> dict[int, float]:
        return {drafts: self.of(drafts) for drafts in self._table}

    def sure(self, drafts: int) -> bool:
        """Whether rounds have shown what they take."""
        return self._rounds[drafts] >= MIN_SAMPLES

    def see(self, drafts: int, seconds: float) -> bool:
        """Take a round's time. Whether it should be seen again soon, since it isn't what was expected."""
        if drafts not in self._table:
            return False
        self._last, self._row = drafts, self._row + 1 if drafts == self._last else 1
        self._rounds[drafts] += 1
        expected = self._table[drafts] + self._own[drafts] + self._more
        late = min(seconds, OUTLIER * expected) - expected
        if self._usual in (drafts, None):
            self._usual = drafts
            self._delays.append(self._more + late)
            self._more = median(self._delays)
            return False
        self._seen[drafts].append(self._own[drafts] + late)
        self._own[drafts] = median(self._seen[drafts])
        if self._row == USUAL:
            self._usual = drafts
            self.rested |= drafts == SKIP_DRAFTER
        return abs(late) > RETRY_DEVIATION * expected


class Chooser:
    """Chooses the number of drafts of each round, among those that its group of programs has.

    `longest[n]` is how many of n drafts can be accepted, n for a chain. `times`: for each group what its numbers of
    drafts take, in seconds. Each group has 0 and another number at least, and may have `SKIP_DRAFTER`. `shared`: those
    numbers that a request has on average, some more and some fewer (`ragged`).

    A number's expected tokens follow from conditional acceptance by position: of the rows whose drafts before position
    j were accepted, those whose draft j was, too. A row without a draft there counts as one whose draft wasn't. A
    position that was hardly seen is taken to be like the one before it. Drafts that are shared out yield what they did
    lately. What they would yield if each request had as many is where that begins.

    Other numbers than the chosen one are tried now and then: acceptance shows in wider rounds alone, and times of
    rounds in themselves. As often as keeps what is expected to be lost within `BUDGET` of the time, and each as much.
    """

    def __init__(
        self, longest: Mapping[int, int], times: Mapping[Group, Mapping[int, float]], shared: Collection[int] = ()
    ):
        self._longest = dict(longest)
        self._shared = {drafts: (0.0, 0.0) for drafts in shared}  # rows of such rounds, and their drafts that stood
        self._times = {group: Times(table) for group, table in times.items()}
        self._tried = [0.0] * max(longest.values())  # by position, over a window
        self._passed = [0.0] * max(longest.values())
        self._saved = 0.0  # seconds that may be spent on a try
        self._lost: dict[int, float] = defaultdict(float)  # by tries of a number
        self._doubtful: int | None = None  # was tried, and is to be tried again
        self._warm = 0.0  # seconds without drafts since the last rest, each by the share of requests that may have some
        self._spent = 0.0  # and how much longer they took for that
        self._rest = 0.0  # seconds to rest
        self.missed = 0.0  # seconds that drafts would have saved since they pay, had no request rested
        self.chosen = max(longest)

    def choose(self, group: Group, share: float, able: float | None = None) -> int:
        """The number of drafts of the next round of this group. `share`: of its requests that may have drafts; `able`:
        of those that could, had they not rested."""
        able = share if able is None else able
        if not able:
            return 0
        times = self.times(group)
        kept, plain = times[0], times.pop(SKIP_DRAFTER, None)
        untried = None
        if plain is not None:
            times[0] = plain  # as it is in the long run
            untried = self._untried(group, times, share)
            if self._resting(group, times, kept, share, able, untried is None):
                self.chosen = 0
                return SKIP_DRAFTER
        if not share:
            return 0
        tokens = self.expected(share)
        speed = {n: tokens[n] / times[n] for n in times}
        best = max(speed, key=speed.get)
        margin = MARGIN if best > self.chosen else 0.0 if best or plain is None else LEAVE
        if speed[best] > speed.get(self.chosen, 0.0) * (1 + margin):
            self.chosen = best
        return self._explore(times, tokens, kept) if untried is None else untried

    def expected(self, share: float = 1.0) -> dict[int, float]:
        """Tokens that a round yields a request, by its drafts."""
        rate, reach, tokens = FIRST, 1.0, [1.0]
        for tried, passed in zip(self._tried, self._passed, strict=True):
            rate = (passed + PRIOR * rate) / (tried + PRIOR)
            reach *= rate
            tokens.append(tokens[-1] + share * reach)
        known = {n: tokens[longest] for n, longest in self._longest.items()}
        for n, (rows, stood) in self._shared.items():
            known[n] = 1 + (share * stood + PRIOR * (tokens[n] - 1)) / (rows + PRIOR)
        return known

    def accepted(self, drafts: int, rows: Counter[int]) -> None:
        """Note rounds of so many drafts: how many rows yielded how many tokens, 1 and up, the target's own included."""
        if drafts in self._shared:
            new, (old, stood) = sum(rows.values()), self._shared[drafts]
            kept = _kept(old, new)
            gained = sum(count * (tokens - 1) for tokens, count in rows.items())
            self._shared[drafts] = kept * old + new, kept * stood + gained
            return
        for j in range(self._longest.get(drafts, 0)):
            tried = sum(count for tokens, count in rows.items() if tokens > j)
            passed = sum(count for tokens, count in rows.items() if tokens > j + 1)
            kept = _kept(self._tried[j], tried)
            self._tried[j] = kept * self._tried[j] + tried
            self._passed[j] = kept * self._passed[j] + passed

    def took(self, group: Group, drafts: int, seconds: float) -> None:
        """Note how long a program took, that had the device to itself."""
        self._doubtful = drafts if self._times[group].see(drafts, seconds) else None

    def times(self, group: Group) -> dict[int, float]:
        """Expected seconds of this group's rounds, by their drafts."""
        return self._times[group].all()

    @property
    def resting(self) -> bool:
        """Whether requests that come now will rest."""
        return self._rest > 0

    def _untried(self, group: Group, times: Mapping[int, float], share: float) -> int | None:
        """A number that may be the fastest, and whose time isn't known."""
        unsure = [n for n in times if not self._times[group].sure(n) and n != self.chosen]
        if not unsure:
            return None
        each = {n: times[n] / tokens for n, tokens in self.expected(share).items() if n in times}
        return next((n for n in unsure if MIN_RELATIVE_SPEED * each[n] < min(each.values())), None)

    def _resting(
        self, group: Group, times: Mapping[int, float], kept: float, share: float, able: float, sure: bool
    ) -> bool:
        """Whether the next round is plain decoding's; one that isn't takes `kept` without drafts. `sure`: the times of
        others are known."""
        tokens, plain = self.expected(able), times[0]
        each = {n: times[n] / tokens[n] * (1 + MARGIN * (n > 0 and self.chosen == 0)) for n in times}
        best = min(each, key=each.get)
        self.missed = self.missed + (each[0] - each[best]) * (1 - share / able) if best and share < able else 0.0
        some = self.expected(share)
        if best and share and plain >= min(kept, *(times[n] / some[n] for n in times if n)):
            self._warm, self._spent, self._rest = max(self._warm - times[best], 0.0), 0.0, 0.0
            return False
        self._rest = max(self._rest - plain, 0.0)
        if not share or self._rest:
            return True
        more = max(kept - plain, 0.0)
        pays = more > MARGIN * kept or not self._times[group].rested  # a first rest shows what it saves
        self._saved += more  # as much for trying drafts as for keeping them possible
        self._warm, self._spent = self._warm + share * kept, self._spent + 2 * more
        if self._warm >= SETTLED * (1 if pays else SELDOM) and sure:
            self._rest = max(self._spent / KEEPING, SETTLED)
            self._warm = self._spent = 0.0
        return False

    def _explore(self, times: Mapping[int, float], tokens: Mapping[int, float], kept: float) -> int:
        """`chosen`, or another number if enough time was saved up for it. A try without drafts takes `kept`."""
        usual, doubtful, self._doubtful = times[self.chosen], self._doubtful, None
        if doubtful in times:
            return doubtful
        least = SELDOM * BUDGET * usual
        take = {n: times[n] if n else kept for n in times if n != self.chosen}
        losses = {n: max(took - usual * tokens[n] / tokens[self.chosen], least) for n, took in take.items()}
        n = min(losses, key=lambda n: self._lost[n] + losses[n])
        self._saved = min(self._saved + BUDGET * usual, losses[n])
        if self._saved < losses[n]:
            return self.chosen
        self._saved = 0.0
        self._lost[n] += losses[n]
        return n


def _kept(old: float, new: float) -> float:
    """The share of earlier observations that still count beside so many new ones."""
    return min(1.0, (max(WINDOW, PROGRAMS * new) - new) / max(old, 1e-9))
