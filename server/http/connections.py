"""One HTTP connection: how many there may be, how large a request's head, and how long a client may take.

Invariant: a client holds a connection, and with it a request, a slot and memory, only while it does its part. A client
is cut off that sends nothing of its request, or reads nothing of its response, for `idle_timeout` seconds; whose
headers take twice as long; or that sends less than `MIN_RATE` bytes of a body a second. All of a request but its body
(request line, headers, trailers, what stands between chunks) has at most `MAX_HEAD` bytes, counted as they arrive.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from http import HTTPStatus
from typing import Any

import httptools
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.http.errors import INVALID, error_body
from server.http.gate import Refusals

log = logging.getLogger("jaxspec.server")

OTHER_FILES = 256  # files and sockets that a server has open beside its connections
REFUSABLE = OTHER_FILES // 2  # connections beyond `max_connections` that are answered; more are cut off at once
RETRY_SECONDS = 1  # in Retry-After of whoever is refused for want of room
MAX_HEAD = 64 * 2**10  # bytes
MIN_RATE = 240  # bytes a second
LOOKS = 8  # at each connection, in each `idle_timeout`
LINGER_SECONDS = 2.0  # in which the rest of a refused request is dropped, so that its client reads why
HEAD, BODY = "head", "body"
INVALID_HEAD = {
    HTTPStatus.BAD_REQUEST: "this is not a valid HTTP/1.1 request",
    HTTPStatus.REQUEST_URI_TOO_LONG: f"the request line is too long; with the headers it has at most {MAX_HEAD} bytes",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: f"headers or trailers are too large; at most {MAX_HEAD} bytes",
}


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits.

    **Arguments:** `max_connections` that may be open; a request on one more is answered with 503. `idle_timeout`, in
    seconds, for the next bytes of a request that has begun to arrive, and for a response's to be read. `refusals` logs
    for all connections.
    """

    def __init__(
        self,
        *args: Any,
        max_connections: int,
        idle_timeout: float,
        refusals: Refusals | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._max_connections, self._idle_timeout = max_connections, idle_timeout
        self._refusals = refusals or Refusals()
        self._part: str | None = HEAD  # of a request that is due; None: a request is complete
        self._since = self._heard = self._read = self.loop.time()  # begin of the part; last bytes in; last bytes out
        self._body = 0  # bytes since `_since`
        self._overhead = 0  # bytes other than the body's since its last one, or since the request began
        self._refused, self.url = False, b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        excess = len(self.connections) - self._max_connections
        if excess > REFUSABLE:
            return transport.abort()
        if excess > 0:
            self.app = self._refuse
        self._timer = self.loop.call_later(self._idle_timeout / LOOKS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._heard = self.loop.time()
        if self._part is None:
            self._begin(HEAD)
        self._overhead += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to a protocol that isn't spoken here; the request is answered all the same
        except httptools.HttpParserError:
            self._reject(HTTPStatus.BAD_REQUEST)
        if self._part is not None and self._overhead > MAX_HEAD:
            self._reject(self._too_large())

    def on_message_begin(self) -> None:
        if self._part != HEAD:  # behind another request, in the same data
            self._begin(HEAD)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == HEAD:  # a trailer comes after the checks of headers, and nobody asks for it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers) > MAX_HEAD:
            self._reject(self._too_large())
        if not self._refused:
            self._begin(BODY)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._overhead = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = None
        if not self._refused:
            super().on_message_complete()

    def resume_writing(self) -> None:
        self._read = self.loop.time()
        super().resume_writing()

    def _begin(self, part: str) -> None:
        self._part, self._since, self._body, self._overhead = part, self.loop.time(), 0, 0

    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _too_large(self) -> HTTPStatus:
        long = self._part == HEAD and len(self.url) > MAX_HEAD // 2
        return HTTPStatus.REQUEST_URI_TOO_LONG if long else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE

    def _reject(self, status: HTTPStatus) -> None:
        """Answer a request that no application sees, and take no other from its client."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._refusals.note_connection(self.client, f"was sent {status}: {INVALID_HEAD[status]}")
        if self._responding():
            if self.cycle.response_started or self._part == HEAD:  # another response goes first
                return self.transport.abort()
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = {"Connection": "close"}
        reply = JSONResponse(error_body(INVALID_HEAD[status], INVALID), status, headers)
        lines = [f"HTTP/1.1 {status} {status.phrase}".encode(), *(b": ".join(each) for each in reply.raw_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", reply.body]))
        self.transport.write_eof()  # `close` while more comes would reset the connection, and lose the answer
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _look(self) -> None:
        """Cut the client off if it hasn't done its part; look again soon if it has."""
        now, limit = self.loop.time(), self._idle_timeout
        self._timer = self.loop.call_later(limit / LOOKS, self._look)
        if self.transport.get_write_buffer_size() == 0:
            self._read = now
        if self._part is None or self.flow.read_paused or (self._part == HEAD and self._responding()):
            self._since, self._heard, self._body = now, now, 0  # the server's turn
        if now - self._read >= limit:
            self._cut_off(f"read nothing of a response for {limit:g} seconds")
        elif now - self._heard >= limit:
            nothing = self.cycle is None and not self._overhead
            self._cut_off(f"sent {'nothing' if nothing else 'half a request, then nothing'} for {limit:g} seconds")
        elif self._part == HEAD and now - self._since >= 2 * limit:
            self._cut_off(f"sent no whole headers in {2 * limit:g} seconds")
        elif self._part == BODY and now - self._since >= limit:
            if self._body < MIN_RATE * limit or not self._responding():
                self._cut_off(f"sent {self._body} bytes of a body in {limit:g} seconds")
            self._since, self._body = now, 0

    def _cut_off(self, did: str) -> None:
        self._refusals.note_connection(self.client, f"{did}; the connection is cut (--idle-timeout)")
        self.transport.abort()  # `close` would wait until what is left has been read

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application that takes no more requests."""
        message = f"{self._max_connections} connections are open, as many as the server allows (--max-connections)"
        headers = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
        body = error_body(f"{message}; try again later", "server_error", code="too_many_connections")
        await JSONResponse(body, 503, headers)(scope, receive, send)


def allow_open_files(max_connections: int) -> int:
    """Raise this process's limit of open files as far as the system allows, and say if that is too low.

    Returns how many connections there may be: `max_connections`, or fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit >= wanted:
        return max_connections
    allowed = max(limit - OTHER_FILES, 1)
    log.warning(
        "the system allows this process %d open files, enough for %d connections instead of %d; raise it with "
        "`ulimit -Hn`, or lower --max-connections",
        limit,
        allowed,
        max_connections,
    )
    return allowed
