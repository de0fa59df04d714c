"""`/v1/responses`: OpenAI's Responses API over the same chats, and the responses that later requests may go on from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from jaxspec.config.request import RequestError, SamplingParams
from server.http.errors import ApiError
from server.protocol import ChatRequest
from server.protocol.responses import PLACES, ResponsesRequest
from server.replies.responses import ResponsesReply
from server.response_store import ResponseStore, Stored
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    store = ResponseStore()

    def stored(name: str, param: str | None = None) -> Stored:
        """**Raises:** `ApiError` for a response that isn't kept."""
        found = store.get(name)
        if found is None:
            message = (
                f"the response {name[:100]!r} is not kept: it was never made, was sent with store: false, failed, was "
                "deleted, or had to make room; send the whole conversation as input"
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Respond to text, or to a conversation's items."""
        serving.check(body.model)
        before = body.previous_response_id
        history = [] if before is None else stored(before, "previous_response_id").items
        with _their_fields():
            chat = ChatRequest.model_validate(body.chat(history))
            params = chat.sampling(serving.sampling)

            def keep(response: dict[str, Any]) -> None:
                if body.store is not False:
                    store.put(response, [*history, *body.input, *response["output"]])

            async def make() -> ResponsesReply:
                prompt = await serving.chat_prompt(chat)
                speech = serving.speech(chat, prompt)
                settings, head = speech.sampling(params), _head(body, params, serving.name)
                options = {"stream": bool(body.stream), "done": keep}
                return ResponsesReply(prompt, settings, serving.texts, head, speech, **options)

            return await serving.answer(request, make(), body.stream, body.store)

    @app.get("/v1/responses/{name}")
    async def response(name: str, stream: bool = False) -> dict[str, Any]:
        """A response that is kept. Its events aren't."""
        found = stored(name)
        if stream:
            raise ApiError(400, "a kept response can't be streamed again; leave stream out", param="stream")
        return found.response

    @app.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> dict[str, Any]:
        """Forget a response."""
        stored(name)
        store.remove(name)
        return {"id": name, "object": "response.deleted", "deleted": True}


def _head(body: ResponsesRequest, params: SamplingParams, model: str) -> dict[str, Any]:
    """The fields of a response that say what was asked for."""
    tools = [{"description": None, "parameters": None, "strict": False, **tool} for tool in body.tools or ()]
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "tools": tools,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "background": False,
        "truncation": "disabled",
        "metadata": body.metadata or {},
    }


@contextmanager
def _their_fields() -> Iterator[None]:
    """Let errors about the chat name the fields of the response's body."""
    try:
        yield
    except RequestError as error:
        raise _renamed(error) from error
    except ValidationError as error:
        problems = error.errors(include_url=False)
        cause = (problems[0].get("ctx") or {}).get("error")
        if not problems[0]["loc"] and isinstance(cause, RequestError):
            raise _renamed(cause) from error
        raise RequestValidationError(
            [{**each, "loc": ("body", *_place(each["loc"]))} for each in problems],
        ) from error


def _renamed(error: RequestError) -> RequestError:
    message = str(error)
    for name in ("max_completion_tokens", "max_tokens", "response_format", "reasoning_effort"):
        message = re.sub(rf"\b{name}\b", PLACES[name], message)
    field, dot, rest = (error.param or "").partition(".")
    place = {"prompt": "input", **PLACES}.get(field, field)
    return RequestError(message, f"{place}{dot}{rest.removeprefix('json_schema.')}" or None, error.code)


def _place(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Where a field of the chat stands in the response's body. A message has no one item, so it is `input`."""
    if not loc or loc[0] not in PLACES:
        return loc
    return (PLACES[loc[0]],) if loc[0] == "messages" else (PLACES[loc[0]], *loc[1:])
