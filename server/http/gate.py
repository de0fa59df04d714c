"""Gate before the routes: the API key, the size of a body, the request's id, and the log of refusals.

Pure ASGI, because a wrapper that reads the request (Starlette's BaseHTTPMiddleware) would hide a client's disconnect.
Invariants: with a key set, nothing but `OPEN_PATHS` and `OPEN_FOLDER` answers a request that doesn't carry it; without,
pages of other origins are kept away (`origin`), and `GUARDED_PATHS` are refused unless the server was told to take
them. Every response has an `X-Request-Id`, under `/v1/messages` as `request-id` too, and one that isn't a success has a
line in the log, or is counted in one: one line, of at most a few hundred characters, whatever the client sent, and no
more lines than a disk can bear.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Sequence

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import FAILED, GONE, ApiError, error_response, speaks_anthropic
from server.http.origin import check_host, check_origin
from server.protocol.base import REQUEST_ID, shown

log = logging.getLogger("jaxspec.server")

# Browsers, probes and scrapers rarely carry a key.
OPEN_PATHS = ("/", "/health", "/ready", "/ping", "/health_generate", "/metrics")
OPEN_FOLDER = "/playground/"
# Routes that act on all clients' requests: the weights, whether anything runs, a record of who asks. So does
# /abort_request with abort_all, which only its body shows: `request.state.trusted` tells its route.
GUARDED_PATHS = frozenset(
    {
        *("/update_weights_from_disk", "/update_weight_version", "/pause_generation", "/continue_generation"),
        *("/release_memory_occupation", "/resume_memory_occupation", "/pause", "/resume", "/sleep", "/wake_up"),
        *("/start_profile", "/stop_profile"),
    }
)
MAX_BODY_BYTES = 64 * 2**20
LINES = 60  # in each PERIOD
PERIOD = 60.0  # seconds
MAX_LINE = 300  # characters of a message; 100 of a path


class Gate:
    """Refuse with 401 a request without `Authorization: Bearer <api_key>` or `x-api-key: <api_key>`, with 413 a body
    over `max_body` bytes.

    Refuse with 403 a host name that is neither in `hosts` nor this machine's own, unless that is None; and without a
    key what would change something and comes from a page whose origin isn't in `origins`, and `GUARDED_PATHS` unless
    `rollout_routes`.

    The request's id, which is the client's `X-Request-Id`, or a new one where that is none, is
    `request.state.request_id`. `request.state.client` is a key of whom it is from: of the API key that it carries,
    unless all must carry the same, or else of its address.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None = None,
        max_body: int = MAX_BODY_BYTES,
        hosts: Sequence[str] | None = None,
        origins: Sequence[str] = (),
        rollout_routes: bool = False,
    ):
        self.app, self.hosts, self.origins, self.rollout_routes = app, hosts, origins, rollout_routes
        self.key = api_key.encode() if api_key else None
        self.max_body = max_body
        self.refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if re.fullmatch(REQUEST_ID, given) else secrets.token_hex(16)
        scope.setdefault("state", {}).update(request_id=request_id, client=self._client(scope, headers))
        scope["state"]["trusted"] = self.key is not None or self.rollout_routes
        asked = f"{scope['method']} {scope['path']}"
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                if speaks_anthropic(scope):
                    MutableHeaders(scope=message)["request-id"] = request_id
            elif 400 <= status != GONE:
                self.refusals.note(status, asked, request_id, message.get("body", b""))
            await send(message)

        try:
            self._check(scope["method"], scope["path"], headers)
            await self.app(scope, self._counted(receive), answer)
        except ApiError as error:
            challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await error_response(scope, error.status, error.body, challenge)(scope, receive, answer)
        except Exception:
            log.exception("%s failed, request id %s", asked, request_id)
            if status == 0:
                error = ApiError(500, FAILED, kind="server_error")
                await error_response(scope, 500, error.body)(scope, receive, answer)

    def _client(self, scope: Scope, headers: Headers) -> str:
        key = (headers.get("authorization") or headers.get("x-api-key")) if self.key is None else None
        address, *_ = scope.get("client") or ("",)
        return hashlib.sha256(f"address {address}".encode() if key is None else key.encode()).hexdigest()[:16]

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """**Raises:** `ApiError` for a request that is refused by its headers alone."""
        if self.hosts is not None:
            check_host(headers, self.hosts)
        if self.key is None:
            check_origin(method, path, headers, self.origins)
            if path in GUARDED_PATHS and not self.rollout_routes:
                raise needs_key(path)
        elif path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            keys = [headers.get("x-api-key"), bearer if scheme.lower() == "bearer" else None]
            given = [key.strip().encode("latin-1") for key in keys if key is not None]
            if not any([hmac.compare_digest(key, self.key) for key in given]):
                found = "the API key is wrong" if given or scheme else "an API key is required"
                message = f"{found}; send the header Authorization: Bearer <key>, or x-api-key: <key>"
                raise ApiError(401, message, code="invalid_api_key")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(415, f"the body comes in the Content-Encoding {shown(coding)}; send it as it is")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self.max_body):
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        """`receive`, until more than `max_body` bytes have come: they were sent in chunks, with no length announced."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body:
                raise HTTPException(413, str(self._too_large()))
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body} bytes; send fewer or shorter prompts at once")


def needs_key(action: str) -> ApiError:
    """The refusal of an `action` on all clients' requests, by a server that doesn't know who asks."""
    way = "with --api-key, or with --enable-rollout-routes if everyone who reaches it may do that"
    return ApiError(403, f"{action} acts on all clients' requests; start the server {way}")


class Refusals:
    """Logs what was refused, failed or cut off: `LINES` in each `PERIOD`, then how many more there were."""

    def __init__(self) -> None:
        self._logged = self._suppressed = 0
        self._ends: asyncio.TimerHandle | None = None

    def note(self, status: int, asked: str, request_id: str, body: bytes) -> None:
        """Log a response. `asked` is its request's method and path, `body` an error's."""
        if not self._has_room():
            return
        level = logging.WARNING if status >= 500 else logging.INFO
        message, field = _cause(body)
        log.log(
            level,
            "%d %s%s: %s (request id %s)",
            status,
            safe(asked, 100),
            f", field {safe(field, 100)}" if field else "",
            safe(message, MAX_LINE),
            request_id,
        )

    def note_connection(self, client: tuple[str, int] | None, did: str) -> None:
        """Log why a connection ends before a request is there, or its response."""
        if self._has_room():
            log.info("%s %s", client[0] if client else "a client", did)

    def _has_room(self) -> bool:
        """Count a line, and say whether it may be written."""
        if self._ends is None:
            self._ends = asyncio.get_running_loop().call_later(PERIOD, self._end)
        if self._logged == LINES:
            self._suppressed += 1
            return False
        self._logged += 1
        return True

    def _end(self) -> None:
        if self._suppressed:
            log.warning("%d more requests were refused or failed within %g s", self._suppressed, PERIOD)
        self._logged = self._suppressed = 0
        self._ends = None


def safe(text: str, limit: int) -> str:
    """`text` on one line, without what a terminal would act on, cut to `limit` characters."""
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def _cause(body: bytes) -> tuple[str, str | None]:
    """Message and field of an error body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return "", None
