"""The API's description, which says what the server does, and a page that shows it without fetching anything.

Invariant: each status that a route answers with is in the description, with the schema of its body.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from server.protocol.base import TOKEN_ID, describe_ranges
from server.protocol.response_models import ErrorResponse

PAGE = Path(__file__).parent / "reference" / "index.html"

ALWAYS = {
    401: "The API key is missing or wrong",
    403: "The host name, or the page that sent this, is not allowed",
    500: "The server failed on this request",
    503: "The engine can't serve now",
}
WITH_PATH = {404: "No such model"}
WITH_BODY = {
    400: "The request is invalid; `param` names the field",
    404: "No such model",
    413: "The body is too large",
    429: "Too many requests wait; try again later",
}


def stream_of(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with `whole`, or with events that each hold a `chunk`."""
    events: dict[str, Any] = {"text/event-stream": {}}  # a schema would be of one event, in some readers of this
    said = f"A `{whole.__name__}`; with `stream`, events whose data is a `{chunk.__name__}` each, then `[DONE]`"
    return {200: {"model": whole | chunk if chunk is not whole else whole, "description": said, "content": events}}


def describe(app: FastAPI, vocab: int) -> None:
    """Make `app` describe its errors and token ids, which are below `vocab`, and serve the page at `/docs`.

    To be called once all routes are there.
    """
    page = PAGE.read_text(encoding="utf-8")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_errors(
                get_openapi(title=app.title, version=app.version, routes=app.routes, summary=SUMMARY)
            )
            _bound_ids(app.openapi_schema, vocab)
        return app.openapi_schema

    app.openapi = openapi

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


SUMMARY = "An OpenAI-compatible API. Errors are OpenAI's error objects; every response has an X-Request-Id header."


def _bound_ids(schema: Any, vocab: int) -> None:
    """Set the maximum of every token id."""
    if isinstance(schema, dict) and schema.get("format") == TOKEN_ID["format"]:
        schema["maximum"] = vocab - 1
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _bound_ids(each, vocab)


def _with_errors(schema: dict[str, Any]) -> dict[str, Any]:
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    error = ErrorResponse.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= error.pop("$defs") | {"ErrorResponse": error}
    for each in schemas.values():
        describe_ranges(each)  # once more: FastAPI makes floats of them, which a seed doesn't fit
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)  # FastAPI's own, which this server answers with 400
            possible = ALWAYS | (WITH_BODY if "requestBody" in operation else {}) | (WITH_PATH if "{" in path else {})
            for status, text in possible.items():
                answers.setdefault(str(status), {"description": text})
            for status, answer in answers.items():
                if status >= "400":
                    answer["content"] = body
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return schema
