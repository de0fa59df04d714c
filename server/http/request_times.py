"""Time each HTTP request, for `/metrics`. Pure ASGI and outermost, so that refusals count too."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestTimes:
    """Call `observe` with the path of each request's route, its method, status and seconds.

    What a client makes up gets no series of its own: requests that no route takes are of the handler "none", and other
    methods are "other".
    """

    def __init__(self, app: ASGIApp, observe: Callable[[str, str, int, float], None]):
        self.app, self.observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, answer)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.observe(handler, method, status, time.perf_counter() - began)
