"""A chat with gpt-oss: what its template writes of each form of message, and what a client gets of a reply.

The template here is ours. It has the public one's rules: instructions from the first message alone, reasoning in
`thinking`, one call a message, a result named after the latest call, a complaint about reasoning beside content.
"""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from jaxspec.checkpoint import load_model
from jaxspec.text import tokenizer as ours
from server.chat.speech import Formats
from tests.checkpoint.test_checkpoint import edit_json
from tests.server.fake import byte_tokenizer
from tests.server.parsers.cases import AREA, WEATHER
from tests.server.test_tools import said, speaking
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

TEMPLATE = """
{%- macro tool_list(tools) -%}
{%- for tool in tools %}{{ "// " + tool.function.description + "\\ntype " + tool.function.name }};{% endfor -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Date: " + strftime_now("%Y") | length | string + " Reasoning: " -}}
{{- (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" -}}
{%- set named = messages[0].role in ("system", "developer") -%}
{%- if named or tools -%}
{{- "<|start|>developer<|message|>" + (messages[0].content if named else "") -}}
{%- if tools %}{{ " functions:" + tool_list(tools) }}{% endif -%}{{- "<|end|>" -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in messages -%}
{%- if message.role == "assistant" and "tool_calls" in message -%}
{%- if message.content and message.thinking %}{{ raise_exception("both") }}{% endif -%}
{%- if message.thinking or message.content -%}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.thinking or message.content) + "<|end|>" -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}{%- set last.name = call.name -%}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" -}}
{{- call.arguments | tojson + "<|call|>" -}}
{%- elif message.role == "assistant" -%}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" -}}
{%- elif message.role == "tool" -%}
{%- if last.name is none %}{{ raise_exception("no call") }}{% endif -%}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" -}}
{{- message.content | tojson + "<|end|>" -}}
{%- elif message.role == "user" -%}
{{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif -%}
"""
SYSTEM = "<|start|>system<|message|>Date: 4 Reasoning: medium<|end|>"
ASK = "<|start|>user<|message|>hi<|end|>"
USER = {"role": "user", "content": "hi"}
MODEL = {"model": "fake/model"}


def harmony_tokenizer() -> ours.Tokenizer:
    return ours.Tokenizer.from_backend(Tokenizer.from_str(byte_tokenizer().to_json()), TEMPLATE)


def call(name: str, key: str, **arguments) -> dict:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(key: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": key, "content": text}


def asks(name: str, arguments: str) -> str:
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


def answers(name: str, text: str) -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{text}"<|end|>'


def thinks(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


CALLS = {"role": "assistant", "tool_calls": [call("a", "1", x=1), call("b", "2"), call("a", "3", x=3)]}


@pytest.mark.parametrize(("messages", "prompt"), [
    ([{"role": "system", "content": "Be brief."}, USER],
     "<|start|>developer<|message|>Be brief.<|end|>" + ASK),
    ([{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Rhyme."}, USER],
     "<|start|>developer<|message|>Be brief.\n\nRhyme.<|end|>" + ASK),
    ([USER, {"role": "system", "content": "Late."}], "<|start|>developer<|message|>Late.<|end|>" + ASK),
    ([USER, {"role": "assistant", "content": "ok", "reasoning_content": "hm"}, USER],
     ASK + "<|start|>assistant<|channel|>final<|message|>ok<|end|>" + ASK),
    ([USER, {"role": "assistant", "reasoning": "hm", "tool_calls": [call("a", "1", x=1)]}, result("1", "8")],
     ASK + thinks("hm") + asks("a", '{"x": 1}') + answers("a", "8")),
    ([USER, {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call("a", "1")]}],
     ASK + thinks("hm\nI look.") + asks("a", "{}")),
    ([USER, CALLS, result("3", "drei"), result("1", "eins"), result("2", "zwei"), USER],
     ASK + asks("a", '{"x": 1}') + answers("a", "eins") + asks("b", "{}") + answers("b", "zwei")
     + asks("a", '{"x": 3}') + answers("a", "drei") + ASK),
    ([USER, CALLS, result("2", "zwei")],
     ASK + asks("a", '{"x": 1}') + asks("b", "{}") + answers("b", "zwei") + asks("a", '{"x": 3}')),
])  # fmt: skip
def test_no_part_of_a_chat_is_lost_or_refused(messages, prompt):
    with speaking("<|channel|>final<|message|>ok", reasoning="auto", tools="auto", tokenizer=harmony_tokenizer()) as (
        chat, llm
    ):  # fmt: skip
        message = chat.create(**MODEL, messages=messages).choices[0].message
        assert message.content == "ok" and getattr(message, "reasoning_content", None) is None
        written = byte_tokenizer().decode(llm.started[-1][0], skip_special_tokens=False)
    assert written == SYSTEM + prompt + "<|start|>assistant"


def test_reasoning_effort_reaches_the_template_of_both_routes():
    with speaking("<|channel|>final<|message|>ok", reasoning="auto", tools="auto", tokenizer=harmony_tokenizer()) as (
        chat, llm
    ):  # fmt: skip
        chat.create(**MODEL, messages=[USER], reasoning_effort="low")
        chat._client.responses.create(**MODEL, input="hi", reasoning={"effort": "high"})
        low, high = (byte_tokenizer().decode(each[0], skip_special_tokens=False) for each in llm.started)
    assert "Reasoning: low" in low and "Reasoning: high" in high


def test_tools_and_variables_reach_the_template_and_calls_the_client():
    bare = {"type": "function", "function": {"name": "now"}}
    reply = "<|channel|>analysis<|message|>hm<|end|>" + asks("get_weather", '{"city": "Oslo"}')
    with speaking(reply, reasoning="auto", tools="auto", tokenizer=harmony_tokenizer()) as (chat, llm):
        more = {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "high"}}}
        (choice,) = chat.create(**MODEL, messages=[USER], tools=[WEATHER, AREA, bare], **more).choices
        written = byte_tokenizer().decode(llm.started[-1][0], skip_special_tokens=False)
        params = llm.started[-1][1]
    assert said(choice) == {
        "content": "", "reasoning_content": "hm", "finish_reason": "tool_calls",
        "tool_calls": [["get_weather", '{"city": "Oslo"}']],
    }  # fmt: skip
    assert "Reasoning: high" in written and "// \ntype now;" in written and "type get_weather;" in written
    assert {"<|channel|>", "<|message|>", "<|call|>"} <= set(params.kept_special_tokens)


def test_the_formats_follow_from_the_template():
    found = Formats.of("gpt_oss", TEMPLATE)
    assert (found.reasoning, found.tools, found.in_template) == ("harmony", "harmony", True)


def test_a_reply_ends_at_return_and_call_whatever_the_files_say(tmp_path):
    """Load a checkpoint whose config and tokenizer name neither."""
    source = tiny_checkpoint("gpt_oss", vocab=BYTE_VOCAB + 3, tokenizer=True, num_hidden_layers=1)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend = Tokenizer.from_file(str(source / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|return|>", "<|start|>", "<|call|>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "config.json", eos_token_id=5)
    model = load_model(str(tmp_path), progress=False)
    ends = [model.tokenizer.added_tokens[name] for name in ("<|im_end|>", "<|return|>", "<|call|>")]
    assert set(model.eos_ids) == {5, *ends}
