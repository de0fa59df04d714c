"""Shared by every route that generates: the engine, the checks before it, and the way from a reply to a response.

Invariant: a request for another model, or to an engine that is dead, is refused before anything else is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from jaxspec import AsyncLLM, RequestError
from jaxspec.checkpoint import Pooling
from jaxspec.engine.adapters import UNKNOWN
from jaxspec.images.chats import Media
from jaxspec.images.picture import Picture, Video
from server.chat.speech import Formats, Speech
from server.generate import ClientGone, EventStream, UnlessGone, chat_prompt, collect, completion_prompts, run
from server.http.errors import GONE, ApiError, describe, engine_died
from server.media.pictures import MediaRules, read_media
from server.metrics import Metrics
from server.prompt_log import PromptLog
from server.protocol import ChatRequest, CompletionRequest
from server.protocol.base import shown
from server.replies import Answer, Prompt, encode
from server.replies.logprobs import TokenNames
from server.tracing import Tracer


@dataclass
class Serving:
    """An engine under its name in the API, and perhaps further names (`aliases`). `sampling` holds of `SamplingParams`
    where a request doesn't say; `formats` is how its model speaks in chats; `prompt_log` is where texts without
    pictures are kept, if they are; `media` says where these and videos may come from; `tracer` sends traces, if wanted.
    """

    llm: AsyncLLM
    name: str
    metrics: Metrics
    sampling: Mapping[str, Any]
    formats: Formats
    prompt_log: PromptLog | None = None
    tracer: Tracer | None = None
    media: MediaRules = field(default_factory=MediaRules)
    aliases: Sequence[str] = ()
    pooling: Pooling | None = None
    running: dict[str, str] = field(default_factory=dict)  # the engine's requests, with the ids that clients know

    def __post_init__(self):
        self.names = (self.name, *self.aliases)
        self.texts, self.ids = TokenNames(self.llm.tokenizer), TokenNames(self.llm.tokenizer, as_ids=True)

    def check(self, model: str | None = None, also: str | None = None, lora: str | None = None) -> str | None:
        """The name of the adapter that a request is for: of `lora`, or of a `model` that is an adapter's name, or the
        model's and an adapter's with a colon between. None: it is for the model itself.

        **Raises:** `ApiError` if the engine is dead, or the request is for another model. `also`: the beginning of
        further names that are this model's.
        """
        if self.llm.error is not None:
            raise engine_died(self.llm.error)
        adapters, found = self.llm.adapters, None
        if model is not None and model not in self.names:
            heads = [f"{name}:" for name in self.names if model.startswith(f"{name}:")]
            found = model if model in adapters else next((model.removeprefix(head) for head in heads), None)
            if found not in adapters and not (also and model.startswith(also)):
                names = ", ".join(map(repr, (*self.names, *adapters)))
                message = f"the model {shown(model)} does not exist; this server serves {names}"
                raise ApiError(404, message, param="model", code=UNKNOWN)
        if lora is None:
            return found if found in adapters else None
        if lora not in adapters or found not in (None, lora):
            known = ", ".join(map(repr, adapters)) or "none"
            other = (
                f"is {shown(lora)}, and model asks for {found!r}" if lora in adapters else f"{shown(lora)} isn't loaded"
            )
            raise ApiError(404, f"lora_path {other}; loaded: {known}", param="lora_path", code=UNKNOWN)
        return lora

    async def chat_prompt(self, body: ChatRequest, most: int | None = None) -> Prompt:
        """A chat's prompt, of at most as many tokens as the context, or `most`. **Raises:** `RequestError`."""
        media, context = await self.read_media(body.media()), most or self.llm.config.context_length
        reader = self.llm.image_reader if media else None
        return await chat_prompt(body, self.llm.tokenizer, self.formats, context, reader, media)

    async def read_media(self, media: Sequence[Media]) -> list[Picture | Video]:
        """Pictures and videos of one prompt. **Raises:** `RequestError`."""
        if not media:
            return []
        context = self.llm.config.context_length
        return await read_media(media, self.llm.image_reader, self.llm.no_pictures, self.media, context)

    async def prompts(self, body: CompletionRequest) -> list[Prompt]:
        """A completion's prompts. **Raises:** `RequestError`."""
        return await completion_prompts(body, self.llm.tokenizer, self.llm.config.context_length)

    def speech(self, body: ChatRequest, prompt: Prompt) -> Speech:
        """How the replies to a chat are read. **Raises:** `RequestError` for a demand that can't be met."""
        return self.formats.speech(body, prompt.ids, self.llm.tokenizer)

    def abort(self, name: str | None) -> None:
        """End what `/generate` was sent as `name`, and the responses that have it as their id; None: all requests.

        **Raises:** `EngineDead`.
        """
        named = [each for each, response in list(self.running.items()) if response == name]
        for each in {*named, name}:
            self.llm.abort(each)

    async def answer(
        self,
        request: Request,
        making: Awaitable[Answer],
        stream: bool | None,
        store: bool | None = None,
        priority: int | None = None,
        lora: str | None = None,
        pooled: bool = False,
    ) -> Response:
        """Make a reply, run its prompts and send it, whole or as events. `store` False keeps it out of the log of
        prompts. `lora`: the adapter of those that name none. `pooled`: it is an embedding or a score.

        **Raises:** `RequestError`, `ApiError`.
        """
        if self.pooling is not None and self.pooling.embeds and not pooled:
            making.close()
            raise ApiError(
                400,
                f"the model {self.name!r} makes embeddings (/v1/embeddings), no texts; --pooling none "
                "has the server generate with it",
            )
        began = time.time()
        try:
            with UnlessGone(request.receive):
                reply = await making
                jobs, kept = reply.jobs(), self.prompt_log if store is not False else None
                for job in jobs:
                    job.lora = job.lora or lora
                watch = kept.watch(jobs, request.url.path) if kept and not any(job.images for job in jobs) else None
                trace = self.tracer and self.tracer.begin(request.headers, request.url.path, jobs, began)
                deltas = run(self.llm, jobs, self.metrics, self.running, watch, request.state.client, trace, priority)
                if stream:
                    return EventStream(self.llm, reply, await anext(deltas), deltas)
                whole = await collect(deltas, reply)
            return Response(encode(whole), media_type="application/json")
        except ClientGone:
            return Response(status_code=GONE)
        except RequestError:
            raise
        except Exception as error:
            raise describe(error, self.llm.error) from error
