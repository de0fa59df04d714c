"""Replies as models write them, and what they say: the situations of vLLM's, SGLang's and llama.cpp's own parser tests.

`source` names the test that a case's situation is from; the words are ours. Where those parsers' streamed and whole
results differ, or lose text, the case says what docs/tools.md says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """`calls`: (name, arguments), the arguments as a value, or as a string where they aren't JSON."""

    name: str
    source: str
    format: str
    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, Any], ...] = ()
    tools: tuple[dict, ...] | None = None
    thinking: str | None = None


def cases_of(format: str, tools: tuple[dict, ...] | None = None) -> tuple[Callable[..., Case], Callable[..., Case]]:
    """`case` and `plain`: rows of a format's table. A plain row's text is its content, whole."""

    def case(name, source, text, *calls, says=None, thinks=None, format=format, tools=tools, thinking=None) -> Case:
        return Case(name, source, format, text, thinks, says, calls, tools, thinking)

    return case, lambda name, source, text, **more: case(name, source, text, says=text, **more)


def tool(name: str, **properties: Any) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
WEATHER = tool("get_weather", city=STRING, state=STRING, unit={"type": "string", "enum": ["celsius", "fahrenheit"]})
AREA = tool("area", shape=STRING, dimensions={"type": "object"}, precision=INTEGER)
TYPES = tool(
    "types",
    i=INTEGER,
    f={"type": "float"},
    n={"type": "number"},
    b={"type": "boolean"},
    s=STRING,
    o={"type": "object"},
    a={"type": "array"},
    maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
    either={"type": ["string", "integer"]},
    number_or_null={"type": ["number", "null"]},
)
NEXT_STEP = tool("next_step", decision=STRING, content=STRING)
TOOLS = (WEATHER, AREA, TYPES, NEXT_STEP, tool("get_time", zone=STRING), tool("search", query=STRING, limit=INTEGER))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def call(name: str, /, **arguments: Any) -> tuple[str, Any]:
    return name, arguments


BASH = "<tool_call>\n<function=bash>\n<parameter=command>\nls /tmp\n</parameter>\n</function>\n</tool_call>"
VALUES = '{"string": "x", "int": 42, "float": 3.25, "bool": true, "null": null, "array": ["a", 1], "object": {"k": []}}'
VALUES_READ = {
    "string": "x",
    "int": 42,
    "float": 3.25,
    "bool": True,
    "null": None,
    "array": ["a", 1],
    "object": {"k": []},
}
ESCAPES = '{"quoted": "he said \\"hi\\"", "path": "C:\\\\tmp", "lines": "a\\nb", "emoji": "é \\ud83d\\ude00"}'
ESCAPES_READ = {"quoted": 'he said "hi"', "path": "C:\\tmp", "lines": "a\nb", "emoji": "é 😀"}
