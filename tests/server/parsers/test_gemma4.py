"""Gemma 4's reasoning and calls, cut anywhere, and what its chat template says of itself."""

from __future__ import annotations

import json

import pytest

from server import parsers
from server.parsers import parse

THOUGHT = "<|channel>thought\nLook it up.\n<channel|>"
CALL = (
    '<|tool_call>call:get_weather{city:<|"|>Pa"ris\n<|"|>,days:3,deep:{a:[1,true,<|"|>x<|"|>],b:null,'
    '<|"|>c d<|"|>:-1.5e3},e:{},f:[]}<tool_call|>'
)
ARGUMENTS = {
    "city": 'Pa"ris\n', "days": 3, "deep": {"a": [1, True, "x"], "b": None, "c d": -1500.0}, "e": {}, "f": [],
}  # fmt: skip


def test_reasoning_content_and_calls_however_they_are_cut():
    text = f"{THOUGHT}Wait.{CALL}<|tool_call>call:ping{{}}<tool_call|>"
    whole = parse("gemma4+gemma4", [text])
    assert (whole["reasoning_content"], whole["content"]) == ("Look it up.\n", "Wait.")
    assert [call["name"] for call in whole["tool_calls"]] == ["get_weather", "ping"]
    assert [json.loads(call["arguments"]) for call in whole["tool_calls"]] == [ARGUMENTS, {}]
    for size in (1, 2, 5):
        assert parse("gemma4+gemma4", [text[i : i + size] for i in range(0, len(text), size)]) == whole


@pytest.mark.parametrize("text,arguments", [
    ('{a:<|"|>unfinis', {"a": "unfinis"}),
    ("{a:tru", {"a": "tru"}),
    ("{a", {"a": None}),
    ("{a:{b:1}", {"a": {"b": 1}}),
    ("{a:[1,{b:2}", {"a": [1, {"b": 2}]}),
    ("{a:None,b:Hello world}<tool_call|>", {"a": None, "b": "Hello world"}),
    ("{a:NaN}", {"a": "NaN"}),
    ('{"a":"b\\n"}', {"a": "b\n"}),
    ("{a:[1}", {"a": [1]}),
])  # fmt: skip
def test_arguments_are_json_whatever_the_model_writes(text, arguments):
    for pieces in ([f"<|tool_call>call:f{text}"], list(f"<|tool_call>call:f{text}")):
        (call,) = parse("gemma4", pieces, cut=False)["tool_calls"]
        assert json.loads(call["arguments"]) == arguments


@pytest.mark.parametrize("text", ["<|tool_call>nothing", "<|tool_call>call:", "<|tool_call>call:f(a)", "call:f{}"])
def test_what_is_no_call_is_content(text):
    assert parse("gemma4", list(text)) == {"reasoning_content": None, "content": text, "tool_calls": []}


def test_a_template_says_that_it_is_gemmas():
    template = "{% if tools %}<|tool>declaration:{% endif %}<|tool_call>call: <|channel>thought"
    assert parsers.reasoning_default("gemma4", template) == parsers.tool_default("gemma4", template) == "gemma4"
    assert parsers.tool_default("gpt_oss", "{% if tools %}<|channel|>{% endif %}") == "harmony"
