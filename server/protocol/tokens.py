"""The bodies of `/tokenize` and `/detokenize`, vLLM's."""

from __future__ import annotations

from pydantic import model_validator

from jaxspec.request import RequestError
from server.protocol.base import Body, Text
from server.protocol.chat import ChatRequest, Message


class TokenizeRequest(ChatRequest):
    """A `prompt`, or the `messages` of a chat. A chat's other fields are taken too, so that the body of one can be sent
    here as it is; those that don't bear on its prompt do nothing."""

    prompt: Text | None = None
    messages: list[Message] | None = None
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
    tokens: list[int]
