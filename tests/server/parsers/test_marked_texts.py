"""Values that mention the marks of their format: each text as each argument, however the reply is cut."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.text.detokenizer import Detokenizer
from server.parsers import parse
from tests.server.fake import byte_tokenizer
from tests.server.parsers.cases import STRING, coder, hermes, tool
from tests.server.parsers.harmony_cases import harmony
from tests.server.parsers.marked_texts import MARKED_TEXTS

WRITE, BASH = tool("write", path=STRING, content=STRING, mode={"type": "integer"}), tool("bash", command=STRING)
TOOLS = (WRITE, BASH)


def _json(name: str, arguments: dict) -> str:
    return json.dumps(arguments, ensure_ascii=False)


WRITERS = {
    "hermes": lambda name, arguments: hermes(name, _json(name, arguments)),
    "qwen3_coder": lambda name, arguments: coder(name, **arguments),
    "llama3_json": lambda name, arguments: f'{{"name": "{name}", "parameters": {_json(name, arguments)}}}',
    "mistral": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{_json(name, arguments)}",
    "harmony": lambda name, arguments: harmony(name, _json(name, arguments)),
}
SEPARATORS = {"llama3_json": "; "}
FORMATS = pytest.mark.parametrize("format", WRITERS)
TEXTS = pytest.mark.parametrize("number", range(len(MARKED_TEXTS)))


def calls(format: str, pieces: list[str], cut: bool = True) -> list[tuple[str, dict]]:
    found = parse(format, pieces, TOOLS, None, cut)
    assert found["content"] is None
    return [(call["name"], json.loads(call["arguments"])) for call in found["tool_calls"]]


def test_there_are_fifty_texts():
    assert len(set(MARKED_TEXTS)) == len(MARKED_TEXTS) >= 50


@FORMATS
@TEXTS
def test_a_value_may_hold_any_marks(format, number):
    text, write = MARKED_TEXTS[number], WRITERS[format]
    for arguments in (
        {"path": "a.md", "content": text},
        {"content": text, "path": "a.md"},
        {"path": "a.md", "content": f"# Tools\n\n{text}\n\nEnd."},
        {"content": f"# Tools\n\n{text}\n\nEnd.", "path": "a.md"},
    ):
        assert calls(format, [write("write", arguments)]) == [("write", arguments)]
    two = [("write", {"path": "a.md", "content": f"# Tools\n\n{text}\n\nEnd."}), ("bash", {"command": "ls"})]
    assert calls(format, [SEPARATORS.get(format, "\n").join(write(*call) for call in two)]) == two


@FORMATS
@TEXTS
def test_every_split_reads_the_same(format, number):
    arguments = {"content": MARKED_TEXTS[number], "path": "a.md"}
    text, expected = WRITERS[format]("write", arguments), [("write", arguments)]
    assert calls(format, list(text)) == expected
    for at in range(1, len(text)):
        assert calls(format, [text[:at], text[at:]]) == expected, at
    detokenizer, tokens = Detokenizer(byte_tokenizer()), list(text.encode())
    draw, pieces = random.Random(number), []
    while tokens:
        size = draw.randint(1, 8)
        pieces.append(detokenizer.push(tokens[:size])[0])
        tokens = tokens[size:]
    assert calls(format, [*pieces, detokenizer.finish()]) == expected


MARKS = [
    *("<tool_call>", "</tool_call>", "<function=write>", "</function>", "<parameter=path>", "<parameter=mode>"),
    *("<parameter=other>", "</parameter>", "\n", "\n", "\n", " ", "7", "a", "b c", "<", "=", ">"),
]


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=60), seed=st.integers(0, 99))
def test_arguments_are_json_of_the_schemas_keys_once(parts, seed):
    reply = "<tool_call>\n<function=write>\n<parameter=content>\n" + "".join(parts)
    found = parse("qwen3_coder", [reply], TOOLS, None, False)
    for call in found["tool_calls"]:
        keys = [key for key, _ in json.loads(call["arguments"], object_pairs_hook=list)]
        schema = WRITE if call["name"] == "write" else BASH
        assert len(set(keys)) == len(keys) and set(keys) <= schema["function"]["parameters"]["properties"].keys()
    draw, pieces = random.Random(seed), []
    while reply:
        size = draw.randint(1, 30)
        pieces, reply = [*pieces, reply[:size]], reply[size:]
    assert parse("qwen3_coder", pieces, TOOLS, None, False) == found


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "mistral", "harmony"])
def test_arguments_that_the_model_leaves_open_are_closed(format):
    arguments = {"path": 'a\n"b\\', "content": "x [{ 1, y", "mode": 7}
    text, name = WRITERS[format]("write", arguments), "write"
    begins = text.index("{", text.index("[ARGS]" if format == "mistral" else name)) + 1
    for end in range(begins, text.index("7")):
        (call,) = parse(format, [text[:end]], TOOLS, None, False)["tool_calls"] or [{"arguments": "{}"}]
        assert isinstance(json.loads(call["arguments"]), dict), text[:end]
