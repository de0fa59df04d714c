"""How a body asks for structured output: OpenAI's `response_format`, vLLM's and SGLang's fields, as one grammar.

Invariant: a body has one grammar at most. Two that mean something are refused by name, whoever's spelling they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, Field

from jaxspec.config.request import RequestError, StructuredOutput
from server.protocol.base import Object, must_be, shown
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
KEYWORDS = ("json", "regex", "choice", "grammar")
FORMATS = ("text", "json_object", "json_schema")

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
        {"properties": {"type": {"enum": ["text", "json_object"]}}},
        {
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
    space = {"whitespace_pattern": {"type": "string", "format": "regex"}}
    return {
        "anyOf": [
            {
                "properties": {name: schema, **(space if name.startswith("json") else {})},
                "required": [name],
                "additionalProperties": False,
            }
            for name, schema in grammars.items()
        ]
    }


def _one_grammar() -> Rule:
    """At most one of the fields is given; a format of plain text is no grammar."""
    names = ("response_format", "structured_outputs", *NAMES)
    absent = dict.fromkeys(names, NULL) | {"response_format": fields(type={"const": "text"})}
    given = {name: {"not": NULL} for name in names}
    given["response_format"] = fields(("type",), type={"enum": ["json_object", "json_schema"]}) | {"type": "object"}
    return {"oneOf": [fields(**absent), *(fields((name,), **absent | {name: given[name]}) for name in names)]}


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
        if (kind := _format(self.response_format)) not in (None, "text"):
            asked["response_format"] = lambda: _of_format(self.response_format, kind)
        if self.structured_outputs is not None:
            asked["structured_outputs"] = lambda: _of_options(self.structured_outputs)
        for name, keyword in NAMES.items():
            if (value := getattr(self, name)) is not None:
                options = {keyword: value, "name": name}
                if keyword == "json":
                    options["whitespace_pattern"] = self.guided_whitespace_pattern
                asked[name] = lambda options=options: StructuredOutput(**options)
        if len(asked) > 1:
            first, second, *_ = asked
            raise RequestError(f"{first} and {second} each say what the text must be; send one", second)
        for name, make in asked.items():
            with naming(name):
                return make()
        return None


def _format(given: dict[str, Any] | None) -> str | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind not in FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(FORMATS)}, got {shown(kind)}", "response_format.type"
        )
    return kind


def _of_format(given: dict[str, Any], kind: str) -> StructuredOutput:
    if kind == "json_object":
        return StructuredOutput(json=True, name="response_format")
    named = given.get("json_schema")
    if not isinstance(named, dict):
        raise RequestError(f"json_schema must be an object with name and schema, got {shown(named)}", "json_schema")
    if unknown := sorted(named.keys() - NAMED_SCHEMA.keys()):
        raise RequestError(
            f"unknown field {unknown[0]!r}; known: {', '.join(NAMED_SCHEMA)}", f"json_schema.{unknown[0]}"
        )
    if not isinstance(named.get("name"), str):
        given = f"got {shown(named['name'])}" if "name" in named else "and is missing; give the schema a name"
        raise RequestError(f"name must be a string, {given}", "json_schema.name")
    if not isinstance(named.get("strict"), bool | None):
        raise RequestError(f"strict must be true or false, got {shown(named['strict'])}", "json_schema.strict")
    schema = named.get("schema")
    return StructuredOutput(json=True if schema is None else schema, name="response_format.json_schema.schema")


def _of_options(given: dict[str, Any]) -> StructuredOutput:
    """vLLM's `structured_outputs`. Fields that are null count as left out, and so does what changes nothing here."""
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
        if options.pop(name, False):
            raise RequestError(f"{name} is not supported; leave it out", name)
    known = (*KEYWORDS, "json_object", "whitespace_pattern")
    if unknown := sorted(options.keys() - set(known)):
        raise RequestError(f"unknown field {unknown[0]!r}; known: {', '.join(known)}", unknown[0])
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
