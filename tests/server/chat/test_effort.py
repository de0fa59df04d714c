"""Reasoning effort and verbosity as templates take them, and messages as other servers answered them."""

import pytest

from jaxspec.config.request import Delta
from server.chat.effort import EFFORTS, effort_variables
from server.chat.speech import Formats, was_cut, write_tools
from server.protocol import ChatRequest
from server.protocol.responses import ResponsesRequest
from tests.text.templates import GEMMA, QWEN3

OSS = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
SMALL4 = "{% if reasoning_effort not in ('none', 'high') %}{{ raise_exception('no') }}{% endif %}"
BOTH = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% if reasoning_effort == 'max' or "
BOTH += "reasoning_effort == 'high' %}{% generation %}{{ thinking }}{% endgeneration %}{% endif %}"


@pytest.mark.parametrize(
    "template, taken",
    [
        (OSS, "low low low medium high high high"),
        (SMALL4, "none none high high high high high"),
        ("{{ reasoning_effort }}", "low low low medium high high high"),
        (GEMMA, "none minimal low medium high xhigh max"),
        (None, "none minimal low medium high xhigh max"),
    ],
)
def test_an_effort_is_the_nearest_that_the_template_takes(template, taken):
    found = [effort_variables(effort, template) for effort in EFFORTS]
    assert found == [{"reasoning_effort": effort} for effort in taken.split()]


def test_no_effort_turns_thinking_off_where_there_is_a_switch():
    assert effort_variables("none", QWEN3) == {"enable_thinking": False}
    assert effort_variables("low", QWEN3) == {"reasoning_effort": "low", "enable_thinking": True}
    assert effort_variables("none", BOTH) == {"thinking": False}
    assert effort_variables("xhigh", BOTH) == {"reasoning_effort": "max", "thinking": True}
    assert effort_variables("minimal", BOTH) == {"reasoning_effort": "high", "thinking": True}


def test_what_a_request_names_itself_counts_most():
    formats = Formats.of("qwen3", QWEN3)
    messages = [{"role": "user", "content": "hi"}]
    body = ChatRequest.model_validate({"messages": messages, "reasoning_effort": "none", "verbosity": "low"})
    assert formats.variables(body) == {"enable_thinking": False, "verbosity": "low"}
    given = {"enable_thinking": True}
    body = ChatRequest.model_validate({"messages": messages, "reasoning_effort": "none", "chat_template_kwargs": given})
    assert formats.variables(body) == given


def chat_of(body):
    asked = ResponsesRequest.model_validate(body)
    return asked.chat(asked.input)[0]


def test_responses_have_both():
    asked = {"input": "hi", "reasoning": {"effort": "max"}, "text": {"verbosity": "high"}}
    chat = chat_of(asked)
    assert (chat["reasoning_effort"], chat["verbosity"]) == ("max", "high")
    ChatRequest.model_validate(chat)


def test_responses_leave_the_developer_to_the_template():
    asked = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}]
    chat = chat_of({"input": asked, "instructions": "c"})
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "developer"]
    chat = chat_of({"input": [asked[1], asked[1]]})
    assert chat["messages"] == [{"role": "developer", "content": "b\n\nb"}]


def test_a_history_of_another_server_passes():
    answer = {
        "role": "assistant",
        "content": "b",
        "reasoning_details": [{"type": "reasoning.text"}],
        "thinking_blocks": [{"type": "thinking"}],
        "provider_specific_fields": {"a": 1},
        "cache_control": {"type": "ephemeral"},
        "annotations": [{"type": "url_citation"}],
        "id": "msg_1",
        "prefix": True,
        "refusal": None,
    }
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a", "id": 1}, answer]})
    assert [message.as_dict() for message in body.messages] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize("arguments", ['{"x": ', "[1]", "5", "hello", '{"x": 1} {', '"a"', '{"a": NaN'])
def test_arguments_that_are_no_json_object_stay_text(arguments):
    call = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": "a"}
    body = ChatRequest.model_validate({"messages": [asked, {"role": "assistant", "tool_calls": [call]}]})
    message = body.messages[1].as_dict()
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert f'{{"name": "f", "arguments": {arguments}}}' in write_tools([message], None)[0]["content"]


def test_a_reply_is_cut_unless_the_model_ended_it():
    ends = [("stop", None), ("stop", "x"), ("stop", 7), ("length", None), ("abort", None)]
    assert [was_cut(Delta("a", 0, finish_reason=why, stop_reason=by)) for why, by in ends] == [False, *[True] * 4]
