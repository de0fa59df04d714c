"""The tools of `/v1/responses` as the functions of a chat, and their calls back again.

Invariant: a chat knows functions alone. A tool of a namespace is a function whose name begins with the namespace's, and
a custom tool is a function of one string. `Toolbox.origins` says what each name stood for, so that a call comes back as
the client declared it. Tools that a provider would run itself are skipped, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jaxspec.config.request import RequestError
from server.protocol.base import at, refuse_unknown, shown
from server.protocol.response_items import HOSTED, MAX_ITEMS
from server.protocol.tools import INPUT, as_function, read_tool

log = logging.getLogger("jaxspec.server")

CHOICES = 'auto, none, required, {"type": "function", "name": NAME}, {"type": "custom", "name": NAME} or allowed_tools'


@dataclass(frozen=True)
class Origin:
    """A function's tool as the client declared it."""

    name: str
    namespace: str | None = None
    custom: bool = False

    def call(self, call_id: str | None) -> dict[str, Any]:
        """The item of a call that has just begun."""
        kind = {"type": "custom_tool_call"} if self.custom else {"type": "function_call"}
        space = {} if self.namespace is None else {"namespace": self.namespace}
        return {**kind, "call_id": call_id, "name": self.name, **space, INPUT if self.custom else "arguments": ""}


@dataclass(frozen=True)
class Toolbox:
    """A chat's `tools`, where each function came from, by its name, and the tools as they were `given`."""

    given: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> Toolbox:
        """The functions of a body's `tools`. **Raises:** `RequestError`."""
        box = cls(given if isinstance(given, list) else [])
        for origin, tool, where in _flat(given):
            name = joined(origin.namespace, origin.name)
            if box.origins.setdefault(name, origin) != origin:
                raise RequestError(f"has the name {name!r}, which another tool has; rename one", where)
            function = {key: value for key, value in tool.items() if key not in ("type", "format")}
            with at(where):
                box.tools.append(read_tool({"type": "function", "function": {**function, "name": name}}))
        return box

    def origin(self, name: str) -> Origin:
        return self.origins.get(name) or Origin(name)

    def choose(self, choice: Any) -> tuple[list[dict[str, Any]], Any]:
        """A chat's tools and `tool_choice` for the choice of a response. **Raises:** `RequestError`."""
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "allowed_tools":
            return self._allowed(choice)
        if kind in ("function", "custom"):
            choice = {"type": "function", "function": {"name": self._named(choice)}}
        elif kind in HOSTED:
            raise RequestError(f"tool_choice asks for {kind}, which this server doesn't run; send {CHOICES}")
        elif choice not in (None, "auto", "none", "required"):
            raise RequestError(f"must be {CHOICES}, got {shown(choice)}")
        return self.tools, choice

    def _allowed(self, choice: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        mode, listed = choice.get("mode") or "auto", choice.get("tools")
        if mode not in ("auto", "required") or not isinstance(listed, list) or len(listed) > MAX_ITEMS:
            raise RequestError('allowed_tools needs "mode": "auto" or "required", and a list of "tools"')
        kinds = [each.get("type") if isinstance(each, dict) else None for each in listed]
        names = {self._named(each) for each, kind in zip(listed, kinds, strict=True) if kind not in HOSTED}
        if bad := sorted(names - self.origins.keys()):
            raise RequestError(f"allowed_tools names {bad[0]!r}, which tools lacks; it has {', '.join(self.origins)}")
        return [tool for tool in self.tools if tool["function"]["name"] in names], mode

    def _named(self, choice: Any) -> str:
        """The function that a tool_choice, or an entry of allowed_tools, names."""
        name = choice.get("name") if isinstance(choice, dict) else None
        if not isinstance(name, str):
            raise RequestError(f"needs a string as the name of a tool, got {shown(choice)}")
        return joined(_namespace(choice), name)


def joined(namespace: str | None, name: str) -> str:
    """The name of a namespace's tool as a function of its own."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _namespace(item: dict[str, Any]) -> str | None:
    """**Raises:** `RequestError` for a namespace that isn't a string."""
    if not isinstance(space := item.get("namespace"), str | None):
        raise RequestError(f"needs a string as its namespace, got {shown(space)}")
    return space


def called(item: dict[str, Any], name: str) -> str:
    """The function that an earlier call was of."""
    return joined(_namespace(item), name)


def _flat(given: Any) -> Iterator[tuple[Origin, dict[str, Any], str]]:
    """Each function or custom tool, those of namespaces too: its origin, it as a function, and where it stands."""
    if not isinstance(given, list) or len(given) > MAX_ITEMS:
        raise RequestError(f"must be a list of tools, at most {MAX_ITEMS}, got {shown(given)}")
    for place, tool in enumerate(given):
        where = f"[{place}]"
        if not isinstance(tool, dict):
            raise RequestError(f"must be an object, got {shown(tool)}", where)
        if tool.get("type") != "namespace":
            yield from _one(tool, None, where)
            continue
        inner, space = tool.get("tools"), tool.get("name")
        if not isinstance(inner, list) or not isinstance(space, str):
            raise RequestError("a namespace needs a string as its name and a list of tools", where)
        with at(where):
            refuse_unknown(tool, ("type", "name", "description", "tools"))
        for number, each in enumerate(inner):
            yield from _one(each, tool, f"{where}.tools[{number}]")


def _one(tool: Any, space: dict[str, Any] | None, where: str) -> Iterator[tuple[Origin, dict[str, Any], str]]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if space is None and kind in HOSTED:
        _log_skipped(kind)
        return
    if kind not in ("function", "custom"):
        raise RequestError(f"has the type {shown(kind)}; this server takes function, custom and namespace", where)
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"needs a name, a string, got {shown(name)}", where)
    if kind == "custom":
        with at(where):
            tool = as_function(tool)
    if space is not None and (says := space.get("description")):
        tool = {**tool, "description": f"{says}\n{tool.get('description') or ''}".strip()}
    yield Origin(name, space and space["name"], kind == "custom"), tool, where


@cache
def _log_skipped(kind: str) -> None:
    """Say once for each kind of hosted tool that it is skipped."""
    log.warning("clients offer the hosted tool %s, which this server doesn't run: the model never sees it", kind)
