"""The body of `/v1/chat/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, FailFast, Field, PlainValidator, model_validator

from jaxspec.config.request import MAX_LOGPROBS, RequestError, SamplingParams
from jaxspec.images.chats import Media, media_of
from jaxspec.text.chat_template import reserved_template_variables
from server.protocol.base import (
    Body,
    Integer,
    Object,
    Open,
    Text,
    at_most,
    check_text,
    describe_ranges,
    read_each,
    shown,
)
from server.protocol.described import NULL, add_rules, any_of, fields, is_true
from server.protocol.generation import Generation, describe_generation
from server.protocol.tools import (
    Allowed,
    Calls,
    Choice,
    Named,
    Tools,
    callable_tools,
    read_calls,
    read_choice,
    read_tools,
)

MAX_MESSAGES = 5000
MAX_PARTS = 1000  # of one message
MAX_TEMPLATE_VARIABLES = 100
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class TextPart(Open):
    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]


def _content(value: Any) -> str | list[dict[str, str] | Media]:
    """A message's text, or its parts if some are pictures or videos. Parts that are all texts are joined by a newline,
    as vLLM does for templates that take a string."""
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list):
        raise RequestError(f"must be a string or a list of parts, got {shown(value)}")
    if len(value) > MAX_PARTS:
        raise RequestError(f"has {len(value)} parts, at most {MAX_PARTS} are allowed")
    parts = read_each(value, _part)
    if any(isinstance(part, Media) for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Any) -> dict[str, str] | Media:
    try:
        media = media_of(part, "the part")
    except RequestError as error:
        raise RequestError(str(error)) from None
    if media is None:
        return {"type": "text", "text": check_text(part["text"])}
    _check_urls(media)
    return media


def _check_urls(media: Media) -> None:
    """**Raises:** `RequestError` unless a picture or video has a URL, or the latter some, one for each frame."""
    urls = media.source if media.video and isinstance(media.source, list) else [media.source]
    if not urls or not all(isinstance(url, str) for url in urls):
        wanted = "its video's URL, or a list of its frames'" if media.video else "its picture's URL"
        raise RequestError(f"{media.where} needs a string as {wanted}, got {shown(media.source)}")


def _describe_message(schema: dict[str, Any]) -> None:
    """Add to the JSON schema what `Message` asks of a role."""
    describe_ranges(schema)
    content = {"anyOf": [{"type": "string"}, {"type": "array"}]}
    asks = {"role": {"not": {"enum": ["assistant", "tool"]}}, "content": content, "tool_calls": {"type": "null"}}
    answers = {"role": {"const": "tool"}, "content": content, "tool_calls": {"type": "null"}}
    schema["anyOf"] = [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": asks, "required": ["content"]},
        {"properties": {**answers, "tool_call_id": {"type": "string"}}, "required": ["content", "tool_call_id"]},
    ]


class Message(Body):
    """One chat message. A reply of any server can be sent back as it is: what this one doesn't know is left out."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_describe_message)
    LENIENT = True
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"refusal": (), "audio": (), "function_call": ()}
    role: Text
    content: Annotated[str | list, PlainValidator(_content, json_schema_input_type=str | Parts)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[dict], PlainValidator(read_calls, json_schema_input_type=Calls)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's newer name for the same
    _number: int = 0  # in the client's list, which may be sorted and cut

    @model_validator(mode="after")
    def _fits_its_role(self):
        """**Raises:** `RequestError` for a message that lacks what its role needs, or has what its role can't.

        A role that no API knows goes to the chat template, which may; but not one that is nearly spelled as another.
        """
        if self.role not in ROLES and (near := get_close_matches(self.role, ROLES, n=1, cutoff=0.8)):
            raise RequestError(f"unknown role {self.role!r}; did you mean {near[0]}?", "role")
        if self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"a message of role {self.role!r} can't have tool_calls; an assistant's can", "tool_calls"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError("a message of role 'tool' needs the tool_call_id that it answers", "tool_call_id")
        if self.content is None and self.role != "assistant":
            raise RequestError(
                "content is required, a string or a list of text parts; only an assistant may go without", "content"
            )
        return self

    def media(self) -> list[Media]:
        """The pictures and videos of this message of a chat."""
        parts = enumerate(self.content) if isinstance(self.content, list) else ()
        return [
            dataclasses.replace(part, where=f"messages[{self._number}].content[{place}]")
            for place, part in parts
            if isinstance(part, Media)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Message as a chat template sees it."""
        more = {"name": self.name, "tool_calls": self.tool_calls or None, "tool_call_id": self.tool_call_id}
        more["reasoning_content"] = self.reasoning_content or self.reasoning or None
        content = self.content or ""
        if isinstance(content, list):
            content = [part.part if isinstance(part, Media) else part for part in content]
        return {"role": self.role, "content": content} | {k: v for k, v in more.items() if v is not None}


def in_call_order(messages: list[Message]) -> list[Message]:
    """Put neighbouring results of tools in the order of their calls: a template that writes no ids pairs both by it.
    They stay as they are if an id is there twice, or no call's."""
    found: list[Message] = []
    places: dict[str, int] = {}
    for role, run in groupby(messages, lambda message: message.role):
        run = list(run)
        if role == "assistant":
            ids = (call.get("id") for message in run for call in message.tool_calls or ())
            places = {each: place for place, each in enumerate(ids)}
        elif role == "tool" and len({each.tool_call_id for each in run} & places.keys()) == len(run):
            run.sort(key=lambda message: places[message.tool_call_id])
        found += run
    return found


def describe_chat(schema: dict[str, Any]) -> None:
    """Add to the JSON schema what `ChatRequest` checks of fields that belong together."""
    describe_generation(schema)
    free = {"anyOf": [NULL, {"enum": ["auto", "none"]}]}
    add_rules(
        schema,
        any_of(fields(top_logprobs={"enum": [None, 0]}), is_true("logprobs")),
        any_of(
            fields(add_generation_prompt={"enum": [None, False]}),
            fields(continue_final_message={"enum": [None, False]}),
        ),
        any_of(fields(tool_choice=free), fields(("tools",), tools={"type": "array", "minItems": 1})),
    )


def _describe_variables(schema: dict[str, Any]) -> None:
    schema |= {
        "maxProperties": MAX_TEMPLATE_VARIABLES,
        "propertyNames": {"not": {"enum": sorted(reserved_template_variables())}},
    }


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ToolChoice = Annotated[str | Named | Allowed, PlainValidator(read_choice, json_schema_input_type=Choice)]
Variables = Annotated[Object, Field(json_schema_extra=_describe_variables)]


class ChatRequest(Generation):
    """The body of `/v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra=describe_chat)

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **Generation.UNSUPPORTED,
        **dict.fromkeys(("function_call", "audio", "web_search_options"), ()),
        **dict.fromkeys(("chat_template", "documents"), ()),
        "functions": ([],),
        "modalities": (["text"],),
        "echo": (False,),
        "add_special_tokens": (False,),  # the template writes them
    }

    messages: Annotated[
        list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES, "messages")
    ]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None  # for templates that read it
    tools: Annotated[list[dict], PlainValidator(read_tools, json_schema_input_type=Tools)] | None = None
    tool_choice: Annotated[str | Named | Allowed, PlainValidator(read_choice, json_schema_input_type=Choice)] | None = (
        None
    )
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _agree(self):
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) mean the "
                "same and differ; send one",
                "max_completion_tokens",
            )
        self.tools, self.tool_choice = callable_tools(self.tools, self.tool_choice)
        for number, message in enumerate(self.messages or ()):
            message._number = number
        self.messages = self.messages and in_call_order(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt opens a new message and continue_final_message continues the last one; send one",
                "continue_final_message",
            )
        variables = self.chat_template_kwargs or {}
        if len(variables) > MAX_TEMPLATE_VARIABLES:
            raise RequestError(
                f"chat_template_kwargs has {len(variables)} variables, at most {MAX_TEMPLATE_VARIABLES} are allowed",
                "chat_template_kwargs",
            )
        if bad := sorted(reserved_template_variables() & variables.keys()):
            raise RequestError(f"{bad[0]!r} can't be set here; it is not the template's to see", "chat_template_kwargs")
        for name in ("reasoning_effort", "verbosity"):
            given = getattr(self, name)
            if given is not None and (other := variables.get(name, given)) != given:
                raise RequestError(
                    f"{name} ({given}) and the variable of that name in chat_template_kwargs ({shown(other)}) mean the "
                    "same and differ; send one",
                    name,
                )
        return self

    def media(self) -> list[Media]:
        """The chat's pictures and videos, in order."""
        return [each for message in self.messages for each in message.media()]

    @property
    def limit_name(self) -> str:
        """The field that the client wrote `max_tokens` in."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}", "top_logprobs"
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(defaults, max_tokens=self.limit, logprobs=logprobs)
