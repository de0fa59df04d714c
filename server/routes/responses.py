"""`/v1/responses`: OpenAI's Responses API over the same chats, and the responses that later requests may go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError, SamplingParams
from server.http.errors import ApiError
from server.http.field_names import their_fields
from server.protocol import ChatRequest
from server.protocol.base import Place
from server.protocol.responses import PLACES, ResponsesRequest, reference
from server.replies import Prompt
from server.replies.responses import ResponsesReply, new_id
from server.response_store import ResponseStore, Stored
from server.routes.serving import Serving

LEADING = ("system", "developer")  # roles whose messages at a conversation's beginning are never truncated


def add(app: FastAPI, serving: Serving) -> None:
    store = ResponseStore()

    def items_of(body: ResponsesRequest) -> tuple[list[dict[str, Any]], int]:
        """The items of a request's whole conversation, and how many of them are of the response before."""
        before = body.previous_response_id
        history = [] if before is None else _stored(store, before, "previous_response_id").items
        return [*history, *(_resolved(store, item) for item in body.input)], len(history)

    async def prompt_of(body: ResponsesRequest, chat: ChatRequest) -> Prompt:
        return await (_truncated if body.truncation == "auto" else Serving.chat_prompt)(serving, chat)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Respond to text, or to a conversation's items."""
        lora = serving.check(body.model, lora=body.lora_path)
        given, before = items_of(body)
        with _chat_of(body, given, before) as chat:
            params = chat.sampling(serving.sampling)

            def keep(response: dict[str, Any]) -> None:
                if body.store is not False:
                    store.put(response, [*map(_with_id, given), *response["output"]])

            async def make() -> ResponsesReply:
                prompt = await prompt_of(body, chat)
                speech = serving.speech(chat, prompt)
                settings, head = speech.sampling(params), _head(body, params, lora or serving.name)
                options = {"stream": bool(body.stream), "as_summary": bool(head["reasoning"]["summary"])}
                options |= {"done": keep, "origin": body.toolbox.origin}
                return ResponsesReply(prompt, settings, serving.texts, head, speech, **options)

            return await serving.answer(request, make(), body.stream, body.store, body.priority, lora)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        """The input tokens of a response."""
        serving.check(body.model, lora=body.lora_path)
        with _chat_of(body, *items_of(body)) as chat:
            prompt = await prompt_of(body, chat)
        return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}

    @app.get("/v1/responses/{name}")
    async def response(name: str, stream: bool = False) -> dict[str, Any]:
        """A response that is kept. Its events aren't."""
        found = _stored(store, name)
        if stream:
            raise ApiError(400, "a kept response can't be streamed again; leave stream out", param="stream")
        return found.response

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(
        name: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """The items that a kept response answers, those of the responses before it too; the newest first."""
        found = _stored(store, name)
        items = found.items[: len(found.items) - len(found.response["output"])]
        items = items[::-1] if order == "desc" else items
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise ApiError(404, f"the response has no input item {after[:100]!r}", param="after")
            items = items[places[0] + 1 :]
        page = [_listed(item) for item in items[:limit]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}

    @app.delete("/v1/responses/{name}")
    async def delete_response(name: str) -> dict[str, Any]:
        """Forget a response."""
        _stored(store, name)
        store.remove(name)
        return {"id": name, "object": "response.deleted", "deleted": True}


@contextmanager
def _chat_of(body: ResponsesRequest, items: list[dict[str, Any]], before: int) -> Iterator[ChatRequest]:
    """The chat that a body means, with the items of its whole conversation, of which the first `before` are of the
    response before. Within, errors about it name the body's fields."""
    places: list[list[Place]] = []
    with their_fields(PLACES, places):
        chat, places[:] = body.chat(items, before)
        yield ChatRequest.model_validate(chat)


def _stored(store: ResponseStore, name: str, param: str | None = None) -> Stored:
    """**Raises:** `ApiError` for a response that isn't kept."""
    found = store.get(name)
    if found is None:
        message = (
            f"the response {name[:100]!r} is not kept: it was never made, was sent with store: false, failed, was "
            "deleted, or had to make room; send the whole conversation as input"
        )
        raise ApiError(404, message, param=param, code="response_not_found")
    return found


def _resolved(store: ResponseStore, item: dict[str, Any]) -> dict[str, Any]:
    """An item, or the one that it refers to. **Raises:** `ApiError` for one that isn't kept."""
    if (name := reference(item)) is None:
        return item
    if (found := store.item(name)) is None:
        message = f"the item {name[:100]!r} is of no response that is kept; send the item itself"
        raise ApiError(404, message, param="input", code="item_not_found")
    return found


def _head(body: ResponsesRequest, params: SamplingParams, model: str) -> dict[str, Any]:
    """The fields of a response that say what was asked for."""
    blank = {"description": None, "parameters": None, "strict": False}
    tools = [{**(blank if tool["type"] == "function" else {}), **tool} for tool in body.toolbox.given]
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "reasoning": {
            "effort": body.reasoning and body.reasoning.effort,
            "summary": body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary),
        },
        "tools": tools,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "background": False,
        "truncation": body.truncation or "disabled",
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
    }


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    """An item with an id of its own, where the client gave it none."""
    return item if isinstance(item.get("id"), str) else {**item, "id": new_id("item")}


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item as lists have it: messages have a type, and their content in parts."""
    if not isinstance(item.get("role"), str):
        return item
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": content} | ({"annotations": []} if kind == "output_text" else {})]
    return {"status": "completed", **item, "type": "message", "content": content or []}


async def _truncated(serving: Serving, chat: ChatRequest) -> Prompt:
    """A chat's prompt, without as many of its oldest turns as it takes to fit the context and the output's limit.

    A turn begins at a user's message. System messages at the beginning stay, and so does the last turn.
    **Raises:** `RequestError`.
    """
    messages, room = chat.messages, serving.llm.config.context_length - (chat.limit or 1)
    head = next((place for place, message in enumerate(messages) if message.role not in LEADING), len(messages))
    turns = [head, *(place for place in range(head + 1, len(messages)) if messages[place].role == "user")]

    async def prompt(turn: int) -> Prompt:
        return await serving.chat_prompt(
            chat.model_copy(update={"messages": messages[:head] + messages[turns[turn] :]})
        )

    async def fits(turn: int) -> Prompt | None:
        try:
            found = await prompt(turn)
        except RequestError as error:
            if error.code != CONTEXT_EXCEEDED:
                raise
            return None
        return found if len(found.ids) <= room else None

    if (found := await fits(0)) is not None:
        return found
    low, high = 0, len(turns) - 1  # the first that fits is above `low`; `high` is taken if none does
    best = await fits(high) or await prompt(high)
    while high - low > 1:
        middle = (low + high) // 2
        if (found := await fits(middle)) is None:
            low = middle
        else:
            high, best = middle, found
    return best
