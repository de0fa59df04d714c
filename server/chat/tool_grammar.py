"""Calls that a request demands, as a grammar of the text in which the model writes them.

Invariant: a text that follows the grammar is read by the format's parser (`server.parsers`) as one call or several of
the tools given, their arguments valid by the tools' schemas. The model may reason first, where it does so at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.request import RequestError, StructuredOutput
from jaxspec.structured.schema import types
from server.parsers import PARSERS, REASONING_PARSERS
from server.parsers.hermes import Hermes
from server.parsers.llama3_json import Llama3Json
from server.parsers.mistral import Mistral
from server.parsers.qwen3_coder import Qwen3Coder
from server.parsers.think import Think

# JSON as models are shown it, which leaves nothing to choose between its parts
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = r"/(?s:.*)/"
# A parameter's text in XML: anything that its parser doesn't take for the end.
VALUE = r"(/(?s:.*)/ & ~/(?s:.*)(<\/parameter>|\n<\/function>|\n<parameter=)(?s:.*)/)"


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    format: str,
    named: str | None = None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
    *,
    reasoning: str | None = None,
    thinking: str | None = None,
) -> StructuredOutput:
    """The grammar of at least one call.

    **Arguments:** `format` is a tool format of `PARSERS`. `named`: one call, of that tool. `parallel`: several may
    follow each other. `special_ids`: token ids of texts that no other tokens spell (`Tokenizer.added_tokens`).
    `reasoning` and `thinking` are those of `server.parsers.Parser`.

    **Raises:** `RequestError` for a format whose calls can't be demanded.
    """
    kind = PARSERS[format]
    if kind not in _CALLS:
        raise RequestError(f"tool_choice can't demand a call in the format {format}; send auto or none", "tool_choice")
    lark = _Lark(special_ids or {})
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    if not functions:
        wanted = "a function" if named is None else f"the function {named!r}"
        raise RequestError(f"tool_choice demands {wanted}, which tools lacks", "tool_choice")
    start = _CALLS[kind](lark, functions, parallel and named is None)
    lark.rules["start"] = f"{_thought(lark, reasoning, thinking)} {start}"
    rules = [f"start: {lark.rules.pop('start')}", *(f"{name}: {body}" for name, body in lark.rules.items())]
    return StructuredOutput(grammar="\n".join(rules), name="tools")


class _Lark:
    """Rules in Lark's syntax, and how to write what they are made of."""

    def __init__(self, tokens: Mapping[str, int]):
        self.tokens = tokens
        self.rules: dict[str, str] = {}

    def literal(self, *texts: str) -> str:
        """These texts one after the other, each a token where the tokenizer has one for it."""
        parts = [f"<[{self.tokens[text]}]>" if text in self.tokens else json.dumps(text) for text in texts]
        return " ".join(parts)

    def rule(self, body: str, options: str = "") -> str:
        """A new rule's name."""
        name = f"r{len(self.rules)}"
        self.rules[f"{name}{options}"] = body
        return name

    def terminal(self, body: str) -> str:
        """A new terminal's name: what a regular expression could say."""
        name = f"T{len(self.rules)}"
        self.rules[name] = body
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': SPACING})}")

    def until(self, marker: str) -> str:
        """Any text up to `marker`, and it."""
        if marker in self.tokens:
            return f"{self.rule(TEXT)} {self.literal(marker)}"
        return self.rule(TEXT, f"[suffix={json.dumps(marker)}]")

    def choice(self, options: Sequence[str]) -> str:
        return self.rule(" | ".join(options))


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, and an empty one where the tool names no parameters."""
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    if (kind := schema.get("type", "object")) != "object":
        raise RequestError(
            f"the parameters of the function {function['name']!r} must have the type object, got {kind!r}", "tools"
        )
    return {**schema, "type": "object"}


def _object(lark: _Lark, function: Mapping[str, Any], key: str) -> str:
    opening = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return f"{lark.literal(opening)} {lark.json(_arguments(function))} {lark.literal('}')}"


def _sequence(lark: _Lark, call: str, separator: str, parallel: bool) -> str:
    return f"{call} ({lark.literal(separator)} {call})*" if parallel else call


def _hermes(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    said = lark.choice([_object(lark, function, "arguments") for function in functions])
    call = lark.rule(f"{lark.literal('<tool_call>', chr(10))} {said} {lark.literal(chr(10), '</tool_call>')}")
    return _sequence(lark, call, "\n", parallel)


def _llama(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    call = lark.choice([_object(lark, function, "parameters") for function in functions])
    return _sequence(lark, call, "; ", parallel)


def _mistral(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    call = lark.choice([_object(lark, function, "arguments") for function in functions])
    return f"{lark.literal('[TOOL_CALLS]', '[')} {_sequence(lark, call, ', ', parallel)} {lark.literal(']')}"


def _coder(lark: _Lark, functions: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    said = lark.choice([_xml(lark, function) for function in functions])
    call = lark.rule(f"{lark.literal('<tool_call>', chr(10))} {said} {lark.literal(chr(10), '</tool_call>')}")
    return _sequence(lark, call, "\n", parallel)


def _xml(lark: _Lark, function: Mapping[str, Any]) -> str:
    """A call in XML: parameters in the schema's order, those that aren't required optional."""
    schema = _arguments(function)
    parts = [lark.literal(f"<function={function['name']}>\n")]
    for key, wanted in (schema.get("properties") or {}).items():
        opening = lark.literal(f"<parameter={key}>\n")
        if "string" not in types(wanted, schema):
            definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            value = f"{lark.json({**definitions, **wanted})} {lark.literal(chr(10) + '</parameter>')}"
        elif options := _texts(wanted):
            value = f"{lark.choice(options)} {lark.literal(chr(10) + '</parameter>')}"
        else:
            value = lark.terminal(f"{VALUE} {lark.literal(chr(10) + '</parameter>')}")
        parameter = f"{opening} {value} {lark.literal(chr(10))}"
        parts.append(parameter if key in (schema.get("required") or ()) else f"({parameter})?")
    return " ".join([*parts, lark.literal("</function>")])


def _texts(schema: Any) -> list[str]:
    """The texts that a parameter's schema lists, each as a literal."""
    schema = schema if isinstance(schema, Mapping) else {}
    listed = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    return [json.dumps(each) for each in listed if isinstance(each, str)]


def _thought(lark: _Lark, reasoning: str | None, thinking: str | None) -> str:
    """Grammar of the reasoning that may come before the calls."""
    kind = REASONING_PARSERS[reasoning] if reasoning else None
    if kind is None or not issubclass(kind, Think) or thinking == "off":
        return ""
    body, space = lark.until(kind.CLOSES), r"/\n{0,2}/"
    if thinking == "prompt" or kind.FORCED:
        return f"{body} {space}"
    return f"({lark.literal(kind.OPENS)} {body} {space})?"


_CALLS = {Hermes: _hermes, Qwen3Coder: _coder, Llama3Json: _llama, Mistral: _mistral}
