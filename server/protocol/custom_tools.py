"""Custom tools, which take text, as functions of one string: a chat knows functions alone."""

from __future__ import annotations

import json
from typing import Any

from jaxspec.config.request import RequestError
from server.protocol.base import refuse_unknown, shown

INPUT = "input"  # the one argument


def as_function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function of one string. Its grammar is told to the model, and a regex is its pattern too."""
    form = tool.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    text: dict[str, Any] = {"type": "string"}
    says = tool.get("description") or ""
    if kind == "grammar":
        refuse_unknown(form, ("type", "syntax", "definition"), f"{where}: format: ")
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise RequestError(f"{where}: a grammar needs the syntax lark or regex, and a string as its definition")
        says = f"{says}\nThe input follows this {syntax}:\n{definition}".strip()
        text |= {"pattern": f"^(?:{definition})$"} if syntax == "regex" else {}
    elif kind != "text":
        raise RequestError(f"{where}: a format has the type text or grammar, got {shown(form)}")
    else:
        refuse_unknown(form, ("type",), f"{where}: format: ")
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": tool.get("name"), "description": says, "parameters": schema}


def as_arguments(text: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
