"""A client for streams of completions. It spends as little Python per event as possible, so that it measures the
server.

One connection per request in flight, kept open for the next one. A general HTTP client costs 40 us an event here (httpx
0.28), half a core at 128 streams of 100 rounds a second; reading lines off a socket costs a few.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from jaxspec.bench.results import BenchError
from jaxspec.config.request import RequestMetrics, TokenLogprobs

SEPARATOR, EVENT, DONE = re.compile(rb"\n\n|\r\n\r\n"), b"data:", b"[DONE]"
# A role alone, sent before the first token, is no output; neither are a reason to end and the usage.
OUTPUT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|refusal|name|arguments)":\s*"[^"]')
LENGTH = re.compile(rb"(?m)^content-length:\s*(\d+)")
FAILURES = OSError, EOFError, asyncio.LimitOverrunError, ValueError  # of a connection, or of a server that isn't HTTP's


@dataclass
class Reply:
    """Reply to one request: times in seconds on the performance counter."""

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)  # of events that bring output, one per round
    ended: float = 0.0
    error: str | None = None
    # offline alone:
    metrics: RequestMetrics | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # if asked for


class Client:
    """Talks HTTP/1.1 to one server. Use within one event loop.

    **Raises:** `BenchError` for a URL that isn't http://host[:port].
    """

    def __init__(self, url: str, api_key: str | None = None):
        try:
            parts = urlsplit(url)
            self._address = parts.hostname, parts.port or 80
            looks_right = parts.scheme == "http" and parts.hostname and parts.path.strip("/") in ("", "v1")
        except ValueError:
            looks_right = False
        if not looks_right:
            raise BenchError(f"--base-url must look like http://127.0.0.1:30000, without TLS, got {url}")
        self._key = api_key
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object. **Raises:** `BenchError` if the server can't be reached, refuses or gives another thing."""
        try:
            status, reader, writer = await self._send("GET", path, b"")
            body = b"".join([piece async for piece in _body(reader)])
            self._idle.append((reader, writer))
        except FAILURES as error:
            host, port = self._address
            raise BenchError(f"GET http://{host}:{port}{path}: {error}; is the server running?") from error
        if status != 200:
            raise BenchError(f"GET {path}: status {status}: {body.decode(errors='replace')[:300]}")
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise BenchError(f"GET {path} gives no JSON object: {body.decode(errors='replace')[:300]!r}")
        return document

    async def stream(self, path: str, request: dict[str, Any]) -> Reply:
        """POST a request and follow its stream to the end. What goes wrong is in the reply's `error`."""
        body = json.dumps(request | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        reply = Reply(time.perf_counter())
        try:
            status, reader, writer = await self._send("POST", path, body)
            if status == 200:
                await _follow(reader, reply)
            else:
                text = b"".join([piece async for piece in _body(reader)]).decode(errors="replace")
                reply.error = f"status {status}: {text[:300]}"
            self._idle.append((reader, writer))
        except FAILURES as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.ended = time.perf_counter()
        return reply

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    def _take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection that the server hasn't closed meanwhile."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    async def _send(self, method: str, path: str, body: bytes):
        reader, writer = self._take() or await asyncio.open_connection(*self._address)
        host, port = self._address
        head = [f"{method} {path} HTTP/1.1", f"host: {host}:{port}", f"content-length: {len(body)}"]
        head += ["content-type: application/json"] if body else []
        head += [f"authorization: Bearer {self._key}"] if self._key else []
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        protocol, status, *_ = *(await reader.readuntil(b"\r\n")).split(), b"", b""
        if not protocol.startswith(b"HTTP/"):
            raise ConnectionError("the answer is not HTTP")
        return int(status), reader, writer


async def _body(reader: asyncio.StreamReader):
    """The rest of a response, piece by piece as it comes, whether it has a length or is chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif length := LENGTH.search(head):
        yield await reader.readexactly(int(length[1]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece
    if b"connection: close" in head:
        reader.feed_eof()  # so that no request is sent to it any more


async def _follow(reader: asyncio.StreamReader, reply: Reply) -> None:
    """Note when output comes, and the token counts that come last."""
    last, rest = b"", b""
    async for piece in _body(reader):
        *events, rest = SEPARATOR.split(rest + piece)
        chunks = [event for event in events if event.startswith(EVENT) and not event.endswith(DONE)]
        if chunks:
            last = chunks[-1]
            if any(map(OUTPUT.search, chunks)):  # what comes at once came from one round
                reply.arrivals.append(time.perf_counter())
    try:
        usage = json.loads(last[len(EVENT) :])["usage"]
        reply.prompt_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        reply.error = f"the stream ended with {last[:300].decode(errors='replace')!r} and not with its usage"
