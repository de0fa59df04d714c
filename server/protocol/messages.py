"""The body of `/v1/messages`, Anthropic's Messages API, and the chat that it means.

Invariant: a message is a chat, so that prompt, tools, structured output and sampling can't differ between the routes.
The chat grows at its end alone: a longer conversation's prompt begins with the shorter one's, so the prefix cache hits.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field, PlainValidator

from jaxspec.config.request import MAX_STOPS, RequestError
from server.protocol.base import (
    MAX_NAME,
    MISSPELT,
    Body,
    CacheSalt,
    Integer,
    Object,
    Open,
    Place,
    Priority,
    Text,
    at,
    at_most,
    must_be,
    read_each,
    refuse_misspelt,
    shown,
)
from server.protocol.chat import MAX_MESSAGES, Effort, Variables
from server.protocol.described import checked_later
from server.protocol.generation import Biases, Numbers, Sampled, StopString
from server.protocol.message_blocks import Blocks, parts, read_blocks, system_text, with_places
from server.protocol.message_tools import CHANGES, Choice, Tools, after_changes, read_choice, read_tools

# Where this route's fields stand in a chat's body, for errors that name them.
PLACES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# Fields that mean in a chat what they mean here, as far as this route has them.
SAME = (
    *Sampled.model_fields,
    *("model", "stream", "max_tokens", "seed", "min_tokens", "fixed_drafts", "cache_salt", "chat_template_kwargs"),
)
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
DISPLAYS = ("summarized", "omitted", "updates")  # all but omitted show thinking; later versions have others
BUDGETS = ((4096, "low"), (16384, "medium"))  # tokens of thinking below which a budget asks for an effort; else high


class _Turn(Open):
    role: Literal["user", "assistant"]
    content: str | Blocks


class _SystemConfig(Open):
    effort: NotRequired[Any]


class _SystemMessage(Open):
    role: Literal["system"]
    content: NotRequired[str | Blocks]
    clear_at: NotRequired[Literal["next_user_message", "never"] | None]
    output_config: NotRequired[_SystemConfig | None]


class _Thinking(Open):
    type: Literal[*THINKING]
    budget_tokens: NotRequired[int]
    display: NotRequired[str | None]


Messages = Annotated[list[_Turn | _SystemMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def _messages(value: Any) -> list[dict[str, Any]]:
    """`messages`, each a role and checked blocks. **Raises:** `RequestError` at the first that isn't one."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"must be a list of messages, not empty, got {shown(value)}")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"has {len(value)} messages, at most {MAX_MESSAGES} are allowed")
    return read_each(value, _message)


def _message(message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        given = f"the role {shown(role)}" if role is not None else shown(message)
        raise RequestError(f"must have the role user, assistant or system, got {given}")
    return _system_message(message) if role == "system" else {"role": role, **_blocks(message, role)}


def _blocks(message: dict[str, Any], role: str) -> dict[str, Any]:
    with at("content"):
        return {"blocks": read_blocks(message.get("content"), role)}


def _system_message(message: dict[str, Any]) -> dict[str, Any]:
    """A system message among the others: text, changes of tools, an effort from here on. `passing` ones are read with
    the user's message before them alone."""
    until, config = message.get("clear_at"), message.get("output_config")
    if until not in (None, "never", "next_user_message"):
        raise RequestError(f"clear_at must be next_user_message or never, got {shown(until)}")
    if not isinstance(config, dict | None):
        raise RequestError(f"output_config must be an object, got {shown(config)}")
    with at("output_config"):
        refuse_misspelt(config or {}, ("effort",))
    told = {"passing": until == "next_user_message", "effort": (config or {}).get("effort")}
    return {"role": "system", **_blocks({"content": [], **message}, "system message"), **told}


def _system(value: Any) -> str:
    return system_text(read_blocks(value, "system"))


def _thinking(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") not in THINKING:
        raise RequestError(f"must have the type {', '.join(THINKING[:-1])} or {THINKING[-1]}, got {shown(value)}")
    budget = value.get("budget_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise RequestError(f"budget_tokens must be a number of tokens, got {shown(budget)}")
    if not isinstance(display := value.get("display"), str | None):
        raise RequestError(f"display must be a string, one of {', '.join(DISPLAYS)}, got {shown(display)}")
    if display not in (None, *DISPLAYS) and (near := get_close_matches(display[:MAX_NAME], DISPLAYS, 1, MISSPELT)):
        raise RequestError(f"unknown display {shown(display)}; did you mean {near[0]}?")
    refuse_misspelt(value, ("type", "budget_tokens", "display"))
    return value


class OutputConfig(Body):
    """`output_config`: how hard to think, and the output's JSON schema."""

    LENIENT = True
    effort: Annotated[Any, checked_later(Effort)] | None = None
    format: Object | None = None


class CountTokensRequest(Body):
    """The body of `/v1/messages/count_tokens`: a message's, without a need for `max_tokens`."""

    LENIENT = True
    # Unread, `thread` would answer the newest messages alone, and `compaction` the conversation that it summarises.
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"thread": (), "compaction": (), "n": (1,)}
    RENAMED: ClassVar[dict[str, str]] = {name: place for name, place in PLACES.items() if name != "prompt"}

    messages: Annotated[list[dict], PlainValidator(_messages, json_schema_input_type=Messages)]
    model: Text | None = None
    system: Annotated[str, PlainValidator(_system, json_schema_input_type=str | Blocks)] | None = None
    tools: Annotated[list[dict], PlainValidator(read_tools, json_schema_input_type=Tools)] | None = None
    tool_choice: Annotated[tuple, PlainValidator(read_choice, json_schema_input_type=Choice)] | None = None
    thinking: Annotated[dict, PlainValidator(_thinking, json_schema_input_type=_Thinking)] | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None  # the beta's name of output_config.format
    chat_template_kwargs: Variables | None = None

    @property
    def places(self) -> dict[str, str]:
        """Where this body's fields stand in a chat's, for errors that name them."""
        beta = self.output_format is not None and not (self.output_config and self.output_config.format)
        return PLACES | {"response_format": "output_format"} if beta else PLACES

    def chat(self) -> tuple[dict[str, Any], list[list[Place]]]:
        """The body of the chat that this is, and for each of its messages where its parts stand.

        **Raises:** `RequestError`.
        """
        chat = {name: value for name in SAME if (value := getattr(self, name, None)) is not None}
        chat["messages"], places = as_chat(self.system, self.messages)
        if chat["messages"][-1]["role"] == "assistant" and "tool_calls" not in chat["messages"][-1]:
            chat["continue_final_message"] = True
        changes = [block for each in self.messages for block in each["blocks"] if block["type"] in CHANGES]
        if tools := after_changes(self.tools or [], changes):
            chat["tools"] = tools
        choice, parallel = self.tool_choice or (None, True)
        if choice is not None:
            chat["tool_choice"] = choice
        if not parallel:
            chat["parallel_tool_calls"] = False
        if (effort := self._effort()) is not None:
            chat["reasoning_effort"] = effort
        given = (self.output_config and self.output_config.format) or self.output_format
        if given is not None:
            schema = given.get("schema")
            if given.get("type") != "json_schema" or not isinstance(schema, dict):
                raise RequestError(
                    f'must have "type": "json_schema" and a schema, got {shown(given)}', "response_format"
                )
            with at("response_format"):
                refuse_misspelt(given, ("type", "schema"))
            if "continue_final_message" in chat:
                raise RequestError(
                    "a format is of a whole answer, and the last message begins one already; end the messages with a "
                    "user's, or leave the format out",
                    "response_format",
                )
            chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        return chat, places

    def _effort(self) -> str | None:
        """The chat's effort. A budget asks for one too: nothing else limits the tokens of thinking."""
        thinking = self.thinking or {}
        if thinking.get("type") == "disabled":
            return "none"
        if later := [each["effort"] for each in self.messages if each.get("effort") is not None]:
            return later[-1]
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        if thinking.get("type") != "enabled":
            return None
        budget = thinking.get("budget_tokens")
        return next((effort for most, effort in BUDGETS if budget is not None and budget < most), "high")


class MessagesRequest(CountTokensRequest, Numbers):
    """The body of `/v1/messages`. None, everywhere, means the default; a field that isn't here passes unread, unless it
    is nearly spelled as one that is."""

    IGNORED = frozenset({"speed"})  # Anthropic's, and no misspelt seed

    max_tokens: Annotated[Integer, Field(ge=0)]  # 0: the prompt is cached, for requests that begin with it
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=MAX_STOPS), at_most(MAX_STOPS, "strings"), must_be(list, "a list")]
        | None
    ) = None
    stream: bool | None = None
    # Beyond Anthropic's, as in chats
    seed: Integer | None = None
    stop_token_ids: Annotated[Any, checked_later(list[int])] | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    logit_bias: Annotated[Any, checked_later(Biases)] | None = None
    speculative: bool | None = None
    fixed_drafts: bool | None = None
    store: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    lora_path: Text | None = None  # SGLang's: an adapter's name

    def chat(self) -> tuple[dict[str, Any], list[list[Place]]]:
        chat, places = super().chat()
        if self.stop_sequences is not None:
            chat["stop"] = self.stop_sequences
        return chat, places

    @property
    def shows_thinking(self) -> bool:
        return (self.thinking or {}).get("display") != "omitted"


def as_chat(system: str | None, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[Place]]]:
    """A chat's messages, and for each where its parts stand.

    Neighbours of one role are one message. Results of tools come before the user's text. The text of a system message
    joins the user's message or the tool's result before it, or else the user's after it: it never moves to the head,
    which would change the whole prompt, and never stands between a call and its result.
    """
    found: list[dict[str, Any]] = []
    origins: list[int] = []
    told: list[dict[str, Any]] = []  # parts of system messages that wait for a user's message
    newest = max((place for place, each in enumerate(messages) if each["role"] == "user"), default=0)

    def add(place: int, message: dict[str, Any]) -> None:
        found.append(message)
        origins.append(place)

    def say(place: int, given: list[dict[str, Any]]) -> None:
        """Add parts of a user's message."""
        if found and found[-1]["role"] == "user":
            found[-1]["content"] += given
        else:
            add(place, {"role": "user", "content": given})

    if system:
        add(0, {"role": "system", "content": [{"type": "text", "text": system, "at": ("system",)}]})
    for place, message in enumerate(messages):
        blocks = with_places(message["blocks"], ("messages", place, "content"))
        if message["role"] == "system":
            text = system_text(blocks)
            if not text or (message["passing"] and place < newest):
                continue
            part = {"type": "text", "text": text, "at": ("messages", place, "content")}
            if not found:
                add(place, {"role": "system", "content": [part]})
            elif found[-1]["role"] == "assistant":
                told.append(part)
            else:
                found[-1]["content"].append(part)
        elif message["role"] == "user":
            results = [block for block in blocks if block["type"] == "tool_result"]
            for block in results:
                content = parts(block["content"])
                if block.get("is_error"):
                    content.insert(0, {"type": "text", "text": "Error:", "at": block["at"]})
                add(place, {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
            said = parts([block for block in blocks if block["type"] != "tool_result"])
            if results and not said:
                found[-1]["content"] += told
            else:
                say(place, told + said)
            told = []
        else:
            if told:
                say(place, told)
                told = []
            turn = _assistant(blocks)
            if found and found[-1]["role"] == "assistant":
                _extend(found[-1], turn)
            else:
                add(place, turn)
    if told:
        say(len(messages) - 1, told)
    if not found:
        raise RequestError("the messages are empty; send a user's message", "messages")
    if len(found) > 1 and found[-1] == {"role": "assistant", "content": []}:  # nothing of it could be continued
        found.pop()
        origins.pop()
    places = [
        [part["at"] for part in message["content"]] or [("messages", origin, "content")]
        for message, origin in zip(found, origins, strict=True)
    ]
    return [_plain(message) for message in found], places


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """An assistant's turn. What it thought in secret is left out: no model here can read it."""
    turn: dict[str, Any] = {"role": "assistant", "content": parts([each for each in blocks if each["type"] == "text"])}
    if thought := [block["thinking"] for block in blocks if block["type"] == "thinking" and block["thinking"]]:
        turn["reasoning_content"] = "\n".join(thought)
    if calls := [block["call"] for block in blocks if block["type"] == "tool_use"]:
        turn["tool_calls"] = calls
    return turn


def _extend(turn: dict[str, Any], more: dict[str, Any]) -> None:
    """Continue an assistant's turn by another that follows it at once."""
    turn["content"] += more["content"]
    if "reasoning_content" in more:
        turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), more["reasoning_content"])))
    if "tool_calls" in more:
        turn["tool_calls"] = turn.get("tool_calls", []) + more["tool_calls"]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a string if it is text alone."""
    content = [{name: value for name, value in part.items() if name != "at"} for part in message["content"]]
    if all(part["type"] == "text" for part in content):
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}
