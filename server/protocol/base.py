"""Base of every body: unknown fields are refused by name, text must be valid UTF-8, and a list is measured before its
elements are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, TypedDict

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxspec.config.request import INTEGERS, NUMBERS, POSITIVE, PRIORITIES, TINY, RequestError, shown

# Fields of other servers, and how this one takes the same.
ELSEWHERE = {
    **dict.fromkeys(
        ("enable_thinking", "thinking"),
        'templates with such a switch take it as "chat_template_kwargs": {"enable_thinking": false}',
    ),
    **dict.fromkeys(("penalty_score", "repeat_penalty"), "here it is repetition_penalty"),
    "features": "send pictures as image_data, data: URLs, and their tokens in token_ids",
}
REQUEST_ID = r"[A-Za-z0-9._:/+=@-]{1,128}"  # of a client
MAX_NAME = 64  # characters of an unknown field or path for which a known one is sought that is spelt alike
MISSPELT = 0.85  # likeness of names, by difflib: `nam` is a `name`


def check_text(text: str) -> str:
    """Refuse what JSON can spell and UTF-8 can't: it could be neither tokenised nor sent back."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has a lone surrogate at character {error.start}") from None
    return text


@contextmanager
def at(place: str) -> Iterator[None]:
    """Within, the field that errors name stands at a `place`: "content" or "[2]"."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), field_path(place, error.param), error.code) from None


def field_path(place: str, field: str | None) -> str:
    """The path of a `field` at a `place`; either may be empty, or begin with an index."""
    dot = "." if place and field and not field.startswith("[") else ""
    return f"{place}{dot}{field or ''}"


def read_each[T](values: list[Any], read: Callable[[Any], T]) -> list[T]:
    """`read` of each value of a list; an error has its place: "[2]"."""
    found: list[T] = []
    try:
        for value in values:
            found.append(read(value))
    except RequestError as error:
        raise RequestError(str(error), field_path(f"[{len(found)}]", error.param), error.code) from None
    return found


def as_text(value: Any) -> str:
    """**Raises:** `RequestError` for another value than a text that UTF-8 can spell."""
    if not isinstance(value, str):
        raise RequestError(f"must be a string, got {shown(value)}")
    return check_text(value)


def text_size(value: Any) -> int:
    """Characters of all strings in a JSON value, keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(each) for key, each in value.items())
    return sum(map(text_size, value)) if isinstance(value, list) else 0


def whole(value: Any) -> Any:
    """An integer where JSON has a number without a fraction: 5.0 is 5, as JSON Schema has it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def at_most(limit: int, what: str) -> BeforeValidator:
    """Refuse a longer list before any element is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            raise RequestError(f"has {len(value)} {what}, at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def must_be(kind: type, what: str) -> BeforeValidator:
    """Refuse a value of another kind, in words."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise RequestError(f"must be {what}, got {shown(value)}")
        return value

    return BeforeValidator(check)


def refuse_unknown(given: dict[str, Any], known: Collection[str], where: str = "") -> None:
    """**Raises:** `RequestError` naming a field of `given` that isn't `known`. One that is null isn't there."""
    if unknown := sorted(key for key, value in given.items() if value is not None and key not in known):
        raise RequestError(f"{where}unknown field {unknown[0]!r}; known: {', '.join(known)}", unknown[0])


def refuse_misspelt(given: dict[str, Any], known: Collection[str]) -> None:
    """**Raises:** `RequestError` naming a field of `given` that is nearly spelled as a `known` one. Others pass."""
    for name, value in given.items():
        if name in known or value is None or len(name) > MAX_NAME:
            continue
        if near := difflib.get_close_matches(name, known, 1, MISSPELT):
            raise RequestError(f"unknown field {name!r}; did you mean {near[0]}?", name)


def _bounds() -> dict[str, dict[str, float]]:
    """Bounds of `SamplingParams`, by field, in JSON Schema's words. A request may also ask for no tokens at all."""
    ranges = {name: {"minimum": low, "maximum": high} for name, (low, high) in (NUMBERS | INTEGERS).items()}
    ranges |= {name: {**ranges[name], "minimum": TINY} for name in POSITIVE}
    ranges["max_tokens"] = ranges["max_completion_tokens"] = {**ranges["max_tokens"], "minimum": 0}
    ranges |= dict.fromkeys(("max_new_tokens", "max_output_tokens"), ranges["max_tokens"])
    ranges |= {"min_new_tokens": ranges["min_tokens"], "sampling_seed": ranges["seed"]}
    return ranges | {"top_logprobs": ranges["logprobs"], "best_of": ranges["n"]}


BOUNDS = _bounds()


def describe_ranges(schema: dict[str, Any]) -> None:
    """Add the ranges to a model's JSON schema: `SamplingParams` checks them, so pydantic doesn't know."""
    for name, field in schema.get("properties", {}).items():
        for branch in field.get("anyOf", [field]):
            if branch.get("type") in ("integer", "number") and name in BOUNDS:
                branch.update(BOUNDS[name])


Place = tuple[str | int, ...]  # a field's path in a body
Object = Annotated[dict[str, Any], must_be(dict, "an object")]
Text = Annotated[str, AfterValidator(check_text)]
CacheSalt = Annotated[Text, Field(json_schema_extra={"minLength": 1})]  # vLLM's: who shares the prefix cache
Integer = Annotated[int, BeforeValidator(whole)]
# The engine checks ids against the vocabulary, whose size the API's description has in place of this maximum.
TOKEN_ID = {"format": "token-id", "minimum": 0, "maximum": 2**31 - 1}
Priority = Annotated[Integer, Field(ge=PRIORITIES[0], le=PRIORITIES[1])]
TokenId = Annotated[Integer, Field(json_schema_extra=TOKEN_ID)]


class Open(TypedDict):
    """An object within a body, as the API's description has it. Fields that it doesn't name are allowed."""

    __pydantic_config__ = ConfigDict(extra="ignore")


class Body(BaseModel):
    """A JSON object whose unknown fields are refused with the nearest known name. A field that is null isn't there."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra=describe_ranges)
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    # Fields that other servers know and that would change the answer, with the values of each that ask for nothing.
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {}
    RENAMED: ClassVar[dict[str, str]] = {}  # fields of other APIs, and what this one calls them
    LENIENT: ClassVar[bool] = False  # other fields pass unread, see `refuse_misspelt`

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise RequestError(f"must be an object, got {shown(data)}")
        known = cls.__pydantic_fields__  # `model_fields` warns of deprecation at every look, which takes its time
        if cls.LENIENT:
            refuse_misspelt({name: value for name, value in data.items() if name not in cls.IGNORED}, known)
        kept = {}
        for name, value in data.items():
            if name in known:
                kept[name] = value
            elif value is None or name in cls.IGNORED:
                continue
            elif name in cls.UNSUPPORTED:
                if value not in cls.UNSUPPORTED[name]:
                    raise RequestError(f"{name} is not supported by this server; leave it out", name)
            elif name in cls.RENAMED:
                raise RequestError(f"unknown field {name!r}; here it is {cls.RENAMED[name]}", name)
            elif not cls.LENIENT:
                near = difflib.get_close_matches(name, known, 1) if len(name) <= MAX_NAME else ()
                hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(sorted(known))}"
                hint = ELSEWHERE.get(name, hint)
                raise RequestError(f"unknown field {name!r}; {hint}", name)
        return kept
