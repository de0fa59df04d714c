"""Qwen3-Coder's and Qwen3.5's format: calls in XML, and values as text.

`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, with newlines between. A call is
certain at the end of its `<function=NAME>`. Values lose the newline after the opening marker and the one before the
closing, and each becomes the JSON type that the tool's schema gives its parameter (`convert`). Strings stream; other
types wait for their end. A parameter comes once, and is one of the schema's; elsewhere its marker is text.

A marker within a value waits for what follows it, `AHEAD` characters or to the end of the reply: it may end the value,
or stand in its text (`value_ends`). In a constrained reply a value ends at the first `</parameter>` on a line of its
own, which the grammar keeps out of its text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from jaxspec.structured.schema import ANY, join, member, members, resolve, same, type_of, types
from server.parsers.scan import Emit, Steps, stops
from server.parsers.tools import MAX_NAME, ToolScanner, escape
from server.parsers.value_ends import MAX_MARKS, Mark, Value, marks_in, value_end

OPENS, CLOSES = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"
MAX_LITERAL = 2**16  # characters of a Python literal that is read as such
AHEAD = 2048  # characters behind a marker that decide whether it ends a value

_NAME = re.compile(r"[^<>\n]*")
_MARKERS = (OPENS, CLOSES, FUNCTION, END, PARAMETER, VALUE_END)
_GRAMMAR_END = stops("\n" + VALUE_END)
_VALUE_STOPS = stops(*_MARKERS, *("\n" + marker for marker in _MARKERS))


class Qwen3Coder(ToolScanner):
    MARKERS = (OPENS, CLOSES)

    def run(self) -> Steps:
        while stop := (yield from self.text(self.content, stops(OPENS, FUNCTION))):
            self.mark()
            if stop == OPENS:
                yield from self.literal(OPENS)
                yield from self.space()
            name = None
            if (yield from self.literal(FUNCTION)):
                name = yield from self.word(_NAME, MAX_NAME)
            if not name or not (stop == OPENS or self.knows(name)) or not (yield from self.literal(">")):
                self.refuse(stop)
                continue
            self.call(name)
            if (yield from self._parameters(self.schemas.get(name, {}))):
                yield from self.space()
                yield from self.closing(CLOSES)

    def _parameters(self, schema: Mapping[str, Any]) -> Steps:
        """Read the parameters and the function's end. Returns whether `</tool_call>` may follow."""
        (named, patterns, others), seen = members(schema, schema), set()
        others = others or not (named or patterns)
        takes = lambda key: key not in seen and member(named, patterns, others, key) is not False  # noqa: E731
        stop = None
        while stop := (yield from self.text(self.content, stops(PARAMETER, END, CLOSES, OPENS))):
            if stop == OPENS:
                break
            self.at += len(stop)
            self.gap()
            if stop != PARAMETER:
                break
            self.mark()
            key = yield from self.word(_NAME, MAX_NAME)
            if not key or not takes(key) or not (yield from self.literal(">")):
                self.back()
                self.content(PARAMETER)
                continue
            self.forget()
            own_line = (yield from self.literal("\n")) is not None
            self.arguments(f'{", " if seen else "{"}"{escape(key)}": ')
            seen.add(key)
            yield from self._value(member(named, patterns, others, key), schema, own_line, takes)
        if stop or not self.cut:
            self.arguments("}" if seen else "{}")
        return stop == END

    def _value(self, schema: Any, root: Any, own_line: bool, takes: Callable[[str], bool]) -> Steps:
        """Read a value and the marker that closes it; its JSON is the call's."""
        string, raw = text_alone(schema, root), []

        def say(text: str) -> None:
            if string:
                self.arguments(escape(text))
            else:
                raw.append(text)

        self.arguments('"' if string else "")
        if self.constrained:
            stop = yield from self.text(say, _GRAMMAR_END)
            self.at += len(stop or "")
        else:
            stop = yield from self._text(say, own_line, takes)
        closed = stop or not self.cut
        if string:
            self.arguments('"' if closed else "")
        else:
            text = "".join(raw)
            self.arguments(convert(text, schema, root) if closed else f'"{escape(text)}')

    def _text(self, emit: Emit, own_line: bool, takes: Callable[[str], bool]) -> Generator[None, None, Mark | None]:
        """Pass on the text of a value, and read the marker that closes it. Returns the mark that ended it."""
        head, value, end = "", Value(own_line), None

        def say(text: str) -> None:
            nonlocal head
            if not value.marked and len(head) < MAX_NAME:
                head += text[:MAX_NAME]
            emit(text)

        while end is None and (stop := (yield from self.text(say, _VALUE_STOPS))):
            value = value._replace(one_word=len(head.split()) == 1)
            marks, end = yield from self._end(value, takes)
            for mark in marks:
                value, _ = value.with_mark(mark)
            size = marks[-1].end if marks else 0 if end else len(stop)
            if size:
                say(self.buffer[self.at : self.at + size])
            self.at += size
        if end and end.kind == "/parameter":
            self.at += end.end
        return end

    def _end(self, value: Value, takes: Callable[[str], bool]) -> Generator[None, None, tuple[list[Mark], Mark | None]]:
        """Decide about the marks that follow in a value. Returns those that are text, and the first, if it ends the
        value. Nothing is read; neither, if there is no mark here."""
        ahead: int | None = AHEAD
        while True:
            while not self.ended and (ahead is None or len(self.buffer) - self.at < ahead):
                yield
            text = self.buffer[self.at :] if ahead is None else self.buffer[self.at : self.at + ahead]
            marks = marks_in(text)
            if not marks or marks[0].start:
                return [], None
            ended, full = self.ended and self.at + len(text) == len(self.buffer), len(marks) == MAX_MARKS
            if full:
                text, ended = text[: marks[-1].end], False
            first, settled = value_end(text, marks, value, takes, self.knows, ended)
            if settled or ended or full:
                break
            ahead = None
        if first == 0:
            return [], marks[0]
        count = first if ended else min(first, (len(marks) + 1) // 2)
        while count < first and not text[marks[count - 1].end : marks[count].start].strip():
            count += 1  # marks that follow each other are decided about together
        return marks[:count], None


def convert(text: str, schema: Any, root: Any) -> str:
    """The JSON of a value: a value that the schema lists, or null, or one of the first type that the schema allows.
    What doesn't read as any of its types stays a string, so that nothing is lost."""
    whole, wanted = resolve(schema, root), _types(schema, root)
    listed = [whole["const"]] if "const" in whole else whole.get("enum") if isinstance(whole.get("enum"), list) else []
    word = text.strip().lower()
    if text in listed:
        return json.dumps(text, ensure_ascii=False)
    if word in ("null", "none") and ("null" in wanted or "string" not in wanted):
        return "null"
    if not _string_first(whole, root) or listed:
        if word in ("true", "false") and "boolean" in wanted:
            return word
        for read in (json.loads, _literal):
            try:
                value = read(text)
                if isinstance(value, str) and "string" not in wanted:  # JSON in a JSON string
                    value = _literal(value)
                written = json.dumps(value, ensure_ascii=False, allow_nan=False)
                if isinstance(value, tuple):
                    continue
                if any(same(value, each) for each in listed) if listed else join(wanted, [type_of(value)]) == wanted:
                    return written
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return f'"{escape(text)}"'


def text_alone(schema: Any, root: Any) -> bool:
    """Whether a value is a string whatever it says, so that it can stream."""
    return _types(schema, root) == {"string"}


def _types(schema: Any, root: Any) -> frozenset[str]:
    """Types that a schema allows; a string, if it doesn't say."""
    found = types(schema, root)
    return frozenset({"string"}) if found in (ANY, frozenset()) else found


def _string_first(whole: Mapping[str, Any], root: Any) -> bool:
    """Whether a schema names the type string before others."""
    options = next((whole[key] for key in ("anyOf", "oneOf") if isinstance(whole.get(key), list)), None)
    if options is None:
        names = whole["type"] if isinstance(whole.get("type"), list) else [whole["type"]] if "type" in whole else []
        options = [{"type": name} for name in names]
    found = (_types(option, root) for option in options)
    return next((kinds == {"string"} for kinds in found if kinds != {"null"}), False)


def _literal(text: str) -> Any:
    if len(text) > MAX_LITERAL:
        raise ValueError("too long for a Python literal")
    return ast.literal_eval(text.strip())
