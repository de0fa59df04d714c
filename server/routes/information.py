"""The routes that tell of the server: its model, its health, its figures."""

from __future__ import annotations

import dataclasses
import platform
import time
from importlib import metadata

import jax
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

import jaxspec
from jaxspec import AsyncLLM
from server.errors import ApiError, engine_died
from server.metrics import Metrics


def add_information(app: FastAPI, llm: AsyncLLM, name: str, metrics: Metrics) -> None:
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
            "model_config": llm.model_config.summary(),
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
