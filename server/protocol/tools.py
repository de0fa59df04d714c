"""Tools in a chat's body: the request's `tools` and `tool_choice`, and the calls and results in its history.

Invariant: lengths are checked before elements are looked at, and what passes is plain data that a chat template can
write: names are words, schemas are objects, and the arguments of earlier calls are mappings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from jaxspec.config.request import RequestError
from server.http.json_reader import parse
from server.protocol.base import Open, check_text, refuse_unknown, shown, text_size

MAX_TOOLS = 128  # OpenAI's limit; also of the calls in one message
MAX_TOOLS_LENGTH = 2**19  # characters of JSON
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


class _Chosen(Open):
    name: Name


class _Choice(Open):
    type: Literal["function"]
    function: _Chosen


class _Called(Open):
    name: str
    arguments: Annotated[str, Field(description="A JSON object", examples=["{}"])]


class _Call(Open):
    id: NotRequired[str]
    type: Literal["function"]
    function: _Called


Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS)]
Choice = Literal["auto", "none", "required"] | _Choice
Calls = Annotated[list[_Call], Field(max_length=MAX_TOOLS)]

NAMED = {"type": "function", "function": {"name": "NAME"}}


@dataclass(frozen=True)
class Named:
    """A `tool_choice` that names the function to call."""

    name: str


def read_tools(value: Any) -> list[dict[str, Any]]:
    """`tools`, each a function. **Raises:** `RequestError` for the first that isn't one, by its place."""
    _check_list(value, "tools")
    tools = [_function(tool, f"tool {place}") for place, tool in enumerate(value)]
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


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}, got {shown(tool)}')
    refuse_unknown(tool, ("type", "function", "cache_control"), f"{where}: ")
    function = {key: value for key, value in tool["function"].items() if value is not None}
    if not isinstance(function.get("strict", False), bool):
        raise RequestError(f"{where} needs true or false as its strict, got {shown(function['strict'])}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where} needs a name of up to 128 letters, digits, and _ - . : /, got {shown(name)}")
    if not isinstance(function.get("description", ""), str):
        raise RequestError(f"{where} needs a string as its description, got {shown(function['description'])}")
    if not isinstance(function.get("parameters", {}), dict):
        raise RequestError(f"{where} needs a JSON schema as its parameters, got {shown(function['parameters'])}")
    return {"type": "function", "function": function}


def read_choice(value: Any) -> str | Named:
    """`tool_choice`: auto, none, required, or a function by its name."""
    if value in ("auto", "none", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(f'must be "auto", "none", "required" or {json.dumps(NAMED)}, got {shown(value)}')
    refuse_unknown(value, ("type", "function"))
    refuse_unknown(function, ("name",), "function: ")
    return Named(name)


def read_calls(value: Any) -> list[dict[str, Any]]:
    """An earlier message's `tool_calls`, their arguments parsed: templates write them as mappings."""
    _check_list(value, "tool calls")
    return [_call(call, f"call {place}") for place, call in enumerate(value)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or call.get("type", "function") != "function":
        raise RequestError(f"{where} must have an id, the type function, and a function with a name and arguments")
    given = function.get("arguments")
    try:
        arguments = {} if given in (None, "") else parse(given.encode()) if isinstance(given, str) else None
    except ValueError:  # not JSON, or not UTF-8
        arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} needs a JSON object, as a string, as its arguments, got {shown(given)}")
    check_text(name + str(call.get("id") or ""))
    check_text(json.dumps(arguments, ensure_ascii=False))
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_tools(tools: list[dict[str, Any]] | None, choice: str | Named | None) -> None:
    """**Raises:** `RequestError` where `choice`, a body's `tool_choice`, asks for a tool that `tools` lacks."""
    if not tools and (choice == "required" or isinstance(choice, Named)):
        raise RequestError("tool_choice asks for a call, which needs tools", "tool_choice")
    names = [tool["function"]["name"] for tool in tools or ()]
    if isinstance(choice, Named) and choice.name not in names:
        raise RequestError(
            f"tool_choice names the function {choice.name!r}, which tools lacks; it has {', '.join(names)}",
            "tool_choice",
        )
