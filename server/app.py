"""The FastAPI application: routes, and nothing that a route doesn't need.

Invariant: a route that generates refuses a request (wrong model, bad field, dead engine) before the engine sees it.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import jaxspec
from jaxspec import AsyncLLM, RequestError
from server import errors
from server.errors import ApiError, chat_fields, describe, engine_died
from server.gate import Gate
from server.generate import ClientGone, EventStream, chat_prompt, collect, completion_prompts, run, unless_gone
from server.logprobs import TokenNames
from server.metrics import Metrics
from server.protocol import ChatRequest, CompletionRequest
from server.stream import ChatReply, CompletionReply, Reply, encode

GONE = 499  # nginx's status for a client that left; nobody reads it


def create_app(
    llm: AsyncLLM,
    served_name: str | None = None,
    api_key: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The server's application over a running engine, which stays the caller's to close.

    **Arguments:** `served_name` is the model's name in the API (None: the engine's `model`); `api_key`, if given, must
    come with every request but `/health` and `/metrics`; `sampling` is what holds of `SamplingParams` for requests that
    don't say otherwise.
    """
    app = FastAPI(title="jaxspec", version=jaxspec.__version__)
    app.add_middleware(Gate, api_key=api_key)
    errors.install(app)
    name = served_name or llm.config.model
    metrics = Metrics(llm.stats)
    _add_generation(app, llm, name, metrics, sampling or {})
    _add_information(app, llm, name, metrics)
    return app


def _add_generation(app: FastAPI, llm: AsyncLLM, name: str, metrics: Metrics, sampling: Mapping[str, Any]) -> None:
    names = TokenNames(llm.tokenizer)

    def check(model: str | None) -> None:
        if llm.error is not None:
            raise engine_died(llm.error)
        if model is not None and model != name:
            message = f"the model {model!r} does not exist; this server serves {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def answer(request: Request, reply: Reply, stream: bool | None) -> Response:
        deltas = run(llm, reply.prompts, reply.params, metrics.latencies)
        try:
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
            prompt = await chat_prompt(body, llm.tokenizer)
            usage, report = body.include_usage, body.prompt_logprobs is not None
            reply = ChatReply([prompt], params, name, names, include_usage=usage, report_prompt=report)
            return await answer(request, reply, body.stream)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        check(body.model)
        params = body.sampling(sampling)
        prompts = await completion_prompts(body, llm.tokenizer)
        options = {"include_usage": body.include_usage, "report_prompt": body.prompt_logprobs is not None}
        reply = CompletionReply(prompts, params, name, names, only_echo=body.only_echo, **options)
        return await answer(request, reply, body.stream)


def _add_information(app: FastAPI, llm: AsyncLLM, name: str, metrics: Metrics) -> None:
    started = time.time()
    card = {
        "id": name,
        "object": "model",
        "created": int(started),
        "owned_by": "jaxspec",
        "root": llm.config.model,
        "max_model_len": llm.config.context_length,
    }

    @app.get("/v1/models")
    async def models() -> dict:
        """The one model served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict:
        """A model by its name."""
        if model != name:
            message = f"the model {model!r} does not exist; this server serves {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return card

    @app.get("/health")
    async def health() -> dict:
        """200 while requests can be served, else 503."""
        if llm.error is not None:
            raise engine_died(llm.error)
        if not llm.stats()["ready"]:
            raise ApiError(503, "the engine is not ready", kind="server_error")
        return {"status": "ok"}

    @app.get("/server_info")
    async def server_info() -> dict:
        """What is served, how, and how it has gone since the start."""
        stats = llm.stats()
        return {
            "model": llm.config.model,
            "draft": llm.config.draft,
            "served_model_name": name,
            "uptime_seconds": time.time() - started,
            "avg_spec_accept_length": stats["avg_spec_accept_length"],
            "versions": {
                "jaxspec": jaxspec.__version__,
                "python": platform.python_version(),
                **{package: metadata.version(package) for package in ("jax", "jaxlib", "transformers", "fastapi")},
            },
            "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
            "engine": dataclasses.asdict(llm.config),
            "model_config": dataclasses.asdict(llm.model_config),
            "stats": stats,
        }

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus' text format."""
        return Response(metrics.text(), media_type=metrics.content_type)

    @app.get("/flush_cache")
    @app.post("/flush_cache")
    async def flush_cache() -> JSONResponse:
        """Empty the prefix tree; 409 while requests run."""
        if llm.error is not None:
            raise engine_died(llm.error)
        if not await llm.flush_cache():
            raise ApiError(409, "requests are running; the cache can be flushed only when none is")
        return JSONResponse({"flushed": True})
