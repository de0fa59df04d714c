"""The body of `/v1/responses`, and what it means as a chat.

Invariant: a response is a chat, so that prompt, tools, structured output and sampling can't differ between the two
routes. Items become messages here, one by one, and any that can't is refused by its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PlainValidator

from jaxspec.config.request import MAX_LOGPROBS, MAX_STOP_IDS, RequestError
from server.protocol.base import (
    Body,
    CacheSalt,
    Integer,
    Place,
    Priority,
    Text,
    TokenId,
    at,
    at_most,
    check_text,
    describe_ranges,
    must_be,
    read_each,
    shown,
)
from server.protocol.chat import Effort, Variables, Verbosity
from server.protocol.described import NULL, add_rules, any_of, checked_later, fields
from server.protocol.generation import Biases, Sampled, Stop
from server.protocol.response_items import MAX_ITEMS, Choice, Format, Input, Tools
from server.protocol.response_tools import Toolbox, called
from server.protocol.tools import as_arguments

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
IMAGE = "input_image"
LOGPROBS = "message.output_text.logprobs"
# Reasoning comes unencrypted, which serves as well. The others are of hosted tools, which never come, and of pictures,
# which stay in the input items anyway.
INCLUDABLE = (
    *(LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "code_interpreter_call.outputs"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    "computer_call_output.output.image_url",
)
# Where this route's fields stand in a chat's body, for errors that name them.
PLACES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}
# Fields that mean in a chat what they mean here.
SAME = (
    *Sampled.model_fields,
    *("model", "stream", "parallel_tool_calls", "seed", "min_tokens", "chat_template_kwargs", "cache_salt"),
)


def _items(value: Any) -> list[dict[str, Any]]:
    """`input` as a list of items, each checked as far as this route knows it."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": check_text(value)}]
    if not isinstance(value, list) or not value:
        raise RequestError(f"must be a string or a list of items, not empty, got {shown(value)}")
    if len(value) > MAX_ITEMS:
        raise RequestError(f"has {len(value)} items, at most {MAX_ITEMS} are allowed")
    read_each(value, lambda item: _message(item) if reference(item) is None else None)
    return value


def reference(item: Any) -> str | None:
    """The id of the item that an `item_reference` stands for, whose type may be left out; None for another item."""
    if not isinstance(item, dict) or (item.get("type") != "item_reference" and item.keys() != {"id"}):
        return None
    return _string(item, "id")


def _message(item: Any) -> dict[str, Any]:
    """An item as (part of) a chat message. **Raises:** `RequestError`."""
    if not isinstance(item, dict):
        raise RequestError(f"must be an object, got {shown(item)}")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RequestError(f"the role must be one of {', '.join(ROLES)}, got {shown(role)}")
        if "content" not in item:
            raise RequestError("a message needs its content")
        return {"role": role, "content": _parts(item, "content")}
    if kind == "reasoning":
        text = _text(item, "content") or _text(item, "summary")
        return {"role": "assistant", "reasoning_content": text}
    if kind == "custom_tool_call":
        item, kind = item | {"arguments": as_arguments(_string(item, "input"))}, "function_call"
    if kind == "function_call":
        call = {"name": called(item, _string(item, "name")), "arguments": _string(item, "arguments")}
        calls = [{"id": _string(item, "call_id"), "type": "function", "function": call}]
        return {"role": "assistant", "tool_calls": calls}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = _parts(item, "output")
        return {"role": "tool", "tool_call_id": _string(item, "call_id"), "content": output}
    raise RequestError(
        f"items of type {shown(kind)} are not supported; send message, reasoning, item_reference, function_call, "
        "custom_tool_call, or the output of one"
    )


def _string(item: dict[str, Any], name: str) -> str:
    if not isinstance(item.get(name), str):
        raise RequestError(f"needs a string as its {name}, got {shown(item.get(name))}")
    return check_text(item[name])


def _parts(item: dict[str, Any], name: str) -> str | list[dict[str, Any]]:
    """An item's text, or, if there are pictures, its parts as a chat has them."""
    value = item.get(name)
    if not isinstance(value, list) or not any(map(_is_image, value)):
        return _text(item, name)
    with at(name):
        return read_each(value, _part)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == IMAGE


def _part(part: Any) -> dict[str, Any]:
    if not _is_image(part):
        return {"type": "text", "text": _part_text(part)}
    url = part.get("image_url")
    if not isinstance(url, str):
        problem = "a file_id, and files are not kept" if part.get("file_id") else f"the image_url {shown(url)}"
        raise RequestError(f"has {problem}; send the picture's URL as its image_url")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(item: dict[str, Any], name: str) -> str:
    """An item's text, or parts of it joined by a newline."""
    value = item.get(name)
    if value is None and name != "output":
        return ""
    with at(name):
        if isinstance(value, str):
            return check_text(value)
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise RequestError(f"must be a string or a list of at most {MAX_ITEMS} text parts, got {shown(value)}")
        return "\n".join(read_each(value, _part_text))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        part = {"text": part.get("refusal")}
    elif kind not in TEXT_PARTS:
        raise RequestError(f"has the type {shown(kind)}; this server reads text and {IMAGE}")
    return _string(part, "text")


def messages(
    instructions: str | None, items: Iterable[dict[str, Any]], before: int = 0
) -> tuple[list[dict[str, Any]], list[list[Place]]]:
    """A chat's messages, and where each one's parts stand in the client's body; the first `before` items stand in the
    response that it goes on from.

    What an assistant thought, said and called without a break is one message; so are the instructions and the system
    messages that follow them, for many templates allow one alone.
    """
    found: list[dict[str, Any]] = []
    places: list[list[Place]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
        places.append([("instructions",)])
    for number, item in enumerate(items, -before):
        message, place = _message(item), _places(item, number)
        last = found[-1] if found else {}
        instructs = message["role"] in ("system", "developer")
        if instructs and [each["role"] for each in found] in (["system"], [message["role"]]):
            if isinstance(last["content"], str) and isinstance(message["content"], str):
                last["content"] += "\n\n" + message["content"]
                continue
            last["content"] = [*_as_parts(last["content"], "\n\n"), *_as_parts(message["content"])]
            places[-1] += place
        elif message["role"] == "assistant" == last.get("role") and _goes_on(last, message):
            last.setdefault("tool_calls", [])
            last["tool_calls"] = last["tool_calls"] + message.get("tool_calls", [])
            last |= {key: value for key, value in message.items() if key != "tool_calls"}
            places[-1] = place if "content" in message else places[-1]
        else:
            found.append(message)
            places.append(place)
    for message in found:
        message.setdefault("content", "")
        if not message.get("tool_calls", True):
            del message["tool_calls"]
    return found, places


def _places(item: dict[str, Any], number: int) -> list[Place]:
    """Where the parts of the input's item of a number stand; below 0 it is of the response before."""
    name = next((name for name in ("content", "output") if name in item), None)
    parts = item[name] if name and isinstance(item[name], list) else []
    if number < 0:
        return [("previous_response_id",)] * max(len(parts), 1)
    return [("input", number, name, part) for part in range(len(parts))] or [("input", number)]


def _as_parts(content: str | list[dict[str, Any]], end: str = "") -> list[dict[str, Any]]:
    return [{"type": "text", "text": content + end}] if isinstance(content, str) else content


def _goes_on(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether a part of an assistant's turn continues the parts before it: reasoning, then text, then calls."""
    if "reasoning_content" in message:
        return False
    return "content" not in message or ("content" not in last and not last.get("tool_calls"))


class TextConfig(Body):
    """`text`: the format of the output, and how long it should be."""

    format: Format | None = None
    verbosity: Annotated[Any, checked_later(Verbosity)] | None = None


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Body):
    """`reasoning`. Where a summary is wanted, of whatever length, the reasoning is it: many clients show no other."""

    effort: Annotated[Any, checked_later(Effort)] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # its older name


def _describe(schema: dict[str, Any]) -> None:
    describe_ranges(schema)
    free = {"anyOf": [NULL, {"enum": ["auto", "none"]}]}
    add_rules(schema, any_of(fields(tool_choice=free), fields(("tools",), tools={"type": "array", "minItems": 1})))


Includable = Annotated[str, Field(json_schema_extra={"enum": [*INCLUDABLE]})]
Ids = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)]


class ResponsesRequest(Sampled):
    """The body of `/v1/responses`. None, everywhere, means the default."""

    model_config = ConfigDict(json_schema_extra=_describe)

    IGNORED = frozenset(
        {
            *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
            *("stream_options", "client_metadata"),
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("conversation", "prompt", "context_management", "moderation"), ()),
        "background": (False,),
    }

    input: Annotated[list[dict], PlainValidator(_items, json_schema_input_type=Input)]
    model: str | None = None
    instructions: Text | None = None
    max_output_tokens: Integer | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: (
        Annotated[list[Includable], Field(json_schema_extra={"maxItems": MAX_ITEMS}), at_most(MAX_ITEMS, "entries")]
        | None
    ) = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[Toolbox, PlainValidator(Toolbox.of, json_schema_input_type=Tools)] | None = None
    tool_choice: Annotated[Any, checked_later(Choice)] | None = None
    parallel_tool_calls: bool | None = None
    # Of the calls of hosted tools, which are never made: calls of the client's own tools don't count.
    max_tool_calls: Annotated[Integer, Field(ge=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Annotated[dict[str, str], must_be(dict, "an object")] | None = None
    stream: bool | None = None
    # vLLM's, beyond OpenAI's
    seed: Integer | None = None
    stop: Annotated[Any, checked_later(Stop)] | None = None
    stop_token_ids: Annotated[Any, checked_later(Ids)] | None = None
    min_tokens: Integer | None = None
    logit_bias: Annotated[Any, checked_later(Biases)] | None = None
    chat_template_kwargs: Variables | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    lora_path: Text | None = None  # SGLang's: an adapter's name

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def toolbox(self) -> Toolbox:
        return self.tools or Toolbox()

    def chat(self, items: Iterable[dict[str, Any]], before: int = 0) -> tuple[dict[str, Any], list[list[Place]]]:
        """The body of the chat that this is, with the items of the whole conversation, and where the parts of its
        messages stand; `before` is as of `messages`. **Raises:** `RequestError`."""
        if bad := [name for name in self.include or () if name not in INCLUDABLE]:
            raise RequestError(f"{bad[0]!r} can't be included; this server has {', '.join(INCLUDABLE)}", "include")
        chat = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        chat["messages"], places = messages(self.instructions, items, before)
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.wants_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.verbosity is not None:
            chat["verbosity"] = self.text.verbosity
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = given = self.text.format
            if given.get("type") == "json_schema":
                chat["response_format"] = {"type": "json_schema", "json_schema": _without(given, "type")}
        try:
            tools, choice = self.toolbox.choose(self.tool_choice)
        except RequestError as error:
            raise RequestError(str(error), "tool_choice") from None
        if tools:
            chat["tools"] = tools
        if choice is not None:
            chat["tool_choice"] = choice
        return chat, places


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}
