"""Stop strings in text that arrives piece by piece: where the text ends, and how much of it can be shown before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class Beginnings:
    """Proper beginnings of some strings, one of which may stand at the end of a text."""

    def __init__(self, strings: Sequence[str]):
        self._prefixes = frozenset(s[:n] for s in strings for n in range(1, len(s)))
        self._longest = max(map(len, self._prefixes), default=0)
        self._ends = frozenset(prefix[-1] for prefix in self._prefixes)

    def waiting(self, text: str, start: int = 0) -> int:
        """Length of the longest end of the text, from `start` on, that a string begins with."""
        if start == len(text) or text[-1] not in self._ends:
            return 0
        longest = min(self._longest, len(text) - start)
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._prefixes), 0)


# A request's completions, of which there may be thousands, all have the same stop strings.
_beginnings = lru_cache(maxsize=16)(Beginnings)


class StopStrings:
    """Looks for the first of several strings, and holds text back only while it could be the beginning of one.

    The text is cut before the string that completes first: the longest, if several do at the same character. `hit` is
    that string, None as long as there is none. `keep`: cut behind it, not before it.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False):
        self.hit: str | None = None
        self._strings, self._keep = tuple(strings), keep
        self._beginnings = _beginnings(self._strings)
        self._held = ""  # text that may begin a stop string

    def push(self, text: str, counts: bool) -> str:
        """Add text, of one character at least; what can be shown of it and of the text held back so far.

        `counts` False: a string that this text completes doesn't end the text.
        """
        self._held += text
        end = self._match(len(text)) if counts else None
        if end is None:
            end = len(self._held) - self._beginnings.waiting(self._held)
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
