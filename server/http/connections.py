"""One HTTP connection: how many there may be, and how long each may stand still.

Invariant: a client holds a connection, and with it a request, a slot and memory, only while it does its part. One that
sends no more of its request, or reads no more of its response, is cut off after `idle_timeout` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.http.errors import error_body

log = logging.getLogger("jaxspec.server")

OTHER_FILES = 256  # files and sockets that a server has open beside its connections
RETRY_SECONDS = 1  # in Retry-After of whoever is refused for want of room


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits.

    **Arguments:** `max_connections` that may be open; a request on one more is answered with 503. `idle_timeout`, in
    seconds, for the next bytes of a request that has begun to arrive, and for a response's to be read.
    """

    def __init__(self, *args: Any, max_connections: int, idle_timeout: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._max_connections, self._idle_timeout = max_connections, idle_timeout
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self.app = self._refuse
        self._reading = self._timer("sent nothing")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().data_received(data)
        complete = self.cycle is not None and not self.cycle.more_body
        if not (complete or self.flow.read_paused or self.transport.is_closing()):
            self._reading = self._timer("sent half a request, then nothing")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self._timer("read nothing of a response")

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _timer(self, did: str) -> asyncio.TimerHandle:
        return self.loop.call_later(self._idle_timeout, self._cut_off, did)

    def _cut_off(self, did: str) -> None:
        self._cancel()
        host = self.client[0] if self.client else "a client"
        log.info("%s %s for %g seconds; the connection is cut (--idle-timeout)", host, did, self._idle_timeout)
        self.transport.abort()  # `close` would wait until what is left has been read

    def _cancel(self) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._reading = self._writing = None

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
