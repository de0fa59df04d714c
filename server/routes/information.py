"""The routes that tell of the server: its model, its options, its figures."""

from __future__ import annotations

import dataclasses
import platform
import time
from datetime import UTC, datetime
from importlib import metadata

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

import jaxspec
from jaxspec import AsyncLLM
from server.http.errors import ApiError, engine_died
from server.protocol.response_models import Flushed, ModelCard, ModelList
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    started, llm, name = time.monotonic(), serving.llm, serving.name  # the wall's clock may be set meanwhile
    now = datetime.now(UTC)

    def card(name: str) -> ModelCard:
        """A model's card, or an adapter's, with OpenAI's, vLLM's and Anthropic's fields."""
        folder = None if name in serving.names else llm.adapters.get(name)
        return ModelCard(
            id=name,
            object="model",
            created=int(now.timestamp()),
            owned_by="jaxspec",
            root=folder or llm.config.model,
            parent=serving.name if folder else None,
            max_model_len=llm.config.context_length,
            type="model",
            display_name=name,
            created_at=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            lifecycle="active",
            max_input_tokens=llm.config.context_length - 1,
            max_tokens=llm.config.context_length - 1,
        )

    running = {409: {"description": "Requests are running"}}

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The one model served, under each of its names, and its adapters."""
        cards = [card(name) for name in (*serving.names, *llm.adapters)]
        return ModelList(object="list", data=cards, has_more=False, first_id=cards[0].id, last_id=cards[-1].id)

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """A model by its name."""
        return card(serving.check(model) or model)

    @app.get("/version")
    async def version() -> dict:
        """jaxspec's version."""
        return {"version": jaxspec.__version__}

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict:
        """Describe the model in SGLang's fields."""
        return {
            "model_path": llm.config.model,
            "tokenizer_path": llm.config.model,
            "served_model_name": name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": llm.stats()["weight_version"],
            "has_image_understanding": llm.image_reader is not None,
            "has_audio_understanding": False,
            "model_type": llm.model_config.model_type,
        }

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict:
        """Report the server's model, options, and figures since the start."""
        return _server_info(llm, name, started)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus' text format."""
        return Response(serving.metrics.text(), media_type=serving.metrics.content_type)

    @app.get("/flush_cache", responses=running, operation_id="flush_cache_by_get")
    @app.post("/flush_cache", responses=running)
    async def flush_cache() -> Flushed:
        """Empty the prefix tree; 409 while requests run."""
        if llm.error is not None:
            raise engine_died(llm.error)
        if not await llm.flush_cache():
            raise ApiError(409, "requests are running; the cache can be flushed only when none is")
        return Flushed(flushed=True)


def _server_info(llm: AsyncLLM, name: str, started: float) -> dict:
    stats = llm.stats()
    return {
        "version": jaxspec.__version__,
        "model": llm.config.model,
        "draft": llm.config.draft,
        "served_model_name": name,
        "uptime_seconds": time.monotonic() - started,
        "avg_spec_accept_length": stats["avg_spec_accept_length"],
        "versions": {
            "jaxspec": jaxspec.__version__,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("jax", "jaxlib", "transformers", "fastapi")},
        },
        "devices": llm.devices,
        "engine": dataclasses.asdict(llm.config),
        "model_config": llm.model_config.summary(),
        "stats": stats,
        "internal_states": [{"avg_spec_accept_length": stats["avg_spec_accept_length"]}],  # where SGLang has it
    }
