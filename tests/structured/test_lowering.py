"""Schemas are lowered to what the grammar library takes: exactly, or refused with the path."""

import json

import pytest

from jaxspec import RequestError, StructuredOutput
from jaxspec.structured.grammar import Grammars
from jaxspec.structured.lowering import SchemaError, lower
from server.chat.tool_grammar import tool_call_grammar
from tests.server.fake import byte_tokenizer
from tests.support.tiny import BYTE_VOCAB

INT, TEXT = {"type": "integer"}, {"type": "string"}
NUMBER, ARRAY, OBJECT = {"type": "number"}, {"type": "array"}, {"type": "object"}
A = {**OBJECT, "properties": {"k": {"const": "a"}, "x": INT}, "required": ["k"]}
B = {**OBJECT, "properties": {"k": {"const": "b"}, "y": INT}, "required": ["k"]}
CLOSED = {**OBJECT, "additionalProperties": False}
NAMED = {"Name[int]": {**CLOSED, "properties": {"c": {"$ref": "#/$defs/Name%5Bint%5D"}}}}
KEYWORDS = {"default": INT, "enum": TEXT, "const": INT, "examples": INT, "$ref": TEXT, "not": INT, "format": TEXT}
TREES = {name: {**OBJECT, "properties": {"c": {"$ref": f"#/$defs/{name}"}}} for name in ("t", "u")}
WHEN = {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]}}
KV = {**CLOSED, "properties": {"k": TEXT, "v": {}}, "required": ["k"]}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), BYTE_VOCAB, [258])


def accepted(grammars, schema, texts):
    grammar, found = grammars.compile(StructuredOutput(json=schema)), []
    for text in texts:
        (lexer, matcher), tokens = grammar.take(), list(text.encode())
        found.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
        grammar.give_back(lexer, failed=matcher.is_error())
    return found


@pytest.mark.parametrize("schema,yes,no", [
    # keywords that impose nothing
    ({**INT, "minimum": -(2**63), "maximum": 2**63 - 1}, ["5", "-5", str(2**63 - 1)], [str(2**63), "1.5"]),
    ({**INT, "minimum": 0, "maximum": 2**64 - 1}, ["5"], ["-5"]),
    ({**NUMBER, "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["-5", "1e5"], ["x"]),
    ({**NUMBER, "minimum": -3.4e38, "maximum": 3.4e38}, ["-5.5"], ["1" + "0" * 39]),
    ({**NUMBER, "minimum": 5e-324}, ["0.1"], ["0", "-1"]),
    ({**INT, "maximum": 10**30}, ["5"], ["x"]),
    ({**ARRAY, "minItems": 0, "maxItems": 2**53 - 1, "uniqueItems": False, "minContains": 0, "contains": INT},
     ["[]"], []),
    ({**TEXT, "minLength": 0.0, "maxLength": 5.0}, ['"abcde"'], ['"abcdef"']),
    ({**OBJECT, "unevaluatedProperties": True, "minProperties": 0, "if": {"required": ["a"]}},
     ["{}", '{"b":1}'], ["1"]),
    ({**TEXT, "properties": 3, "uniqueItems": True, "then": False, "contentSchema": {}}, ['"a"'], ["1"]),
    ({**OBJECT, "propertyNames": TEXT, "additionalProperties": INT}, ['{"a":1}'], ['{"a":"x"}']),
    ({"anyOf": [{"not": {}}, INT, False]}, ["1"], ['"a"']),
    # names of members
    ({**OBJECT, "propertyNames": {"enum": ["a", "b.c"]}, "additionalProperties": INT},
     ['{"b.c":1,"a":2}', "{}"], ['{"c":1}', '{"bxc":1}', '{"a":"x"}']),
    ({**OBJECT, "propertyNames": {"pattern": "^x"}, "properties": {"y": {}, "xa": INT}},
     ['{"xa":1,"xb":[]}'], ['{"y":1}']),
    ({**OBJECT, "propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^b"}]}}, ['{"a":1,"bb":1}'], ['{"aa":1}']),
    ({**OBJECT, "propertyNames": {"format": "date"}}, ['{"2026-01-31":1}'], ['{"a":1}']),
    ({**OBJECT, "propertyNames": False}, ["{}"], ['{"a":1}']),
    # patterns of names that other patterns share
    ({**OBJECT, "patternProperties": {"^a": INT, "b": INT, "^x-": {}}},
     ['{"ab":1,"cb":2,"x-b":3,"q":"x"}'], ['{"ab":"x"}', '{"cb":"x"}', '{"x-b":"x"}']),
    ({**OBJECT, "patternProperties": {"^x-": {}, "^.*$": INT}, "properties": {"p": {"minimum": 3}}},
     ['{"p":3,"x-":1}'], ['{"p":1}', '{"x-":"x"}', '{"q":"x"}']),
    ({**CLOSED, "patternProperties": {"": INT, "^a": {"minimum": 3}}}, ['{"b":1,"a":3}'], ['{"a":1}', '{"b":"x"}']),
    ({**CLOSED, "properties": KEYWORDS, "required": ["$ref"]},
     ['{"$ref":"a"}', '{"default":1,"enum":"a","const":1,"examples":2,"$ref":"q","not":1,"format":"x"}'],
     ['{"$ref":1}']),
    # references
    ({"$ref": "#/$defs/Name[int]", "$defs": NAMED}, ['{"c":{"c":{}}}'], ['{"d":1}']),
    ({"$ref": "#/$defs/t", "required": ["c"], "$defs": TREES}, ['{"c":{"c":{}}}'], ['{"c":1}', '{"d":1}']),
    ({"allOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/u"}], "$defs": TREES}, ['{"c":{"c":{}}}'], ['{"c":1}']),
    ({**OBJECT, "nullable": True, "properties": {"a": {"$ref": "#/d", "nullable": True}}, "d": INT},
     ["null", '{"a":null}', '{"a":1}'], ['{"a":"x"}']),
    # unions
    ({"oneOf": [A, B]}, ['{"k":"a","x":1}', '{"k":"b"}'], ['{"k":"c"}']),
    ({**OBJECT, "properties": {"k": {"const": "a"}}, "anyOf": [B, {"properties": {"k": {"enum": ["a", 1]}}}]},
     ['{"k":"a"}', "{}"], ['{"k":"b"}', '{"k":1}']),
    ({"anyOf": [{**INT, "enum": ["a"]}, {**TEXT, "enum": ["a", 1]}, {"const": 1, "enum": [2]}]}, ['"a"'], ["1", "2"]),
    ({"oneOf": [INT, {**NUMBER, "maximum": 3}]}, ["7", "1"], ['"a"']),
    ({**ARRAY, "uniqueItems": True}, ["[1]"], ["1"]),
    ({**OBJECT, "properties": {"a": INT}, "oneOf": [{"properties": {"b": INT}, "required": ["b"]},
      {"properties": {"c": INT}, "required": ["c"]}], "unevaluatedProperties": False},
     ['{"a":1,"b":2}'], ['{"a":1,"d":2}']),
    # conditions and negations
    ({**KV, **WHEN}, ['{"k":"a","v":1}', '{"k":"b"}', '{"k":"ab"}', '{"k":""}'], ['{"k":"a"}', '{"v":1}']),
    ({**CLOSED, "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
     ['{"a":1,"b":1}', '{"b":1}', "{}"], ['{"a":1}']),
    ({**CLOSED, "properties": {"a": INT, "b": INT}, "dependencies": {"a": {"required": ["b"]}, "b": ["a"]}},
     ['{"a":1,"b":1}', "{}"], ['{"a":1}', '{"b":1}']),
    ({**CLOSED, "properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]}},
     ['{"a":1}', "{}"], ['{"a":1,"b":1}']),
    ({"not": {"type": ["null", "object"]}}, ["1", '"a"'], ["null", "{}"]),
    ({**TEXT, "not": {"enum": ["a", "bc"]}}, ['"b"', '"bcd"', '""', '"\u00e9"'], ['"a"', '"bc"']),
    ({"enum": [1, "a", None], "not": {"const": "a"}}, ["1", "null"], ['"a"']),
    # texts
    ({**TEXT, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ['"1.5"', '"-.5"', '"007"'], ['"."', '"-"', '""']),
    ({**TEXT, "pattern": "^(?=[a-z]*q)(?=.{2,3}$)[a-z]+$"}, ['"aq"', '"qbc"'], ['"q"', '"abc"', '"qbcd"']),
    ({**TEXT, "format": "nickname"}, ['"a"'], ["1"]),
])  # fmt: skip
def test_what_a_lowered_schema_allows(grammars, schema, yes, no):
    assert accepted(grammars, schema, [*yes, *no]) == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize("schema,why", [
    ({**OBJECT, "properties": {"a": {**ARRAY, "items": {"type": "strange"}}}},
     "at /properties/a/items: 'strange' isn't a"),
    ({**ARRAY, "contains": INT}, "at /: contains can't"),
    ({**OBJECT, "properties": {"a": {"not": {"pattern": "a"}}}}, "at /properties/a: not with pattern"),
    ({"if": {"minProperties": 1}, "then": False}, "if with minProperties"),
    ({"anyOf": [{}, 3]}, "at /anyOf/1: a schema is an object, true or false, not 3"),
    ({"anyOf": {}}, "anyOf must be a list"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/c"}}}}},
     "at /properties/b: .*#/.defs/c"),
    ({"$dynamicRef": "#a"}, "at /: .dynamicRef can't be followed"),
    ({**OBJECT, "required": "a"}, "required must be a list of names"),
    ({**TEXT, "minLength": -1}, "minLength must be a whole number of at least 0, not -1"),
    ({**NUMBER, "maximum": "3"}, "maximum must be a number"),
    ({**OBJECT, "propertyNames": {"pattern": "a", "minLength": 3}}, "at /propertyNames: names with"),
    ({**OBJECT, "propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "propertyNames beside pattern"),
])  # fmt: skip
def test_what_is_refused_says_where(schema, why):
    with pytest.raises(SchemaError, match=why):
        lower(schema)


@pytest.mark.parametrize("options,disjoint", [
    ([A, B], True),
    ([{**A, "required": []}, B], True),
    ([{**A, "required": []}, {**B, "required": []}], False),
    ([A, {"properties": B["properties"], "required": ["k"]}], True),
    ([{"properties": each["properties"], "required": ["k"]} for each in (A, B)], False),  # of what is no object
    ([INT, TEXT, {"type": "null"}], True),
    ([INT, NUMBER], False),
    ([{"enum": ["a", 1]}, {"const": "b"}], True),
    ([{"enum": ["a", 1]}, {"const": 1.0}], True),
    ([{"enum": ["a", 1]}, {"const": 1}], False),
    ([{"const": ""}, {**TEXT, "minLength": 1}], True),
    ([{"const": "auto"}, {**TEXT, "pattern": "^[0-9]+$"}], True),
    ([{**INT, "maximum": 3}, {**NUMBER, "exclusiveMinimum": 3}], True),
    ([{**INT, "maximum": 3}, {**INT, "minimum": 3}], False),
    ([{**CLOSED, "properties": {"a": INT}, "required": ["a"]},
      {**CLOSED, "properties": {"b": INT}, "required": ["b"]}], True),
    ([{"$ref": "#/$defs/A"}, {"anyOf": [{"$ref": "#/$defs/B"}, TEXT]}], True),
    ([{**OBJECT, "properties": {"s": A}, "required": ["s"]}, {**OBJECT, "properties": {"s": B}}], True),
])  # fmt: skip
def test_a_union_is_exact_where_its_options_exclude_each_other(options, disjoint):
    schema = {"oneOf": options, "$defs": {"A": A, "B": B}}
    if disjoint:
        assert lower(schema, strict=True) == lower(schema)
    else:
        with pytest.raises(SchemaError, match="options that may overlap"):
            lower(schema, strict=True)


@pytest.mark.parametrize("part,why", [
    ({**OBJECT, "patternProperties": {"^a": INT, "b$": TEXT}},
     r"patternProperties \^a and b\$ have names in common but different schemas"),
    ({**TEXT, "pattern": r"\bfoo\b"}, r"the pattern \\bfoo\\b has an anchor or a word boundary within"),
    ({**TEXT, "pattern": r"(a)\1"}, ".*backreferences are not supported"),
    ({**TEXT, "pattern": "^a$", "minLength": 3}, "no text follows it"),
    ({**INT, "minimum": 3, "maximum": 2}, r"no value follows it: minimum \(3\) is greater"),
])  # fmt: skip
def test_a_reason_of_the_library_names_the_part(grammars, part, why):
    outer = {**OBJECT, "properties": {"a": {**ARRAY, "items": {"$ref": "#/$defs/p"}, "minItems": 1}}, "required": ["a"]}
    with pytest.raises(RequestError, match=f"^json: the JSON schema can't be compiled: at /properties/a/items: {why}"):
        grammars.compile(StructuredOutput(json={**outer, "$defs": {"p": part}}))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**outer, "$defs": {"p": part}}}}]
    for format in ("hermes", "qwen3_coder"):
        with pytest.raises(
            RequestError, match=f"^tools: .* function 'f' can't be compiled: at /properties/a/items: {why}"
        ):
            grammars.compile(tool_call_grammar(tools, format))


def test_what_is_weaker_is_refused_by_name_where_it_is_strict(grammars):
    for schema, words in (({"oneOf": [INT, NUMBER]}, "oneOf"), ({**ARRAY, "uniqueItems": True}, "uniqueItems")):
        wanted = StructuredOutput(json={**CLOSED, "properties": {"a": schema}}, strict=True, name="the_field")
        with pytest.raises(RequestError, match=f"^the_field: .* at /properties/a: {words}") as caught:
            grammars.compile(wanted)
        assert caught.value.param == "the_field"
    lower({**ARRAY, "uniqueItems": True, "maxItems": 1}, strict=True)


@pytest.mark.parametrize("schema,strict,closed", [
    ({**OBJECT, "properties": {"a": INT}}, False, True),
    ({"properties": {"a": INT}}, False, True),
    ({**OBJECT, "required": ["a"]}, True, True),
    (OBJECT, False, False),
    (OBJECT, True, True),
    ({**OBJECT, "properties": {"a": INT}, "additionalProperties": True}, False, False),
    ({**OBJECT, "properties": {"a": INT}, "additionalProperties": True}, True, True),
    ({**OBJECT, "properties": {"a": INT}, "additionalProperties": INT}, True, False),
    ({**OBJECT, "properties": {"a": INT}, "patternProperties": {"^x": INT}}, False, False),
    ({**OBJECT, "properties": {"a": INT}, "unevaluatedProperties": {}}, False, False),
    ({"allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]}, False, True),
])  # fmt: skip
def test_objects_of_arguments_are_closed_unless_the_schema_opens_them(schema, strict, closed):
    lowered = json.dumps(lower({"properties": {"o": schema}, "required": ["o"]}, strict=strict, arguments=True))
    assert lowered.count('"additionalProperties": false') == 1 + closed


def test_a_schema_that_is_multiplied_out_without_end_is_refused():
    unions = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]
    with pytest.raises(SchemaError, match="more than 1000 options"):
        lower({"allOf": unions})
