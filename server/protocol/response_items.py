"""The items, tools and formats of `/v1/responses` as the API's description has them. `responses.py` checks them.

An item may have further fields, such as those of an item that this server sent.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field

from server.protocol.base import Object, Open
from server.protocol.structured import NAMED_SCHEMA, OBJECT
from server.protocol.tools import MAX_TOOLS, AnyText, Name, ToolFunction

MAX_ITEMS = 4096
# Tools that OpenAI runs itself, or that its models know without a schema.
HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
    *("code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp", "local_shell", "shell"),
    *("apply_patch", "tool_search", "programmatic_tool_calling"),
)
HostedType = Annotated[str, Field(json_schema_extra={"enum": [*HOSTED]})]


class _Part(Open):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class _Refusal(Open):
    type: Literal["refusal"]
    refusal: str


Content = str | Annotated[list[_Part | _Refusal], Field(max_length=MAX_ITEMS)]


class _Message(Open):
    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None


class _Reasoning(Open):
    type: Literal["reasoning"]
    content: NotRequired[Content | None]
    summary: NotRequired[Content | None]


class _Call(Open):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    arguments: Annotated[str, Field(description="A JSON object", examples=["{}"])]


class _CustomCall(Open):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    input: str


class _Reference(Open):
    type: Literal["item_reference"]
    id: str


class _Output(Open):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


Item = _Message | _Reasoning | _Call | _CustomCall | _Output | _Reference
Input = str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]


class _Function(ToolFunction):
    type: Literal["function"]


class _Grammar(Open):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class _Custom(Open):
    type: Literal["custom"]
    name: Name
    description: NotRequired[str | None]
    format: NotRequired[AnyText | _Grammar | None]


class _Namespace(Open):
    type: Literal["namespace"]
    name: Name
    description: NotRequired[str | None]
    tools: Annotated[list[_Function | _Custom], Field(max_length=MAX_TOOLS)]


class _Hosted(Open):
    """A tool that a provider would run itself: it is skipped."""

    type: HostedType


Tools = Annotated[list[_Function | _Custom | _Namespace | _Hosted], Field(max_length=MAX_TOOLS)]


class _Chosen(Open):
    type: Literal["function", "custom"]
    name: Name
    namespace: NotRequired[str | None]


class _HostedChosen(Open):
    type: HostedType


class _Allowed(Open):
    type: Literal["allowed_tools"]
    mode: NotRequired[Literal["auto", "required"]]
    tools: Annotated[list[_Chosen | _HostedChosen], Field(max_length=MAX_ITEMS)]


Choice = Literal["auto", "none", "required"] | _Chosen | _Allowed

FORMAT = {
    "anyOf": [
        {"properties": {"type": {"const": "text"}}, "required": ["type"], "additionalProperties": False},
        {
            "properties": {"type": {"const": "json_object"}, "schema": OBJECT},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "properties": {"type": {"const": "json_schema"}, **NAMED_SCHEMA},
            "required": ["type", "name"],
            "additionalProperties": False,
        },
    ]
}
Format = Annotated[Object, Field(json_schema_extra=FORMAT)]
