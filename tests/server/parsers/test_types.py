"""Values of qwen3_coder become the types of the tool's schema, wherever it says them."""

import json

import pytest

from server.parsers import parse
from tests.server.parsers.cases import coder

DEFS = {
    "Count": {"type": "integer"},
    "Mode": {"enum": ["auto", 1, None]},
    "Place": {"allOf": [{"$ref": "#/$defs/Base"}, {"required": ["x"]}]},
    "Base": {"properties": {"x": {"type": "integer"}}},
}
SCHEMAS = [
    ({"$ref": "#/$defs/Count"}, "42", 42),
    ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, "7", 7),
    ({"allOf": [{"$ref": "#/$defs/Count"}, {"minimum": 3}]}, "42", 42),
    ({"allOf": [{"allOf": [{"type": "boolean"}]}]}, "True", True),
    ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
    ({"items": {"type": "string"}}, '["a"]', ["a"]),
    ({"properties": {}}, "{'a': None}", {"a": None}),
    ({"additionalProperties": True}, "{}", {}),
    ({"const": 3}, "3", 3),
    ({"const": "3"}, "3", "3"),
    ({"enum": [1, 2, "3"]}, "2", 2),
    ({"enum": [1, 2, "3"]}, "3", "3"),
    ({"$ref": "#/$defs/Mode"}, "1", 1),
    ({"$ref": "#/$defs/Mode"}, "auto", "auto"),
    ({"$ref": "#/$defs/Mode"}, "null", None),
    ({"enum": ["true", "false"]}, "true", "true"),
    ({"enum": [True, "auto"]}, "true", True),
    ({"type": ["string", "integer"]}, "5", "5"),
    ({"type": ["integer", "string"]}, "5", 5),
    ({"type": ["integer", "string"]}, "none", "none"),
    ({"anyOf": [{"type": "integer"}, {"items": {}}]}, "[1]", [1]),
    ({"oneOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
    ({"type": "integer"}, "4.0", 4.0),
    ({"type": "integer"}, "4.5", "4.5"),
    ({"type": "number"}, "true", "true"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"description": "anything"}, "5", "5"),
    ({"$ref": "#/$defs/Missing"}, "5", "5"),
]


@pytest.mark.parametrize("schema, text, value", SCHEMAS)
def test_a_value_has_its_schemas_type(schema, text, value):
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (call,) = parse("qwen3_coder", list(coder("f", x=text)), tools)["tool_calls"]
    assert json.loads(call["arguments"]) == {"x": value}
    assert type(json.loads(call["arguments"])["x"]) is type(value)


def test_keys_are_found_through_references():
    parameters = {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"x": {"type": "integer"}}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    found = parse("qwen3_coder", [coder("f", x="1", y="2")], tools)
    assert json.loads(found["tool_calls"][0]["arguments"]) == {"x": "1\n</parameter>\n<parameter=y>\n2"}
    open_to_others = {"properties": {}, "additionalProperties": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": open_to_others}}]
    found = parse("qwen3_coder", [coder("f", x="1", y="2")], tools)
    assert json.loads(found["tool_calls"][0]["arguments"]) == {"x": 1, "y": 2}


@pytest.mark.parametrize("parameters,given,expected", [
    ({"anyOf": [{"properties": {"k": {"const": "a"}, "x": {"type": "integer"}}}, {"$ref": "#/$defs/Base"}]},
     {"k": "a", "x": "1"}, {"k": "a", "x": 1}),
    ({"properties": {"k": {"type": "string"}}, "if": {}, "then": {"properties": {"x": {"type": "boolean"}}}},
     {"k": "1", "x": "true"}, {"k": "1", "x": True}),
    ({"patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}}},
     {"n_a": "1", "s_a": "2"}, {"n_a": 1, "s_a": "2"}),
    ({"properties": {"x": {}}, "allOf": [{"properties": {"x": {"type": "integer"}}, "patternProperties": {"y": {}}}]},
     {"x": "1"}, {"x": 1}),
    ({"properties": {"x": {"type": "integer"}}, "additionalProperties": {}}, {"x": "1", "y": "2"}, {"x": 1, "y": "2"}),
    ({"anyOf": [{"$ref": "#"}, {"properties": {"x": {"type": "null"}}}]}, {"x": "null"}, {"x": None}),
])  # fmt: skip
def test_members_are_found_in_unions_and_by_patterns(parameters, given, expected):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**parameters, "$defs": DEFS}}}]
    (call,) = parse("qwen3_coder", [coder("f", **given)], tools)["tool_calls"]
    assert json.loads(call["arguments"]) == expected
