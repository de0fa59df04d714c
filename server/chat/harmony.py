"""A chat as gpt-oss' chat template takes it, which knows fewer forms of a message than OpenAI's API has.

The template reads instructions from the first message alone, reasoning from `thinking`, and of a message's calls only
the first. It refuses a call that has both reasoning and content, and writes each tool's description. What a client sent
is put into that form, so that no part of it is lost or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def as_template_takes(
    messages: list[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Instructions, then messages with a call each, behind which its result stands; tools all have a description."""
    messages = _with_thinking(_instructions_first(messages))
    spread = [each for message in messages for each in _one_call_each(message)]
    tools = tools and [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
    return list(_results_behind_calls(spread)), tools or None


def _instructions_first(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All system and developer messages as one, which comes first."""
    instructions = [message for message in messages if message["role"] in ("system", "developer")]
    if len(instructions) < 2 and messages[: len(instructions)] == instructions:
        return messages
    first = {"role": "developer", "content": "\n\n".join(message["content"] for message in instructions)}
    return [first, *(message for message in messages if message not in instructions)]


def _with_thinking(messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for given in messages:
        message = dict(given)
        thinking = message.pop("reasoning_content", None)
        if "tool_calls" in message and message["content"] and thinking:
            thinking, message["content"] = f"{thinking}\n{message['content']}", ""
        yield message | ({"thinking": thinking} if thinking else {})


def _one_call_each(message: dict[str, Any]) -> list[dict[str, Any]]:
    first, *others = message.get("tool_calls") or [None]
    if not others:
        return [message]
    rest = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in others]
    return [{**message, "tool_calls": [first]}, *rest]


def _results_behind_calls(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results of calls that stand together follow in the calls' order, each behind its own; others stay in place."""
    given: set[int] = set()
    for i, message in enumerate(messages):
        if i in given:
            continue
        yield message
        for call in message.get("tool_calls", ()):
            mine = (
                j for j in _results(messages, i) if j not in given and messages[j]["tool_call_id"] == call.get("id")
            )
            found = next(mine, None)
            if found is not None:
                given.add(found)
                yield messages[found]


def _results(messages: list[dict[str, Any]], i: int) -> Iterator[int]:
    """The results that follow the calls around message i, before anybody else speaks."""
    for j in range(i + 1, len(messages)):
        if messages[j]["role"] == "tool":
            yield j
        elif "tool_calls" not in messages[j]:
            return
