"""Chats in a form that a template writes whole: templates drop or refuse roles that their model wasn't trained on.

Invariant: each text of a chat, each call's name and its arguments reach the prompt, or the chat is refused with the
part at fault. A probe decides: the chat with a mark in place of each part, rendered once for each shape of a chat. So
what templates trim, or strip of earlier turns' reasoning, doesn't count as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from jaxspec.text.errors import TokenizerError

Messages = list[dict[str, Any]]
Form = Callable[[Messages], Messages]

MAX_SHAPES = 1024  # remembered

_lock = threading.Lock()
_forms: dict[Any, Form] = {}  # by template and shape, the oldest first


def in_form(messages: Messages, template: str, options: dict[str, Any], render: Callable[[Messages], str]) -> Messages:
    """The messages in the first form of which `render` writes all texts and calls.

    The forms: as they are; developer's messages as system's, which comes first where the template doesn't mention
    developers; all of these as one that comes first; that one at the beginning of the user's first message. Each with
    an assistant's text apart from its calls, and with arguments that are no JSON objects as an object.

    **Raises:** `TokenizerError` where none does; the template's own complaint, if it has one.
    """
    key = template, tuple(map(_shape, messages)), repr(sorted((options | {"tools": bool(options["tools"])}).items()))
    if (form := _forms.get(key)) is not None:
        return form(messages)
    tried: list[Messages] = []
    complaint: TokenizerError | None = None
    for form in _candidates("developer" in template):
        if (changed := form(messages)) in tried:
            continue
        tried.append(changed)
        try:
            lost = _lost(changed, render)
        except TokenizerError as error:
            complaint = complaint or error
            continue
        if lost is None:
            with _lock:
                while len(_forms) >= MAX_SHAPES:
                    del _forms[next(iter(_forms))]
                _forms[key] = form
            return changed
        complaint = complaint or TokenizerError(
            f"the chat template doesn't write {lost}; leave it out, or send its text in a role that the model knows, "
            "such as user"
        )
    raise complaint


def _candidates(knows_developer: bool) -> Iterator[Form]:
    roles = [_as_they_are, _developer_as_system, _one_system_message, _system_in_user_message]
    if not knows_developer:
        roles = [*roles[1:], roles[0]]
    for arguments, calls, role in product((_as_they_are, _arguments_as_objects), (_as_they_are, _calls_apart), roles):
        yield partial(_in_turn, (role, calls, arguments))


def _in_turn(forms: tuple[Form, ...], messages: Messages) -> Messages:
    for form in forms:
        messages = form(messages)
    return messages


def _shape(message: dict[str, Any]) -> Any:
    """All that decides how a template writes a message, beside its text."""
    text = message.get("content")
    said = tuple(bool(each.strip()) for each in _texts(text)) if isinstance(text, str | list) else type(text)
    given = [call["function"].get("arguments") for call in _calls(message)]
    calls = [(type(arguments), bool(arguments)) for arguments in given]
    return message.get("role"), said, tuple(calls), tuple(sorted(message))


def _lost(messages: Messages, render: Callable[[Messages], str]) -> str | None:
    """The first part of the chat that the template doesn't write, in words."""
    parts: dict[str, str] = {}  # by mark

    def mark(part: str) -> str:
        parts[made := f"Mark{len(parts)}."] = part
        return made

    marked = []
    for message in messages:
        content, calls = message.get("content"), []
        for place, said in enumerate(_texts(content)):
            if shown := said.strip()[:60]:
                said = mark(f"the message of role {message.get('role')!r} that begins {shown!r}")
                content = _with_text(content, place, said)
        for call in _calls(message):
            function, whose = call["function"], f"the call of {call['function'].get('name')!r}"
            changed = {"name": mark(whose)}
            if arguments := function.get("arguments"):
                said = mark(f"the arguments in {whose}")
                changed["arguments"] = said if isinstance(arguments, str) else {"argument": said}
            calls.append({**call, "function": function | changed})
        marked.append({**message, "content": content} | ({"tool_calls": calls} if calls else {}))
    text = render(marked)
    return next((part for mark, part in parts.items() if mark not in text), None)


def _texts(content: Any) -> list[str]:
    """Texts of a message's content, which is one, or a list of parts with pictures among them; "" for a picture."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [str(part.get("text") or "") if isinstance(part, dict) else "" for part in parts]


def _with_text(content: Any, part: int, text: str) -> Any:
    """A message's content with another text in place of one."""
    if isinstance(content, str):
        return text
    return [*content[:part], {**content[part], "text": text}, *content[part + 1 :]]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    whole = isinstance(calls, list) and all(
        isinstance(each, dict) and isinstance(each.get("function"), dict) for each in calls
    )
    return calls if whole else []


def _is_system(message: dict[str, Any]) -> bool:
    return message.get("role") in ("system", "developer") and isinstance(message.get("content"), str)


def _as_they_are(messages: Messages) -> Messages:
    return messages


def _developer_as_system(messages: Messages) -> Messages:
    return [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]


def _one_system_message(messages: Messages) -> Messages:
    found = [each for each in messages if _is_system(each)]
    if not found:
        return messages
    first = {**found[0], "role": "system", "content": "\n\n".join(each["content"] for each in found)}
    return [first, *(each for each in messages if not _is_system(each))]


def _system_in_user_message(messages: Messages) -> Messages:
    first, *others = _one_system_message(messages)
    if not _is_system(first):
        return messages
    asked = next((n for n, each in enumerate(others) if each.get("role") == "user"), None)
    content = others[asked].get("content") if asked is not None else None
    if isinstance(content, list):
        content = [{"type": "text", "text": f"{first['content']}\n\n"}, *content]
    elif isinstance(content, str):
        content = f"{first['content']}\n\n{content}"
    else:
        return [{**first, "role": "user"}, *others]
    others[asked] = {**others[asked], "content": content}
    return others


def _calls_apart(messages: Messages) -> Messages:
    spread: Messages = []
    for message in messages:
        if message.get("content") and _calls(message):
            spread.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": ""}
        spread.append(message)
    return spread


def _arguments_as_objects(messages: Messages) -> Messages:
    def whole(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):
            return call
        return {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}

    return [
        {**each, "tool_calls": [whole(call) for call in calls]} if (calls := _calls(each)) else each
        for each in messages
    ]
