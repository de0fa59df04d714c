"""`tools` and `tool_choice` of `/v1/messages` as those of a chat."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from jaxspec.config.request import RequestError
from server.protocol.base import Open, refuse_misspelt, shown
from server.protocol.tools import MAX_TOOLS, Name

log = logging.getLogger("jaxspec.server")

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
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
    found = []
    for place, tool in enumerate(value):
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str | None):
            raise RequestError(f"tool {place} must have a name and an input_schema, got {shown(tool)}")
        if tool.get("type") not in (None, "custom"):
            _log_skipped(tool["type"])
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise RequestError(f"tool {place} needs a JSON schema as its input_schema, got {shown(schema)}")
        function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        found.append({"type": "function", "function": function | {"parameters": {"type": "object", **schema}}})
    return found


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
