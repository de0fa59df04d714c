"""The routes that record what the engine does: `/start_profile` and `/stop_profile`, as vLLM and SGLang name them."""

from __future__ import annotations

import asyncio
import json

from fastapi import FastAPI
from fastapi.responses import Response

from jaxspec.engine.timeline import Timeline
from server.http.errors import ApiError
from server.protocol.response_models import Started
from server.routes.serving import Serving

RECORDED = {409: {"description": "The engine is recorded already, or isn't"}}
TRACE = {200: {"content": {"application/json": {}}, "description": "A file for ui.perfetto.dev"}}


def add(app: FastAPI, serving: Serving) -> None:
    recording: list[Timeline] = []  # at most one

    @app.post("/start_profile", responses=RECORDED)
    async def start_profile() -> Started:
        """Record each program, step and request from now on, until `/stop_profile`."""
        engine = getattr(serving.llm, "engine", None)
        if engine is None:
            raise ApiError(501, "several engines serve behind this port (--dp-size); profile a server of one")
        if recording:
            raise ApiError(409, "the engine is being recorded; end that with /stop_profile first")
        timeline = Timeline(engine)
        timeline.start()
        recording.append(timeline)
        return Started(started=True)

    @app.post("/stop_profile", responses=RECORDED | TRACE, response_class=Response)
    async def stop_profile() -> Response:
        """End the recording, and return it in Chrome's trace event format."""
        if not recording:
            raise ApiError(409, "nothing is being recorded; begin with /start_profile")
        timeline = recording.pop()
        text = await asyncio.to_thread(lambda: json.dumps(timeline.stop().trace(), separators=(",", ":")))
        named = {"Content-Disposition": 'attachment; filename="jaxspec-trace.json"'}
        return Response(text, media_type="application/json", headers=named)
