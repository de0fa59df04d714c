"""`/v1/responses` through the official client, against the fake engine."""

import json
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import Delta, RequestMetrics, SamplingParams, TokenLogprobs
from server.app import create_app
from server.chat.speech import Speech
from server.parsers import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from server.protocol.responses import messages
from server.replies import Prompt
from server.replies.logprobs import TokenNames
from server.replies.responses import ResponsesReply
from server.response_store import MAX_SHARE, OVERHEAD, ResponseStore
from tests.server.fake import TEXT, byte_tokenizer
from tests.server.live import serving
from tests.server.test_tools import Scripted

MODEL = {"model": "fake/model"}
ASK = {**MODEL, "input": "hello"}


def prompt_text(fake):
    return byte_tokenizer().decode(fake.started[-1][0], skip_special_tokens=False)


def prompts(fake):
    return [byte_tokenizer().decode(prompt, skip_special_tokens=False) for prompt, _ in fake.started]


def test_text(client, fake):
    reply = client.responses.create(**ASK, instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, user="me")
    assert reply.output_text == TEXT and reply.status == "completed" and reply.id.startswith("resp_")
    (message,) = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert prompt_text(fake).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>")
    assert fake.started[-1][1].temperature == 0.5 and fake.names == [reply.id]
    usage = reply.usage
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (len(TEXT.encode()), 2)
    assert usage.input_tokens == len(fake.started[-1][0]) and usage.total_tokens == sum(
        (usage.input_tokens, usage.output_tokens)
    )
    assert (reply.instructions, reply.metadata, reply.model) == ("Be brief.", {"a": "b"}, "fake/model")
    assert reply.model_dump()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 8


def test_items_become_a_chat(client, fake):
    client.responses.create(
        **MODEL,
        input=[
            {"role": "developer", "content": "one"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
        instructions="zero",
    )
    assert prompt_text(fake) == (
        "<|im_start|>system\nzero\n\none<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_of_reasoning_text_and_calls_is_one_message():
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    turn = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "let me see"},
        call,
        call | {"call_id": "c2"},
    ]
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]}
    (first, *others), _ = messages(None, [*turn, result, *turn, {"role": "assistant", "content": "again"}])
    assert (first["role"], first["reasoning_content"], first["content"]) == ("assistant", "hm", "let me see")
    assert [each["id"] for each in first["tool_calls"]] == ["c1", "c2"]
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert others[0] == {"role": "tool", "tool_call_id": "c1", "content": "7"}
    assert others[1] == first and others[2] == {"role": "assistant", "content": "again"}
    assert messages(None, [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}])[0] == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_each_part_has_its_place():
    part = {"type": "input_image", "image_url": "u"}
    items = [{"role": "user", "content": content} for content in ([part, part], [part], [], "a")]
    told = [[("previous_response_id",)] * 2, [("input", 0, "content", 0)], [("input", 1)], [("input", 2)]]
    assert messages("Be brief.", items, before=1)[1] == [[("instructions",)], *told]


class Answer(BaseModel):
    city: str
    population: int


def test_parse_gives_the_clients_own_type(client, fake):
    fake.text = '{"city": "Rome", "population": 3}'
    reply = client.responses.parse(**ASK, text_format=Answer)
    assert reply.output_parsed == Answer(city="Rome", population=3)
    structured = fake.started[-1][1].structured
    assert structured.kind == "json" and set(json.loads(structured.text)["properties"]) == {"city", "population"}
    assert reply.text.format.type == "json_schema" and reply.text.format.name == "Answer"
    with client.responses.stream(**ASK, text_format=Answer) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == reply.output_parsed


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_function_is_called_and_its_result_goes_back(step):
    """The whole turn through the model's own format, here Hermes': whole, streamed, and with history."""
    with scripted_server(CALL_TEXT, step) as (client, fake):
        talk(client, fake)


def talk(client, fake):
    reply = client.responses.create(**ASK, tools=[TOOL])
    (call,) = reply.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    assert reply.tools[0].name == "weather" and '"weather"' in prompt_text(fake)
    with client.responses.stream(**ASK, tools=[TOOL]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert "".join(deltas) == streamed.arguments == call.arguments
    fake.text = TEXT
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(**MODEL, input=[result], previous_response_id=reply.id, tools=[TOOL])
    assert again.output_text == TEXT and "sunny" in prompt_text(fake) and '{"city": "Rome"}' in prompt_text(fake)
    whole = [{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), result]
    prompt = prompt_text(fake)
    client.responses.create(**MODEL, input=whole, tools=[TOOL], store=False)
    assert prompt_text(fake) == prompt, "the same conversation sent whole"


PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL, PATCH]}
AGENT = [SPACE, {"type": "web_search"}, {"type": "local_shell"}, {"type": "mcp", "server_label": "a"}, PATCH]


@contextmanager
def scripted_server(text, step=3):
    fake = Scripted(EngineConfig(model="fake/model", context_length=4096), text=text, step=step)
    app = create_app(fake)
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client, fake


def test_tools_of_namespaces_and_custom_ones_are_functions_and_hosted_ones_are_skipped(caplog):
    patch = 'a "b"\n☃ 😀'
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in (
            ("crm__weather", {"city": "Rome"}),
            ("apply_patch", {"input": patch}),
            ("crm__apply_patch", {"patch": 5}),
        )
    )
    with scripted_server(text) as (client, fake):
        reply = client.responses.create(**ASK, tools=AGENT)
        namespaced, custom, odd = reply.output
        assert (namespaced.type, namespaced.name, namespaced.namespace) == ("function_call", "weather", "crm")
        assert (custom.type, custom.name, custom.namespace, custom.input) == (
            *("custom_tool_call", "apply_patch", None),
            patch,
        )
        assert (odd.type, odd.namespace, odd.input) == ("custom_tool_call", "crm", '{"patch": 5}'), "no input is all"
        prompt = prompt_text(fake)
        assert '"crm__weather"' in prompt and "Customers." in prompt and "follows this lark grammar" not in prompt
        assert "The input follows this lark" in prompt and "web_search" not in prompt and "mcp" not in prompt
        assert "the hosted tool local_shell" in caplog.text
        assert [tool.type for tool in reply.tools] == ["namespace", "web_search", "local_shell", "mcp", "custom"]

        events = list(client.responses.create(**ASK, tools=AGENT, stream=True))
        for place, item in ((1, custom), (2, odd)):
            mine = [event for event in events if getattr(event, "output_index", None) == place]
            deltas = [event.delta for event in mine if event.type == "response.custom_tool_call_input.delta"]
            assert "".join(deltas) == item.input
            kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in mine))
            inputs = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
            assert kinds == ["output_item.added", *inputs, "output_item.done"]
        assert events[-1].response.output[1].input == patch

        results = [
            {"type": "function_call_output", "call_id": namespaced.call_id, "output": "sunny"},
            {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "Done!"},
        ]
        fake.text = TEXT
        client.responses.create(**MODEL, input=results, previous_response_id=reply.id, tools=AGENT)
        prompt = prompt_text(fake)
        assert '{"name": "crm__weather", "arguments": {"city": "Rome"}}' in prompt and "Done!" in prompt
        assert json.dumps({"input": patch}, ensure_ascii=False) in prompt
        whole = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in reply.output), *results]
        client.responses.create(**MODEL, input=whole, tools=AGENT)
        assert prompt_text(fake) == prompt


def test_a_choice_among_tools():
    with scripted_server(CALL_TEXT) as (client, fake):

        def asked(choice):
            client.responses.create(**ASK, tools=[TOOL, *AGENT], tool_choice=choice)
            grammar = fake.started[-1][1].structured
            return [
                name for name in ("weather", "crm__weather", "crm__apply_patch") if f'"{name}"' in prompt_text(fake)
            ], (grammar and grammar.text)

        listed = [{"type": "function", "name": "weather", "namespace": "crm"}, {"type": "web_search"}]
        assert asked({"type": "allowed_tools", "mode": "auto", "tools": listed}) == (["crm__weather"], None)
        seen, grammar = asked({"type": "allowed_tools", "mode": "required", "tools": listed})
        assert seen == ["crm__weather"] and "crm__weather" in grammar
        seen, grammar = asked({"type": "custom", "name": "apply_patch", "namespace": "crm"})
        assert len(seen) == 3 and "crm__apply_patch" in grammar and "crm__weather" not in grammar


def test_items_are_referred_to_and_listed(client, fake):
    first = client.responses.create(**ASK)
    (message,) = first.output
    more = [{"type": "item_reference", "id": message.id}, {"role": "user", "content": "more"}]
    second = client.responses.create(**MODEL, input=more, max_tool_calls=3)
    client.responses.create(
        **MODEL, input=[{"role": "user", "content": "a", "id": odd} for odd in (None, {}, "x", "x")]
    )
    assert any(f"assistant\n{TEXT}<|im_end|>\n<|im_start|>user\nmore" in prompt for prompt in prompts(fake))
    listed = client.responses.input_items.list(second.id).data
    assert [item.role for item in listed] == ["user", "assistant"] and listed[1].id == message.id
    assert (listed[0].content[0].type, listed[0].content[0].text) == ("input_text", "more")
    third = client.responses.create(**MODEL, input="third", previous_response_id=second.id)
    pages = client.responses.input_items.list(third.id, limit=2, order="asc")
    assert [item.content[0].text for item in pages] == [TEXT, "more", TEXT, "third"], "page by page"
    client.responses.delete(first.id)
    client.responses.create(**MODEL, input=more[:1], store=False)  # the others still have it
    for name in (second.id, third.id):
        client.responses.delete(name)
    with pytest.raises(NotFoundError, match="of no response that is kept"):
        client.responses.create(**MODEL, input=more[:1])


def test_truncation_drops_the_oldest_turns(client, fake):
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{i:02}" + 10 * "."} for i in range(21)]
    with pytest.raises(BadRequestError, match="the prompt has 500 tokens"):
        client.responses.create(**MODEL, input=turns, instructions="Be brief.")
    reply = client.responses.create(**MODEL, input=turns, instructions="Be brief.", truncation="auto")
    prompt, length = prompt_text(fake), len(fake.started[-1][0])
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "20.." in prompt and "00.." not in prompt and reply.truncation == "auto"
    kept = prompt.count("<|im_start|>user")
    assert length < 256 <= length + (length // kept), "no turn more would fit"
    with pytest.raises(BadRequestError, match=r"the prompt has 3\d\d tokens"):
        client.responses.create(**MODEL, input=300 * "a", truncation="auto")


def test_an_empty_stop_string_is_none(client, fake):
    for stop in ("", [""], ["", "ö"]):
        client.responses.create(**ASK, extra_body={"stop": stop})
    assert [params.stop for _, params in fake.started] == [(), (), ("ö",)]


def test_too_short_a_limit_leaves_it_incomplete(client):
    reply = client.responses.create(**ASK, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output_text == TEXT.encode()[:3].decode() and reply.output[0].status == "incomplete"
    *_, last = client.responses.create(**ASK, max_output_tokens=3, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_events_come_in_openais_order_and_say_what_the_whole_says(client):
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    shown = [kind for before, kind in zip([None, *kinds], kinds, strict=False) if kind != before]
    assert shown == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    created, last = events[0].response, events[-1].response
    assert (created.status, created.output, created.usage) == ("in_progress", [], None)
    assert last.output_text == TEXT and last.usage.output_tokens == len(TEXT.encode())
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_own_stream_accumulates(client):
    with client.responses.stream(**ASK) as stream:
        deltas = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert deltas[-1] == final.output_text == TEXT


def test_log_probabilities_come_when_included(client, fake):
    asked = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    whole = client.responses.create(**asked).output[0].content[0].logprobs
    assert [entry.token for entry in whole] == ["h", "\ufffd", "\ufffd", "l"]
    assert (whole[0].logprob, len(whole[0].top_logprobs)) == (-1.5, 2)
    events = list(client.responses.create(**asked, stream=True))
    assert [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs] != []
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in whole]
    assert fake.started[0][1].logprobs == 2
    assert client.responses.create(**ASK).output[0].content[0].logprobs == []


def test_a_response_is_gone_on_from(client, fake):
    first = client.responses.create(**ASK, instructions="only now")
    second = client.responses.create(**MODEL, input="more", previous_response_id=first.id)
    assert prompt_text(fake) == (
        f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    ), "the conversation without the former instructions"
    assert second.previous_response_id == first.id
    count = client.responses.input_tokens.count(**MODEL, input="more", previous_response_id=first.id)
    assert (count.object, count.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    *_, last = client.responses.create(**MODEL, input="third", previous_response_id=second.id, stream=True)
    assert prompt_text(fake).count("<|im_start|>user") == 3
    assert client.responses.retrieve(last.response.id).output_text == TEXT, "a streamed one is kept too"


def test_responses_are_kept_deleted_and_not_kept(client):
    kept = client.responses.create(**ASK)
    assert client.responses.retrieve(kept.id) == kept
    with pytest.raises(BadRequestError, match="can't be streamed again"):
        client.responses.retrieve(kept.id, stream=True)
    client.responses.delete(kept.id)
    loose = client.responses.create(**ASK, store=False)
    for name in (kept.id, loose.id):
        with pytest.raises(NotFoundError, match="not kept"):
            client.responses.retrieve(name)
        with pytest.raises(NotFoundError, match="not kept"):
            client.responses.create(**ASK, previous_response_id=name)


def test_the_store_forgets_what_was_used_longest_ago():
    store = ResponseStore(max_count=2)
    for name in "ab":
        store.put({"id": name}, [])
    assert store.get("a") is not None
    store.put({"id": "c"}, [])
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]
    small = ResponseStore(max_bytes=MAX_SHARE * (OVERHEAD + 100))
    names = "abcdefghijklmnopq"
    for name in names:
        small.put({"id": name}, [{"text": "x" * 60}])
    assert small.get("a") is None and all(small.get(name) for name in names[1:])
    small.put({"id": "z"}, [{"text": "x" * 100}])
    assert small.get("z") is None and small.get("b") is not None, "what is too large displaces nothing"
    store.put({"id": "d"}, [{"id": "item", "text": "x"}])
    assert store.item("item") == {"id": "item", "text": "x"} and store.item("other") is None
    assert store.remove("d") and store.item("item") is None
    assert small.remove("b") and not small.remove("b")


def test_the_store_bounds_memory_whatever_is_kept():
    """Empty objects take a hundred times as much memory as characters, and some characters four bytes."""
    most = 2**18
    room = most // MAX_SHARE - OVERHEAD - 100
    for item in ({}, {"a": []}, "\U0001f600", "\ud800"):
        items = [item] * (room // len(json.dumps(item, separators=(",", ":")) + ","))
        store = ResponseStore(max_bytes=most)
        tracemalloc.start()
        for i in range(2 * MAX_SHARE):
            store.put({"id": str(i)}, items)
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert used < 1.2 * most
        assert store.get("31").items == items and store.get("31").response == {"id": "31"}


@pytest.mark.parametrize("fields,param,says", [
    ({"input": []}, "input", "not empty"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0]", "input[0]: the role must be one of"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]",
     "input[0].content[0]: has the image_url null"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "'computer_call' are not supported"),
    ({"input": [{"type": "item_reference"}]}, "input[0]", "needs a string as its id"),
    ({"input": [{"role": "user", "contnt": "a"}]}, "input[0]", "input[0]: a message needs its content"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]", "as its arguments"),
    ({"input": [{"role": "user", "content": "\ud800"}]}, "input[0].content", "surrogate"),
    ({"tools": [{"type": "web_serch"}]}, "tools[0]", "'web_serch'; this server takes function, custom and namespace"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0]", "tools[0]: a namespace needs a string"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [5]}]}, "tools[0].tools[0]", "has the type null"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format",
     "needs the syntax lark or"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "json"}}]}, "tools[0].format",
     "must have the type text or grammar"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "text", "syntax": "lark"}}]},
     "tools[0].format.syntax", "unknown field 'syntax'"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [], "tool": 1}]}, "tools[0].tool",
     "tools[0].tool: unknown field 'tool'"),
    ({"tools": [{"type": "function", "name": "a__b"}, {"type": "namespace", "name": "a", "tools": [
        {"type": "function", "name": "b"}]}]}, "tools[1].tools[0]", "has the name 'a__b', which another tool has"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "which this server doesn't run"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
     "tool_choice", "allowed_tools names 'g', which tools lacks"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "all", "tools": []}}, "tool_choice", 'needs "mode"'),
    ({"max_tool_calls": 0}, "max_tool_calls", "max_tool_calls"),
    ({"include": ["everything"]}, "include", "can't be included"),
    ({"enable_thinking": False}, "enable_thinking", '"chat_template_kwargs": {"enable_thinking": false}'),
    ({"penalty_score": 1.1}, "penalty_score", "here it is repetition_penalty"),
    ({"background": True}, "background", "not supported"),
    ({"truncation": "end"}, "truncation", "'auto' or 'disabled'"),
    ({"conversation": "c"}, "conversation", "not supported"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort", "'high', 'xhigh' or 'max'"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "'auto', 'concise' or 'detailed'"),
    ({"text": {"verbosity": "most"}}, "text.verbosity", "'low', 'medium' or 'high'"),
    ({"text": {"format": {"type": "json"}}}, "text.format.type", "text.format.type must be one of"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "name must be a string"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}},
        "text.format.schema",
        "text.format.schema must be a JSON schema",
    ),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "?"}]}, "tools[1]", "tools[1]: needs a name"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "which needs tools"),
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be"),
    ({"max_output_tokens": 1000}, "max_output_tokens", "lower max_output_tokens"),
    ({"temperature": -1}, "temperature", "temperature must be"),
    ({"max_tokens": 1}, "max_tokens", "did you mean"),
    ({"stream": True, "temperature": -1}, "temperature", "temperature must be"),
])  # fmt: skip
def test_bad_requests_are_named_in_this_routes_words(http, fake, fields, param, says):
    body = json.dumps({"input": "hi", **fields})
    reply = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and says in error["message"], error
    assert fake.started == []


def test_a_late_failure_is_a_failed_response(client, http, fake, monkeypatch):
    async def fails(prompt, params):
        yield Delta("id", 0, "h", [104])
        raise KeyError("a secret")

    monkeypatch.setattr(fake, "_deltas", fails, raising=False)
    *_, last = client.responses.create(**ASK, stream=True)
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert last.response.output[0].status == "incomplete" and "secret" not in str(last)
    assert http.post("/v1/responses", json={"input": "hello"}).status_code == 500


@dataclass(frozen=True)
class Recited(Speech):
    """A speech whose parser gives these pieces, one for each push."""

    pieces: list = field(default_factory=list)

    def parser(self, params):
        return Recital(self.pieces)


@dataclass
class Recital:
    pieces: list
    cut: bool = False

    def push(self, text):
        return [self.pieces.pop(0)]

    def finish(self):
        return []


SCRIPT = [
    Piece(REASONING, "hm"),
    Piece(REASONING, "m"),
    Piece(CONTENT, "So"),
    Piece(CALL, "f", 0, "call_1"),
    Piece(ARGUMENTS, '{"a"', 0),
    Piece(ARGUMENTS, ":1}", 0),
    Piece(CALL, "g", 1, "call_2"),
]


def scripted(script=SCRIPT, finish="stop", parallel=True, **options):
    speech = Recited(None, None, parallel=parallel, pieces=list(script))
    reply = ResponsesReply(Prompt([1, 2, 3]), SamplingParams(), TokenNames(None), {"model": "m"}, speech, **options)
    deltas = [Delta("id", 0, "x", [1, 2], [TokenLogprobs(1, -1.0, ())]) for _ in script]
    deltas[-1].finish_reason, deltas[-1].metrics = finish, RequestMetrics(cached_tokens=1)
    return reply, deltas


def told(script=SCRIPT, finish="stop", **options):
    """The events of a stream, and the response that a whole one is."""
    reply, deltas = scripted(script, finish, stream=True, **options)
    text = "".join(reply.chunks(0, delta) for delta in deltas) + reply.closing()
    events = [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block]
    whole, deltas = scripted(script, finish, **options)
    for delta in deltas:
        whole.take(0, delta)
    return events, whole.whole()


def test_reasoning_text_and_calls_are_items():
    events, whole = told()
    thought, said, first, second = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hmm"}] and thought["summary"] == []
    assert (said["content"][0]["text"], len(said["content"][0]["logprobs"])) == ("So", 1)
    assert (first["name"], first["call_id"], first["arguments"]) == ("f", "call_1", '{"a":1}')
    assert (second["name"], second["arguments"], second["status"]) == ("g", "", "completed")
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}, "the scripted pieces come from no parser"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]

    def same(response):
        return [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]

    assert events[-1]["type"] == "response.completed" and same(last) == same(whole)


def test_each_item_is_done_before_the_next_is_added():
    events, _ = told()
    steps = [(event["type"].removeprefix("response."), event.get("output_index")) for event in events[2:-1]]
    assert steps == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("output_item.added", 3),
        ("function_call_arguments.done", 3),
        ("output_item.done", 3),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4 and added[2]["arguments"] == ""


def test_reasoning_is_the_summary_that_is_wanted():
    """Codex, Vercel's AI SDK and LangChain ask for one, and show nothing else of reasoning."""
    events, whole = told(SCRIPT[:3], as_summary=True)
    thought = whole["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "hmm"}] and "content" not in thought
    assert [event["type"].removeprefix("response.reasoning_summary_") for event in events[3:8]] == [
        *("part.added", "text.delta", "text.delta", "text.done", "part.done"),
    ]
    assert all(event["summary_index"] == 0 and "content_index" not in event for event in events[3:8])
    assert messages(None, [thought])[0][0]["reasoning_content"] == "hmm"


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
def test_a_summary_is_made_of_what_the_model_thinks(name):
    fake = Scripted(text="<think>hm</think>yes")
    app = create_app(fake, "fake/model", reasoning_parser="qwen3")
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        reply = client.responses.create(**ASK, reasoning={name: "auto"})
    assert reply.output[0].summary[0].text == "hm" and reply.reasoning.summary == "auto"


def test_without_parallel_calls_the_first_alone_counts():
    _, whole = told(parallel=False)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]


def test_an_empty_reply_is_an_empty_message():
    events, whole = told([Piece(CONTENT, "")])
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]
    assert "response.output_item.done" in [event["type"] for event in events]


def test_an_aborted_response_has_failed():
    kept = []
    events, whole = told(SCRIPT[:2], "abort", done=kept.append)
    assert (whole["status"], whole["error"]["message"]) == ("failed", "the request was aborted") and kept == []
    assert events[-1]["type"] == "response.failed" and whole["output"][0]["status"] == "incomplete"
