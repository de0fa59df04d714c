"""`/v1/messages` over the fake engine: Anthropic's bodies in, its objects, events and errors out."""

import json
import random
import re

import httpx
import pytest
from pydantic import ValidationError

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import Delta, RequestError, RequestMetrics, SamplingParams
from jaxspec.engine.async_llm import EngineDead, Overloaded, RequestTimeout
from server.app import create_app
from server.chat.speech import PLAIN, Speech
from server.protocol.messages import MessagesRequest
from server.replies import Prompt
from server.replies.logprobs import TokenNames
from server.replies.messages import MessagesReply
from tests.server.fake import CONTEXT, TEXT, byte_tokenizer
from tests.server.live import serving
from tests.server.test_tools import Scripted

PATH = "/v1/messages"
ASK = {"model": "fake/model", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
LONG = ASK | {"max_tokens": 500}
TOOL = {"name": "weather", "description": "Tell it.", "input_schema": {"properties": {"city": {"type": "string"}}}}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
FORM = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def prompt_text(fake):
    return byte_tokenizer().decode(fake.started[-1][0], skip_special_tokens=False)


def events_of(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = re.fullmatch(r"event: (\w+)\ndata: (.*)", block, re.DOTALL).groups()
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def joined(events):
    """The message that a stream's events accumulate to, each checked for its place."""
    message, opened = None, None
    for event in events:
        if event["type"] == "message_start":
            assert message is None
            message = dict(event["message"], content=[])

        elif event["type"] == "content_block_start":
            assert opened is None and event["index"] == len(message["content"])
            opened = event["content_block"] | {"json": ""}
            message["content"].append(opened)
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            match delta.pop("type"):
                case "text_delta":
                    opened["text"] += delta["text"]
                case "thinking_delta":
                    opened["thinking"] += delta["thinking"]
                case "signature_delta":
                    opened["signature"] += delta["signature"]
                case "input_json_delta":
                    opened["json"] += delta["partial_json"]
        elif event["type"] == "content_block_stop":
            text = opened.pop("json")
            if opened["type"] == "tool_use":
                opened["input"] = json.loads(text)
            opened = None
        elif event["type"] == "message_delta":
            assert opened is None
            message |= event["delta"] | {name: event[name] for name in ("usage", "weight_version")}
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"] and events[-1]["type"] == "message_stop"
    return message


def test_text(http, fake):
    body = ASK | {"system": "Be brief.", "temperature": 0.5, "top_k": 3, "metadata": {"user_id": "me"}, "new_key": [1]}
    body["cache_salt"] = "mine"
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "X-Request-Id": "mine"}
    response = http.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert response.status_code == 200 and response.headers["request-id"] == "mine"
    reply = response.json()
    assert reply["content"] == [{"type": "text", "text": TEXT}] and re.fullmatch(r"msg_\w+", reply["id"])
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "fake/model")
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    prompt, params = fake.started[-1]
    assert (params.temperature, params.top_k, params.max_tokens, params.cache_salt) == (0.5, 3, 64, "mine")
    assert prompt_text(fake).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>")
    assert reply["usage"] == {
        "input_tokens": len(prompt) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(TEXT.encode()),
        "output_tokens_details": {"thinking_tokens": 0},
    }
    events = events_of(http.post(PATH, json=body | {"stream": True}))
    assert joined(events) == reply | {"id": events[0]["message"]["id"]}
    assert events[0]["message"]["usage"]["input_tokens"] == len(prompt)
    count = http.post(
        f"{PATH}/count_tokens", json={"model": "fake/model", "system": "Be brief.", "messages": ASK["messages"]}
    )
    assert count.json() == {"input_tokens": len(prompt)}


@pytest.mark.parametrize("step", [1, 1000])
def test_a_tool_is_used_and_its_result_goes_back(step):
    fake = Scripted(EngineConfig(model="fake/model", context_length=4096), text=f"Let me see.\n{CALL_TEXT}", step=step)
    with serving(create_app(fake)) as url, httpx.Client(base_url=url) as http:
        reply = http.post(PATH, json=LONG | {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}).json()
        text, call = reply["content"]
        assert text == {"type": "text", "text": "Let me see.\n"} and reply["stop_reason"] == "tool_use"
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"}) and call["id"]
        assert '"type": "object"' in prompt_text(fake) and "bash" not in prompt_text(fake)
        streamed = joined(events_of(http.post(PATH, json=LONG | {"tools": [TOOL], "stream": True})))
        assert streamed["content"][1] | {"id": call["id"]} == call and streamed["stop_reason"] == "tool_use"

        forced = {"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}}
        fake.text = CALL_TEXT
        assert http.post(PATH, json=LONG | {"tools": [TOOL]} | forced).json()["stop_reason"] == "tool_use"
        assert fake.started[-1][1].structured is not None
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
        turns = [*ASK["messages"], {"role": "assistant", "content": reply["content"]}]
        turns += [{"role": "user", "content": [{"type": "text", "text": "Well?"}, result]}]
        http.post(PATH, json=LONG | {"tools": [TOOL], "messages": turns})
        said = prompt_text(fake)
        assert said.index('"city": "Rome"') < said.index("sunny") < said.index("Well?")


def said(parser, text, *, finish="stop", stop_reason=None, limit=50, shows=True):
    """A message's reply to one delta, whole."""
    names = TokenNames(byte_tokenizer())
    reply = MessagesReply(Prompt([1] * 9), SamplingParams(), "m", parser, names, limit=limit, shows_thinking=shows)
    told = {"finish_reason": finish, "stop_reason": stop_reason, "metrics": RequestMetrics(cached_tokens=4)}
    reply.take(0, Delta("r", 0, text, list(text.encode().ljust(40)), **told))
    return reply.whole()


THINK = Speech("qwen3", None, thinking="prompt")


def test_thinking_has_a_signature_and_may_be_left_out():
    reply = said(THINK, "hm\n</think>\n\nyes")
    thought, text = reply["content"]
    assert reply["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    assert thought["thinking"].strip() == "hm" and thought["signature"] and text["text"].strip() == "yes"
    hidden, _ = said(THINK, "hm\n</think>\n\nyes", shows=False)["content"]
    assert hidden["thinking"] == "" and text["text"].strip() == "yes"
    for block in (thought, hidden):  # either way the next turn's prompt has it
        assert chat([*ASK["messages"], turn("assistant", block, USE)])["messages"][1]["reasoning_content"] == "hm\n"
    with pytest.raises(ValidationError, match="another signature"):
        chat([turn("assistant", hidden | {"signature": hidden["signature"][:-2]})])


def test_thinking_that_is_left_out_is_no_silence():
    """A client ends a stream in which nothing comes for a while."""
    fake = Scripted(EngineConfig(model="fake/model", context_length=4096), text="<think>let me see</think>yes", step=4)
    with serving(create_app(fake, reasoning_parser="qwen3")) as url, httpx.Client(base_url=url) as http:
        body = ASK | {"stream": True, "thinking": {"type": "adaptive", "display": "omitted"}}
        events = events_of(http.post(PATH, json=body))
    told = [each["delta"] for each in events if each.get("delta", {}).get("type") == "thinking_delta"]
    assert len(told) > 2 and not any(each["thinking"] for each in told)
    counted = joined(events)["usage"]["output_tokens_details"]["thinking_tokens"]
    assert sum(each["estimated_tokens"] for each in told) == counted == len("let me see")


@pytest.mark.parametrize("how,reason", [
    ({}, "end_turn"),
    ({"stop_reason": 7}, "end_turn"),
    ({"stop_reason": "END"}, "stop_sequence"),
    ({"finish": "length", "limit": 40}, "max_tokens"),
    ({"finish": "length", "limit": 41}, "model_context_window_exceeded"),
])  # fmt: skip
def test_stop_reasons(how, reason):
    reply = said(PLAIN, "a", **how)
    assert reply["stop_reason"] == reason
    assert reply["stop_sequence"] == ("END" if reason == "stop_sequence" else None)


def test_arguments_that_are_no_object_become_an_empty_one():
    speech = Speech(None, "hermes", [])
    for arguments in ('{"a": 1e999}', '{"a": "\\ud800"}', "[1]"):
        reply = said(speech, f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
        assert all(block["input"] == {} for block in reply["content"] if block["type"] == "tool_use")
        json.dumps(reply, allow_nan=False, ensure_ascii=False).encode()


def chat(messages, system=None, **more):
    body = MessagesRequest.model_validate(
        {**ASK, **more, "messages": messages} | ({"system": system} if system else {})
    )
    return body.chat()[0]


def turn(role, *blocks):
    return {"role": role, "content": list(blocks)}


def text(says):
    return {"type": "text", "text": says, "cache_control": {"type": "ephemeral"}}


USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "7"}


def roles(messages):
    return [(message["role"], message["content"]) for message in as_chat_of(messages)]


def as_chat_of(messages):
    return chat(messages)["messages"]


def test_what_claude_code_sends_keeps_the_prompts_head():
    """The billing header is dropped, and each conversation's chat begins with that of the turn before."""
    header = lambda n: text(f"x-anthropic-billing-header: cc_version=2.1; cch={n:05x};")  # noqa: E731
    turns = [
        turn("user", text("<env>"), text("hi")),
        turn("system", text("note one")),
        turn("assistant", {"type": "thinking", "thinking": "hm", "signature": "s"}, text("calling"), USE),
        turn("system", text("note two")),
        turn("user", RESULT),
        turn("system", text("note three")),
        turn("assistant", {"type": "redacted_thinking", "data": "x"}, text("done")),
        turn("system", text("note four")),
        turn("user", text("more")),
    ]
    system = [header(1), text("You are Claude Code."), text("Rules.")]
    found = chat(turns, system)["messages"]
    assert [(each["role"], each["content"]) for each in found] == [
        ("system", "You are Claude Code.\nRules."),
        ("user", "<env>\nhi\nnote one"),
        ("assistant", "calling"),
        ("tool", "7\nnote two\nnote three"),
        ("assistant", "done"),
        ("user", "note four\nmore"),
    ]
    assert found[2]["reasoning_content"] == "hm" and found[2]["tool_calls"][0]["id"] == "t1"
    for length in (2, 6, 9):
        shorter = chat(turns[:length], [header(length), *system[1:]])["messages"]
        assert found[: len(shorter)] == shorter
    assert chat(turns, "x-anthropic-billing-header: cch=1;\nBe.")["messages"][0]["content"] == "Be."


def test_turns():
    assert roles([turn("user", text("a")), turn("user", text("b"))]) == [("user", "a\nb")]
    assert roles([turn("user", text("a")), turn("assistant", text("")), turn("user", text("b"))]) == [
        *[("user", "a"), ("assistant", ""), ("user", "b")]
    ]
    failed = turn("user", RESULT | {"is_error": True})
    assert roles([turn("user", text("a")), turn("assistant", USE), failed])[-1] == ("tool", "Error:\n7")
    prefill = [*ASK["messages"], turn("assistant", text("It is"))]
    assert chat(prefill)["continue_final_message"] is True and "continue_final_message" not in chat(ASK["messages"])
    pages = {"type": "document", "title": "t", "source": {"type": "content", "content": [text("p"), PIXEL]}}
    parts = as_chat_of([turn("user", pages, text("?"))])[0]["content"]
    assert [each.get("text") for each in parts] == ["t\np", None, "?"] and parts[1]["type"] == "image_url"
    shown = as_chat_of([turn("user", text("what?"), PIXEL)])[0]["content"]
    assert shown[1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("given,effort", [
    ({}, None),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
    ({"thinking": {"type": "adaptive"}}, None),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10000}}, "medium"),
    ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "high"),
])  # fmt: skip
def test_thinking_and_effort(given, effort):
    assert chat(ASK["messages"], **given).get("reasoning_effort") == effort


def test_tools_change_within_a_conversation():
    """Claude Code and the SDKs' tool runners add and remove tools by blocks of system messages."""
    named = lambda kind, name: {"type": kind, "tool": {"type": "tool_reference", "name": name}}  # noqa: E731
    late = {"type": "tool_definition", "definition": TOOL | {"name": "late", "defer_loading": True}}
    hosted = {"type": "tool_definition", "definition": {"type": "web_search_20260318", "name": "web_search"}}
    mcp = {"type": "tool_removal", "tool": {"type": "mcp_toolset_reference", "server_name": "s"}}
    turns = [turn("user", text("a")), turn("system", text("note"), {"type": "tool_addition", "tool": late}, mcp)]
    names = lambda turns: [each["function"]["name"] for each in chat(turns, tools=[TOOL]).get("tools", [])]  # noqa: E731
    assert names(turns[:1]) == ["weather"] and names(turns) == ["weather", "late"]
    assert roles(turns) == [("user", "a\nnote")]
    turns.append(turn("system", named("tool_removal", "weather"), {"type": "tool_addition", "tool": hosted}))
    assert names(turns) == ["late"]
    assert names([*turns, turn("system", named("tool_removal", "late"))]) == []
    assert names([*turns, turn("system", named("tool_addition", "weather"))]) == ["weather", "late"]


def test_a_system_message_may_pass_and_set_the_effort():
    hint = {"role": "system", "content": "hurry", "clear_at": "next_user_message"}
    effort = {"role": "system", "output_config": {"effort": "low"}}
    turns = [turn("user", text("a")), hint, effort]
    assert roles(turns) == [("user", "a\nhurry")]
    assert chat(turns, output_config={"effort": "high"})["reasoning_effort"] == "low"
    turns += [turn("assistant", USE), turn("user", RESULT)]
    assert roles(turns) == [("user", "a"), ("assistant", ""), ("tool", "7")]


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "x_new": [1]}


def test_keys_of_later_versions_pass_everywhere(http):
    known = {
        "speed": "fast",
        "betas": ["a"],
        "inference_geo": "us",
        "service_tier": "auto",
        "container": {"skills": []},
    }
    assert http.post(PATH, json=ASK | known | MARK).status_code == 200
    plain = [turn("user", text("a")), turn("assistant", USE), turn("user", RESULT)]
    marked = [turn(each["role"], each["content"][0] | MARK) | MARK for each in plain]
    body = {"messages": marked, "system": [text("s") | MARK], "tools": [TOOL | MARK]} | MARK | known
    body |= {"tool_choice": {"type": "auto"} | MARK, "thinking": {"type": "adaptive", "display": "updates"} | MARK}
    form = {"format": FORM["output_config"]["format"] | {"name": "n"} | MARK, "task_budget": {}}
    counts = [
        http.post(f"{PATH}/count_tokens", json=each).json()["input_tokens"]
        for each in (body, body | {"output_config": form}, {"messages": plain, "system": "s", "tools": [TOOL]})
    ]
    assert len({*counts}) == 1


def test_turns_that_anthropics_servers_made_are_read():
    """A conversation may go on here that began there."""
    hit = {"type": "web_search_result", "title": "Rome", "url": "http://r", "encrypted_content": "x" * 99}
    blocks = [
        {"type": "compaction", "content": "They met.", "signature": "s"},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "Rome"}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": [hit]},
        {"type": "mcp_tool_use", "id": "2", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "2", "content": [text("done")], "is_error": False},
        text("It is in Italy."),
    ]
    given = [turn("user", text("a")), turn("assistant", *blocks), turn("user", text("b"))]
    (_, told, _) = chat(given, thinking={"type": "between_tools"})["messages"]
    assert told["content"] == "\n".join([
        *("They met.", 'web_search {"query": "Rome"}', '[{"type": "web_search_result", "title": "Rome", "url": "http://r"}]'),
        *("f {}", '[{"type": "text", "text": "done"}]', "It is in Italy."),
    ])  # fmt: skip


@pytest.mark.parametrize("change,says", [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: must have the role"),
    ({"messages": [turn("user", text("a"), {"type": "video"})]}, "messages[0].content[1]: user content takes"),
    ({"messages": [turn("user", RESULT | {"content": [text("a"), {"type": "text"}]})]}, ".content[0].content[1]: a "),
    (
        {"messages": [turn("user", {"type": "document", "source": {"type": "content", "content": [{"type": "a"}]}})]},
        "messages[0].content[0].source.content[0]: document content takes blocks of type text, image, got",
    ),
    ({"messages": [turn("system", text("")) | {"output_config": {"efort": 1}}]}, "messages[0].output_config.efort: u"),
    ({"messages": [turn("user", text("a")), turn("assistant", text("b")), turn("user", PIXEL)]}, "messages[2].content"),
    (
        {"messages": [turn("system", {"type": "tool_addition", "tool": {"type": "tool_definition"}})]},
        "messages[0].content[0].tool.definition: must have a name",
    ),
    ({"messages": [turn("user", {"type": "tool_result"})]}, "tool_use_id"),
    ({"messages": [turn("system", text(""))]}, "empty"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}, TOOL | {"name": "a b"}]}, "tools[1]: needs a name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]: has OpenAI's type function"),
    ({"stop": ["a"]}, "here it is stop_sequences"),
    ({"response_format": {"type": "json_object"}}, "here it is output_config.format"),
    ({"n": 2}, "n is not supported"),
    ({"thinking": {"type": "adaptive", "display": "omited"}}, "unknown display 'omited'; did you mean omitted?"),
    ({"thinking": {"type": "adaptive", "display": True}}, "display must be a string, one of summarized, omitted, u"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": {"type": "tool", "name": "s"}},
        "which needs tools; those that a provider runs itself",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "weather"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"thinking": {"type": "on"}}, "thinking"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"output_format": {"type": "json"}}, "output_format: must have"),
    ({"messages": [turn("user", text("a")), turn("assistant", text("{"))], **FORM}, "output_config.format: a format"),
    ({"output_format": {"type": "json_schema", "schema": {"const": "a" * 2**20}}}, "output_format.schema has"),
    ({"output_format": {"type": "json_schema", "schema": {}, "shema": 1}}, "output_format.shema: unknown"),
    ({"temperature": -1}, "temperature"),
    ({"temprature": 1}, "did you mean temperature?"),
    ({"output_config": {"efort": "low"}}, "output_config.efort: unknown field 'efort'; did you mean effort?"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}, "shema": {}}}}, "did you mean schema?"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_paralel_tool_use": True}}, "did you mean disable_"),
    ({"thinking": {"type": "enabled", "budget_token": 7}}, "did you mean budget_tokens?"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread is not supported"),
    ({"compaction": {"type": "summarize"}}, "compaction is not supported"),
    ({"messages": [{"role": "system", "content": "a", "clear_at": "now"}]}, "clear_at must be"),
    ({"messages": [turn("system", {"type": "tool_removal", "tool": {"type": "x"}})]}, "needs a tool_reference as its"),
])  # fmt: skip
def test_bad_fields(http, fake, change, says):
    response = http.post(PATH, json=ASK | change)
    told = response.json()
    assert response.status_code == 400 and (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert says in told["error"]["message"] and told["request_id"] == response.headers["request-id"]
    assert not fake.started
    # The SDKs' tool runners send a thread by themselves, and go on without one after this code.
    code = {"error_code": "thread_unsupported_request"} if "thread" in change else None
    assert told["error"].get("details") == code


def test_a_long_prompt_says_so_and_a_large_limit_is_what_fits(http, fake):
    long = ASK | {"messages": [{"role": "user", "content": "a" * 2 * CONTEXT}]}
    message = http.post(PATH, json=long).json()["error"]["message"]
    tokens, most = map(int, re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message).groups())
    assert most == CONTEXT - 1 and http.post(f"{PATH}/count_tokens", json=long).json() == {"input_tokens": tokens}
    enormous = ASK | {"messages": [{"role": "user", "content": "a" * 200 * CONTEXT}]}
    assert re.match(r"prompt is too long: \d+ tokens > ", http.post(PATH, json=enormous).json()["error"]["message"])
    assert http.post(PATH, json=ASK | {"max_tokens": 32000}).status_code == 200
    assert fake.started[-1][1].max_tokens is None


@pytest.mark.parametrize("said", ["H", "Hello"])  # the engine's one token ends its text, or doesn't
def test_no_tokens_cache_the_prompt_alone(http, fake, said):
    fake.text = said
    whole = http.post(PATH, json=ASK | {"max_tokens": 0}).json()
    assert fake.started[-1][1].no_tokens and fake.started[-1][1].max_tokens == 1
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    events = events_of(http.post(PATH, json=ASK | {"max_tokens": 0, "stream": True}))
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]
    assert joined(events) == whole | {"id": events[0]["message"]["id"]}


def test_names_keys_and_routes():
    with serving(create_app(Scripted(), ["mine", "other"], api_key="k")) as url, httpx.Client(base_url=url) as http:
        told = http.post(PATH, json=ASK)
        assert (told.status_code, told.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}, {"x-api-key": "k", "Authorization": "no"}):
            for name in ("mine", "other", "claude-opus-9"):
                reply = http.post(PATH, json=ASK | {"model": name}, headers=headers)
                assert reply.status_code == 200 and reply.json()["model"] == "mine"
        assert http.post(PATH, json=ASK, headers={"x-api-key": "j"}).status_code == 401
        unknown = http.post(PATH, json=ASK, headers=headers)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert http.get(PATH, headers=headers).json()["type"] == "error" and http.head("/").status_code == 200
        assert http.post("/v1/responses", json=ASK, headers=headers).json()["error"]["param"], "OpenAI's elsewhere"
        theirs = http.get("/v1/models/claude", headers=headers | {"anthropic-version": "2023-06-01"})
        assert theirs.json()["error"]["type"] == "not_found_error" and theirs.headers["request-id"]
        page = http.get("/v1/models", headers=headers).json()
        assert [each["id"] for each in page["data"]] == ["mine", "other"] and page["has_more"] is False
        card = http.get("/v1/models/other", headers=headers).json()
        assert (card["type"], card["object"], card["display_name"]) == ("model", "model", "other")
        limits = card["max_input_tokens"], card["max_tokens"]
        assert card["lifecycle"] == "active" and limits == (CONTEXT - 1, CONTEXT - 1)
        assert card["created_at"].endswith("Z") and (page["first_id"], page["last_id"]) == ("mine", "other")


class Failing(Scripted):
    fails: Exception = KeyError("a secret")

    async def _deltas(self, prompt, params):
        yield Delta("id", 0, "a", [97])
        raise self.fails


def test_an_error_ends_a_stream_with_the_type_of_its_status():
    with serving(create_app(engine := Failing(), "fake/model")) as url, httpx.Client(base_url=url) as http:
        for error, status, kind in (
            (engine.fails, 500, "api_error"),
            (RequestTimeout("late"), 504, "timeout_error"),
            (Overloaded("full"), 429, "rate_limit_error"),
            (EngineDead("stopped"), 503, "overloaded_error"),
        ):
            engine.fails = error
            events = events_of(http.post(PATH, json=ASK | {"stream": True}))
            assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == kind
            told = http.post(PATH, json=ASK)
            assert (told.status_code, told.json()["error"]["type"]) == (status, kind) and "secret" not in told.text


VALUES = [
    *(None, True, -1, 0, 2.5, 1e300, 10**30, "", "a", "\ud800", [], ["a"], [None], {}, {"type": "text"}, [[[]]], [{}]),
    *({"type": "tool", "name": "x"}, {"a": {"b": [1]}}, [{"role": "user", "content": [{"type": "image"}]}]),
]
FOREIGN = ("server_tool_use", "mcp_tool_result", "compaction")
RICH = ASK | {
    "system": [text("s")],
    "tools": [TOOL | {"strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "messages": [
        {"role": "system", "content": "s", "clear_at": "never", "output_config": {"effort": "low"}},
        turn("system", {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}),
        turn("system", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}),
        turn("user", text("a"), PIXEL, {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}),
        turn("assistant", {"type": "thinking", "thinking": "t", "signature": "s"}, USE),
        turn("assistant", *({"type": kind, "name": "n", "input": {"a": [1]}, "content": "c"} for kind in FOREIGN)),
        turn(
            "user", RESULT | {"content": [text("r"), {"type": "tool_reference", "tool_name": "f"}], "is_error": False}
        ),
    ],
    **dict.fromkeys(
        ("stop_sequences", "temperature", "top_p", "top_k", "stream", "metadata", "logit_bias", "seed"), None
    ),
    **dict.fromkeys(("chat_template_kwargs", "stop_token_ids", "service_tier", "container", "mcp_servers"), None),
}


def spots(value, path=()):
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(each, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def fuzz(bodies):
    with serving(create_app(Scripted(text="a"), "fake/model")) as url, httpx.Client(base_url=url) as http:
        for number, body in enumerate(bodies):
            data = json.dumps(body).encode()
            path = (PATH, f"{PATH}/count_tokens")[number % 2]
            response = http.post(path, content=data, headers={"content-type": "application/json"})
            assert response.status_code < 500, (body, response.text)
            assert response.status_code == 200 or response.json()["type"] == "error"


def all_bodies():
    return [changed(RICH, path, value) for path in list(spots(RICH))[1:] for value in VALUES]


def test_no_field_breaks_it():
    fuzz(random.Random(64).sample(all_bodies(), 80))


@pytest.mark.exhaustive
def test_no_field_breaks_it_whatever_its_value():
    for half in (all_bodies(), all_bodies()[1:]):  # each by both routes
        fuzz(half)


def test_an_aborted_message_is_an_error():
    with pytest.raises(Exception, match="aborted"):
        said(PLAIN, "a", finish="abort")


def test_errors_name_the_clients_fields():
    with pytest.raises(RequestError, match="json_schema"):
        chat(ASK["messages"], output_format={"type": "text"})
