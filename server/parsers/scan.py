"""The scanner that every format is written with: text comes in pieces of any size, and a generator reads it in order.

Invariant: where the text was cut can't be seen by a format. A step either decides on characters that no later text can
change, or yields and runs again once there is more; after `finish` there is no more, and no step yields. So feeding a
text whole and feeding it a character at a time take the same decisions, and differ only in how the output is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from jaxspec.text.stop_strings import Beginnings

REASONING, CONTENT, CALL, ARGUMENTS = "reasoning", "content", "call", "arguments"

Steps = Generator[None, None, None]  # what a format's `run` is
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class Piece(NamedTuple):
    """A part of a reply. `kind` says which: `reasoning` and `content` carry text; `call` begins tool call `index`, with
    its name as text and an `id`; `arguments` carries more of that call's arguments."""

    kind: str
    text: str
    index: int = 0
    id: str = ""


class Stops(Beginnings):
    """Strings at which running text ends, found as soon as they are complete.

    None may contain another, except as its end: so the first one complete is the first one there.
    """

    def __init__(self, *stops: str):
        for one in stops:
            if any(other != one and other in one[:-1] and not one.endswith(other) for other in stops):
                raise ValueError(f"{one!r} contains another stop")
        self.search = re.compile("|".join(map(re.escape, stops))).search
        super().__init__(stops)


stops = lru_cache(maxsize=None)(Stops)  # the formats' own, a few


class Scanner:
    """Reads a reply of one format. A format writes `run`, from the steps below, which are its whole vocabulary.

    `buffer[at:]` is the text still to be read. Between `mark` and `forget` nothing before `at` is dropped, so that a
    format can go back when what began like a call turns out to be none.
    """

    def __init__(self):
        self.buffer, self.at, self.ended = "", 0, False
        self.cut = True  # the reply ended before the model ended it
        self.constrained = False  # the reply follows a grammar, which says where texts end
        self.pieces: list[Piece] = []
        self.openings = 0  # markers read that begin a part of the reply, such as `<think>`
        self._mark: int | None = None
        self._steps = self.run()
        next(self._steps)

    def run(self) -> Steps:
        """Read the reply. Must read on until the text has ended."""
        raise NotImplementedError

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what it completes."""
        self.buffer += text
        next(self._steps)
        return self._take()

    def finish(self, cut: bool = True) -> list[Piece]:
        """No more text comes; returns what was held back. `cut`: the model would have gone on."""
        self.ended, self.cut = True, cut
        for _ in self._steps:
            raise RuntimeError(f"{type(self).__name__} waits for text after the end")
        return self._take()

    def _take(self) -> list[Piece]:
        """Take the pieces read since, neighbours of one kind joined."""
        runs = [[*run] for _, run in groupby(self.pieces, lambda piece: (piece.kind, piece.index))]
        self.pieces = []
        return [run[0]._replace(text="".join(piece.text for piece in run)) for run in runs]

    # What to do with text

    def reasoning(self, text: str) -> None:
        self.pieces.append(Piece(REASONING, text))

    def content(self, text: str) -> None:
        self.pieces.append(Piece(CONTENT, text))

    # Where to go back to

    def mark(self) -> None:
        """Keep the text from here on."""
        self._mark = self.at

    def since_mark(self) -> str:
        """Text read since the mark."""
        return self.buffer[self._mark : self.at]

    def back(self) -> None:
        """Go back to the mark, and forget it."""
        self.at = self._mark
        self._mark = None

    def forget(self) -> None:
        """Forget the mark: the text read since is settled."""
        self._mark = None

    def _drop(self, end: int) -> None:
        if self._mark is None:
            self.buffer, self.at = self.buffer[end:], 0
        else:
            self.at = end

    # Steps: each is used as `yield from self.step()`

    def text(self, emit: Emit, stops: Stops) -> Generator[None, None, str | None]:
        """Pass text on until a stop. Returns the stop, which is still to be read, or None at the end."""
        while True:
            found = stops.search(self.buffer, self.at)
            if found:
                end = found.start()
            else:
                end = len(self.buffer) - (0 if self.ended else stops.waiting(self.buffer, self.at))
            if end > self.at:
                emit(self.buffer[self.at : end])
            self._drop(end)
            if found:
                return found.group()
            if self.ended:
                return None
            yield

    def rest(self, emit: Emit) -> Steps:
        """Pass all that follows on."""
        while True:
            if self.at < len(self.buffer):
                emit(self.buffer[self.at :])
                self._drop(len(self.buffer))
            if self.ended:
                return
            yield

    def more(self) -> Generator[None, None, bool]:
        """Wait for a character; returns whether there is one."""
        while self.at == len(self.buffer) and not self.ended:
            yield
        return self.at < len(self.buffer)

    def space(self) -> Steps:
        """Read whitespace, if there is any."""
        while True:
            self.at = _SPACE.match(self.buffer, self.at).end()
            if self.at < len(self.buffer) or self.ended:
                return
            yield

    def literal(self, *options: str) -> Generator[None, None, str | None]:
        """Read the option that the text goes on with. Returns it, or None, and then nothing is read."""
        longest = max(map(len, options))
        while True:
            rest = self.buffer[self.at : self.at + longest]
            for option in options:
                if rest.startswith(option):
                    self.at += len(option)
                    return option
            if self.ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def closing(self, marker: str) -> Generator[None, None, bool]:
        """Read a marker that closes something, or what there is of one that the end of the reply cuts. Returns whether
        there was any."""
        if (yield from self.literal(marker)):
            return True
        rest = self.buffer[self.at :]
        if not rest or not marker.startswith(rest):
            return False
        self.at += len(rest)
        return True

    def word(self, pattern: re.Pattern[str], limit: int) -> Generator[None, None, str | None]:
        """Read the characters that `pattern`, such as `[a-z]*`, matches. None, and nothing read, if there are more than
        `limit`, or none, or nothing follows them."""
        while True:
            end = pattern.match(self.buffer, self.at).end()
            if end < len(self.buffer) or self.ended or end - self.at > limit:
                break
            yield
        if not 0 < end - self.at <= limit or end == len(self.buffer):
            return None
        word, self.at = self.buffer[self.at : end], end
        return word

    def upto(self, stop: str, limit: int) -> Generator[None, None, str | None]:
        """Read up to `stop`, and it; returns the text before. None, and nothing read, if that has over `limit`
        characters."""
        while True:
            end = self.buffer.find(stop, self.at, self.at + limit + len(stop))
            if end >= 0 or self.ended or len(self.buffer) - self.at >= limit + len(stop):
                break
            yield
        if end < 0:
            return None
        text, self.at = self.buffer[self.at : end], end + len(stop)
        return text

    def string(self, limit: int) -> Generator[None, None, str | None]:
        """Read a JSON string of at most `limit` characters and return what it says. None, and nothing read, if there is
        no such string, or one that UTF-8 can't spell."""
        while True:
            found = _STRING.match(self.buffer, self.at)
            long = len(self.buffer) - self.at > limit
            if found or self.ended or long or self.buffer[self.at : self.at + 1] not in ("", '"'):
                break
            yield
        if not found or found.end() - self.at > limit:
            return None
        try:
            said = json.loads(found.group())
            said.encode()
        except ValueError:  # an unknown escape, a control character, or half of a surrogate pair
            return None
        self.at = found.end()
        return said


def join(pieces: Sequence[Piece]) -> dict:
    """The whole reply: `reasoning_content` and `content` (None where there is none), and `tool_calls`."""
    calls: list[dict] = []
    for piece in pieces:
        if piece.kind == CALL:
            calls.append({"name": piece.text, "arguments": ""})
        elif piece.kind == ARGUMENTS:
            calls[piece.index]["arguments"] += piece.text
    texts = {kind: "".join(p.text for p in pieces if p.kind == kind) or None for kind in (REASONING, CONTENT)}
    return {"reasoning_content": texts[REASONING], "content": texts[CONTENT], "tool_calls": calls}
