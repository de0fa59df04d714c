"""The API's description against the server: responses, statuses, ranges, and the page that shows it."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from jaxspec.config.request import INTEGERS, NUMBERS, RequestError, SamplingParams
from server.http.gate import MAX_BODY_BYTES
from server.protocol.response_models import ChatCompletion, ChatCompletionChunk, Completion

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def schema(http):
    return http.get("/openapi.json").json()


@pytest.mark.parametrize("options", [
    {}, {"n": 2, "max_tokens": 9}, {"max_tokens": 0}, {"prompt_logprobs": 2}, {"return_token_ids": True},
    {"logprobs": 2}, {"stream_options": {"include_usage": True}}, {"stream_options": {"continuous_usage_stats": True}},
    {"return_tokens_as_token_ids": True, "logprobs": 1}, {"echo": True, "logprobs": 1},
])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_answered_is_what_is_described(http, path, options):
    body = {"messages": USER, **options} if path == CHAT else {"prompt": ["hi", "ho"], **options}
    if path == CHAT:
        if body.pop("echo", None):
            return
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    whole, chunk = (ChatCompletion, ChatCompletionChunk) if path == CHAT else (Completion, Completion)
    if "stream_options" not in body:
        whole.model_validate(http.post(path, json=body).json())
    reply = http.post(path, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events.pop() == "[DONE]" and events
    for event in events:
        chunk.model_validate(json.loads(event))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake/model", "/health", "/server_info", "/flush_cache"])
def test_information_is_what_is_described(http, schema, path):
    described = schema["paths"]["/v1/models/{model}" if path.startswith("/v1/models/") else path]["get"]
    answer = described["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(http.get(path).json(), {**answer, "components": schema["components"]})


def test_errors_are_described(http, schema):
    error = schema["components"]["schemas"]["ErrorResponse"]
    asked = {
        400: http.post(TEXT, json={}),
        404: http.post(TEXT, json={"prompt": "a", "model": "no"}),
        413: http.post(TEXT, content=b" " * (MAX_BODY_BYTES + 1)),
        500: http.post(TEXT, json={"prompt": "boom"}),
    }
    for status, reply in asked.items():
        assert reply.status_code == status
        jsonschema.validate(reply.json(), {**error, "components": schema["components"]})
        assert str(status) in schema["paths"][TEXT]["post"]["responses"]
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"] and {"401", "500", "503"} <= set(operation["responses"])
    assert list(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_every_reference_is_defined(schema):
    names = set(re.findall(r'"#/components/schemas/([^"]*)"', json.dumps(schema)))
    assert names <= set(schema["components"]["schemas"])


@pytest.mark.parametrize("name", sorted(NUMBERS | INTEGERS))
def test_a_described_range_is_the_engines(schema, name):
    field = schema["components"]["schemas"]["CompletionRequest"]["properties"][name]
    branch = next(each for each in field.get("anyOf", [field]) if "minimum" in each)
    low, high = branch["minimum"], branch["maximum"]
    assert type(low) is type(high) is (int if branch["type"] == "integer" else float)
    for value in (low, high):
        if (name, value) != ("max_tokens", 0):  # which the server makes of one token
            SamplingParams(**{"max_tokens": None, name: value})
    whole = type(low) is int
    for value in (low - 1 if whole else low - 1e-9, high + 1 if whole else high * (1 + 1e-9)):
        with pytest.raises(RequestError):
            SamplingParams(**{"max_tokens": None, name: value})


def test_the_reference_page_fetches_nothing_but_the_description(http):
    reply = http.get("/docs")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//|@import|url\(", reply.text)
    assert re.findall(r'fetch\("([^"]*)"\)', reply.text) == ["openapi.json"]
    assert "connect-src 'self'" in reply.headers["content-security-policy"]


def valid(schema, path, body):
    """Whether the description allows `body`."""
    asked = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**asked, "components": schema["components"]}).is_valid(body)


ITEM = {"type": "message", "role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "function": {"name": "f"}}
FORM = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}
CUSTOM = {"type": "custom", "custom": {"name": "c", "format": FORM}}
CUSTOM_CALL = {"id": "d", "type": "custom", "custom": {"name": "c", "input": "x"}}


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": USER, "reasoning_effort": "low"}),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [CUSTOM_CALL]}], "tools": [CUSTOM],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
    ("/v1/responses", {"input": "a", "reasoning": {"effort": "high"}}),
    (CHAT, {"messages": USER, "response_format": {"type": "text"}, "regex": "a"}),
    (TEXT, {"prompt": "a", "structured_outputs": {"json_object": True, "whitespace_pattern": ""}}),
    (TEXT, {"prompt": "a", "stop_token_ids": [258], "ebnf": "root ::= \"a\"", "guided_json": None}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True}), ("/tokenize", {"messages": USER, "prompt": None}),
    ("/tokenize", {"messages": USER, "stream_options": {}}), ("/detokenize", {"tokens": [258, 1.0]}),
    ("/generate", {"text": ["a", "b"], "rid": ["x", "y"], "top_logprobs_num": [1, 2], "token_ids_logprob": [1]}),
    ("/generate", {"input_ids": [[1], [2.0]], "sampling_params": [{"regex": "a"}, {"ebnf": "a"}]}),
    ("/abort_request", {"rid": "x"}), ("/abort_request", {"abort_all": True}),
    ("/v1/responses", {"input": [ITEM, {"type": "reasoning", "id": "r", "summary": []}, CALL], "store": False}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}),
    ("/v1/responses", {"input": "a", "truncation": "auto", "max_tool_calls": 1, "stop": "", "tools": [
        {"type": "namespace", "name": "a", "description": "b", "tools": [{"type": "function", "name": "f"}]},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
        {"type": "mcp", "server_label": "m"},
    ], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}),
    ("/v1/responses", {"input": [
        ITEM, {**CALL, "namespace": "a"}, {"type": "custom_tool_call", "call_id": "d", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
    ]}),
])  # fmt: skip
def test_what_the_description_allows_is_accepted(http, schema, path, body):
    assert valid(schema, path, body) and http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": USER, "top_logprobs": 2}),
    (CHAT, {"messages": USER, "add_generation_prompt": True, "continue_final_message": True}),
    (CHAT, {"messages": USER, "tool_choice": "required"}),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": False}}),
    (CHAT, {"messages": USER, "regex": "a", "guided_grammar": "b"}),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "strict": 0}}]}),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": 0}}}),
    (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}),
    (TEXT, {"prompt": "a", "regex": ""}), (TEXT, {"prompt": [259]}), (TEXT, {"prompt": "a", "stop_token_ids": [259]}),
    ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": USER}), ("/tokenize", {"prompt": "a", "top_p": 0}),
    ("/tokenize", {"messages": USER, "add_special_tokens": True}), ("/detokenize", {"tokens": [259]}),
    ("/generate", {}), ("/generate", {"text": "a", "input_ids": [1]}), ("/generate", {"input_ids": [259]}),
    ("/generate", {"text": []}), ("/generate", {"text": "a", "top_logprobs_num": 21}),
    ("/generate", {"text": "a", "return_logprob": True, "token_ids_logprob": [1]}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}),
    ("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}),
    ("/abort_request", {}), ("/abort_request", {"rid": ""}), ("/abort_request", {"abort_all": False}),
    ("/v1/responses", {"input": [{}]}), ("/v1/responses", {"input": [{**ITEM, "type": 0}]}),
    ("/v1/responses", {"input": [{**ITEM, "role": "tool"}]}),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": {}}]}),
    ("/v1/responses", {"input": "a", "top_logprobs": 21}), ("/v1/responses", {"input": "a", "include": ["x"]}),
    ("/v1/responses", {"input": "a", "tool_choice": "required"}), ("/v1/responses", {"input": "a", "tools": [{}]}),
    ("/v1/responses", {"input": "a", "stop_token_ids": [259]}), ("/v1/responses", {"input": "a", "stop": 5}),
    ("/v1/responses", {"input": "a", "reasoning": {"effort": "most"}}),
    ("/v1/responses", {"input": "a", "tools": [{"type": "web_serch"}]}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}),
])  # fmt: skip
def test_what_the_description_forbids_is_refused(http, schema, path, body):
    assert not valid(schema, path, body) and http.post(path, json=body).status_code == 400


# What JSON Schema can't say, which docs/serving.md lists too: all that schemathesis finds of the description.
BEYOND = {
    "a prompt longer than the context": (TEXT, {"prompt": "a" * 999}),
    "a prompt that has no tokens": (TEXT, {"prompt": ""}),
    "best_of differs from n": (TEXT, {"prompt": "a", "best_of": 2}),
    "min_tokens above max_tokens": (TEXT, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}),
    "two limits that differ": (CHAT, {"messages": USER, "max_tokens": 2, "max_completion_tokens": 3}),
    "too many prompts times n": (TEXT, {"prompt": ["a"] * 100, "n": 100}),
    "a logit_bias outside the vocabulary": (TEXT, {"prompt": "a", "logit_bias": {"259": 1}}),
    "a grammar that doesn't parse": (TEXT, {"prompt": "a", "guided_json": "{"}),
    "a chosen tool that isn't among the tools": (
        CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    "a list for other than the prompts": ("/generate", {"text": ["a", "b"], "rid": ["x"]}),
    "an n that differs between prompts": ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}),
    "text that UTF-8 can't spell": (TEXT, {"prompt": "\ud800"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_json_schema_cannot_say_is_refused_and_listed(http, schema, name):
    path, body = BEYOND[name]
    headers = {"Content-Type": "application/json"}
    assert valid(schema, path, body)
    assert http.post(path, content=json.dumps(body), headers=headers).status_code == 400
    assert f"| {name} |" in (Path(__file__).parents[3] / "docs/serving.md").read_text()
