"""The routes that generate: chats and completions."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from jaxspec import AsyncLLM, RequestError
from server.errors import GONE, ApiError, chat_fields, describe, engine_died
from server.generate import ClientGone, EventStream, chat_prompt, collect, completion_prompts, jobs, run, unless_gone
from server.logprobs import TokenNames
from server.metrics import Metrics
from server.protocol import ChatRequest, CompletionRequest
from server.protocol.base import shown
from server.protocol.generation import Generation
from server.replies import ChatReply, CompletionReply, Reply, encode
from server.speech import Formats


def add_generation(
    app: FastAPI, llm: AsyncLLM, name: str, metrics: Metrics, sampling: Mapping[str, Any], formats: Formats
) -> None:
    texts, ids = TokenNames(llm.tokenizer), TokenNames(llm.tokenizer, as_ids=True)

    def check(model: str | None) -> None:
        if llm.error is not None:
            raise engine_died(llm.error)
        if model is not None and model != name:
            message = f"the model {shown(model)} does not exist; this server serves {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def options(body: Generation, request: Request) -> dict[str, Any]:
        """What a reply shows beside its text."""
        return {
            "names": ids if body.return_tokens_as_token_ids else texts,
            "request_id": request.state.request_id,
            "include_usage": body.include_usage,
            "continuous_usage": body.continuous_usage,
            "report_prompt": body.prompt_logprobs is not None,
            "return_token_ids": bool(body.return_token_ids),
            "no_tokens": body.no_tokens,
        }

    async def answer(request: Request, making: Awaitable[Reply], stream: bool | None) -> Response:
        try:
            reply = await unless_gone(request.receive, making)
            deltas = run(llm, jobs(reply), metrics)
            if stream:
                first = await unless_gone(request.receive, anext(deltas))
                return EventStream(llm, reply, first, deltas)
            whole = await unless_gone(request.receive, collect(deltas, reply))
            return Response(encode(whole), media_type="application/json")
        except ClientGone:
            return Response(status_code=GONE)
        except RequestError:
            raise
        except Exception as error:
            raise describe(error, llm.error) from error

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a chat."""
        check(body.model)
        with chat_fields(body.limit_name):
            params = body.sampling(sampling)

            async def make() -> ChatReply:
                prompt = await chat_prompt(body, llm.tokenizer, formats, llm.config.context_length)
                speech = formats.speech(body, prompt.ids, llm.tokenizer)
                return ChatReply([prompt], speech.sampling(params), name, speech=speech, **options(body, request))

            return await answer(request, make(), body.stream)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        check(body.model)
        params = body.sampling(sampling)

        async def make() -> CompletionReply:
            prompts = await completion_prompts(body, llm.tokenizer, llm.config.context_length)
            return CompletionReply(prompts, params, name, **options(body, request))

        return await answer(request, make(), body.stream)
