"""How many prompt tokens fit between two rounds, so that requests that run aren't held up for longer than they may.

Learned from the results that the engine reads anyway, while the device has no pause. Host data only, no jax.
"""

from __future__ import annotations

from typing import NamedTuple

MOVE_RATE = 1 / 8  # share of a difference by which what is expected falls, or a round's time moves
OUTLIER = 2  # times what is expected: what took longer counts as that, since the host was held up
DECAY = 1 / 256  # share of what it takes more than others suggest that is forgotten of a program at each other's


class Dispatched(NamedTuple):
    """Dispatches since the round before: the size of each program of prompts, and when the first was, in seconds; 0 if
    there are none. `rounds`: of the program that is behind them. `pictures`: some were read, too."""

    prompts: tuple[int, ...] = ()
    began: float = 0.0
    rounds: int = 1
    pictures: bool = False

    @property
    def alone(self) -> bool:
        """Whether there are none."""
        return not (self.prompts or self.pictures)


class PrefillBudget:
    """`most`: seconds between two rounds at most, None for no limit; times of rounds and of programs of prompts are
    learned then, too. `sizes`: the blocks of `block` tokens that these programs are made for, ascending; their padding
    takes as long as tokens do.

    A program's time rises at once with what is seen, since a long prompt's later tokens take longer, and falls slowly.
    Small programs take longer for a token. So each size is learned by itself. What one that hasn't run takes is guessed
    from the others, and so is in time what one took that hasn't run for long: it is tried again.

    So do programs of several rounds, which run while no prompt waits. One round takes no longer than several, and no
    less than its share of them.
    """

    def __init__(self, most: float | None, block: int, sizes: tuple[int, ...]):
        self._most, self._block, self._sizes = most, block, sizes
        self._rounds: dict[int, float] = {}  # what a program of so many rounds takes
        self._took: dict[int, float] = {}  # by size
        self._dispatched = Dispatched()
        self._pictures = 0
        self._read_at = 0.0

    def prompts(self, blocks: int, now: float) -> None:
        """Note a program of so many blocks of prompts that is about to be dispatched."""
        size = next(size for size in self._sizes if size >= blocks)
        before = self._dispatched
        self._dispatched = before._replace(prompts=(*before.prompts, size), began=before.began or now)

    def round(self, now: float, rounds: int = 1, pictures: int = 0) -> Dispatched:
        """Note that a program of so many rounds is about to be dispatched; what it is behind of. `pictures`: how many
        have been read so far."""
        dispatched, self._dispatched = self._dispatched, Dispatched()
        read, self._pictures = pictures > self._pictures, pictures
        return Dispatched(dispatched.prompts, dispatched.began or now, rounds, read)

    def read(self, dispatched: Dispatched, now: float) -> None:
        """Note that a round's result is there."""
        took, self._read_at = now - max(self._read_at, dispatched.began), now
        if dispatched.pictures:
            return  # nobody knows how much of it they took
        if not dispatched.prompts:
            if not self._rounds:
                self._took.clear()  # what was learned has a round in it
            expected = self._rounds.get(dispatched.rounds, took)
            self._rounds[dispatched.rounds] = expected + MOVE_RATE * (min(took, OUTLIER * expected) - expected)
            return
        self._learn(dispatched.prompts, max(took - self._takes(dispatched.rounds), 0.0))

    @property
    def token(self) -> float:
        """Seconds that a token of the largest program takes; 0 as long as that isn't known."""
        largest = self._sizes[-1]
        return self._expected(largest) / (largest * self._block) if self._took else 0.0

    def tokens(self) -> int | None:
        """Prompt tokens that may be computed between two rounds: so many of the largest programs, or one smaller one;
        0: none of them fits. None: as many as one likes, or nothing is known."""
        if self._most is None or not self._took:
            return None
        left, largest = self._most - self._takes(1), self._sizes[-1]
        if (each := self._expected(largest)) <= left:
            return int(left / each) * largest * self._block if each else None
        return max((size for size in self._sizes if self._expected(size) <= left), default=0) * self._block

    def _takes(self, rounds: int) -> float:
        """Seconds that a program of so many rounds takes; 0 if none has run."""
        shares = {other: took * rounds / other for other, took in self._rounds.items()}
        takes = self._rounds.get(rounds, max(shares.values(), default=0.0))
        for other, share in shares.items():
            least, most = sorted((share, self._rounds[other]))
            takes = min(max(takes, least), most)
        return takes

    def _learn(self, programs: tuple[int, ...], took: float) -> None:
        """Note what programs of these sizes took together."""
        expected = {size: self._expected(size) if self._took else 0.0 for size in programs}
        if not (whole := sum(expected[size] for size in programs)):  # nothing is known, or a round took all of the time
            self._took |= {size: took * size / sum(programs) for size in programs}
            return
        ratio = min(took / whole, OUTLIER)
        for size, time in expected.items():
            falls = size in self._took and ratio < 1
            self._took[size] = time * (1 + MOVE_RATE * (ratio - 1) if falls else ratio)
        for size in self._took.keys() - expected.keys():
            self._took[size] += DECAY * min(self._guess(size) - self._took[size], 0.0)

    def _expected(self, size: int) -> float:
        """Seconds that a program takes, if any has run."""
        return self._took[size] if size in self._took else self._guess(size)

    def _guess(self, size: int) -> float:
        """Estimate a program's seconds from other sizes: the next smaller one's time is taken for half fixed, and a
        larger one takes no longer for a token."""
        smaller = max((other for other in self._took if other < size), default=size)
        middle = self._took[smaller] * (1 + size / smaller) / 2 if smaller < size else 0.0
        return max([middle, *(time * size / other for other, time in self._took.items() if other > size)])
