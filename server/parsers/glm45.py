"""GLM-4.5's format, and MiniMax-M2's: a name, then each argument's key and value between tags.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>
    <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>

Whitespace may stand between tags. A value is text without escapes, and becomes the JSON type that the tool's schema
gives its key (`convert`). Its closing tag counts where another argument, the call's end or another call follows it, or
nothing; elsewhere it is text of the value.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

from jaxspec.structured.schema import member, members
from server.parsers.qwen3_coder import convert, text_alone
from server.parsers.scan import Steps, stops
from server.parsers.tools import MAX_NAME, ToolScanner, escape

_NAME = re.compile(r"[\w.:/-]*")


class Glm45(ToolScanner):
    """`SECTION` is around calls; "": each stands by itself. `NAME_END` and `VALUE` are "" where no such tag is."""

    SECTION, SECTION_END = "", ""
    OPENS, NAME_END, CLOSES = "<tool_call>", "", "</tool_call>"
    KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    MARKERS = (OPENS, CLOSES, KEY, KEY_END, VALUE, VALUE_END)

    def run(self) -> Steps:
        begins = stops(*filter(None, (self.SECTION, self.OPENS)))
        while stop := (yield from self.text(self.content, begins)):
            self.mark()
            if stop == self.SECTION:
                yield from self.literal(stop)
                yield from self.space()
            if not (yield from self._call()):
                self.refuse(stop)
                continue
            self.mark()
            yield from self.space()
            if self.SECTION_END and (yield from self.closing(self.SECTION_END)):
                self.forget()
            else:
                self.back()

    def _call(self) -> Generator[None, None, bool]:
        """Read a call behind a mark. Returns whether there is one: if not, nothing was passed on."""
        if not (yield from self.literal(self.OPENS)):
            return False
        yield from self.space()
        name = yield from self.word(_NAME, MAX_NAME)
        if not name or (self.NAME_END and not (yield from self.literal(self.NAME_END))):
            return False
        yield from self.space()
        sign = yield from self.literal(self.KEY, self.CLOSES)
        if sign is None:
            return False
        self.call(name)
        yield from self._arguments(self.schemas.get(name, {}), sign)
        return True

    def _arguments(self, schema: dict[str, Any], sign: str | None) -> Steps:
        """Read the arguments, of which the first key has begun if `sign` says so, and the call's end."""
        of, begun = members(schema, schema), False
        while sign == self.KEY:
            key = yield from self.upto(self.KEY_END, MAX_NAME)
            if key is None:
                sign = None
                break
            self.arguments(f'{", " if begun else "{"}"{escape(key)}": ')
            begun = True
            if (yield from self._opens_value()):
                sign = yield from self._value(member(*of, key), schema)
            else:
                self.arguments("null")
                sign = yield from self.literal(self.KEY, self.CLOSES)
        if sign is not None or not self.cut:
            self.arguments("}" if begun else "{}")

    def _opens_value(self) -> Generator[None, None, bool]:
        """Read the tag that opens a value, where the format has one. Returns whether a value follows."""
        if not self.VALUE:
            return True
        yield from self.space()
        return (yield from self.literal(self.VALUE)) is not None

    def _value(self, schema: Any, root: Any) -> Generator[None, None, str | None]:
        """Read a value; its JSON is the call's. Returns the tag behind it, "" for none, None for a value cut off."""
        string, raw, sign = text_alone(schema, root), [], None
        say = (lambda text: self.arguments(escape(text))) if string else raw.append
        self.arguments('"' if string else "")
        while sign is None and (yield from self.text(say, stops(self.VALUE_END))):
            self.mark()
            self.at += len(self.VALUE_END)
            sign = yield from self._follows()
            if sign is None:
                self.back()
                say(self.VALUE_END)
                self.at += len(self.VALUE_END)
            else:
                self.forget()
        closed, text = sign is not None or not self.cut, "".join(raw)
        if string:
            self.arguments('"' if closed else "")
        else:
            self.arguments(convert(text, schema, root) if closed else f'"{escape(text)}')
        return sign

    def _follows(self) -> Generator[None, None, str | None]:
        """Read the tag that may follow a value; "" where the reply or another call follows, None for anything else."""
        yield from self.space()
        sign = yield from self.literal(self.KEY, self.CLOSES, self.OPENS)
        if sign == self.OPENS:
            self.at -= len(sign)
            return ""
        return sign if sign or (yield from self.more()) else ""


class MinimaxM2(Glm45):
    SECTION, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
    OPENS, NAME_END, CLOSES = '<invoke name="', '">', "</invoke>"
    KEY, KEY_END, VALUE, VALUE_END = '<parameter name="', '">', "", "</parameter>"
    MARKERS = (SECTION, SECTION_END)
