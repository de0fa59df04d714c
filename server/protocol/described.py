"""Rules between fields, for the API's description: JSON Schema for what the validators of a body check.

Invariant: a rule refuses nothing that a validator accepts. What JSON Schema can't say, such as that two numbers are
equal, is left to the validators; docs/serving.md lists it.
"""

from __future__ import annotations

from typing import Any

from pydantic import PlainValidator

Rule = dict[str, Any]  # a JSON schema for a body

NULL = {"type": "null"}


def fields(required: tuple[str, ...] = (), **schemas: Rule) -> Rule:
    """A rule for some fields, each of which may be missing unless it is `required`."""
    return {"properties": schemas, **({"required": [*required]} if required else {})}


def null(*names: str) -> Rule:
    """None of the fields is given."""
    return fields(**dict.fromkeys(names, NULL))


def is_true(name: str) -> Rule:
    return fields((name,), **{name: {"const": True}})


def one_of(first: str, second: str, **with_second: Rule) -> Rule:
    """Exactly one of two fields is given; `with_second` are rules that hold beside the second."""
    present = {"not": NULL}
    either = fields((first,), **{first: present, second: NULL})
    return {"oneOf": [either, fields((second,), **{first: NULL, second: present}, **with_second)]}


def any_of(*rules: Rule) -> Rule:
    return {"anyOf": [*rules]}


def add_rules(schema: dict[str, Any], *rules: Rule) -> None:
    """Let a body's schema hold only where all `rules` do."""
    schema["allOf"] = [*schema.get("allOf", ()), *rules]


def checked_later(kind: Any) -> PlainValidator:
    """A field that is described as `kind`, and validated where its body becomes another."""
    return PlainValidator(lambda value: value, json_schema_input_type=kind)
