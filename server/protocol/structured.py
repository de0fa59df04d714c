"""How a body asks for structured output: OpenAI's `response_format`, vLLM's and SGLang's fields, as one grammar.

Invariant: a body has one grammar at most. Two that mean something are refused by name, whoever's spelling they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, Field

from jaxspec.config.request import RequestError, StructuredOutput
from server.protocol.base import Object, must_be, refuse_unknown, shown
from server.protocol.described import NULL, Rule, fields

# vLLM's older fields and SGLang's, each the keyword of StructuredOutput that it means
NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
OF_JSON = ("response_format", "guided_json", "json_schema")  # fields that guided_whitespace_pattern goes with
FLAGS = ("disable_any_whitespace", "disable_fallback")  # of structured_outputs; nothing falls back here anyway
KEYWORDS = ("json", "regex", "choice", "grammar")
FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}  # fields beside each type

# What the API's description says of these fields; the functions below and `StructuredOutput` check them.
OBJECT = {"type": ["object", "null"]}
NAMED_SCHEMA = {
    "name": {"type": "string"},
    "description": {},
    "schema": OBJECT,
    "strict": {"type": ["boolean", "null"]},
}
FORMAT_SCHEMA = {
    "required": ["type"],
    "anyOf": [
        {"properties": {"type": {"const": "text"}}, "additionalProperties": False},
        {"properties": {"type": {"const": "json_object"}, "schema": OBJECT}, "additionalProperties": False},
        {
            "additionalProperties": False,
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["name"],
                    "properties": NAMED_SCHEMA,
                    "additionalProperties": False,
                },
            },
            "required": ["json_schema"],
        },
    ],
}
Regex = Annotated[str, Field(json_schema_extra={"format": "regex", "minLength": 1})]
Choice = Annotated[str, Field(json_schema_extra={"minLength": 1})]
Choices = Annotated[list[Choice], Field(json_schema_extra={"minItems": 1})]
JsonText = Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]
Grammar = Annotated[str, Field(json_schema_extra={"minLength": 1})]
Space = Annotated[str, Field(json_schema_extra={"format": "regex"})]
Schema = Annotated[dict[str, Any] | JsonText, must_be(dict | str, "a JSON schema, as an object or as text")]


def _options_schema() -> dict[str, Any]:
    """`structured_outputs`: one grammar, and beside a JSON schema its white space."""
    grammars = {
        "json": {"anyOf": [{"type": "object"}, {"type": "string", "contentMediaType": "application/json"}]},
        "regex": {"type": "string", "format": "regex", "minLength": 1},
        "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        "grammar": {"type": "string", "minLength": 1},
        "json_object": {"const": True},
    }
    flag = {"type": "boolean"}
    spaces = [
        {"whitespace_pattern": {"type": "string", "format": "regex"}, "disable_any_whitespace": {"const": False}},
        {"disable_any_whitespace": flag},
    ]
    return {
        "anyOf": [
            {
                "properties": {name: schema, "disable_fallback": flag, **space},
                "required": [name],
                "additionalProperties": False,
            }
            for name, schema in grammars.items()
            for space in (spaces if name.startswith("json") else [{"disable_any_whitespace": {"const": False}}])
        ]
    }


def _one_grammar() -> Rule:
    """At most one of the fields is given; a format of plain text is no grammar."""
    names = ("response_format", "structured_outputs", *NAMES)
    absent = dict.fromkeys((*names, "guided_whitespace_pattern"), NULL)
    absent["response_format"] = fields(type={"const": "text"})
    given = {name: {"not": NULL} for name in names}
    given["response_format"] = fields(("type",), type={"enum": ["json_object", "json_schema"]}) | {"type": "object"}
    each = [absent | {name: given[name]} for name in names]
    for name, rule in zip(names, each, strict=True):
        rule |= {"guided_whitespace_pattern": {}} if name in OF_JSON else {}
    return {"oneOf": [fields(**absent), *(fields((name,), **rule) for name, rule in zip(names, each, strict=True))]}


ONE_GRAMMAR = _one_grammar()


class StructuredFields(BaseModel):
    """The fields of a body that constrain its text, to inherit from."""

    response_format: Annotated[Object, Field(json_schema_extra=FORMAT_SCHEMA)] | None = None
    structured_outputs: Annotated[Object, Field(json_schema_extra=_options_schema())] | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_whitespace_pattern: Space | None = None
    json_schema: Schema | None = None
    regex: Regex | None = None
    ebnf: Grammar | None = None

    def structured(self) -> StructuredOutput | None:
        """The grammar that the body asks for. **Raises:** `RequestError` naming the field."""
        asked: dict[str, Callable[[], StructuredOutput]] = {}
        space = self.guided_whitespace_pattern
        if (kind := _format(self.response_format)) not in (None, "text"):
            asked["response_format"] = lambda: _of_format(self.response_format, kind, space)
        if self.structured_outputs is not None:
            asked["structured_outputs"] = lambda: _of_options(self.structured_outputs)
        for name, keyword in NAMES.items():
            if (value := getattr(self, name)) is not None:
                options = {keyword: value, "name": name, "whitespace_pattern": space}
                asked[name] = lambda options=options: StructuredOutput(**options)
        if len(asked) > 1:
            first, second, *_ = asked
            raise RequestError(f"{first} and {second} each say what the text must be; send one", second)
        if space is not None and asked.keys().isdisjoint(OF_JSON):
            field = "guided_whitespace_pattern"
            raise RequestError(f"{field} needs a JSON schema beside it, in one of {', '.join(OF_JSON)}", field)
        for name, make in asked.items():
            with naming(name):
                return make()
        return None


def _format(given: dict[str, Any] | None) -> str | None:
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(FORMATS)}, got {shown(kind)}", "response_format.type"
        )
    with naming("response_format"):
        refuse_unknown(given, ("type", *FORMATS[kind]), f"a format of type {kind} has an ")
    return kind


def _of_format(given: dict[str, Any], kind: str, space: str | None) -> StructuredOutput:
    name = "response_format.json_schema.schema"
    if kind == "json_object":  # llama.cpp and others take its schema here
        named, name = {"name": "schema", "schema": given.get("schema")}, "response_format"
    else:
        named = given.get("json_schema")
    if not isinstance(named, dict):
        raise RequestError(f"json_schema must be an object with name and schema, got {shown(named)}", "json_schema")
    with naming("json_schema"):
        refuse_unknown(named, NAMED_SCHEMA)
    if not isinstance(named.get("name"), str):
        given = f"got {shown(named['name'])}" if "name" in named else "and is missing; give the schema a name"
        raise RequestError(f"name must be a string, {given}", "json_schema.name")
    if not isinstance(strict := named.get("strict"), bool | None):
        raise RequestError(f"strict must be true or false, got {shown(strict)}", "json_schema.strict")
    schema = True if named.get("schema") is None else named["schema"]
    return StructuredOutput(json=schema, name=name, strict=strict is True, whitespace_pattern=space)


def _of_options(given: dict[str, Any]) -> StructuredOutput:
    """vLLM's `structured_outputs`. Fields that are null count as left out, and so does what changes nothing here."""
    options = {name: value for name, value in given.items() if value is not None}
    if options.pop("disable_additional_properties", False) is not False:
        name = "disable_additional_properties"
        raise RequestError(f"{name} is not supported; say additionalProperties: false in the schema", name)
    refuse_unknown(options, (*KEYWORDS, "json_object", "whitespace_pattern", *FLAGS))
    flags = {name: options.pop(name, False) for name in FLAGS}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise RequestError(f"{name} must be true or false, got {shown(flag)}", name)
    if flags["disable_any_whitespace"]:
        if "whitespace_pattern" in options or not (options.get("json_object") or "json" in options):
            why = "goes with json or json_object, and without whitespace_pattern"
            raise RequestError(f"disable_any_whitespace {why}", "disable_any_whitespace")
        options["whitespace_pattern"] = ""
    if not isinstance(wanted := options.pop("json_object", False), bool):
        raise RequestError(f"json_object must be true or false, got {shown(wanted)}", "json_object")
    if wanted:
        if "json" in options:
            raise RequestError("json and json_object each say what the text must be; send one", "json_object")
        options["json"] = True
    kinds = [name for name in KEYWORDS if name in options]
    if len(kinds) != 1:
        which = f"got {' and '.join(kinds)}" if kinds else "got none"
        raise RequestError(f"structured_outputs takes exactly one of {', '.join(KEYWORDS)}; {which}")
    return StructuredOutput(**options, name=f"structured_outputs.{'json_object' if wanted else kinds[0]}")


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Within, errors name the body's field, and what of it is wrong, where they don't already."""
    try:
        yield
    except RequestError as error:
        inner = error.param or ""
        param = inner if f"{inner}.".startswith(f"{field}.") else f"{field}.{inner}" if inner else field
        raise RequestError(str(error), param) from error
