"""Qwen3-Coder's and Qwen3.5's format: calls in XML, and values as text.

`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, with newlines between. A call is
certain at the end of its `<function=NAME>`. Values lose the newline after the opening marker and the one before the
closing, and each becomes the JSON type that the tool's schema gives its parameter (`convert`). Strings stream; other
types wait for their end. A parameter left open ends where the next begins, or where the function ends.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from server.parsers.scan import Steps, stops
from server.parsers.tools import MAX_NAME, ToolScanner, escape

OPENS, CLOSES = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"
MAX_LITERAL = 2**16  # characters of a Python literal that is read as such

_NAME = re.compile(r"[^<>\n]*")
_VALUE_STOPS = stops("\n" + VALUE_END, VALUE_END, "\n" + END, "\n" + PARAMETER)


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
            if (yield from self._parameters(self.schemas.get(name, {}).get("properties") or {})):
                yield from self.space()
                yield from self.closing(CLOSES)

    def _parameters(self, properties: Mapping[str, Any]) -> Steps:
        """Read the parameters and the function's end. Returns whether `</tool_call>` may follow."""
        separator = "{"
        while stop := (yield from self.text(self.content, stops(PARAMETER, END, CLOSES))):
            self.at += len(stop)
            self.gap()
            if stop != PARAMETER:
                self.arguments("{}" if separator == "{" else "}")
                return stop == END
            self.mark()
            key = yield from self.word(_NAME, MAX_NAME)
            if not key or not (yield from self.literal(">")):
                self.back()
                self.content(PARAMETER)
                continue
            self.forget()
            yield from self.literal("\n")
            self.arguments(f'{separator}"{escape(key)}": ')
            yield from self._value(types(properties.get(key)))
            separator = ", "
        return False

    def _value(self, wanted: list[str]) -> Steps:
        """Read a value and the marker that closes it; its JSON is the call's."""
        raw: list[str] = []
        if wanted == ["string"]:
            self.arguments('"')
            stop = yield from self.text(lambda text: self.arguments(escape(text)), _VALUE_STOPS)
            self.arguments('"' if stop else "")
        else:
            stop = yield from self.text(raw.append, _VALUE_STOPS)
            text = "".join(raw)
            self.arguments(convert(text, wanted) if stop else f'"{escape(text)}')
        if stop and stop.endswith(VALUE_END):
            self.at += len(stop)


def types(schema: Any) -> list[str]:
    """The JSON types that a parameter's schema allows; a string, if it doesn't say."""
    if not isinstance(schema, Mapping):
        return ["string"]
    given = schema.get("type")
    found = [str(each).strip().lower() for each in (given if isinstance(given, list) else [given]) if each]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, Mapping) and option.get("type"):
                found += [kind for kind in types(option) if kind not in found]
    return [_NAMES.get(kind, kind) for kind in found] or ["string"]


# Names of types that schemas have though JSON Schema doesn't; vLLM knows these too.
_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("num", "float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple"), "array"),
}
_PYTHON = {"integer": int, "number": int | float, "object": dict, "array": list}
_NUMBERS = ("integer", "number")  # which Python's True and False are too


def convert(text: str, wanted: list[str]) -> str:
    """The JSON of a value, by vLLM's rules: the word null is null where the schema allows it, or wants no string; else
    the first type counts. What doesn't read as that type stays a string, so that nothing is lost."""
    kind = next((kind for kind in wanted if kind != "null"), "null")
    word = text.strip().lower()
    if word in ("null", "none") and ("null" in wanted or kind != "string"):
        return "null"
    if kind == "boolean" and word in ("true", "false"):
        return word
    if kind not in ("string", "boolean"):
        for read in (json.loads, _literal):
            try:
                value = read(text)
                if isinstance(value, str) and kind in ("object", "array"):  # JSON in a JSON string
                    value = _literal(value)
                if isinstance(value, _PYTHON.get(kind, object)) and (kind not in _NUMBERS or value is not bool(value)):
                    return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return f'"{escape(text)}"'


def _literal(text: str) -> Any:
    if len(text) > MAX_LITERAL:
        raise ValueError("too long for a Python literal")
    return ast.literal_eval(text.strip())
