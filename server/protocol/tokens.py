"""The bodies of `/tokenize` and `/detokenize`, vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, FailFast, Field, model_validator

from jaxspec.config.request import RequestError
from server.protocol.base import Body, Text, TokenId, at_most
from server.protocol.chat import MAX_MESSAGES, ChatRequest, Message, describe_chat
from server.protocol.described import NULL, add_rules, one_of
from server.protocol.generation import STREAM_RULE

MAX_TOKENS = 2**20  # that are decoded at once


def _describe(schema: dict[str, Any]) -> None:
    describe_chat(schema)
    schema["allOf"].remove(STREAM_RULE)
    schema["properties"]["messages"] = {"anyOf": [schema["properties"]["messages"], NULL]}
    add_rules(schema, one_of("prompt", "messages", add_special_tokens={"enum": [None, False]}))


class TokenizeRequest(ChatRequest):
    """A `prompt`, or the `messages` of a chat. A chat's other fields are taken too, so that the body of one can be sent
    here as it is; those that don't bear on its prompt do nothing."""

    model_config = ConfigDict(json_schema_extra=_describe)
    prompt: Text | None = None
    messages: Annotated[
        list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES, "messages")
    ] = None  # a chat's field, not required
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self):
        return self  # nothing is streamed here

    @model_validator(mode="after")
    def _agree(self):
        if (self.prompt is None) == (self.messages is None):
            given = "neither" if self.prompt is None else "both"
            raise RequestError(f"send a prompt or the messages of a chat; {given} was given", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError("the chat template writes the special tokens; leave it out", "add_special_tokens")
        return super()._agree()


class DetokenizeRequest(Body):
    """Token ids, to be decoded with their special tokens."""

    model: str | None = None
    tokens: Annotated[
        list[TokenId], FailFast(), Field(json_schema_extra={"maxItems": MAX_TOKENS}), at_most(MAX_TOKENS, "token ids")
    ]
