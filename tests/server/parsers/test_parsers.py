"""Every format, on replies from public parsers' own tests, however their text was cut."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.text.detokenizer import Detokenizer
from server.parsers import PARSERS, REASONING_PARSERS, Parser, parse
from server.parsers.scan import Stops
from tests.server.fake import byte_tokenizer
from tests.server.parsers.cases import TOOLS, Case
from tests.server.parsers.harmony_cases import HARMONY
from tests.server.parsers.hermes_cases import HERMES
from tests.server.parsers.llama3_json_cases import LLAMA
from tests.server.parsers.mistral_cases import MISTRAL
from tests.server.parsers.qwen3_coder_cases import CODER
from tests.server.parsers.section_cases import SECTIONS, kimi
from tests.server.parsers.tagged_cases import TAGGED
from tests.server.parsers.think_cases import THINK

CASES = THINK + HERMES + CODER + LLAMA + MISTRAL + SECTIONS + TAGGED + HARMONY
TABLE = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.name}")


def read(case: Case, pieces: list[str]) -> dict:
    return parse(case.format, pieces, case.tools, case.thinking)


def value(arguments: str):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def test_there_are_enough_cases_from_public_tests():
    assert sum(case.source != "-" for case in CASES) >= 80
    assert len({(case.format, case.name) for case in CASES}) == len(CASES)


@TABLE
def test_a_whole_reply(case):
    found = read(case, [case.text])
    assert found["reasoning_content"] == case.reasoning
    assert found["content"] == case.content
    assert [(call["name"], value(call["arguments"])) for call in found["tool_calls"]] == list(case.calls)


@TABLE
def test_a_reply_cut_anywhere_says_what_the_whole_says(case):
    text, whole = case.text, read(case, [case.text])
    assert read(case, list(text)) == whole, "a character at a time"
    for cut in range(len(text) + 1):
        assert read(case, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    draw = random.Random(case.name)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(2, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(case, pieces) == whole, pieces


@TABLE
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_tokens_in_groups_as_speculation_brings_them(case, step):
    """Each token is a byte, so that characters, too, are cut."""
    detokenizer, tokens = Detokenizer(byte_tokenizer()), list(case.text.encode())
    pieces = [detokenizer.push(tokens[at : at + step])[0] for at in range(0, len(tokens), step)]
    assert read(case, [*pieces, detokenizer.finish()]) == read(case, [case.text])


MARKUP = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=search>", "</function>"),
    *("<parameter=query>", "<parameter=limit>", "</parameter>", "<function=", "<parameter=", "[TOOL_CALLS]", "[ARGS]"),
    *("<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "assistant", "analysis"),
    *("final", " to=functions.search", '{"name": "search", "arguments": {', '{"name": "search"', '"arguments"'),
    *('"query"', '{"', '"}', "}}", "{", "}", "[", "]", ",", ":", ";", '"', "\\", '\\"'),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json"),
    *("<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.search:0"),
    "<|tool_call_argument_begin|>",
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="', "</invoke>"),
    *('<parameter name="', '">', "</minimax:tool_call>"),
    *("\\u00e9", "\\ud83d", "\\ude00", "\n", " ", "null", "1", "x", "add", "<", "/", ">", "|", "é☃"),
]
REPLIES = st.lists(st.sampled_from(MARKUP), max_size=24)
FORMATS = [*REASONING_PARSERS, *PARSERS, "qwen3+hermes", "qwen3+qwen3_coder", "think+llama3_json", "mistral+mistral"]


@pytest.mark.parametrize("format", dict.fromkeys(FORMATS))
@settings(max_examples=75, deadline=None)
@given(
    parts=REPLIES,
    thinking=st.sampled_from([None, "prompt", "off"]),
    tools=st.sampled_from([None, TOOLS]),
    seed=st.integers(0, 99),
)
def test_any_reply_reads_the_same_however_it_is_cut(format, parts, thinking, tools, seed):
    text = "".join(parts)
    whole = parse(format, [text], tools, thinking)
    assert parse(format, list(text), tools, thinking) == whole
    assert parse(format, parts, tools, thinking) == whole
    draw, pieces = random.Random(seed), []
    while text:
        cut = draw.randint(1, 9)
        pieces, text = [*pieces, text[:cut]], text[cut:]
    assert parse(format, pieces, tools, thinking) == whole


@pytest.mark.parametrize("format", dict.fromkeys(FORMATS))
@settings(max_examples=75, deadline=None)
@given(parts=REPLIES, thinking=st.sampled_from([None, "prompt", "off"]))
def test_no_word_of_a_reply_is_lost(format, parts, thinking):
    """Words numbered in order stand between the markup: all come out once, in calls or beside them."""
    words = [f"wörd{i}." for i in range(len(parts))]
    text = "".join(part + word for part, word in zip(parts, words, strict=True))
    found = parse(format, [text], None, thinking)
    said = [found["reasoning_content"] or "", found["content"] or ""]
    said += [part for call in found["tool_calls"] for part in (call["name"], call["arguments"])]
    joined = "\0".join(said)
    swallowed = [word for word in words if joined.count(word) != 1]
    assert not swallowed or (format in HEADERS and _in_headers(text, swallowed)), (found, swallowed)


HEADERS = ("harmony", "gpt_oss", "openai", "openai_gptoss")  # which drop the words of a message's header


def _in_headers(text: str, words: list[str]) -> bool:
    spans = []
    for start in ("<|channel|>", "<|start|>", " to="):
        at = text.find(start)
        while at >= 0:
            end = text.find("<|message|>", at)
            spans.append(text[at : end if end >= 0 else len(text)])
            at = text.find(start, at + 1)
    return all(any(word in span for span in spans) for word in words)


def test_text_is_passed_on_as_soon_as_it_can_be_no_marker():
    parser = Parser("qwen3", "hermes")
    steps = [(piece, [p.text for p in parser.push(piece)]) for piece in ("Hello", " <", "b", "> <tool_", "call", "!")]
    assert steps == [
        ("Hello", ["Hello"]),
        (" <", [" "]),
        ("b", ["<b"]),
        ("> <tool_", ["> "]),
        ("call", []),
        ("!", ["<tool_call!"]),
    ]


def test_arguments_stream_as_they_come():
    parser = Parser(None, "hermes")
    pieces = ['<tool_call>{"name": "f", ', '"arguments": {', '"q": "a', " b", '"}', "}</tool_call>"]
    kinds = [[(p.kind, p.text) for p in parser.push(piece)] for piece in pieces]
    assert kinds == [
        [],
        [],
        [("call", "f"), ("arguments", '{"q": "a')],
        [("arguments", " b")],
        [("arguments", '"}')],
        [],
    ]
    coder = Parser(None, "qwen3_coder", TOOLS)
    coder.push("<tool_call>\n<function=search>\n<parameter=query>\nlong")
    assert [p.text for p in coder.push(" words\n")] == [" words"], "a newline waits, it may be the marker's"


@pytest.mark.parametrize(
    "format",
    [
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "deepseek_v3",
        "kimi_k2",
        "glm45",
        "minimax_m2",
        "harmony",
        "qwen3",
    ],
)
def test_nothing_that_a_model_repeats_takes_long(format):
    """Text that begins a call again and again is read once, not from each beginning to the end."""
    repeated = [part for part in MARKUP if len(part) > 1]
    repeated += ['{"arguments": {', '{"name": ', "<tool_call>[{", "<function=f><parameter=a", "[TOOL_CALLS][", " to="]
    for part in repeated:
        text, started = part * (20_000 // len(part)), time.process_time()
        parse(format, [text])
        assert time.process_time() - started < 1, part


def test_kimis_ids_are_the_models_own():
    (begun, *_) = Parser(None, "kimi_k2").push(kimi("search", "{}", 3))
    assert (begun.text, begun.id) == ("search", "functions.search:3")


def test_ids_are_unique_and_mistral_gets_its_own_kind():
    pieces = Parser(None, "hermes").push('<tool_call>{"name": "f"}</tool_call>' * 3)
    ids = [p.id for p in pieces if p.kind == "call"]
    assert len(set(ids)) == 3 and all(id.startswith("call_") for id in ids)
    assert [p.index for p in pieces if p.kind == "call"] == [0, 1, 2]
    (begun, _) = Parser(None, "mistral").push('[TOOL_CALLS]f{"a": 1}')
    assert len(begun.id) == 9 and begun.id.isalnum()


def test_an_unknown_format_is_refused_with_the_known_ones():
    for wrong in ("hermess", "qwen3+nope", "hermes+qwen3", "qwen3+hermes+x", ""):
        with pytest.raises(ValueError, match=r"no parser .*qwen3.*hermes"):
            parse(wrong, [])


def test_stops_refuse_one_inside_another():
    with pytest.raises(ValueError, match="contains another"):
        Stops("xabc", "ab")
