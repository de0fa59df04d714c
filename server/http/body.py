"""How a request's body becomes a checked model, whatever its size, beside the streams that run.

Invariant: a body over `INLINE` bytes is joined, parsed and validated in one thread of its own, by code that other
threads can interrupt (`json_reader`). So many large bodies wait for one another and delay nobody else.
"""

from __future__ import annotations

import email.message
import inspect
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from jaxspec.config.request import RequestError
from server.http.errors import GONE
from server.http.json_reader import parse
from server.workers import Workers

INLINE = 16 * 2**10  # bytes that are read in a few milliseconds, whatever they are
NOT_JSON = 'the body must be a JSON object, sent with "Content-Type: application/json"'

_reader = Workers(1, "jaxspec-body")


class BodyRoute(APIRoute):
    """A route whose body is read here instead of by FastAPI, which would do it on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        if self.response_field is None and inspect.signature(self.endpoint).parameters.keys() <= {"body", "request"}:
            handle = self._call

        async def read(request: Request) -> Response:
            try:
                chunks = [chunk async for chunk in request.stream()]
            except ClientDisconnect:
                return Response(status_code=GONE)
            if not chunks[0] or not _is_json(request.headers.get("content-type", "")):
                raise RequestError(NOT_JSON)
            if sum(map(len, chunks)) <= INLINE:
                value = _validated(b"".join(chunks), model)
            else:
                value = await _reader.run(lambda _: _validated(b"".join(chunks), model))
            return await handle(_Read(request.scope, request.receive, value))

        return read

    async def _call(self, request: _Read) -> Response:
        """Call a function of a body, and perhaps the request, that returns a response. FastAPI would resolve its
        dependencies first, which costs as much as checking a chat."""
        given = {"body": request.value} | ({"request": request} if self.dependant.request_param_name else {})
        return await self.endpoint(**given)


class _Read(Request):
    """A request with the model that its body holds, which FastAPI takes as it is."""

    def __init__(self, scope: Scope, receive: Receive, value: Any):
        super().__init__(scope, receive)
        self.value = value

    async def body(self) -> bytes:
        return b"read"

    async def json(self) -> Any:
        return self.value


def _validated(body: bytes, model: type[BaseModel]) -> BaseModel:
    """**Raises:** `RequestError` for what isn't JSON, `RequestValidationError` for what isn't such a model."""
    value = parse(body)
    if not isinstance(value, dict):
        raise RequestError(NOT_JSON)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in problems]) from None


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    header = email.message.Message()
    header["content-type"] = content_type
    kind, subtype = header.get_content_maintype(), header.get_content_subtype()
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
