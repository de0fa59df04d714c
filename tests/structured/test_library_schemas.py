"""Schemas as libraries write them, each with a valid value: Zod 4.6, pydantic 2.14, openapi-generator 7 and
protobuf-jsonschema 1.1 wrote `library_schemas.jsonl`. `jsonschema` judges."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from jaxspec import RequestError, StructuredOutput
from jaxspec.structured.grammar import Grammars
from tests.server.fake import byte_tokenizer
from tests.support.tiny import BYTE_VOCAB

CASES = [json.loads(line) for line in Path(__file__).with_name("library_schemas.jsonl").read_text().splitlines()]
INEXACT = {  # what strict refuses: unions that may overlap by JSON Schema, and sets
    "pydantic: model": "/properties/tags: uniqueItems",
    "pydantic: sequences": "/properties/d: uniqueItems",
    "openapi-generator: AnyPet": "at /: oneOf has options that may overlap",
}
OTHERS = (None, True, -7, 1.25, "~", [], ["~", {}], {}, {"~": 1})


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), BYTE_VOCAB, [258])


def accepts(grammar, value) -> bool:
    lexer, matcher = grammar.take()
    tokens = list(json.dumps(value, ensure_ascii=False).encode())
    accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    grammar.give_back(lexer, failed=matcher.is_error())
    return accepted


def spoilt(value):
    """Copies of a value with one part of it replaced, left out or added."""
    yield from OTHERS
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(parts):
        for other in spoilt(inner):
            changed = copy.copy(value)
            changed[key] = other
            yield changed
    if isinstance(value, dict):
        yield from ({key: inner for key, inner in value.items() if key != left_out} for left_out in value)
        yield {**value, "~": 1}
    if isinstance(value, list):
        yield from (value[:-1], [*value, *value[-1:]])


def judge(schema):
    """OpenAPI 3.0 says null by `nullable`, and draft 4's bounds have `exclusiveMinimum: true`."""
    text = json.dumps(schema)
    if '"nullable"' in text:
        schema = with_null(schema)
    old = '"exclusiveMinimum": true' in text
    newest = jsonschema.Draft4Validator if old else jsonschema.Draft202012Validator
    return jsonschema.validators.validator_for(schema, default=newest)(schema)


def with_null(schema):
    if isinstance(schema, list):
        return [with_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: with_null(value) for key, value in schema.items()}
    if found.pop("nullable", None) is True:
        return {**found, "type": [found["type"], "null"]} if "type" in found else {"anyOf": [found, {"type": "null"}]}
    return found


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_library_s_schema_holds(grammars, case):
    schema, valid = case["schema"], case["valid"]
    grammar, judged = grammars.compile(StructuredOutput(json=schema)), judge(schema)
    judged.validate(valid)
    assert accepts(grammar, valid)
    wrong = [
        value for value in spoilt(valid) if any(error.validator != "uniqueItems" for error in judged.iter_errors(value))
    ]
    assert not [value for value in wrong if accepts(grammar, value)]
    assert wrong or case["name"] in ("zod: json", "pydantic: recursive alias")  # which allow any JSON


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_strict_refuses_what_is_weaker(grammars, case):
    wanted = StructuredOutput(json=case["schema"], strict=True)
    if (why := INEXACT.get(case["name"])) is None:
        assert accepts(grammars.compile(wanted), case["valid"])
    else:
        with pytest.raises(RequestError, match=why):
            grammars.compile(wanted)
