"""`/v1/messages`: Anthropic's Messages API over the same chats, and the count of a message's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError
from jaxspec.text.errors import TooLong
from server.http.field_names import their_fields
from server.protocol import ChatRequest
from server.protocol.base import Place
from server.protocol.messages import CountTokensRequest, MessagesRequest
from server.replies import Prompt
from server.replies.messages import MessagesReply
from server.routes.serving import Serving

CLAUDE = "claude-"  # names that clients of this API ask for by themselves, for side tasks; here they are the one model
COUNTED = 16  # contexts: a longer prompt's tokens aren't counted to the end


def add(app: FastAPI, serving: Serving) -> None:
    context = serving.llm.config.context_length

    @contextmanager
    def chat_of(body: CountTokensRequest) -> Iterator[ChatRequest]:
        """The chat that a body means. Within, errors about it name the body's fields."""
        places: list[list[Place]] = []
        with their_fields(body.places, places):
            chat, places[:] = body.chat()
            yield ChatRequest.model_validate(chat)

    async def prompt_of(chat: ChatRequest) -> Prompt:
        """A chat's prompt. **Raises:** `RequestError`, in the words that make clients shorten the conversation if it
        is longer than is counted."""
        try:
            return await serving.chat_prompt(chat, COUNTED * context)
        except RequestError as error:
            if isinstance(error.__cause__, TooLong):
                raise _too_long(error.__cause__.least, context - 1) from error
            if error.code == CONTEXT_EXCEEDED:
                raise _too_long(COUNTED * context, context - 1) from error
            raise

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        lora = serving.check(body.model, CLAUDE, body.lora_path)
        with chat_of(body) as chat:
            params = chat.sampling(serving.sampling)

            async def make() -> MessagesReply:
                prompt = await prompt_of(chat)
                if len(prompt.ids) >= context:
                    raise _too_long(len(prompt.ids), context - 1)
                speech = serving.speech(chat, prompt)
                settings = speech.sampling(params)
                if len(prompt.ids) + body.max_tokens > context:  # as many as fit, as Anthropic has it
                    settings = dataclasses.replace(settings, max_tokens=None)
                options: dict[str, Any] = {"stream": bool(body.stream), "shows_thinking": body.shows_thinking}
                name = lora or serving.name
                return MessagesReply(prompt, settings, name, speech, serving.texts, limit=body.max_tokens, **options)

            return await serving.answer(request, make(), body.stream, body.store, body.priority, lora)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """The input tokens of a message."""
        serving.check(body.model, CLAUDE)
        with chat_of(body) as chat:
            return {"input_tokens": len((await prompt_of(chat)).ids)}


def _too_long(tokens: int, most: int) -> RequestError:
    return RequestError(f"prompt is too long: {tokens} tokens > {most} maximum", code=CONTEXT_EXCEEDED)
