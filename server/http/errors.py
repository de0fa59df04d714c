"""OpenAI's error format, Anthropic's where its API is spoken, and the one place that turns an exception into it.

Invariant: every response that isn't a success has the body `{"error": {"message", "type", "param", "code"}}`, or for
Anthropic's clients that of `as_anthropic`, and none carries a traceback.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from jaxspec.config.request import Busy, RequestError
from jaxspec.engine.adapters import UNKNOWN
from jaxspec.engine.async_llm import EngineDead, Overloaded, RequestFailed, RequestTimeout
from server.protocol.base import MAX_NAME, MISSPELT, field_path, shown

log = logging.getLogger("jaxspec.server")

INVALID = "invalid_request_error"
FAILED = "the server failed on this request; its log has the details"
STOPPING = "the server is shutting down; send the request again once it is back"
MAX_SHOWN = 3  # problems of one body that are spelled out
GONE = 499  # nginx's status for a client that left; nobody reads it
MESSAGES = "/v1/messages"
# Anthropic's types, by status
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Anthropic's codes of fields that are refused, by which its SDKs' tool runners go on without them
REFUSED_FIELDS = {"thread": "thread_unsupported_request"}
MAX_MESSAGE = 2000  # characters: a message quotes what was sent, which may be megabytes


class ApiError(Exception):
    """A request that fails with `status`. `kind` is OpenAI's `type`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: Any = None,
        retry_after: int | None = None,  # seconds
    ):
        super().__init__(message)
        self.status = status
        self.headers = None if retry_after is None else {"Retry-After": str(retry_after)}
        self.body = error_body(message, kind, param, code)


def error_body(message: str, kind: str, param: str | None = None, code: Any = None) -> dict[str, Any]:
    return {"error": {"message": _sendable(message), "type": kind, "param": param and _sendable(param), "code": code}}


def as_anthropic(status: int, body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """An error's body in Anthropic's words. Its message begins with the field at fault, which has no place there."""
    error = body["error"]
    kind = ANTHROPIC_TYPES.get(status) or (INVALID if status < 500 else "api_error")
    field, message = error["param"], error["message"]
    message = f"{field}: {message}" if field and not message.startswith(field) else message
    told: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    if code := REFUSED_FIELDS.get(field):
        told["error"]["details"] = {"error_code": code}
    return told if request_id is None else told | {"request_id": request_id}


def error_response(
    scope: Scope, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response with an error's `body`, as the API of the request's path has it."""
    if speaks_anthropic(scope):
        body = as_anthropic(status, body, scope.get("state", {}).get("request_id"))
    return JSONResponse(body, status, headers)


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is Anthropic's by its path, or by the header that its clients send to every route."""
    if scope["path"] == MESSAGES or scope["path"].startswith(f"{MESSAGES}/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def _sendable(text: str) -> str:
    """`text` cut short, and with lone surrogates, which a field's name may have and UTF-8 can't spell, escaped."""
    short = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
    return short.encode(errors="backslashreplace").decode()


def describe(error: Exception, engine_error: BaseException | None) -> ApiError:
    """Turn `error`, raised while its request ran, into the client's. An unknown one's details go to the log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError) and error.code == UNKNOWN:  # an adapter unloaded since the route's check
        return ApiError(404, str(error), param="model", code=UNKNOWN)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDead):
        return engine_died(engine_error) if engine_error else ApiError(503, STOPPING, kind="server_error")
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", retry_after=1)
    if isinstance(error, Busy):
        return ApiError(503, str(error), kind="server_error", code="busy", retry_after=2)
    if isinstance(error, RequestTimeout):
        return ApiError(504, str(error), kind="server_error", code="request_timeout")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), kind="server_error", code="request_failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, FAILED, kind="server_error")


@contextmanager
def chat_fields(limit_name: str) -> Iterator[None]:
    """Within, errors about `prompt` and `max_tokens` name a chat's fields instead: `messages`, and `limit_name`."""
    try:
        yield
    except RequestError as error:
        if error.param not in ("prompt", "max_tokens", "min_tokens"):  # others don't mention them, and may quote text
            raise
        param = {"prompt": "messages", "max_tokens": limit_name}.get(error.param, error.param)
        raise RequestError(re.sub(r"\bmax_tokens\b", limit_name, str(error)), param, error.code) from error


def engine_died(error: BaseException) -> ApiError:
    message = f"the engine stopped on {type(error).__name__} and serves no more; see the server's log and restart it"
    return ApiError(503, message, kind="server_error", code="engine_dead")


def install(app: FastAPI) -> None:
    """Register a handler for everything that a route, the router or the body parser can raise."""

    @app.exception_handler(ApiError)
    @app.exception_handler(EngineDead)
    @app.exception_handler(RequestError)
    async def _described(request: Request, error: Exception) -> JSONResponse:
        told = describe(error, None)
        return error_response(request.scope, told.status, told.body, told.headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = [_problem(item) for item in error.errors()]
        message = "; ".join(text for text, _ in problems[:MAX_SHOWN])
        if len(problems) > MAX_SHOWN:
            message += f"; and {len(problems) - MAX_SHOWN} more"
        return error_response(request.scope, 400, error_body(message, INVALID, problems[0][1]))

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            paths, path = sorted(app.openapi()["paths"]), request.url.path
            near = difflib.get_close_matches(path, paths, 1, MISSPELT) if len(path) <= MAX_NAME else ()
            message = f"no such route: {where}; {f'did you mean {near[0]}?' if near else f'routes: {", ".join(paths)}'}"
        elif error.status_code == 405:
            allowed = ", ".join(sorted(_methods(app, request)))
            message = f"{where} is not allowed; use {allowed}"
            return error_response(request.scope, 405, error_body(message, INVALID), {"Allow": allowed})
        else:
            message = str(error.detail)
        kind = INVALID if error.status_code < 500 else "server_error"
        return error_response(request.scope, error.status_code, error_body(message, kind), error.headers)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The methods of all routes at a request's path; Starlette names those of the first alone."""
    routes = [route for route in app.routes if route.matches(request.scope)[0] != Match.NONE]
    return set().union(*(route.methods or () for route in routes if isinstance(route, Route)))


def _problem(item: dict[str, Any]) -> tuple[str, str | None]:
    """One pydantic error as (sentence, path of the field)."""
    place = _path(item["loc"][1:])  # loc[0] is "body"
    cause = (item.get("ctx") or {}).get("error")
    if isinstance(cause, RequestError):
        param = field_path(place, cause.param) or None
        return (f"{param}: {cause}" if place else str(cause)), param
    if item["type"] == "missing":
        return f"{place} is required", place
    if item["type"] == "too_short" and item["ctx"]["min_length"] == 1:
        return f"{place} is empty; it must have at least one item", place
    return f"{place}: {item['msg'].lower()}, got {shown(item.get('input'))}", place


def _path(loc: tuple[str | int, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
