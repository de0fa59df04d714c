"""Tools in a chat's body: the request's `tools` and `tool_choice`, and the calls and results in its history.

Invariant: lengths are checked before elements are looked at, and what passes is plain data that a chat template can
write: names are words, schemas are objects, and the arguments of earlier calls are mappings, or text. Custom tools and
their calls become those of functions of one string; the `type` of a tool still says how its client declared it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from jaxspec.config.request import RequestError
from server.http.json_reader import parse
from server.protocol.base import Open, at, check_text, read_each, refuse_unknown, shown, text_size

MAX_TOOLS = 128  # OpenAI's limit; also of the calls in one message
MAX_TOOLS_LENGTH = 2**19  # characters of JSON
INPUT = "input"  # the one argument of a custom tool, as a function of one string
NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)

# What the API's description says of these fields; the functions below check them.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class ToolFunction(Open):
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class _Tool(Open):
    type: Literal["function"]
    function: ToolFunction


class _Syntax(Open):
    syntax: Literal["lark", "regex"]
    definition: str


class _Grammar(Open):
    type: Literal["grammar"]
    grammar: _Syntax


class AnyText(Open):
    type: Literal["text"]


class _Custom(Open):
    name: Name
    description: NotRequired[str | None]
    format: NotRequired[AnyText | _Grammar | None]


class _CustomTool(Open):
    type: Literal["custom"]
    custom: _Custom


class _Chosen(Open):
    name: Name


class _Choice(Open):
    type: Literal["function"]
    function: _Chosen


class _CustomChoice(Open):
    type: Literal["custom"]
    custom: _Chosen


class _Listed(Open):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Choice | _CustomChoice], Field(max_length=MAX_TOOLS)]


class _AllowedTools(Open):
    type: Literal["allowed_tools"]
    allowed_tools: _Listed


class _Called(Open):
    name: str
    arguments: Annotated[str, Field(description="A JSON object", examples=["{}"])]


class _Call(Open):
    id: NotRequired[str]
    type: Literal["function"]
    function: _Called


class _CustomCalled(Open):
    name: str
    input: str


class _CustomCall(Open):
    id: NotRequired[str]
    type: Literal["custom"]
    custom: _CustomCalled


Tools = Annotated[list[_Tool | _CustomTool], Field(max_length=MAX_TOOLS)]
Choice = Literal["auto", "none", "required"] | _Choice | _CustomChoice | _AllowedTools
Calls = Annotated[list[_Call | _CustomCall], Field(max_length=MAX_TOOLS)]

KINDS = ("function", "custom")  # types of a tool, and names of the field that describes it
NAMED = '{"type": "function", "function": {"name": "NAME"}}, the same of a custom tool'


@dataclass(frozen=True)
class Named:
    """A `tool_choice` that names the tool to call."""

    name: str


@dataclass(frozen=True)
class Allowed:
    """A `tool_choice` among the tools of these names; `mode` is auto or required."""

    mode: str
    names: frozenset[str]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """`tools`, each with its `type` and a function. **Raises:** `RequestError` at the first that isn't one."""
    _check_list(value, "tools")
    tools = read_each(value, read_tool)
    kinds: dict[str, str] = {}
    for place, tool in enumerate(tools):
        if kinds.setdefault(name := tool["function"]["name"], tool["type"]) != tool["type"]:
            raise RequestError(f"has the name {name!r}, which a tool of another type has; rename one", f"[{place}]")
    if (size := text_size(tools)) > MAX_TOOLS_LENGTH:
        raise RequestError(f"has {size} characters of text, at most {MAX_TOOLS_LENGTH} are allowed")
    written = json.dumps(tools, ensure_ascii=False)
    if len(written) > MAX_TOOLS_LENGTH:
        raise RequestError(f"has {len(written)} characters as JSON, at most {MAX_TOOLS_LENGTH} are allowed")
    check_text(written)
    return tools


def _check_list(value: Any, what: str) -> None:
    if not isinstance(value, list):
        raise RequestError(f"must be a list of {what}, got {shown(value)}")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"has {len(value)} {what}, at most {MAX_TOOLS} are allowed")


def read_tool(tool: Any) -> dict[str, Any]:
    """A tool with its `type` and a function. **Raises:** `RequestError`."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in KINDS or not isinstance(tool.get(kind), dict):
        raise RequestError(
            f'must be {{"type": "function", "function": {{...}}}} or {{"type": "custom", "custom": {{...}}}}, '
            f"got {shown(tool)}"
        )
    refuse_unknown(tool, ("type", kind, "cache_control"))
    function = {key: value for key, value in tool[kind].items() if value is not None}
    if not isinstance(function.get("strict", False), bool):
        raise RequestError(f"needs true or false as its strict, got {shown(function['strict'])}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"needs a name of up to 128 letters, digits, and _ - . : /, got {shown(name)}")
    if not isinstance(function.get("description", ""), str):
        raise RequestError(f"needs a string as its description, got {shown(function['description'])}")
    if kind == "custom":
        with at("custom"):
            function = as_function({**function, "format": _flat(function.get("format"))})
    if not isinstance(function.get("parameters", {}), dict):
        raise RequestError(f"needs a JSON schema as its parameters, got {shown(function['parameters'])}")
    return {"type": kind, "function": function}


def _flat(form: Any) -> Any:
    """A custom tool's format as `/v1/responses` has it: with its grammar's fields beside its type."""
    grammar = form.get("grammar") if isinstance(form, dict) else None
    return {**form, **grammar, "grammar": None, "type": form.get("type")} if isinstance(grammar, dict) else form


def read_choice(value: Any) -> str | Named | Allowed:
    """`tool_choice`: auto, none, required, a tool by its name, or the tools that are allowed."""
    if value in ("auto", "none", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "allowed_tools":
        return _allowed(value)
    chosen = value.get(kind) if kind in KINDS else None
    name = chosen.get("name") if isinstance(chosen, dict) else None
    if not isinstance(name, str):
        raise RequestError(f'must be "auto", "none", "required", {NAMED}, or allowed_tools, got {shown(value)}')
    refuse_unknown(value, ("type", kind))
    with at(kind):
        refuse_unknown(chosen, ("name",))
    return Named(name)


def _allowed(choice: dict[str, Any]) -> Allowed:
    refuse_unknown(choice, ("type", "allowed_tools"))
    given = choice.get("allowed_tools")
    mode = given.get("mode") if isinstance(given, dict) else None
    if mode not in ("auto", "required") or not isinstance(given.get("tools"), list):
        raise RequestError(
            'allowed_tools must be {"mode": "auto", "tools": [...]} or the same with the mode "required", '
            f"got {shown(given)}"
        )
    with at("allowed_tools"):
        refuse_unknown(given, ("mode", "tools"))
        with at("tools"):
            _check_list(given["tools"], "tools")
            return Allowed(mode, frozenset(read_each(given["tools"], _name)))


def _name(tool: Any) -> str:
    """The name of one of `allowed_tools`."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    chosen = tool.get(kind) if kind in KINDS else None
    if not isinstance(chosen, dict) or not isinstance(chosen.get("name"), str):
        raise RequestError(f"must be {NAMED}, got {shown(tool)}")
    return chosen["name"]


def read_calls(value: Any) -> list[dict[str, Any]]:
    """An earlier message's `tool_calls`, their arguments parsed: templates write them as mappings. What a model wrote
    that is no JSON object stays text."""
    _check_list(value, "tool calls")
    return read_each(value, _call)


def _call(call: Any) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, dict) else None
    function = call.get(kind) if kind in KINDS else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            "must have an id, the type function or custom, and under that name what was called: a name and arguments, "
            "or a custom tool's input"
        )
    if kind == "custom":
        if not isinstance(text := function.get(INPUT), str):
            raise RequestError(f"needs a string as its input, got {shown(text)}")
        function = {"arguments": as_arguments(text)}
    given = function.get("arguments")
    if not isinstance(given, str | None):
        raise RequestError(f"needs a JSON object, as a string, as its arguments, got {shown(given)}")
    check_text(name + str(call.get("id") or ""))
    arguments = given or {}
    if isinstance(arguments, str):
        try:
            read = parse(check_text(arguments).encode())
            arguments = read if isinstance(read, dict) else arguments
        except ValueError:  # not JSON
            pass
    check_text(json.dumps(arguments, ensure_ascii=False))
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def callable_tools(
    tools: list[dict[str, Any]] | None, choice: str | Named | Allowed | None
) -> tuple[list[dict[str, Any]] | None, str | Named | None]:
    """The tools that a body's `tool_choice` lets the model call, and the choice among them.

    **Raises:** `RequestError` where it asks for a tool that `tools` lacks.
    """
    names = [tool["function"]["name"] for tool in tools or ()]
    asked = {choice.name} if isinstance(choice, Named) else choice.names if isinstance(choice, Allowed) else set()
    if not names and (choice == "required" or asked):
        said = "tool_choice asks for a call, which needs tools; those that a provider runs itself are left out here"
        raise RequestError(said, "tool_choice")
    if missing := sorted(asked - set(names)):
        raise RequestError(
            f"tool_choice names the tool {missing[0]!r}, which tools lacks; it has {', '.join(names)}", "tool_choice"
        )
    if not isinstance(choice, Allowed):
        return tools, choice
    return callable_tools([tool for tool in tools or () if tool["function"]["name"] in asked], choice.mode)


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """A custom tool as a function of one string. Its grammar is told to the model, and a regex is its pattern too."""
    with at("format"):
        syntax, definition = _grammar(tool.get("format") or {"type": "text"})
    text: dict[str, Any] = {"type": "string"}
    says = tool.get("description") or ""
    if syntax:
        says = f"{says}\nThe input follows this {syntax}:\n{definition}".strip()
        text |= {"pattern": f"^(?:{definition})$"} if syntax == "regex" else {}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": tool.get("name"), "description": says, "parameters": schema}


def _grammar(form: Any) -> tuple[str, str]:
    """The syntax and the definition of a custom tool's format; both empty for plain text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "grammar"):
        raise RequestError(f"must have the type text or grammar, got {shown(form)}")
    refuse_unknown(form, ("type",) if kind == "text" else ("type", "syntax", "definition"))
    if kind == "text":
        return "", ""
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise RequestError("a grammar needs the syntax lark or regex, and a string as its definition")
    return syntax, definition


def as_arguments(text: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
