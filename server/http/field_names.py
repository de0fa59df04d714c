"""Errors about a chat that another API's body stands for, in that body's field names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxspec.config.request import RequestError
from server.protocol.base import Place

NAMED = ("max_completion_tokens", "max_tokens", "response_format", "reasoning_effort")  # by messages of errors
PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")  # of a message, as errors about pictures name it


@contextmanager
def their_fields(names: Mapping[str, str], parts: Sequence[Sequence[Place]]) -> Iterator[None]:
    """Let errors within about a chat name the fields of its client's body.

    **Arguments:** `names` has the client's name of a chat's field, where it is another; `parts` has, for each message
    of the chat, where its parts stand in the client's body.
    """
    try:
        yield
    except RequestError as error:
        raise _renamed(error, names, parts) from error
    except ValidationError as error:
        problems = error.errors(include_url=False)
        cause = (problems[0].get("ctx") or {}).get("error")
        if not problems[0]["loc"] and isinstance(cause, RequestError):
            raise _renamed(cause, names, parts) from error

        def place(loc: Place) -> Place:
            if loc[:1] == ("messages",) and len(loc) > 1:
                return parts[loc[1]][0][:3]  # up to the list of parts
            return (names[loc[0]], *loc[1:]) if loc and loc[0] in names else loc

        raise RequestValidationError([{**each, "loc": ("body", *place(each["loc"]))} for each in problems]) from error


def _renamed(error: RequestError, names: Mapping[str, str], parts: Sequence[Sequence[Place]]) -> RequestError:
    message = str(error)
    for name in NAMED:
        if name in names:  # where a schema stands right below the format
            message = re.sub(rf"\b{name}\b(\.json_schema(?=\.))?", names[name], message)
    if part := PART.match(error.param or ""):
        head, *rest = parts[int(part[1])][int(part[2])]
        field = head + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in rest)
        return RequestError(message.replace(part[0], field), field, error.code)
    field, dot, rest = (error.param or "").partition(".")
    place = names.get(field, field)
    return RequestError(message, f"{place}{dot}{rest.removeprefix('json_schema.')}" or None, error.code)
