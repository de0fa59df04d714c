"""What stands before the routes: the API key and the size of a body.

Pure ASGI, because a wrapper that reads the request (Starlette's BaseHTTPMiddleware) would hide a client's disconnect.
Invariant: with a key set, nothing but `OPEN_PATHS` answers a request that doesn't carry it.
"""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError

OPEN_PATHS = ("/", "/health", "/metrics")  # browsers, probes and scrapers rarely carry a key
MAX_BODY_BYTES = 64 * 2**20


class Gate:
    """Refuse with 401 a request without `Authorization: Bearer <api_key>`, with 413 a body over `max_body` bytes."""

    def __init__(self, app: ASGIApp, api_key: str | None = None, max_body: int = MAX_BODY_BYTES):
        self.app = app
        self.key = api_key.encode() if api_key else None
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        try:
            self._authorize(scope["path"], headers.get(b"authorization", b""))
            length = headers.get(b"content-length", b"")
            if length.isdigit() and int(length) > self.max_body:
                raise self._too_large()
        except ApiError as error:
            challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            return await JSONResponse(error.body, error.status, headers=challenge)(scope, receive, send)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:  # sent in chunks, with no length announced
                raise HTTPException(413, str(self._too_large()))  # the only kind that FastAPI's body reader lets pass
            return message

        await self.app(scope, counted, send)

    def _authorize(self, path: str, header: bytes) -> None:
        if self.key is None or path in OPEN_PATHS:
            return
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key):
            found = "the API key is wrong" if header else "an API key is required"
            raise ApiError(401, f"{found}; send the header Authorization: Bearer <key>", code="invalid_api_key")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body} bytes; send fewer or shorter prompts at once")
