"""The bodies of `/tokenize` and `/detokenize`, vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field, model_validator

from jaxspec.request import RequestError
from server.protocol.base import Body, Integer, Text, at_most
from server.protocol.chat import MAX_MESSAGES, ChatRequest, Message

MAX_TOKENS = 2**20  # that are decoded at once


class TokenizeRequest(ChatRequest):
    """A `prompt`, or the `messages` of a chat. A chat's other fields are taken too, so that the body of one can be sent
    here as it is; those that don't bear on its prompt do nothing."""

    prompt: Text | None = None
    messages: Annotated[
        list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES, "messages")
    ] = None  # a chat's field, not required
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _agree(self):
        if (self.prompt is None) == (self.messages is None):
            given = "neither" if self.prompt is None else "both"
            raise RequestError(f"send a prompt or the messages of a chat; {given} was given", "prompt")
        if self.messages is None:
            return self
        if self.add_special_tokens:
            raise RequestError("the chat template writes the special tokens; leave it out", "add_special_tokens")
        return super()._agree()


class DetokenizeRequest(Body):
    """Token ids, to be decoded with their special tokens."""

    model: str | None = None
    tokens: Annotated[list[Integer], FailFast(), at_most(MAX_TOKENS, "token ids")]
