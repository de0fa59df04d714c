"""Stop strings in text that arrives piece by piece: where the text ends, and how much of it can be shown before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Looks for the first of several strings, and holds text back only while it could be the beginning of one.

    The text is cut before the string that completes first: the longest, if several do at the same character. `hit` is
    that string, None as long as there is none. `keep`: cut behind it, not before it.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False):
        self.hit: str | None = None
        self._strings, self._keep = tuple(strings), keep
        self._prefixes, self._longest, self._ends = _beginnings(self._strings)
        self._held = ""  # text that may begin a stop string

    def push(self, text: str, counts: bool) -> str:
        """Add text, of one character at least; what can be shown of it and of the text held back so far.

        `counts` False: a string that this text completes doesn't end the text.
        """
        self._held += text
        end = self._match(len(text)) if counts else None
        if end is None:
            end = len(self._held) - self._waiting()
        shown, self._held = self._held[:end], self._held[end:] if self.hit is None else ""
        return shown

    def rest(self) -> str:
        """No more text comes: what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _match(self, new: int) -> int | None:
        """Where to cut the held text for the string that completes first among its last `new` characters."""
        before = len(self._held) - new
        found = []
        for string in self._strings:
            start = self._held.find(string, max(0, before - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start, string))
        if not found:
            return None
        end, start, self.hit = min(found)
        return end if self._keep else start

    def _waiting(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        if self._held[-1] not in self._ends:
            return 0
        longest = min(self._longest, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held[-n:] in self._prefixes), 0)


@lru_cache(maxsize=16)  # a request's completions, of which there may be thousands, all have the same stop strings
def _beginnings(stops: tuple[str, ...]) -> tuple[frozenset[str], int, frozenset[str]]:
    """The proper beginnings of stop strings, the longest one's length, and the characters that any of them end with."""
    prefixes = frozenset(s[:n] for s in stops for n in range(1, len(s)))
    return prefixes, max(map(len, prefixes), default=0), frozenset(prefix[-1] for prefix in prefixes)
