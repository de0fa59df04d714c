"""Tools and reasoning through the official client: what the model wrote, by rule, and what the client gets."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from openai import BadRequestError, OpenAI

from jaxspec.text.tokenizer import Tokenizer
from server.app import create_app
from server.chat.speech import Formats
from server.protocol import ChatRequest
from tests.server.fake import FakeLLM, byte_tokenizer
from tests.server.live import serving
from tests.server.parsers.cases import AREA, WEATHER, coder, hermes
from tests.support.sample import rare

ASK = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = {"tools": [WEATHER, AREA]}
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
OSLO, BONN = hermes("get_weather", '{"city": "Oslo ☃"}'), hermes("get_weather", '{"city": "Bonn"}')


@dataclass
class Scripted(FakeLLM):
    """A fake engine that says `text`, `step` tokens (bytes) at a time, and takes prompts of any length. It looks for no
    stop strings: `stop_reason` is what it says that ended the text."""

    text: str = ""
    step: int = 1
    stop_reason: str | int | None = None

    def prepare(self, prompt, params):
        pass

    async def _deltas(self, prompt, params):
        tokens = list(self.text.encode())[: params.max_tokens]
        for place in range(0, len(tokens), self.step):
            for index in range(params.n):
                last = min(place + self.step, len(tokens))
                parts = [self._delta(index, tokens, p, tokens[p], prompt, params, None) for p in range(place, last)]
                delta = parts[-1]
                delta.text = "".join(part.text for part in parts)
                delta.token_ids = [token for part in parts for token in part.token_ids]
                delta.logprobs = [e for part in parts for e in part.logprobs] if params.logprobs is not None else None
                if last == len(tokens):
                    delta.finish_reason = "stop" if len(tokens) == len(self.text.encode()) else "length"
                    delta.stop_reason = self.stop_reason
                yield delta


_servers = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def servers():
    with _servers:
        yield


@functools.cache
def served(reasoning: str, tools: str, tokenizer: Tokenizer) -> tuple[OpenAI, Scripted]:
    """One server for all texts of two formats: it reads a tokenizer's template at its start."""
    llm = Scripted(tokenizer=tokenizer)
    url = _servers.enter_context(serving(create_app(llm, reasoning_parser=reasoning, tool_call_parser=tools)))
    return _servers.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)), llm


@contextmanager
def speaking(
    text: str, step: int = 3, reasoning: str = "qwen3", tools: str = "hermes", stop_reason=None, tokenizer=None
) -> Iterator[tuple]:
    tokenizer = tokenizer or byte_tokenizer()
    client, llm = served(reasoning, tools, tokenizer)
    vars(llm).update(vars(Scripted(tokenizer=tokenizer, text=text, step=step, stop_reason=stop_reason)))
    yield client.chat.completions, llm


def gather(stream) -> list[dict]:
    """The message of each choice, put together from a stream as its rules say."""
    messages: dict[int, dict] = {}
    for chunk in stream:
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": "", "reasoning_content": "", "tool_calls": []})
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                calls = message["tool_calls"]
                if part.id is not None:
                    assert part.index == len(calls) and part.type == "function" and part.function.name
                    calls.append([part.function.name, ""])
                else:
                    assert part.index == len(calls) - 1 and part.function.name is None and part.type is None
                calls[part.index][1] += part.function.arguments
            message["finish_reason"] = choice.finish_reason
    return [messages[index] for index in sorted(messages)]


def said(choice) -> dict:
    message = choice.message
    calls = [[each.function.name, each.function.arguments] for each in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None)
    return {
        "content": message.content or "",
        "reasoning_content": reasoning or "",
        "tool_calls": calls,
        "finish_reason": choice.finish_reason,
    }


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_a_stream_says_what_the_whole_says(step):
    text = f"<think>\nhm ☃\n</think>\n\nI look.\n{OSLO}\n{BONN}"
    with speaking(text, step) as (chat, _):
        (whole,) = chat.create(**ASK, **TOOLS).choices
        assert said(whole) == {
            "content": "\n\nI look.\n",
            "reasoning_content": "\nhm ☃\n",
            "tool_calls": [["get_weather", '{"city": "Oslo ☃"}'], ["get_weather", '{"city": "Bonn"}']],
            "finish_reason": "tool_calls",
        }
        assert len({each.id for each in whole.message.tool_calls}) == 2
        assert gather(chat.create(**ASK, **TOOLS, stream=True)) == [said(whole)]


@pytest.mark.parametrize("step", [1, rare(2), rare(5), 1000])
@pytest.mark.parametrize("format,parts", [
    ("qwen3", ["<think>", "\nhm ☃ a < b\n", f"</think>\n\nI look.\n{OSLO}"]),
    ("qwen3", ["\n<think>", "cut off <"]),
    ("qwen3", ["no reasoning <think>at all</think>"]),
    ("deepseek_r1", ["", " no opening marker", "</think>ok"]),
    (
        "harmony",
        [ANALYSIS, "hm ☃", f"<|end|><|start|>assistant{ANALYSIS}", "hm", f"<|end|><|start|>assistant{FINAL}ok"],
    ),
    (None, ["<think>hm</think>ok"]),
])  # fmt: skip
def test_reasoning_tokens_are_counted_however_they_arrive(step, format, parts):
    """A byte is a token. Every other part is reasoning."""
    text, expected = "".join(parts), len("".join(parts[1::2]).encode())
    tools = "harmony" if format == "harmony" else "hermes"
    with speaking(text, step, format or "none", tools) as (chat, _):
        usage = chat.create(**ASK, n=2).usage
        assert usage.completion_tokens == 2 * len(text.encode())
        assert usage.completion_tokens_details.reasoning_tokens == 2 * expected
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(chat.create(**ASK, n=2, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
        assert counts == sorted(counts) and chunks[-1].usage == usage

        responses = chat._client.responses
        asked = {"model": "fake/model", "input": "hi"}
        events = list(responses.create(**asked, stream=True))
        for response in (responses.create(**asked), events[-1].response):
            assert response.usage.output_tokens_details.reasoning_tokens == expected


def test_content_is_null_beside_a_call_alone():
    with speaking(OSLO) as (chat, _):
        message = chat.create(**ASK, **TOOLS).choices[0].message
        assert message.content is None and message.reasoning_content is None
        with_none = chat.create(**ASK, **TOOLS, tool_choice="none").choices[0]
        assert with_none.message.content == OSLO and with_none.finish_reason == "stop"
        without = chat.create(**ASK).choices[0]
        assert without.message.content == OSLO and without.message.tool_calls is None


def test_each_choice_has_its_own_parser():
    with speaking(f"<think>a</think>b{OSLO}") as (chat, _):
        asked = {**ASK, **TOOLS, "n": 3}
        whole = [said(choice) for choice in chat.create(**asked).choices]
        assert whole[0]["tool_calls"] and whole == [whole[0]] * 3
        assert gather(chat.create(**asked, stream=True)) == whole


def test_one_call_alone_where_parallel_calls_are_off():
    with speaking(OSLO + BONN + "x") as (chat, _):
        (whole,) = chat.create(**ASK, **TOOLS, parallel_tool_calls=False).choices
        assert [each.function.arguments for each in whole.message.tool_calls] == ['{"city": "Oslo ☃"}']
        assert whole.message.content == "x"
        assert gather(chat.create(**ASK, **TOOLS, parallel_tool_calls=False, stream=True)) == [said(whole)]


@pytest.mark.parametrize("most,reason,calls,content", [
    (25, "length", [], OSLO[:25]),
    (62, "length", [["get_weather", '{"city": "Osl']], ""),
    (None, "tool_calls", [["get_weather", '{"city": "Oslo ☃"}']], ""),
])  # fmt: skip
def test_a_call_cut_off_is_not_lost(most, reason, calls, content):
    with speaking(OSLO) as (chat, _):
        (choice,) = chat.create(**ASK, **TOOLS, max_tokens=most).choices
        expected = {"content": content, "reasoning_content": "", "tool_calls": calls, "finish_reason": reason}
        assert said(choice) == expected
        assert gather(chat.create(**ASK, **TOOLS, max_tokens=most, stream=True)) == [expected]


@pytest.mark.parametrize("step", [1, rare(7), 1000])
@pytest.mark.parametrize("text,stop_reason,whole", [
    (OSLO[:62], "lo", False),
    (OSLO[:62], 7, False),
    (OSLO + BONN[:62], "n", False),
    (OSLO + BONN[:62], None, True),  # the model ended its turn, and what it wrote is what it called
    (OSLO.removesuffix("</tool_call>"), "</tool_call>", True),
    (OSLO, "<tool_call>", True),
    (OSLO, 7, True),
])  # fmt: skip
def test_a_call_that_a_stop_string_cuts_is_not_finished(text, stop_reason, whole, step):
    with speaking(text, step, stop_reason=stop_reason) as (chat, _):
        (choice,) = chat.create(**ASK, **TOOLS).choices
        assert choice.message.tool_calls and choice.finish_reason == ("tool_calls" if whole else "stop")
        assert gather(chat.create(**ASK, **TOOLS, stream=True)) == [said(choice)]

        tools = [{"type": "function", **tool["function"]} for tool in TOOLS["tools"]]
        asked = {"model": "fake/model", "input": "hi", "tools": tools}
        *_, last = chat._client.responses.create(**asked, stream=True)
        for response in (chat._client.responses.create(**asked), last.response):
            assert response.status == "completed"
            assert response.output[-1].status == ("completed" if whole else "incomplete")


def test_logprobs_are_those_of_all_tokens():
    text = f"<think>a</think>b{OSLO}"
    with speaking(text) as (chat, _):
        asked = {**ASK, **TOOLS, "logprobs": True}
        whole = chat.create(**asked).choices[0].logprobs.content
        assert bytes(byte for item in whole for byte in item.bytes).decode() == text
        chunks = [choice for chunk in chat.create(**asked, stream=True) for choice in chunk.choices]
        assert [item for choice in chunks if choice.logprobs for item in choice.logprobs.content] == whole


def test_chunks_without_news_are_not_sent():
    with speaking(f"ab{OSLO}", step=1) as (chat, _):
        chunks = list(chat.create(**ASK, **TOOLS, stream=True))
        empty = [c for chunk in chunks for c in chunk.choices if not c.finish_reason and not c.delta.model_fields_set]
        assert not empty


def test_values_become_what_the_schema_says():
    with speaking(coder("area", precision="2", shape="disc"), tools="qwen3_coder", tokenizer=Template()) as (chat, _):
        (made,) = chat.create(**ASK, **TOOLS).choices[0].message.tool_calls
        assert json.loads(made.function.arguments) == {"precision": 2, "shape": "disc"}


RUN = {"type": "custom", "custom": {"name": "run", "description": "Runs a command.", "format": {
    "type": "grammar", "grammar": {"syntax": "regex", "definition": "ls|pwd"},
}}}  # fmt: skip
PATCH = {"type": "custom", "custom": {"name": "patch", "format": {
    "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"},
}}}  # fmt: skip


def custom_parts(stream) -> list[dict]:
    """Calls of a stream, each with its `type`, name and what it was given."""
    calls: list[dict] = []
    for chunk in stream:
        for part in (part for choice in chunk.choices for part in choice.delta.tool_calls or ()):
            if part.id is not None:
                assert part.index == len(calls)
                calls.append(
                    {"id": part.id, "type": part.type, part.type: {"name": None, "input": "", "arguments": ""}}
                )
            call = calls[part.index]
            given = part.custom if call["type"] == "custom" else part.function.model_dump(exclude_none=True)
            for key, text in given.items():
                call[call["type"]][key] = (call[call["type"]][key] or "") + text
    return calls


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_custom_tools_are_called_with_a_text(step):
    patch = 'a "b"\n☃ 😀'
    calls = [
        ("patch", {"input": patch}),
        ("get_weather", {"city": "Rome"}),
        ("run", {"dir": "x"}),
        ("run", {"input": ""}),
    ]
    text = "\n".join(hermes(name, json.dumps(arguments)) for name, arguments in calls)
    tools = {"tools": [WEATHER, PATCH, RUN]}
    with speaking(text, step) as (chat, llm):
        whole = chat.create(**ASK, **tools).choices[0]
        streamed = custom_parts(chat.create(**ASK, **tools, stream=True))
        assert "Runs a command.\\nThe input follows this regex:\\nls|pwd" in prompt(llm)
        assert "The input follows this lark" in prompt(llm) and '"type": "custom"' not in prompt(llm)
        chat.create(model="fake/model", messages=[*ASK["messages"], whole.message.model_dump()], **tools)
        assert json.dumps({"input": patch}, ensure_ascii=False) in prompt(llm)
    assert [call.type for call in whole.message.tool_calls] == ["custom", "function", "custom", "custom"]
    first, second, third, fourth = whole.message.tool_calls
    assert (first.custom.name, first.custom.input, second.function.name) == ("patch", patch, "get_weather")
    assert (third.custom.input, fourth.custom.input) == ('{"dir": "x"}', ""), "without an input the arguments are it"
    assert whole.finish_reason == "tool_calls"
    assert [call.get("custom", call.get("function"))["name"] for call in streamed] == [name for name, _ in calls]
    inputs = [call["custom"]["input"] for call in streamed if call["type"] == "custom"]
    assert inputs == [patch, '{"dir": "x"}', ""] and streamed[1]["function"]["arguments"] == '{"city": "Rome"}'


def test_a_choice_among_tools():
    with speaking("x") as (chat, llm):

        def asked(choice) -> tuple[list[str], str | None]:
            chat.create(**ASK, tools=[WEATHER, PATCH, RUN], tool_choice=choice)
            grammar = llm.started[-1][1].structured
            seen = [name for name in ("get_weather", "patch", "run") if f'"name": "{name}"' in prompt(llm)]
            return seen, grammar and grammar.text

        seen, grammar = asked({"type": "custom", "custom": {"name": "run"}})
        assert len(seen) == 3 and "ls|pwd" in grammar and "get_weather" not in grammar
        listed = [
            {"type": "custom", "custom": {"name": "run"}},
            {"type": "function", "function": {"name": "get_weather"}},
        ]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
        assert asked(allowed) == (["get_weather", "run"], None)
        allowed["allowed_tools"]["mode"] = "required"
        seen, grammar = asked(allowed)
        assert seen == ["get_weather", "run"] and "ls|pwd" in grammar and "get_weather" in grammar
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
        assert asked(allowed) == ([], None)


@pytest.mark.parametrize("step", [1, 1000])
def test_demanded_values_may_hold_whole_calls(step):
    """The grammar says where a value ends, so that its parser needs no guess."""
    inner = f"<parameter=state>\nx\n{coder('get_weather', city='Bonn')}".replace("\n</parameter>", "</parameter>")
    text = "<think>no <tool_call>{ yet</think>\n\n" + coder("get_weather", city=inner)
    with speaking(text, step, tools="qwen3_coder", tokenizer=Template()) as (chat, _):
        (whole,) = chat.create(**ASK, **TOOLS, tool_choice="required").choices
        assert gather(chat.create(**ASK, **TOOLS, tool_choice="required", stream=True)) == [said(whole)]
    assert whole.message.reasoning_content == "no <tool_call>{ yet"
    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": inner}


def prompt(llm: Scripted) -> str:
    return byte_tokenizer().decode(llm.started[-1][0], skip_special_tokens=False)


def test_a_call_and_its_result_go_back_into_the_prompt():
    """The fake model's template knows no tools, so they are described in a system message."""
    with speaking(OSLO) as (chat, llm):
        first = chat.create(**ASK, **TOOLS).choices[0].message
        begun = prompt(llm)
        assert begun.startswith("<|im_start|>system\n# Tools") and json.dumps(WEATHER) in begun
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "8 °C"}
        chat.create(model="fake/model", messages=[*ASK["messages"], first, result], **TOOLS)
        assert prompt(llm) == begun + (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo ☃"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n8 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )


class Template:
    """A tokenizer that notes what its template, which knows tools, is given; its prompt ends in `tail`."""

    chat_template = "{% for tool in tools %}<tool_call>{% endfor %}<think>"

    def __init__(self, tail: str = ""):
        self.tail, self.given = tail, {}

    def write_chat(self, messages, **given):
        self.given = {"messages": messages, **given}
        return f"x{self.tail}"

    def __getattr__(self, name):
        return getattr(byte_tokenizer(), name)


def test_a_template_that_knows_tools_is_given_them():
    history = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "reasoning": "look first",
            "tool_calls": [
                {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "a2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "8"}]},
    ]
    with speaking("hm</think>\nok", tokenizer=Template("<think>\n")) as (chat, llm):
        message = chat.create(model="fake/model", messages=history, **TOOLS).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "\nok"), "the prompt opened the block"
    assert llm.tokenizer.given["tools"] == TOOLS["tools"]
    assistant, answer = llm.tokenizer.given["messages"][1:]
    assert assistant == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look first",
        "tool_calls": [
            {"id": "a1", **call_of("get_weather", city="Oslo")},
            {"id": "a2", **call_of("get_time")},
        ],
    }
    assert answer == {"role": "tool", "content": "8", "tool_call_id": "a1"}


def as_sent(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def call_of(name, **arguments):
    return as_sent(name, arguments)


def test_thinking_that_the_prompt_closed_is_content():
    with speaking("<think> is a tag", tokenizer=Template("<think>\n\n</think>\n\n")) as (chat, _):
        assert chat.create(**ASK).choices[0].message.content == "<think> is a tag"


def test_the_text_shows_the_markers_of_its_parsers():
    """In some vocabularies they are special tokens, which a text leaves out."""
    with speaking("x", reasoning="qwen3", tokenizer=Template()) as (chat, llm):
        chat.create(**ASK)
        chat.create(**ASK, **TOOLS)
    found = [params.kept_special_tokens for _, params in llm.started]
    assert found == [("<think>", "</think>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    with speaking("x", reasoning="harmony", tools="harmony", tokenizer=Template()) as (chat, llm):
        chat.create(**ASK)
    assert {"<|channel|>", "<|message|>", "<|end|>"} <= set(llm.started[0][1].kept_special_tokens)


@pytest.mark.parametrize("fields,param,says", [
    ({"tools": [{}] * 129}, "tools", "at most 128"),
    ({"tools": "f"}, "tools", "list of tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "needs a name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0]", "JSON schema"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0]", "description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**19}}]}, "tools", "at most"),
    ({**TOOLS, "tool_choice": "any"}, "tool_choice", '"required"'),
    ({**TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "it has get_weather"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs tools"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "needs the tool_call_id"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [call_of("f")]}]},
        "messages[0].tool_calls[0]",
        "needs a JSON object, as a string",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [as_sent("f", "{}")]}]},
        "messages[0].tool_calls",
        "can't have tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [as_sent("f", ["a"])]}]},
        "messages[0].tool_calls[0]",
        "needs a JSON object",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}}]}, "tools[0].custom.format",
     "text or grammar"),
    ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "syntax": "gbnf"}}}]},
     "tools[0].custom.format",
     "lark or regex"),
    ({"tools": [{"type": "custom", "custom": {"description": "f"}}]}, "tools[0]", "needs a name"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0]", '"custom": {'),
    ({"tools": [call_of("f"), {"type": "custom", "custom": {"name": "f"}}]}, "tools[1]", "rename one"),
    ({**TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "it has get_weather"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
     "tool_choice", "needs tools"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "f"}}]}}}, "tool_choice", "names the tool 'f'"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}},
     "tool_choice.allowed_tools.tools[0]", "tools[0]: must be"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.mode",
     "unknown field"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all", "tools": []}}}, "tool_choice",
     'the mode "required"'),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]},
        "messages[0].tool_calls[0]",
        "needs a string as its input",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"function_call": "auto"}, "function_call", "not supported"),
])  # fmt: skip
def test_bad_tools_are_refused_by_name(fields, param, says):
    with speaking("x") as (chat, llm):
        with pytest.raises(BadRequestError) as refused:
            chat.create(model="fake/model", messages=fields.pop("messages", ASK["messages"]), extra_body=fields)
        assert refused.value.param == param and says in refused.value.message
        assert not llm.started


def test_tools_without_a_parser_are_refused():
    with speaking("x", tools="none") as (chat, _), pytest.raises(BadRequestError, match="--tool-call-parser"):
        chat.create(**ASK, **TOOLS)
    with speaking("x", tools="mistral") as (chat, _), pytest.raises(BadRequestError, match="doesn't mention tools"):
        chat.create(**ASK, **TOOLS)


@pytest.mark.parametrize("model_type,template,reasoning,tools", [
    ("qwen3", "{% if tools %}<tool_call>{% endif %}<think></think>", "qwen3", "hermes"),
    ("qwen3_5_moe", "{% if tools %}<tool_call>\n<function=x>{% endif %}<think>", "qwen3", "qwen3_coder"),
    ("qwen2", "{%- if tools %}<tool_call>{% endif %}", None, "hermes"),
    ("llama", "{{ tools }}<|python_tag|>", None, "llama3_json"),
    ("glm4_moe", "{{ tools }}<tool_call><arg_key><think>", "glm45", "glm45"),
    ("minimax_m2", "{{ tools }}<minimax:tool_call>", None, "minimax_m2"),
    ("kimi_k2", "{{ tools }}<|tool_calls_section_begin|>", None, "kimi_k2"),
    ("kimi_k2", "{{ tools }}<|tool_calls_section_begin|><think>", "kimi_k2", "kimi_k2"),
    ("deepseek_v3", "{{ tools }}<｜tool▁calls▁begin｜>", None, "deepseek_v31"),
    ("deepseek_v3", "{{ tools }}<｜tool▁calls▁begin｜>```json", None, "deepseek_v3"),
    ("qwen2", "<｜Assistant｜><think>\\n", "deepseek_r1", "hermes"),
    ("mistral", "{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
    ("gpt_oss", "{{ tools }}<|channel|>", "harmony", "harmony"),
    ("llama", "{{ messages }} tools", None, "hermes"),
    ("llama", "{{ tools }}", None, None),
    ("llama", None, None, None),
])  # fmt: skip
def test_formats_by_the_chat_template(model_type, template, reasoning, tools):
    found = Formats.of(model_type, template)
    assert (found.reasoning, found.tools) == (reasoning, tools)
    flags = Formats.of(model_type, template, "none", "mistral")
    assert (flags.reasoning, flags.tools) == (None, "mistral")


@pytest.mark.parametrize("given,read", [
    (("b", "a"), "ab"),
    (("c", "b", "a"), "abc"),
    (("b", "x", "a"), "bxa"),
    (("b", "a", "b"), "bab"),
])  # fmt: skip
def test_results_stand_in_the_order_of_their_calls(given, read):
    """Most templates write no ids, and pair calls and results by their order."""
    calls = [{"id": each, "type": "function", "function": {"name": each, "arguments": "{}"}} for each in "abc"]
    turns = [{"role": "assistant", "tool_calls": calls[:2]}, {"role": "assistant", "tool_calls": calls[2:]}]
    results = [{"role": "tool", "tool_call_id": each, "content": each} for each in given]
    more = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "a", "content": "a"}]
    body = ChatRequest.model_validate({"messages": [*turns, *results, *more]})
    assert "".join(message.content or " " for message in body.messages) == f"  {read}xa"
