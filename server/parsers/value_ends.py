"""The end of a value in XML, which a mark alone doesn't say: values are text without escapes, and may mention marks.

A reading takes each mark for structure or for text. It costs much for each mark within a text that has no partner
there, half as much for each mark that its structure lacks, and a little for any mark within a text. The cheapest
reading counts; of equal ones, the one that puts marks into a value of several words, and whose values end as they
begin; then the one whose first value is longest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_MARKS = 24  # of a decision
MAX_READINGS = 8  # the cheapest, kept at each mark
ALONE, LACKS, WITHIN = 100, 50, 1  # costs of a mark without a partner, of one that isn't there, of any within a text

_MARK = re.compile(r"\n?<(?:(/?)(tool_call)|(/)(parameter|function)|(parameter|function)=([^<>\n]+))>")
_KINDS = ("parameter", "function", "tool_call")


class Mark(NamedTuple):
    """A mark with the newline before it, if there is one. `kind` begins with a slash where the mark closes."""

    kind: str
    name: str
    start: int
    end: int
    own_line: bool


class Value(NamedTuple):
    """A text as far as it was read: whether it began on a line of its own, was one word up to its first mark, and had
    marks; and how many of each kind it has opened and not closed."""

    own_line: bool = False
    one_word: bool = False
    marked: bool = False
    opened: tuple[int, ...] = (0, 0, 0)

    def with_mark(self, mark: Mark) -> tuple[Value, int]:
        """The text with a mark more, and its cost."""
        closes, number = mark.kind[0] == "/", _KINDS.index(mark.kind.lstrip("/"))
        opened, lacks_partner = list(self.opened), closes and not self.opened[number]
        opened[number] += 0 if lacks_partner else -1 if closes else 1
        return self._replace(marked=True, opened=tuple(opened)), ALONE * lacks_partner + WITHIN


class _Reading(NamedTuple):
    """Readings compare by their first three fields. `first`: the mark that ends the value, negative. `settled`: what
    follows that mark is another value or call. `at`: the next mark. `keys`: of values begun since. `text`: where the
    reading stands, in a value or behind the function."""

    cost: int
    doubts: int
    first: int
    settled: bool
    at: int
    keys: frozenset[str]
    text: Value
    in_value: bool


def marks_in(text: str) -> list[Mark]:
    """Find the marks of `text`, at most `MAX_MARKS`."""
    found = []
    for each in _MARK.finditer(text):
        slash, call, closes, closed, opened, name = each.groups()
        kind = f"/{closed}" if closes else opened or f"{slash}{call}"
        found.append(Mark(kind, name or "", each.start(), each.end(), each.group()[0] == "\n"))
        if len(found) == MAX_MARKS:
            break
    return found


def _is_word(text: str) -> bool:
    return len(text.split()) == 1


class _Structure(NamedTuple):
    """Marks, and what follows each; `takes` and `knows` as of `value_end`."""

    marks: Sequence[Mark]
    follows: Sequence[str]
    takes: Callable[[str], bool]
    knows: Callable[[str], bool]

    def begins_call(self, i: int) -> bool:
        marks = self.marks
        return marks[i].kind == "tool_call" and self.follows[i] == "function" and self.knows(marks[i + 1].name)

    def over(self, i: int) -> bool:
        """Whether nothing but another call follows mark i."""
        return self.follows[i] == "end" or (self.follows[i] == "tool_call" and self.begins_call(i + 1))

    def end(self, i: int, keys: frozenset[str]) -> tuple[int, int, int | None] | None:
        """If mark i may end a value: the cost, the next mark to read, and the mark that begins another value."""
        marks, follows, mark = self.marks, self.follows, self.marks[i]
        begins = next((n for n in (i, i + 1) if n < len(marks) and marks[n].kind == "parameter"), None)
        fresh = begins is not None and marks[begins].name not in keys and self.takes(marks[begins].name)
        if mark.kind == "/parameter":
            if follows[i] == "parameter":
                return (0, i + 2, i + 1) if fresh else None
            if follows[i] == "/function":
                return 0, i + 2 + (follows[i + 1] == "/tool_call"), None
            if follows[i] == "/tool_call":
                return LACKS, i + 2, None
            return (2 * LACKS, i + 1, None) if self.over(i) else None
        if i and marks[i - 1].kind == "/parameter" and follows[i - 1] == mark.kind:
            return None  # the mark before ended the value, or none of them does
        if mark.kind == "parameter":
            return (LACKS, i + 1, i) if mark.own_line and fresh else None
        if mark.kind == "/function":
            last = i + (follows[i] == "/tool_call")
            over = self.over(last)
            return (LACKS if over else 5 * LACKS, last + 1, None) if mark.own_line or over else None
        if mark.kind == "/tool_call":
            return (2 * LACKS, i + 1, None) if self.over(i) else None
        return (3 * LACKS, i, None) if self.begins_call(i) else None


def value_end(
    text: str,
    marks: Sequence[Mark],
    value: Value,
    takes: Callable[[str], bool],
    knows: Callable[[str], bool],
    ended: bool,
) -> tuple[int, bool]:
    """Choose the mark that ends a value; as many as there are means none of them. Returns, too, whether text that
    follows could not change that.

    **Arguments:** `marks`: of `text`, in order, which the value goes on with. `takes`: whether a key may begin another
    value. `knows`: whether a tool has this name. `ended`: the reply ends with the text.
    """
    none = len(marks)
    ends = [*(mark.start for mark in marks[1:]), len(text)]
    between = [text[mark.end : end] for mark, end in zip(marks, ends, strict=True)]
    kinds = [*(mark.kind for mark in marks[1:]), "end" if ended else ""]
    follows = ["text" if gap.strip() else kind for gap, kind in zip(between, kinds, strict=True)]
    structure = _Structure(marks, follows, takes, knows)
    readings = [_Reading(0, 0, -none, True, 0, frozenset(), value, True)]
    for i, mark in enumerate(marks):
        found = [each for each in readings if each.at > i]
        for each in readings:
            if each.at > i:
                continue
            longer, cost = each.text.with_mark(mark)
            doubts = each.doubts + (each.in_value and each.text.one_word and not each.text.marked)
            found.append(each._replace(cost=each.cost + cost, doubts=doubts, at=i + 1, text=longer))
            if not each.in_value or (end := structure.end(i, each.keys)) is None:
                continue
            cost, at, begins = end
            keys, behind, value_begins = each.keys, Value(), begins is not None
            if value_begins:
                keys, gap = keys | {marks[begins].name}, between[begins]
                behind = Value(gap.startswith("\n") or (not gap and at < none and marks[at].own_line), _is_word(gap))
            reading = each._replace(
                cost=each.cost + cost + ALONE * sum(each.text.opened),
                doubts=each.doubts + (mark.kind == "/parameter" and mark.own_line != each.text.own_line),
                at=at,
                keys=keys,
                text=behind,
                in_value=value_begins,
            )
            if each.first == -none:
                reading = reading._replace(first=-i, settled=value_begins or at == i or structure.over(at - 1))
            if at == i:  # the mark is read again, behind the function
                longer, _ = reading.text.with_mark(mark)
                reading = reading._replace(text=longer, at=i + 1)
            found.append(reading)
        readings = sorted(found, key=lambda each: each[:3])[:MAX_READINGS]

    def total(each: _Reading) -> tuple[int, int, int]:
        left = ALONE * sum(each.text.opened) + 3 * LACKS if each.in_value else LACKS * sum(each.text.opened)
        return each.cost + left * ended, each.doubts, each.first

    best = min(readings, key=total)
    return -best.first, best.settled
