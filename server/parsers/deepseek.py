"""DeepSeek's formats: calls in a section of their own, between markers that are single tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes a call so. V3 and R1 write `function<｜tool▁sep｜>NAME`, and the arguments as a block of Markdown. Both are
read, and so are calls without a section, or without what closes them.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from server.parsers.scan import Steps, stops
from server.parsers.tools import MAX_NAME, ToolScanner

FENCE = "```"

_NAME = re.compile(r"[\w.:/-]*")


class DeepseekV31(ToolScanner):
    """`HEAD` and `TAIL` are around a call's name and its arguments, as models write them. `SECTIONS` and
    `SECTION_ENDS`: all spellings that are read."""

    SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    MARKERS = (SECTION, SECTION_END, CALL, SEPARATOR, CALL_END)
    SECTIONS, SECTION_ENDS = (SECTION,), (SECTION_END,)
    HEAD, TAIL = (CALL, "{name}", SEPARATOR), (CALL_END,)

    def run(self) -> Steps:
        while stop := (yield from self.text(self.content, stops(*self.SECTIONS, self.CALL))):
            self.mark()
            if stop in self.SECTIONS:
                yield from self.literal(stop)
                yield from self.space()
            if not (yield from self._call()):
                self.refuse(stop)
                continue
            closed = False
            while not closed:
                self.mark()
                yield from self.space()
                for end in self.SECTION_ENDS:
                    closed = closed or (yield from self.closing(end))
                if not closed and not (yield from self._call()):
                    self.back()
                    break
            self.forget()

    def _call(self) -> Generator[None, None, bool]:
        """Read a call behind a mark. Returns whether there is one: if not, nothing was passed on."""
        if not (yield from self.literal(self.CALL)):
            return False
        yield from self.space()
        name = yield from self.name()
        yield from self.space()
        if not name or not (yield from self.value(name, self.arguments)):
            return False
        yield from self.space()
        if (yield from self.literal(FENCE)):
            yield from self.space()
        yield from self.closing(self.CALL_END)
        return True

    def name(self) -> Generator[None, None, str | None]:
        """Read a call's head. Returns the tool's name, or None."""
        name = yield from self.word(_NAME, MAX_NAME)
        if not name or not (yield from self.literal(self.SEPARATOR)):
            return None
        if name == "function" and (yield from self.more()) and self.buffer[self.at] not in '{"':
            name = yield from self.word(_NAME, MAX_NAME)
            yield from self.space()
            if (yield from self.literal(FENCE)):
                yield from self.literal("json")
        return name


class DeepseekV3(DeepseekV31):
    HEAD = DeepseekV31.CALL, "function", DeepseekV31.SEPARATOR, "{name}\n```json\n"
    TAIL = "\n```", DeepseekV31.CALL_END
