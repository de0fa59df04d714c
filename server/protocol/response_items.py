"""The items, tools and formats of `/v1/responses` as the API's description has them. `responses.py` checks them.

An item may have further fields, such as those of an item that this server sent.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field

from server.protocol.base import Object, Open
from server.protocol.structured import NAMED_SCHEMA, OBJECT
from server.protocol.tools import MAX_TOOLS, Name, ToolFunction

MAX_ITEMS = 4096


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
    content: NotRequired[Content | None]


class _Reasoning(Open):
    type: Literal["reasoning"]
    content: NotRequired[Content | None]
    summary: NotRequired[Content | None]


class _Call(Open):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, Field(description="A JSON object", examples=["{}"])]


class _Output(Open):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


Item = _Message | _Reasoning | _Call | _Output
Input = str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]


class _Tool(ToolFunction):
    type: Literal["function"]


Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS)]


class _Chosen(Open):
    type: Literal["function"]
    name: Name


Choice = Literal["auto", "none", "required"] | _Chosen

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
