"""Errors about a chat that another API's body stands for, in that body's field names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from jaxspec.config.request import RequestError

NAMED = ("max_completion_tokens", "max_tokens", "response_format", "reasoning_effort")  # by messages of errors
PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")  # of a message, as errors about pictures name it
Place = tuple[str | int, ...]


@contextmanager
def their_fields(places: Mapping[str, str], message_place: Callable[[int], Place]) -> Iterator[None]:
    """Let errors within about a chat name the fields of its client's body.

    **Arguments:** `places` has the client's name of a chat's field, where it is another; `message_place` gives where
    the message of a number stands in the client's body.
    """
    try:
        yield
    except RequestError as error:
        raise _renamed(error, places, message_place) from error
    except ValidationError as error:
        problems = error.errors(include_url=False)
        cause = (problems[0].get("ctx") or {}).get("error")
        if not problems[0]["loc"] and isinstance(cause, RequestError):
            raise _renamed(cause, places, message_place) from error

        def place(loc: Place) -> Place:
            if loc[:1] == ("messages",) and len(loc) > 1:
                return message_place(int(loc[1]))
            return (places[loc[0]], *loc[1:]) if loc and loc[0] in places else loc

        raise RequestValidationError([{**each, "loc": ("body", *place(each["loc"]))} for each in problems]) from error


def _renamed(error: RequestError, places: Mapping[str, str], message_place: Callable[[int], Place]) -> RequestError:
    message = str(error)
    for name in NAMED:
        if name in places:  # where a schema stands right below the format
            message = re.sub(rf"\b{name}\b(\.json_schema(?=\.))?", places[name], message)
    if part := PART.match(error.param or ""):
        place = message_place(int(part[1]))
        field = place[0] + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place[1:])
        where = field if len(place) > 1 else f"part {part[2]} of message {part[1]} of the {field}"
        return RequestError(message.replace(part[0], where), field, error.code)
    field, dot, rest = (error.param or "").partition(".")
    place = places.get(field, field)
    return RequestError(message, f"{place}{dot}{rest.removeprefix('json_schema.')}" or None, error.code)
