"""Shared by the formats of tool calls: how a call begins, when it is certain, and how the rest is treated.

Invariant: no character of a reply is lost. Until a call is certain nothing of it has been passed on, and if it turns
out to be none its text becomes content; from then on its text is the call's arguments, complete or not. Only markup
goes: markers, the JSON around name and arguments, and whitespace alone between calls.

A call written in JSON is certain once its name is known and its arguments have begun as an object: a brace, and then a
quote or the closing brace.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from server.parsers.scan import ARGUMENTS, CALL, CONTENT, Emit, Piece, Scanner, Steps, stops

MAX_NAME = 256  # characters of a tool's name, and of the keys beside it
# Of a call (and parameters); an object with others before these is none. A function holds name and arguments.
KEYS = ("name", "arguments", "type", "id", "function")

_CONTROLS = re.compile(r"[\x00-\x1f]")
_SIGNS = stops(*'"{}[]<,:')
_UNESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_STRING_STOPS = stops('"', "\\")


class ToolScanner(Scanner):
    """A scanner that finds calls. `tools` are the request's, as OpenAI writes them, or None where they aren't known."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None):
        functions = [tool.get("function", tool) for tool in tools or ()]
        self.schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self.calls = 0
        self._blank, self._held = True, ""  # only whitespace since the start or the last call, and that whitespace
        super().__init__()

    def finish(self, cut: bool = True) -> list[Piece]:
        pieces = super().finish(cut)
        if self._held and not self.calls:
            pieces.append(Piece(CONTENT, self._held))
        return pieces

    def knows(self, name: str) -> bool:
        """Whether `name` is one of the request's tools, as far as those are known."""
        return not self.schemas or name in self.schemas

    def content(self, text: str) -> None:
        """Pass content on, without whitespace that stands alone beside calls."""
        if self._blank:
            self._held += text
            if self._held.isspace():
                return
            text, self._held, self._blank = self._held, "", False
        super().content(text)

    def call(self, name: str) -> None:
        """Begin a call; what was read since the mark is settled."""
        self.forget()
        self.pieces.append(Piece(CALL, name, self.calls, self.new_id()))
        self.calls += 1
        self.gap()

    def gap(self) -> None:
        """Whitespace from here on stands beside a call."""
        self._blank, self._held = True, ""

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def arguments(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(ARGUMENTS, text, self.calls - 1))

    def refuse(self, marker: str) -> None:
        """Refuse a call that began with `marker`, at the mark: the marker is content, and reading goes on behind it."""
        self.back()
        self.content(marker)
        self.at += len(marker)

    # Calls in JSON

    def another_call(self) -> Steps:
        """Read a call in braces after others. Returns whether there is one: what began like one is text then."""
        if not (yield from self.more()) or self.buffer[self.at] != "{":
            return False
        self.mark()
        if (yield from self.json_call()):
            return True
        self.refuse("{")
        return False

    def json_call(self, marked: bool = True) -> Generator[None, None, bool]:
        """Read `{"name": ..., "arguments": {...}}`, its keys in any order, behind a mark. Returns whether it is a call:
        if not, nothing was passed on. `marked`: a marker stands before it, so it needs no arguments, and may name a
        tool that the request doesn't have, for the client to tell the model."""
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        seen: set[str] = set()
        sign = yield from self.literal("{")
        while sign in ("{", ","):
            key = yield from self._key(seen)
            if key == "name":
                name = yield from self.string(MAX_NAME)
                if not name or not (marked or self.knows(name)):
                    return False
            elif key == "arguments":
                early = []
                if not (yield from self.value(name, self.arguments if name else early.append)):
                    return False
            elif key == "function" and (yield from self.more()) and self.buffer[self.at] == "{":
                if not (yield from self.json_call(marked)):
                    return False
                yield from self._closing()
                return True
            elif key is None or (yield from self.string(MAX_NAME)) is None:
                return False
            if name and early is not None:
                self._settle(name, early)
                yield from self._closing()
                return True
            yield from self.space()
            sign = yield from self.literal(",", "}")
        if sign is None or name is None or not marked:
            return False
        self._settle(name, ["{}"])
        return True

    def _key(self, seen: set[str]) -> Generator[None, None, str | None]:
        """Read a key that a call has, the colon behind it, and whitespace. None if there is none, or it came before."""
        yield from self.space()
        key = yield from self.string(MAX_NAME)
        key = "arguments" if key == "parameters" else key
        yield from self.space()
        if key not in KEYS or key in seen or not (yield from self.literal(":")):
            return None
        seen.add(key)
        yield from self.space()
        return key

    def _settle(self, name: str, arguments: list[str]) -> None:
        """Begin the call with these arguments, unless it has begun."""
        if self._mark is not None:
            self.call(name)
            self.arguments("".join(arguments))

    def _closing(self) -> Steps:
        """Read the brace that closes a call's object, and further members before it."""
        yield from self.space()
        after = self.at
        if (yield from self.literal("}", ",")) == ",":
            yield from self.space()
            if (yield from self.more()) and self.buffer[self.at] == '"':
                yield from self.json(lambda _: None, "}")
            else:
                self.at = after

    def value(self, name: str | None, emit: Emit) -> Generator[None, None, bool]:
        """Read arguments: an object, passed on as it stands; a string that holds one, without its quotes and escapes;
        or null, for none. Returns whether they are any of these; then, and if `name` is given, its call has begun."""
        start = self.at
        opening = yield from self.literal("{", '"', "null")
        if opening == "{":
            yield from self.space()
            if not (yield from self.more()) or self.buffer[self.at] not in '"}':
                return False
            self.at = start
        if opening and name is not None:
            self.call(name)
        if opening == "{":
            yield from self.json(emit)
        elif opening == '"':
            yield from self._string_body(emit)
        elif opening == "null":
            emit("{}")
        return opening is not None

    def json(self, emit: Emit, brackets: str = "") -> Steps:
        """Pass on a JSON object or list that begins here, or of which these closing `brackets` are to come, innermost
        last. It ends with its last bracket, or at a `<` outside of strings, which no JSON has, or with the reply.

        What is no JSON for a plain reason is mended: raw control characters and unknown escapes in strings, a comma at
        the end, brackets that are missing or don't match; and, unless the reply was cut, an end that is missing.
        """
        comma, state = "", ""  # a comma and space that wait for a member; the sign or kind of value before

        def say(text: str) -> None:
            nonlocal comma, state
            if (comma + text).strip() in ("", ","):
                comma += text
                if "," not in comma:
                    emit(comma)
                    comma = ""
                return
            emit(comma + text)
            comma, state = "", "value" if not text.isspace() else state

        def close(bracket: str) -> None:
            nonlocal comma, state
            emit({"key": ": null", ":": "null"}.get(state, "") + comma.replace(",", "") + bracket)
            comma, state = "", "value"

        while sign := (yield from self.text(say, _SIGNS)):
            if sign == "<":
                break
            self.at += 1
            if sign in "{[":
                say(sign)
                brackets, state = brackets + ("}" if sign == "{" else "]"), sign
            elif sign in "}]":
                while brackets and sign in brackets and brackets[-1] != sign:
                    close(brackets[-1])
                    brackets = brackets[:-1]
                if sign in brackets:
                    close(sign)
                    brackets = brackets[:-1]
                if not brackets:
                    return
            elif sign == '"':
                key = brackets[-1:] == "}" and state in ("{", ",", "")
                say(sign)
                yield from self._quoted(emit)
                state = "key" if key else "value"
            elif sign == ",":
                say(sign)
                state = sign
            else:
                say(sign)
                state = sign
        if sign or not self.cut:
            for bracket in reversed(brackets):
                close(bracket)

    def _quoted(self, emit: Emit) -> Steps:
        """Pass on the rest of a JSON string, as JSON."""
        while sign := (yield from self.text(lambda text: emit(_CONTROLS.sub(_escaped, text)), _STRING_STOPS)):
            self.at += 1
            if sign == '"':
                emit(sign)
                return
            if not (yield from self.more()):
                break
            sign = self.buffer[self.at]
            self.at += 1
            if sign == "u":
                digits = yield from self._hex()
                emit(f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}")
            else:
                emit("\\" + sign if sign in _UNESCAPED else "\\\\" + _CONTROLS.sub(_escaped, sign))
        if not self.cut:
            emit('\\\\"' if sign else '"')

    def _string_body(self, emit: Emit) -> Steps:
        """Pass on what a JSON string says, up to its closing quote, which is read. A bad escape stands for itself."""
        while (stop := (yield from self.text(emit, _STRING_STOPS))) == "\\":
            self.at += 1
            if not (yield from self.more()):
                emit("\\")
                return
            sign = self.buffer[self.at]
            self.at += 1
            if sign != "u":
                emit(_UNESCAPED.get(sign, "\\" + sign))
                continue
            digits, low = (yield from self._hex()), ""
            if _surrogate(digits, 0xD800) and (yield from self.literal("\\u")):
                low = yield from self._hex()
            emit(_character(digits, low))
        self.at += len(stop or "")

    def _hex(self) -> Generator[None, None, str]:
        """Read up to four hexadecimal digits."""
        digits = ""
        while len(digits) < 4 and (yield from self.more()) and self.buffer[self.at] in "0123456789abcdefABCDEF":
            digits += self.buffer[self.at]
            self.at += 1
        return digits


def _surrogate(digits: str, first: int) -> bool:
    """Whether these four digits are half of a surrogate pair, of the 1024 from `first` on."""
    return len(digits) == 4 and first <= int(digits, 16) < first + 0x400


def _character(digits: str, low: str) -> str:
    """Character for `\\uDIGITS`, and `\\uLOW` after the first half of a pair; half a pair alone is U+FFFD."""
    if _surrogate(digits, 0xD800) and _surrogate(low, 0xDC00):
        return chr(0x10000 + ((int(digits, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if len(digits) < 4:
        return "\\u" + digits
    alone = "\ufffd" if 0xD800 <= int(digits, 16) < 0xE000 else chr(int(digits, 16))
    return alone + (_character(low, "") if low else "")


def _escaped(control: re.Match[str]) -> str:
    return escape(control.group())


def escape(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
