"""The routes that probes ask: is the server alive, is it ready, does it generate.

Invariant: a probe is answered in bounded time, and however many come at once, they cost the engine one token.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

from jaxspec import AsyncLLM, SamplingParams
from server.http.errors import ApiError, describe, engine_died
from server.protocol.response_models import Health
from server.routes.serving import Serving

PROBE_SECONDS = 20.0  # SGLang's
LOOK_SECONDS = 0.1  # how often a probe looks whether others' tokens come


def check_ready(llm: AsyncLLM) -> None:
    """**Raises:** `ApiError` with status 503 while requests can't be served."""
    if llm.error is not None:
        raise engine_died(llm.error)
    if not llm.stats()["ready"]:
        raise ApiError(503, "the engine is not ready", kind="server_error")


def health_of(llm: AsyncLLM) -> Health:
    """**Raises:** as `check_ready`."""
    check_ready(llm)
    engines = llm.stats().get("engines", ())
    if lost := {str(each["engine"]): each["error"] for each in engines if each["error"] is not None}:
        return Health(status="degraded", lost=lost)
    return Health(status="ok")


class Probe:
    """Finds out whether the engine generates. Probes that overlap share one request."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._request: asyncio.Task | None = None

    async def __call__(self) -> None:
        """Return once a token has come, be it of another request. **Raises:** `ApiError` if none does in time."""
        if self._request is None or self._request.done():
            self._request = asyncio.create_task(self._generate())
            self._request.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs it
        request, before = self._request, self._tokens()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                while not request.done() and self._tokens() == before:
                    await asyncio.wait((request,), timeout=LOOK_SECONDS)
        except TimeoutError:
            message = f"the engine has generated no token for {PROBE_SECONDS:g} seconds"
            raise ApiError(503, message, kind="server_error") from None
        if request.done() and (error := request.exception()) is not None:
            raise describe(error, self._llm.error)

    def _tokens(self) -> int:
        return self._llm.stats()["generation_tokens_total"]

    async def _generate(self) -> None:
        async for _ in self._llm.generate([0], SamplingParams(temperature=0.0, max_tokens=1)):
            pass


def add(app: FastAPI, serving: Serving) -> None:
    llm, probe = serving.llm, Probe(serving.llm)

    @app.head("/health", include_in_schema=False)
    @app.head("/ready", include_in_schema=False)
    @app.head("/ping", include_in_schema=False)
    @app.get("/health", response_model_exclude_none=True)
    @app.get("/ready", response_model_exclude_none=True)
    @app.get("/ping", response_model_exclude_none=True)
    @app.post("/ping", response_model_exclude_none=True)
    async def health() -> Health:
        """200 while requests can be served, else 503. With several engines, the status is `degraded` once some have
        ended."""
        return health_of(llm)

    @app.get("/health_generate", response_model_exclude_none=True)
    async def health_generate() -> Health:
        """200 once the engine has generated a token, 503 if it doesn't in time."""
        check_ready(llm)
        await probe()
        return health_of(llm)

    @app.get("/load")
    async def load() -> dict:
        """How many generating requests the server has in hand."""
        return {"server_load": serving.metrics.load}
