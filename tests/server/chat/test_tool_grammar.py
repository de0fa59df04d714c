"""Demanded calls: every text that follows their grammar is read as calls, valid by the tools' schemas."""

from __future__ import annotations

import functools
import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from jaxspec.config.request import RequestError
from jaxspec.structured.source import source
from server.chat.tool_grammar import tool_call_grammar
from server.parsers import parse
from tests.server.fake import byte_tokenizer
from tests.server.parsers.cases import tool
from tests.server.parsers.marked_texts import MARKED_TEXTS
from tests.server.parsers.section_cases import CLOSES, KIMI_CLOSES, KIMI_OPENS, OPENS, kimi, v3, v31
from tests.server.parsers.tagged_cases import glm, minimax
from tests.server.parsers.test_marked_texts import MARKS

END = 258
KINDS = {"type": "string", "enum": ["a", 'b"', "<c>"]}
TOOLS = [
    tool("pick", kind=KINDS, size={"type": "integer", "minimum": 0, "maximum": 99}),
    tool("mark", on={"type": "boolean"}, deep={"type": "array", "items": {"$ref": "#/$defs/k"}, "maxItems": 2}),
    {"type": "function", "function": {"name": "stop"}},
]
for each in TOOLS[:2]:
    each["function"]["parameters"]["additionalProperties"] = False
TOOLS[0]["function"]["parameters"]["required"] = ["kind"]
TOOLS[1]["function"]["parameters"]["$defs"] = {"k": KINDS}
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters", {"maxProperties": 0}) for each in TOOLS}
SECTIONS = {
    "deepseek_v3": (OPENS, v3, CLOSES), "deepseek_v31": (OPENS, v31, CLOSES), "kimi_k2": (KIMI_OPENS, kimi, KIMI_CLOSES)
}  # fmt: skip
TAGGED = {"glm45": "</arg_value>", "minimax_m2": "</parameter>"}  # by the tag that ends a value
FORMATS = ["hermes", "qwen3_coder", "llama3_json", "mistral", *SECTIONS, *TAGGED]


def matcher(wanted) -> LLMatcher:
    made = LLMatcher(LLTokenizer(byte_tokenizer().to_json(), eos_token=[END]), source(wanted))
    assert not made.is_error(), made.get_error()
    return made


def follow(made: LLMatcher, draw: random.Random) -> str:
    """A random text of the grammar."""
    text = bytearray()
    while True:
        allowed = np.flatnonzero(np.frombuffer(made.compute_logit_bias(), np.uint8))
        token = int(draw.choice(allowed))
        if token == END:
            return text.decode()
        assert made.consume_token(token)
        text.append(token)


def accepts(wanted, text: str) -> bool:
    made = matcher(wanted)
    return made.try_consume_tokens(list(text.encode())) == len(text.encode()) and made.is_accepting()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("named", "parallel"), [(None, True), (None, False), ("pick", True)])
def test_a_text_of_the_grammar_is_calls_valid_by_their_schemas(format, named, parallel):
    draw, most, names = random.Random(format), 0, set()
    for _ in range(20):
        text = follow(matcher(tool_call_grammar(TOOLS, format, named, parallel)), draw)
        found = parse(format, [text], TOOLS)
        assert found["tool_calls"] and found["content"] is None, text
        for call in found["tool_calls"]:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
            names.add(call["name"])
        most = max(most, len(found["tool_calls"]))
    assert (most > 1) == (parallel and named is None)
    assert names == ({"pick"} if named else set(SCHEMAS))


@pytest.mark.parametrize("format", FORMATS)
def test_text_that_calls_nothing_is_no_text_of_the_grammar(format):
    wanted = tool_call_grammar(TOOLS, format)
    for text in ("", "Sure!", '{"name": "fly", "arguments": {}}', "<tool_call>\n</tool_call>"):
        assert not accepts(wanted, text)


def test_strings_of_any_text_end_at_their_marker():
    wanted = tool_call_grammar([tool("say", text={"type": "string"})], "qwen3_coder")
    text = "<tool_call>\n<function=say>\n<parameter=text>\n<b>\n</x> y\n\n</parameter>\n</function>\n</tool_call>"
    assert accepts(wanted, text)
    assert json.loads(parse("qwen3_coder", [text])["tool_calls"][0]["arguments"]) == {"text": "<b>\n</x> y\n"}
    assert not accepts(wanted, text.replace("\n</parameter>", ""))
    assert not accepts(wanted, text.replace("</x>", "</parameter>")), "the parser would end the value there"


LOG = tool("log", text={"type": "string"}, tags={"type": "array", "items": {"type": "string"}}, note={})
LOG["function"]["parameters"] |= {"required": ["text", "tags"], "additionalProperties": False}
KNOWN = [LOG, tool("bash", command={"type": "string"})]
CALLS = [
    *("<tool_call>\n<function=bash>\n<parameter=command>\nls", "</parameter>\n</function>\n</tool_call>\n"),
    *('<tool_call>\n{"name": "bash", "arguments": {}}', '[TOOL_CALLS]bash[ARGS]{"command": 1}', "</think>", "\\"),
]


@functools.cache
def grammar_of(format):
    return matcher(tool_call_grammar(KNOWN, format, reasoning="qwen3", thinking="prompt"))


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=80, deadline=None)
@drawn(st.lists(st.sampled_from([*MARKS, *CALLS]), max_size=12).map("".join) | st.sampled_from(MARKED_TEXTS))
def test_the_parser_reads_what_the_grammar_takes(format, text):
    """Any marks may stand in reasoning and values but the one that ends them."""
    thought, given = "hm " + text.replace("</think>", ""), {"text": text, "tags": [text, text]}
    reply = f"{thought}</think>\n\n{call(format, given, 'log')}"
    made, tokens = grammar_of(format).deep_copy(), list(reply.encode())
    taken = made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()
    ends = {"qwen3_coder": "\n</parameter>", **TAGGED}.get(format)
    assert taken == (ends is None or ends not in text)
    if taken:
        found = parse(f"qwen3+{format}", [reply], KNOWN, "prompt", constrained=True)
        assert found["reasoning_content"] == thought and found["content"] is None
        assert [(each["name"], json.loads(each["arguments"])) for each in found["tool_calls"]] == [("log", given)]


INT, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"oneOf": [{"properties": {"k": {"const": "a"}, "x": INT}, "required": ["k", "x"]},
                {"properties": {"k": {"const": "b"}, "y": TEXT}, "required": ["k", "y"]}]}  # fmt: skip
DECIMAL = {"anyOf": [{"type": "number"}, {**TEXT, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}


def members(**properties):
    return {"type": "object", "properties": properties, "required": [*properties]}


def call(format, arguments, name="f") -> str:
    """A call as models write it."""
    said = json.dumps(arguments, ensure_ascii=False)
    if format == "qwen3_coder" or format in TAGGED:
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        if format in TAGGED:
            return glm(name, **texts) if format == "glm45" else minimax((name, texts))
        said = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"
    if format in SECTIONS:
        opens, write, closes = SECTIONS[format]
        return opens + write(name, said) + closes
    body = f'{{"name": "{name}", "{"parameters" if format == "llama3_json" else "arguments"}": {said}}}'
    marks = {"hermes": ("<tool_call>\n", "\n</tool_call>"), "mistral": ("[TOOL_CALLS][", "]")}.get(format, ("", ""))
    return body.join(marks)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("parameters,yes,no", [
    (members(a=INT), [{"a": 1}], [{"a": 1, "b": 2}, {}, {"a": "x"}]),
    ({**members(a={"$ref": "#/$defs/N[int]"}), "$defs": {"N[int]": INT}}, [{"a": 1}], [{"a": "x"}]),
    (members(a={**TEXT, "minLength": 2, "maxLength": 3}), [{"a": "ab"}, {"a": "é é"}], [{"a": "a"}, {"a": "abcd"}]),
    (members(a={**TEXT, "pattern": "^[a-z]+/\\d$"}), [{"a": "ab/1"}], [{"a": "a"}, {"a": "a/1b"}]),
    (members(a={**TEXT, "pattern": "^a|b"}), [{"a": "xbc"}, {"a": "ac"}], [{"a": "xac"}]),
    (members(a={**TEXT, "pattern": r"^[(?=]\(?!$"}), [{"a": "=(!"}, {"a": "?!"}], [{"a": "x"}]),
    (members(a={**TEXT, "format": "date"}), [{"a": "2026-01-31"}], [{"a": "x"}]),
    (members(a={"enum": ["x", "y", None]}), [{"a": "x"}, {"a": None}], [{"a": "z"}]),
    (members(a={"anyOf": [{"enum": ["x"]}, {"type": "null"}]}), [{"a": "x"}, {"a": None}], [{"a": "z"}, {"a": 3}]),
    (members(a={"type": ["string", "null"]}), [{"a": "any"}, {"a": None}], []),
    (members(a={"anyOf": [{**INT, "minimum": 3}, TEXT]}), [{"a": "any"}, {"a": 5}], [{"a": 1}]),
    (members(a={"anyOf": [{"type": "array", "items": INT}, TEXT]}), [{"a": "y"}, {"a": [1]}], [{"a": ["q"]}]),
    (members(a={"const": "k"}, b={"enum": [1, "a", True]}), [{"a": "k", "b": True}],
     [{"a": "z", "b": 1}, {"a": "k", "b": 2}]),
    (members(a=DECIMAL), [{"a": 1.5}], [{"a": "x"}]),
    (AB, [{"k": "a", "x": 1}, {"k": "b", "y": "q"}], [{"k": "a", "y": "q"}, {"k": "b", "y": "q", "x": 1}]),
    ({"allOf": [members(a=INT), {"$ref": "#/$defs/B"}], "$defs": {"B": members(b=TEXT)}},
     [{"a": 1, "b": "x"}], [{"a": 1}, {"a": 1, "b": "x", "c": "y"}]),
    ({"type": "object", "additionalProperties": TEXT}, [{"z": "q", "y": "r"}, {}], []),
    ({"type": "object"}, [{}], [{"a": 1}]),
    ({"type": "object", "patternProperties": {"^n": INT, "^s": TEXT}, "additionalProperties": False, "required": ["n"]},
     [{"n": 1, "s": "x"}], [{"n": "x"}, {"n": 1, "s": 3, "q": 1}, {"n": 1, "q": "y"}]),
    (members(m={"type": "object"}, n={"properties": {"z": INT}}), [{"m": {"a": 1}, "n": {"z": 1}}],
     [{"m": {}, "n": {"y": 1}}, {"m": {}, "n": 3}]),
    ({**members(a=TEXT), "additionalProperties": True}, [{"a": "x"}, {"a": "x", "z": "q"}], [{"z": "q"}]),
    (members(a={"type": "str"}, b={"items": INT}), [{"a": "x", "b": [1]}], [{"a": "x", "b": 3}]),
])  # fmt: skip
def test_every_format_constrains_arguments_alike(format, parameters, yes, no):
    wanted = tool_call_grammar([{"type": "function", "function": {"name": "f", "parameters": parameters}}], format)
    found = [accepts(wanted, call(format, arguments)) for arguments in (*yes, *no)]
    assert found == [True] * len(yes) + [False] * len(no)


def test_strict_closes_what_says_that_anything_may_follow():
    function = {"name": "f", "parameters": {**members(a=TEXT), "additionalProperties": True}, "strict": True}
    wanted = tool_call_grammar([{"type": "function", "function": function}], "hermes")
    assert accepts(wanted, call("hermes", {"a": "x"})) and not accepts(wanted, call("hermes", {"a": "x", "z": "q"}))


@pytest.mark.parametrize("reasoning,thinking,begins,never", [
    (None, None, "", "<think>a</think>\n\n"),
    ("qwen3", None, "<think>\na < b\n</think>\n\n", "a</think>"),
    ("qwen3", None, "", "<think>a"),
    ("qwen3", "prompt", "\na\n</think>\n\n", ""),
    ("qwen3", "off", "", "<think>a</think>\n\n"),
    ("deepseek_r1", None, "a</think>", ""),
])  # fmt: skip
def test_a_model_may_reason_before_it_calls(reasoning, thinking, begins, never):
    wanted = tool_call_grammar(TOOLS, "hermes", reasoning=reasoning, thinking=thinking)
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert accepts(wanted, begins + call)
    assert not accepts(wanted, never + call)


def test_a_marker_that_is_a_token_is_that_token():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.added_tokens
    assert tokens["<|im_start|>"] == 257
    made = matcher(tool_call_grammar(TOOLS, "hermes", special_ids={"<tool_call>": 257, "</tool_call>": 256}))
    body = list(b'\n{"name": "stop", "arguments": {}}\n')
    assert made.try_consume_tokens([257, *body, 256]) == len(body) + 2 and made.is_accepting()


def test_a_value_ends_at_a_tag_that_is_a_token():
    say = [tool("say", text={"type": "string"}, times={"type": "integer"})]
    made = matcher(tool_call_grammar(say, "glm45", special_ids={"<arg_value>": 257, "</arg_value>": 256}))
    before, between = list(b"<tool_call>say\n<arg_key>text</arg_key>\n"), list(b"\n<arg_key>times</arg_key>\n")
    tokens = [*before, 257, *b"hi\n", 256, *between, 257, *b"3", 256, *b"\n</tool_call>"]
    assert made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


def test_what_cannot_be_demanded_is_refused():
    with pytest.raises(RequestError, match="harmony"):
        tool_call_grammar(TOOLS, "harmony")
    with pytest.raises(RequestError, match="'absent'"):
        tool_call_grammar(TOOLS, "hermes", "absent")
    for wrong, why in (
        ({"type": "string"}, "of the function 'f' must have the type object, got 'string'"),
        ({"type": "objekt"}, "of the function 'f': at /: 'objekt' isn't a type"),
        (members(a={"type": "array", "items": {"type": "strange"}}), "'f': at /properties/a/items: 'strange'"),
        (
            members(a={"type": "array", "items": {**TEXT, "format": "iri"}}),
            "'f': at /properties/a/items: the format iri",
        ),
        (members(a={**TEXT, "pattern": "a(?=b)c"}), "'f': at /properties/a: the pattern 'a.*c' looks ahead or behind"),
    ):
        with pytest.raises(RequestError, match=why) as caught:
            tool_call_grammar([{"function": {"name": "f", "parameters": wrong}}], "hermes")
        assert caught.value.param == "tools"
    with pytest.raises(RequestError, match="'f': at /properties/a: oneOf has options that may overlap"):
        overlapping = members(a={"oneOf": [INT, {"type": "number"}]})
        tool_call_grammar([{"function": {"name": "f", "strict": True, "parameters": overlapping}}], "hermes")
    with pytest.raises(RequestError, match=r"'f' in this format: the pattern .* has anchors within"):
        tool_call_grammar([tool("f", a={**TEXT, "pattern": "x(^a|b$)"})], "qwen3_coder")
    huge = [tool("f", x={"enum": ["x" * 2**18]})]
    with pytest.raises(RequestError, match="at most"):
        tool_call_grammar(huge, "hermes")
