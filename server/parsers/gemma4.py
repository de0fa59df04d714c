"""Gemma 4's formats: `<|channel>thought` reasoning `<channel|>`, and calls whose strings stand between marks of their
own: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

Keys are bare at any depth, and nothing in a string is escaped. Arguments become JSON as they come. Read as well: quoted
keys, strings in JSON's quotes, and an end of the reply in place of the closing marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from server.parsers.scan import Steps, stops
from server.parsers.think import Think
from server.parsers.tools import MAX_NAME, ToolScanner, escape

OPENS, CLOSES, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
ENDS = {"{": "}", "[": "]"}

_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r'[^\s:,{}\[\]<"]*')
_VALUE_ENDS = stops(",", "}", "]", "<")


class Gemma4Thoughts(Think):
    OPENS, CLOSES = "<|channel>", "<channel|>"

    def _block(self) -> Steps:
        if (yield from self.literal("thought")):
            yield from self.literal("\n")
        yield from super()._block()


class Gemma4(ToolScanner):
    MARKERS = (OPENS, CLOSES, QUOTE)

    def run(self) -> Steps:
        while (yield from self.text(self.content, stops(OPENS))):
            self.mark()
            yield from self.literal(OPENS)
            yield from self.space()
            name = None
            if (yield from self.literal("call:")):
                yield from self.space()
                name = yield from self.word(_NAME, MAX_NAME)
            if not name or not (yield from self.literal("{")):
                self.refuse(OPENS)
                continue
            self.call(name)
            self.arguments("{")
            yield from self._members()
            yield from self.space()
            yield from self.closing(CLOSES)

    def _members(self) -> Steps:
        """Pass on, as JSON, what an object has behind its brace, the brace that ends it included."""
        ends, begun = ["}"], [False]  # of the objects and lists that are open, and whether they have a member yet
        while ends:
            yield from self.space()
            sign = yield from self.literal(",", "}", "]")
            if sign in ends:
                while True:
                    self.arguments(ends[-1])
                    begun.pop()
                    if ends.pop() == sign:
                        break
            if sign:
                continue
            quoted = yield from self.literal(QUOTE)
            if not quoted and (not (yield from self.more()) or self.buffer[self.at] == "<"):
                break
            self.arguments(", " if begun[-1] else "")
            begun[-1] = True
            if ends[-1] == "}":
                self.arguments(f"{json.dumps((yield from self._key(quoted)), ensure_ascii=False)}: ")
                quoted = yield from self.literal(QUOTE)
            opened = None if quoted else (yield from self.literal("{", "["))
            if opened:
                self.arguments(opened)
                ends.append(ENDS[opened])
                begun.append(False)
            else:
                yield from self._value(quoted)
        if ends and not self.cut:
            self.arguments("".join(reversed(ends)))

    def _key(self, quoted: str | None) -> Generator[None, None, str]:
        """Read a key and the colon behind it. `quoted`: its opening mark, if it had one."""
        if quoted:
            key = yield from self.upto(QUOTE, MAX_NAME)
        else:
            key = (yield from self.string(MAX_NAME)) or (yield from self.word(_KEY, MAX_NAME))
            if not key and self.ended:
                key = _KEY.match(self.buffer, self.at).group()
                self.at += len(key)
        yield from self.space()
        if not (yield from self.literal(":")) and not key and (yield from self.more()):
            self.at += 1  # no key: the sign would be read again
        yield from self.space()
        return key or ""

    def _value(self, quoted: str | None) -> Steps:
        """Pass on a string, a number or a word. `quoted`: the string's opening mark, if it had one."""
        if quoted:
            self.arguments('"')
            closed = yield from self.text(lambda text: self.arguments(escape(text)), stops(QUOTE))
            self.at += len(closed or "")
            self.arguments('"' if closed or not self.cut else "")
            return
        if (yield from self.literal('"')):
            self.arguments('"')
            yield from self._quoted(self.arguments)
            return
        word: list[str] = []
        stop = yield from self.text(word.append, _VALUE_ENDS)
        text = "".join(word).strip()
        try:
            json.loads(text, parse_constant=_no_number)
        except ValueError:
            text = {"None": "null", "True": "true", "False": "false", "": "null"}.get(text, f'"{escape(text)}"')
        self.arguments(text if stop or not self.cut else text.rstrip('"'))


def _no_number(name: str) -> None:
    """Refuse NaN and Infinity, which JSON doesn't have."""
    raise ValueError(name)
