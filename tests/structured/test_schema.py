"""One reading of a JSON schema for parsers and grammars: references, `allOf`, types; and of nonsense."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.structured.schema import ANY, NEVER, resolve, types

JSON = {"anyOf": [{"type": "object", "additionalProperties": {"$ref": "#/$defs/J"}}, {"items": {"$ref": "#/$defs/J"}}]}
ROOT = {
    "$id": "https://x.org/root",
    "$defs": {
        "Name[int]": {"type": "integer", "minimum": 1},
        "a/b~c": {"const": "x"},
        "50%": {"enum": ["a", 1, None]},
        "A": {"$ref": "#/$defs/B"},
        "B": {"allOf": [{"$ref": "#/$defs/A"}]},
        "J": JSON,
        "L": {"anyOf": [{"$ref": "#/$defs/L"}, {"type": "string"}]},
        "named": {"$anchor": "here", "properties": {"a": {}}},
        "list": [{"type": "null"}],
    },
}


@pytest.mark.parametrize("schema,expected", [
    ({"$ref": "#/$defs/Name[int]"}, "integer"),
    ({"$ref": "#/$defs/Name%5Bint%5D"}, "integer"),
    ({"$ref": "https://x.org/root#/$defs/Name[int]"}, "integer"),
    ({"$ref": "#/$defs/a~1b~0c"}, "string"),
    ({"$ref": "#/$defs/50%"}, "integer null string"),
    ({"$ref": "#/$defs/50%25"}, "integer null string"),
    ({"$ref": "#here"}, "object"),
    ({"$ref": "#/$defs/list/0"}, "null"),
    ({"$ref": "#/$defs/J"}, "array object"),
    ({"type": "array", "items": {}, "description": "d"}, "array"),
    ({"items": {}}, "array"),
    ({"prefixItems": [{}]}, "array"),
    ({"properties": {"a": {}}, "required": ["a"]}, "object"),
    ({"additionalProperties": {"type": "string"}}, "object"),
    ({"minimum": 1}, "number"),
    ({"pattern": "a"}, "string"),
    ({"type": ["string", "null"]}, "null string"),
    ({"type": "string", "nullable": True}, "null string"),
    ({"allOf": [{"$ref": "#/$defs/Name[int]"}], "nullable": True}, "integer null"),
    ({"type": "string", "enum": ["a", None], "nullable": True}, "null string"),
    ({"enum": ["a"], "nullable": True}, "string"),
    ({"type": ["string", "null"], "enum": ["a", None]}, "null string"),
    ({"const": True}, "boolean"),
    ({"const": 1.0}, "integer"),
    ({"enum": [1, 1.5]}, "number"),
    ({"type": "number", "allOf": [{"type": "integer"}]}, "integer"),
    ({"allOf": [{"type": ["string", "integer"]}, {"anyOf": [{"type": "number"}, {"type": "null"}]}]}, "integer"),
    ({"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "null"}, {}]}]}, "null string"),
    ({"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/Name[int]"}]}, "boolean integer"),
    ({"type": "string", "allOf": [{"type": "integer"}]}, ""),
    ({"type": "int"}, "integer"),
    ({"type": "Dict"}, "object"),
    (False, ""),
    ({"enum": []}, ""),
])  # fmt: skip
def test_types(schema, expected):
    assert " ".join(sorted(types(schema, ROOT))) == expected


@pytest.mark.parametrize("schema", [
    True, {}, None, 3, [], "x", {"type": 3}, {"type": [[]]}, {"type": "strange"}, {"anyOf": 3}, {"allOf": {"a": 1}},
    {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/L"}, {"$ref": 5}, {"$ref": "#/nowhere"}, {"$ref": "other.json"},
    {"$ref": "#/$defs/list/99999999999999"}, {"minimum": 1, "pattern": "a"}, {"description": "d"},
])  # fmt: skip
def test_no_type_is_any(schema):
    assert types(schema, ROOT) == ANY


@pytest.mark.parametrize("schema,expected", [
    ({"$ref": "#/$defs/Name[int]", "minimum": 1, "title": "t"}, {"minimum": 1, "title": "t", "type": "integer"}),
    ({"allOf": [{"properties": {"a": {"minLength": 1}}, "required": ["a"]}, {"properties": {"b": {}}}]},
     {"properties": {"a": {"minLength": 1}, "b": {}}, "required": ["a"]}),
    ({"properties": {"a": {"minLength": 1}}, "allOf": [{"properties": {"a": {"maxLength": 2}}, "required": ["a"]}]},
     {"properties": {"a": {"allOf": [{"minLength": 1}, {"maxLength": 2}]}}, "required": ["a"]}),
    ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}, "additionalProperties": False}]},
     {"properties": {"a": False, "b": {}}, "additionalProperties": False}),
    ({"properties": {"a": {}}, "allOf": [{"patternProperties": {"^x": {}}, "additionalProperties": False}]},
     {"properties": {"a": {}}, "allOf": [{"patternProperties": {"^x": {}}, "additionalProperties": False}]}),
    ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    ({"type": "object", "allOf": [{"type": "object", "nullable": True}]}, {"type": "object"}),
    ({"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}}, {"properties": {"a": {}, "b": {}}}),
    ({"enum": [1, True, "a"], "allOf": [{"enum": [True, "a", 2]}]}, {"enum": [True, "a"]}),
    ({"pattern": "a", "allOf": [{"pattern": "b"}]}, {"pattern": "a", "allOf": [{"pattern": "b"}]}),
    ({"items": {}, "allOf": [{"prefixItems": [{}], "items": False}]},
     {"items": {}, "allOf": [{"prefixItems": [{}], "items": False}]}),
    ({"required": ["a"], "allOf": [{"properties": {"a": {}}, "unevaluatedProperties": False}]},
     {"required": ["a"], "properties": {"a": {}},
      "allOf": [{"properties": {"a": {}}, "unevaluatedProperties": False}]}),
    ({"allOf": [{"allOf": [{"allOf": [True]}]}, False]}, NEVER),
    ({"$ref": "#/$defs/A", "title": "t"}, {"title": "t"}),
    ({"$ref": "#/nowhere"}, {"$ref": "#/nowhere"}),
    (7, {}),
])  # fmt: skip
def test_resolve(schema, expected):
    assert resolve(schema, ROOT) == expected


def test_a_schema_that_doubles_at_each_level_takes_no_time():
    both = lambda word, i: {word: [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]}  # noqa: E731
    for word in ("allOf", "anyOf"):
        root = {"$defs": {**{str(i): both(word, i) for i in range(50)}, "50": {"type": "null"}}}
        assert types({"$ref": "#/$defs/0"}, root) == {"null"}
    chain = {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(5000)}}
    assert types({"$ref": "#/$defs/0"}, chain) == ANY


WORDS = ["$ref", "allOf", "anyOf", "type", "properties", "enum", "required", "additionalProperties", "not", "if", "#/a"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([*WORDS, "#", "#/a/allOf/0", "string", 1.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*WORDS, "a"]), inner, max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_nonsense_is_read(schema, root):
    assert isinstance(resolve(schema, root), dict)
    assert types(schema, root) <= ANY | {"integer"}
