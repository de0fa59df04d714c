"""Grammars of tool calls: text that a parser of `server.parsers` reads as calls whose arguments follow their schemas.

For requests that demand a call (`tool_choice` required, or a function by its name).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.request import RequestError, StructuredOutput
from jaxspec.structured.grammar import WHITESPACE

Tool = Mapping[str, Any]

# Text of a parameter in XML: anything without what the parser ends a value at.
VALUE = r"(/(.|\n)*/ & ~/(.|\n)*(<\/parameter>|\n<\/function>|\n<parameter=)(.|\n)*/)"


def tool_call_grammar(
    tools: Sequence[Tool],
    format: str,
    named: str | None = None,
    parallel: bool = True,
    special_ids: Mapping[str, int] | None = None,
) -> StructuredOutput:
    """One call or several, in the format of a parser.

    **Arguments:**

    - `tools`: the request's, as OpenAI writes them. `named`: the function that must be called, once; None is any.
    - `format`: `hermes`, `llama3_json`, `mistral` or `qwen3_coder`. `parallel`: whether a further call may follow.
    - `special_ids`: the token ids of those markers that are special tokens of the model, which no text spells.

    **Raises:** `RequestError` for another format, for no tools, or a name that none of them has.
    """
    if format not in FORMATS:
        raise RequestError(
            f"calls can't be demanded in the format {format!r}; it can be {', '.join(FORMATS)}", "tool_choice"
        )
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in functions if named in (None, function["name"])]
    if not chosen:
        wanted = "any function" if named is None else f"the function {named!r}"
        raise RequestError(f"tool_choice demands {wanted}, which tools lacks", "tool_choice")
    marks = {marker: f"<[{token}]>" for marker, token in (special_ids or {}).items()}
    mark = lambda marker: marks.get(marker, _text(marker))  # noqa: E731
    calls = [FORMATS[format](function, f"t{i}") for i, function in enumerate(chosen)]
    opens, between, closes, around = AROUND[format]
    start = " ".join([*map(mark, opens), "call", *_further(between, parallel and named is None), *map(mark, closes)])
    body = " ".join([*map(mark, around[0]), "(" + " | ".join(f"t{i}" for i in range(len(chosen))) + ")"])
    rules = [f"start: {start}", f"call: {body} {' '.join(map(mark, around[1]))}", *(r for call in calls for r in call)]
    return StructuredOutput(grammar="\n".join(["%llguidance {}", *rules]) + "\n", name="tools")


def _further(between: str, parallel: bool) -> list[str]:
    return [f"({_text(between)} call)*"] if parallel else []


def _text(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text)


def _json(schema: Any) -> str:
    """A value that follows a schema. Whitespace between its parts has an end."""
    schema = dict(schema) if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _arguments(function: Tool) -> dict[str, Any]:
    schema = function.get("parameters") or {}
    return (
        {"type": "object", "additionalProperties": False, "properties": {}}
        if not schema
        else {"type": "object"} | schema
    )


def _object(function: Tool, rule: str, key: str) -> list[str]:
    opens = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    return [f"{rule}: {_text(opens)} {_json(_arguments(function))} {_text('}')}"]


def _xml(function: Tool, rule: str) -> list[str]:
    """A function's parameters in the order of its schema, those that aren't required left out or not."""
    schema = _arguments(function)
    required, shared = schema.get("required") or [], {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
    body, rules = [], []
    for i, (key, value) in enumerate((schema.get("properties") or {}).items()):
        name = f"{rule}_{i}"
        body.append(name if key in required else f"{name}?")
        rules += _parameter(key, value, shared, name)
    opens, closes = _text(f"<function={function['name']}>\n"), _text("</function>")
    return [f"{rule}: {opens} {' '.join(body)} {closes}", *rules]


def _parameter(key: str, schema: Any, shared: Mapping[str, Any], name: str) -> list[str]:
    opens, ends = _text(f"<parameter={key}>\n"), "\n</parameter>\n"
    schema = schema if isinstance(schema, Mapping) else {}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices and all(isinstance(choice, str) for choice in choices):
        return [f"{name}: {opens} ({' | '.join(map(_text, choices))}) {_text(ends)}"]
    if _texts(schema):
        text = name.upper()
        return [f"{name}: {opens} {text}", f"{text}: {VALUE} {_text(ends)}"]
    return [f"{name}: {opens} {_json({**shared, **schema})} {_text(ends)}"]


def _texts(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter's value is written as text, not as JSON."""
    kinds = schema.get("type", "string" if not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref", "enum"} else None)
    return kinds == "string"


# Of each format: its rules for a function, and the markers before all calls, between two, behind all, around each.
FORMATS = {
    "hermes": lambda function, rule: _object(function, rule, "arguments"),
    "llama3_json": lambda function, rule: _object(function, rule, "parameters"),
    "mistral": lambda function, rule: _object(function, rule, "arguments"),
    "qwen3_coder": _xml,
}
AROUND = {
    "hermes": ((), "\n", (), (("<tool_call>", "\n"), ("\n", "</tool_call>"))),
    "llama3_json": ((), "; ", (), ((), ())),
    "mistral": (("[TOOL_CALLS]", "["), ", ", ("]",), ((), ())),
    "qwen3_coder": ((), "\n", (), (("<tool_call>", "\n"), ("\n", "</tool_call>"))),
}
