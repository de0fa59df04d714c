"""The API's description against the server: responses, statuses, ranges, and the page that shows it."""

import json
import re

import jsonschema
import pytest

from jaxspec.request import INTEGERS, NUMBERS, RequestError, SamplingParams
from server.gate import MAX_BODY_BYTES
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
