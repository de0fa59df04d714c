"""Tools for a model whose chat template knows none: described in a system message, calls and results as text.

The format is Hermes', which the parser of that name reads back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INTRODUCTION = """\
# Tools

You may call one or more functions to help with the request. Here they are, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object, between these tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


def write_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict]:
    """The chat for a template that takes roles and contents only."""
    written: list[dict[str, Any]] = []
    if tools:
        introduction = INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        written.append({"role": "system", "content": introduction})
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if plain["role"] == "system" and [each["role"] for each in written] == ["system"]:
            written[0] = {**plain, "content": f"{plain['content']}\n\n{written[0]['content']}"}
        elif plain["role"] == "tool":
            result = f"<tool_response>\n{plain['content']}\n</tool_response>"
            if written and written[-1].get("content", "").endswith("</tool_response>"):
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
        else:
            calls = "\n".join(_call(call["function"]) for call in message.get("tool_calls") or ())
            plain["content"] = "\n".join(filter(None, (plain["content"], calls)))
            written.append(plain)
    return written


def _call(function: Mapping[str, Any]) -> str:
    said = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
