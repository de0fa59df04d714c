"""The routes that generate as OpenAI's do: chats and completions."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from server.http.errors import chat_fields
from server.http.openapi import stream_of
from server.protocol import ChatRequest, CompletionRequest
from server.protocol.generation import Generation
from server.protocol.response_models import ChatCompletion, ChatCompletionChunk, Completion
from server.replies import ChatReply, CompletionReply
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    def options(body: Generation, request: Request) -> dict[str, Any]:
        """Options of a reply beside its text."""
        return {
            "names": serving.ids if body.return_tokens_as_token_ids else serving.texts,
            "id": body.rid,
            "request_id": body.request_id or request.state.request_id,
            "include_usage": body.include_usage,
            "continuous_usage": body.continuous_usage,
            "report_prompt": body.prompt_logprobs is not None,
            "return_token_ids": bool(body.return_token_ids),
            "no_tokens": body.no_tokens,
        }

    @app.post("/v1/chat/completions", responses=stream_of(ChatCompletion, ChatCompletionChunk))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a chat."""
        lora = serving.check(body.model, lora=body.lora_path)
        with chat_fields(body.limit_name):
            params = body.sampling(serving.sampling)

            async def make() -> ChatReply:
                prompt = await serving.chat_prompt(body)
                speech = serving.speech(body, prompt)
                settings = speech.sampling(params)
                name = lora or serving.name
                return ChatReply([prompt], settings, name, speech=speech, **options(body, request))

            return await serving.answer(request, make(), body.stream, body.store, body.priority, lora)

    @app.post("/v1/completions", responses=stream_of(Completion, Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        lora = serving.check(body.model, lora=body.lora_path)
        params = body.sampling(serving.sampling)

        async def make() -> CompletionReply:
            prompts = await serving.prompts(body)
            return CompletionReply(prompts, params, lora or serving.name, **options(body, request))

        return await serving.answer(request, make(), body.stream, body.store, body.priority, lora)
