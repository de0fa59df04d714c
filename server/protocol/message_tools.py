"""`tools` and `tool_choice` of `/v1/messages` as those of a chat, and changes of tools within a conversation."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from jaxspec.config.request import RequestError
from server.protocol.base import Open, at, read_each, refuse_misspelt, shown
from server.protocol.tools import MAX_TOOLS, Name, read_tool

log = logging.getLogger("jaxspec.server")

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
CHANGES = ("tool_addition", "tool_removal")  # blocks: from here on a tool can be called, or can't
REFERENCES = ("tool_reference", "mcp_tool_reference", "mcp_toolset_reference")
MAX_LOGGED = 32
_skipped: set[str] = set()


class _Tool(Open):
    """A tool of another type than `custom` is one that Anthropic's models know or run: it is skipped."""

    type: NotRequired[str | None]
    name: NotRequired[str]
    description: NotRequired[str | None]
    input_schema: NotRequired[dict[str, Any]]


class _Choice(Open):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[Name]
    disable_parallel_tool_use: NotRequired[bool | None]


Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS)]
Choice = _Choice


def read_tools(value: Any) -> list[dict[str, Any]]:
    """A chat's tools. Those deferred are among them: to add one later would change the prompt's head.

    **Raises:** `RequestError`.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(f"must be a list of tools, at most {MAX_TOOLS}, got {shown(value)}")
    return [tool for tool in read_each(value, _tool) if tool is not None]


def _tool(tool: Any) -> dict[str, Any] | None:
    """A chat's tool; None for one that Anthropic's models know or run."""
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str | None):
        raise RequestError(f"must have a name and an input_schema, got {shown(tool)}")
    if tool.get("type") == "function":
        own = '{"name": "NAME", "description": "...", "input_schema": {...}}'
        raise RequestError(f"has OpenAI's type function; here a tool is {own}")
    if tool.get("type") not in (None, "custom"):
        _log_skipped(tool["type"])
        return None
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(f"needs a JSON schema as its input_schema, got {shown(schema)}")
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return read_tool({"type": "function", "function": function | {"parameters": {"type": "object", **schema}}})


def read_change(kind: str, tool: Any) -> dict[str, Any]:
    """The `name` of the tool that a block of `kind` adds or removes, and its `definition`, a chat's tool, where the
    block has one. Both are None for tools of MCP servers, which the model never sees. **Raises:** `RequestError`."""
    given = tool.get("type") if isinstance(tool, dict) else None
    if given == "tool_definition" and kind == "tool_addition":
        with at("tool.definition"):
            found = _tool(tool.get("definition"))
        return {"name": found and found["function"]["name"], "definition": found}
    if given not in REFERENCES:
        allowed = "a tool_reference" if kind == "tool_removal" else "a tool_reference or tool_definition"
        raise RequestError(f"a {kind} needs {allowed} as its tool, got {shown(tool)}")
    name = tool.get("name") if given == "tool_reference" else None
    if given == "tool_reference" and not isinstance(name, str):
        raise RequestError(f"a tool_reference needs a string as its name, got {shown(name)}")
    return {"name": name, "definition": None}


def after_changes(tools: list[dict[str, Any]], changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat's tools at the end of a conversation with these changes. Tools that it defines come last."""
    known, removed = list(tools), []
    for change in changes:
        if (name := change["name"]) is None:
            continue
        if change["type"] == "tool_removal":
            removed.append(name)
            continue
        removed = [each for each in removed if each != name]
        if change["definition"] is not None:
            known = [tool for tool in known if tool["function"].get("name") != name] + [change["definition"]]
    return [tool for tool in known if tool["function"].get("name") not in removed]


def read_choice(value: Any) -> tuple[Any, bool]:
    """A chat's `tool_choice`, and whether it may make several calls at once. **Raises:** `RequestError`."""
    kind = value.get("type") if isinstance(value, dict) else None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in (*CHOICES, "tool") or (kind == "tool" and not isinstance(name, str)):
        allowed = "auto, any or none, or tool with a name"
        raise RequestError(f"must be an object of type {allowed}, got {shown(value)}")
    alone = value.get("disable_parallel_tool_use") or False
    if not isinstance(alone, bool):
        raise RequestError(f"disable_parallel_tool_use must be true or false, got {shown(alone)}")
    refuse_misspelt(value, ("type", "name", "disable_parallel_tool_use"))
    return CHOICES.get(kind) or {"type": "function", "function": {"name": name}}, not alone


def _log_skipped(kind: str) -> None:
    """Say once for each type of tool, of the first `MAX_LOGGED`, that it is skipped."""
    if kind not in _skipped and len(_skipped) < MAX_LOGGED:
        _skipped.add(kind)
        log.warning("clients offer tools of type %s, which have no schema: the model never sees them", shown(kind))
