"""Every invalid request: OpenAI's error body, a message that names the field, and nothing started."""

import json
import logging

import httpx
import openai
import pytest

from jaxspec.text.errors import TokenizerError
from server.app import create_app
from server.http.gate import MAX_BODY_BYTES
from tests.server.fake import FakeLLM
from tests.server.live import serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def error(reply, status=400):
    """The error object of a reply, checked for its shape."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.text and "secret" not in reply.text
    return body["error"]


@pytest.mark.parametrize("fields,param,says", [
    ({"prompt": 3}, "prompt", "list of token ids"),
    ({"prompt": []}, "prompt", "none of them empty"),
    ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1]: must be a string, got 1"),
    ({"prompt": [1, "a"]}, "prompt[1]", "must be a token id, an integer, got 'a'"),
    ({"prompt": [[1], [2, None]]}, "prompt[1][1]", "must be a token id, an integer, got null"),
    ({"prompt": [[1], "a"]}, "prompt[1]", "must be a list of token ids, got 'a'"),
    ({"prompt": [True]}, "prompt[0]", "must be a token id"),
    ({"prompt": ""}, "prompt", "0 tokens"),
    ({"prompt": [[1], []]}, "prompt[1]", "0 tokens"),
    ({"prompt": ["a", "x" * 300, ""]}, "prompt[1]", "300 tokens"),
    ({"prompt": ["a", "\ud800"]}, "prompt[1]", "lone surrogate"),
    ({"prompt": [1, 9999]}, "prompt", "9999"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": "x" * 300}, "prompt", "300 tokens"),
    ({"prompt": [[1]] * 1025, "n": 2}, "prompt", "1025 prompts with n 2 ask for 2050 completions, at most 2048"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"stop": ["a", "\udc00"]}, "stop[1]", "lone surrogate"),
    ({"stop": ["a", 5]}, "stop[1]", "must be a string, got 5"),
    ({"stop": 3}, "stop", "string or a list of strings"),
    ({"temperature": "hot"}, "temperature", "valid number, got 'hot'"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": -1}, "temperature", "0 to 100"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"top_p": 0}, "top_p", "a number greater than 0 (at least 1e-30) and at most 1, got 0"),
    ({"top_p": -1}, "top_p", "and at most 1, got -1"),
    ({"repetition_penalty": 101}, "repetition_penalty", "greater than 0 (at least 1e-30) and at most 100, got 101"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 1000}, "n", "1 to 128, got 1000"),
    ({"n": "2"}, "n", "integer, got '2'"),
    ({"best_of": 3}, "best_of", "equals n"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "from 0 to 2147483647, got -1; leave it out"),
    ({"max_tokens": 5.5}, "max_tokens", "valid integer"),
    ({"prompt": [1.5]}, "prompt[0]", "must be a token id"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "min_tokens (1) must not exceed max_tokens (0)"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "must not exceed"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "takes as keys token ids, which are integers of at least 0"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "below the vocabulary's size, got '-1'"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias", "below the vocabulary's size, got 99999999999"),
    ({"logit_bias": {"5": None}}, "logit_bias", "takes numbers from -100 to 100, got null for the token 5"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"stop": ["x"] * 65}, "stop", "at most 64 strings, got 65"),
    ({"stop_token_ids": [1] * 33}, "stop_token_ids", "has 33 ids, at most 32"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "has 301 entries, at most 300"),
    ({"prompt": ["a"] * 2049}, "prompt", "has 2049 prompts, at most 2048"),
    ({"stop": ["x" * 100_000]}, "stop", "at most 256 characters, got 1, the longest of 100000"),
    ({"stop_token_ids": [-3]}, "stop_token_ids", "takes token ids, which are integers of at least 0"),
    ({"tempertur": 1}, "tempertur", "did you mean temperature?"),
    ({"zzz": False}, "zzz", "known fields: "),
    ({"x" * 500: 1}, "x" * 500, "known fields: "),
    ({"\ud800": 1}, "\\ud800", "unknown field '\\ud800'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "unknown field 'usage'"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"guided_json": {}, "regex": "a"}, "regex", "send one"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completion(http, fake, fields, param, says, stream):
    if "stream_options" not in fields:
        fields = {**fields, "stream": stream}
    body = {"prompt": "hi", **fields}
    found = error(http.post(TEXT, content=json.dumps(body), headers={"Content-Type": "application/json"}))
    assert (found["param"], found["type"]) == (param, "invalid_request_error") and says in found["message"]
    assert fake.started == []


@pytest.mark.parametrize("fields,param,says", [
    ({"messages": []}, "messages", "at least one item"),
    ({"messages": USER * 5001}, "messages", "has 5001 messages, at most 5000"),
    ({"messages": [{"role": "user", "content": [{}] * 1001}]}, "messages[0].content", "has 1001 parts"),
    ({"messages": [{}] * 100}, "messages[0].role", "messages[0].role is required"),
    ({"chat_template_kwargs": {f"x{i}": 1 for i in range(101)}}, "chat_template_kwargs", "has 101 variables"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [*USER, {"content": "hi"}]}, "messages[1].role", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text parts"),
    ({"messages": [{"role": "\ud800", "content": "a"}]}, "messages[0].role", "surrogate"),
    ({"messages": [{"role": "asistant", "content": "a"}]}, "messages[0].role", "did you mean assistant?"),
    ({"messages": ["hi"]}, "messages[0]", "messages[0]: must be an object, got 'hi'"),
    ({"messages": {"a": 1, "b": 2}}, "messages", "list, got an object with 2 fields"),
    ({"tools": {"a": 1, "b": 2}}, "tools", "must be a list of tools, got an object with 2 fields"),
    ({"tools": [{"a": None}]}, "tools[0]", "got an object with 1 field"),
    ({"tool_choice": True}, "tool_choice", "got true"),
    ({"stream_options": 5}, "stream_options", "stream_options: must be an object, got 5"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object, got []"),
    ({"temperature": True}, "temperature", "got true"),
    ({"messages": [{"role": "user", "content": "a", "nam": "b"}]}, "messages[0].nam", "did you mean name?"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "part has no"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "needs a string"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0]",
        "tool_calls[0]: must have",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0]", "tools[0]: must be"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"audio": {}}, "audio", "not supported"),
    ({"reasoning_effort": "higher"}, "reasoning_effort", "'medium', 'high', 'xhigh' or 'max'"),
    ({"verbosity": "max"}, "verbosity", "'low', 'medium' or 'high'"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort",
        "differ; send one",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"priority": 1.5}, "priority", "integer"),
    ({"priority": 2**31}, "priority", "2147483647"),
    ({"bad_words": ["a"]}, "bad_words", "not supported"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be an integer from 0"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens must be an integer from 0"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "must not exceed max_tokens (0)"),
    ({"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "must not exceed max_completion_tokens (3)"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "lower max_completion_tokens"),
    ({"max_tokens": 300}, "max_tokens", "lower max_tokens"),
    ({"max_completion_tokens": 300, "stream": True}, "max_completion_tokens", "lower max_completion_tokens"),
    ({"max_completion_tokens": 3, "stop": {"max_tokens": 1}}, "stop", "got an object with 1 field"),
    ({"max_completion_tokens": 3, "stop": ["a", ["max_tokens"]]}, "stop[1]", "got ['max_tokens']"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "send one"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "tokens, allowed are"),
])  # fmt: skip
def test_bad_chat(http, fake, fields, param, says):
    body = json.dumps({"messages": USER, **fields})
    found = error(http.post(CHAT, content=body, headers={"Content-Type": "application/json"}))
    assert found["param"] == param and says in found["message"]
    assert fake.started == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("size", [300, 30_000, 300_000])
def test_a_prompt_beyond_the_context_has_openais_code(http, fake, path, size):
    text = "x" * size
    found = error(
        http.post(path, json={"prompt": text} if path == TEXT else {"messages": [{**USER[0], "content": text}]})
    )
    assert found["code"] == "context_length_exceeded" and found["param"] in ("messages", "prompt")
    assert fake.started == []


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_an_empty_list_of_tools_asks_for_nothing(http, fake, name):
    assert http.post(CHAT, json={"messages": USER, name: []}).json()["choices"][0]["finish_reason"] == "stop"
    asked = [fake.started[-1]]
    assert http.post(CHAT, json={"messages": USER}).status_code == 200
    assert [fake.started[-1]] == asked


def test_fields_that_are_null_are_not_there(http):
    nothing = dict.fromkeys(("zzz", "tools", "functions", "priority", "max_tokens", "user", "stream", "logit_bias"))
    assert http.post(CHAT, json={"messages": USER, **nothing}).status_code == 200
    message = {**USER[0], "audio": None, "zzz": None}
    assert http.post(CHAT, json={"messages": [message], "stream_options": None}).status_code == 200


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "n", "min_tokens", "logprobs", "best_of"])
def test_an_integer_may_be_spelt_as_a_float(http, fake, name):
    assert http.post(TEXT, json={"prompt": [97.0, 98], "temperature": 1, name: 1.0}).status_code == 200
    prompt, params = fake.started[-1]
    assert prompt == [97, 98] and getattr(params, name if name != "best_of" else "n") == 1
    assert error(http.post(TEXT, json={"prompt": "a", name: 1.5}))["param"] == name


@pytest.mark.parametrize("content,says", [
    (b'{"prompt": "hi"', "not valid JSON"),
    (b"", "must be a JSON object"),
    (b"[1]", "must be a JSON object"),
    (b'{"prompt": "\xff"}', "isn't UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
])  # fmt: skip
def test_malformed_body(http, content, says):
    found = error(http.post(TEXT, content=content, headers={"Content-Type": "application/json"}))
    assert says in found["message"]


def test_what_was_sent_is_quoted_in_part(http):
    long = "x" * 100_000
    values = (long, [long] * 50, {long[:1000]: long}, [[[[long]]]])
    for field in ("temperature", "stop", "logit_bias", "stop_token_ids", "stream_options", "messages"):
        for value in values:
            message = error(http.post(CHAT, json={"messages": USER, field: value}))["message"]
            assert len(message) <= 2000, (field, message)
    found = error(http.post(TEXT, json={"prompt": "a", long[:5000]: 1}))
    assert len(found["message"]) == 2000 and found["message"].endswith("xxx...")
    assert len(error(http.post(TEXT, json={"prompt": "a", "model": long}), 404)["message"]) < 200


def test_content_type_is_named(http):
    assert "application/json" in error(http.post(TEXT, content=b'{"prompt": "hi"}'))["message"]


def test_one_bad_prompt_refuses_all_before_any_starts(http, fake):
    for stream in (False, True):
        found = error(http.post(TEXT, json={"prompt": [[1], [2], [9999]], "stream": stream}))
        assert "9999" in found["message"]
    assert fake.started == []


def test_wrong_model_names_the_served_one(client):
    with pytest.raises(openai.NotFoundError, match="'fake/model'") as caught:
        client.completions.create(model="gpt-9", prompt="hi")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_unknown_route_and_method(http):
    assert "/v1/chat/completions" in error(http.post("/v1/chat"), 404)["message"]
    for path, near in (("/chat/completions", CHAT), ("/v1/v1/messages", "/v1/messages"), ("/v1/model", "/v1/models")):
        message = error(http.post(path), 404)["message"]
        assert message == f"no such route: POST {path}; did you mean {near}?"
    assert "did you mean" not in error(http.post("/v1/completions" * 4000), 404)["message"]
    reply = http.get(TEXT)
    assert "use POST" in error(reply, 405)["message"] and reply.headers["allow"] == "POST"
    both = http.put("/flush_cache")
    assert "use GET, POST" in error(both, 405)["message"] and both.headers["allow"] == "GET, POST"


def test_template_complaint_is_passed_on(http, fake):
    class Refuses:
        measure = fake.tokenizer.measure

        def write_chat(self, *_, **__):
            raise TokenizerError("roles must alternate")

    fake.tokenizer = Refuses()
    found = error(http.post(CHAT, json={"messages": USER}))
    assert (found["message"], found["param"]) == ("roles must alternate", "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_tells_nothing(http, stream, caplog):
    caplog.set_level(logging.CRITICAL)
    assert error(http.post(TEXT, json={"prompt": "boom", "stream": stream}), 500)["type"] == "server_error"
    assert http.post(TEXT, json={"prompt": "hi"}).status_code == 200, "the server goes on"


def test_failure_in_mid_stream_is_an_event(http, client, fake):
    reply = http.post(TEXT, json={"prompt": "late failure", "stream": True})
    events = reply.text.strip().split("\n\n")
    assert reply.status_code == 200 and events[-1] == "data: [DONE]"
    assert events[-2].startswith('data: {"error":{"message":"the server failed') and "secret" not in reply.text
    with pytest.raises(openai.APIError, match="the server failed"):
        list(client.completions.create(model="fake/model", prompt="late failure", stream=True))
    assert fake.running == 0


def test_dead_engine(http, fake):
    reply = http.post(TEXT, json={"prompt": "die", "stream": True})
    assert "engine stopped on RuntimeError" in reply.text and "secret" not in reply.text
    for asked in (("POST", TEXT, {"prompt": "hi"}), ("GET", "/health", None), ("POST", "/flush_cache", None)):
        method, path, body = asked
        assert error(http.request(method, path, json=body), 503)["code"] == "engine_dead"


def test_api_key():
    with serving(create_app(FakeLLM(), api_key="sesame")) as url:
        ask = {"model": "fake/model", "prompt": "hi"}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sesame") as client:
            assert client.completions.create(**ask).choices
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError, match="wrong"),
        ):
            client.completions.create(**ask)
        for path in ("/v1/models", "/server_info", "/flush_cache", "/nowhere"):
            assert error(httpx.get(url + path), 401)["code"] == "invalid_api_key"
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/metrics").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large(http, chunked):
    size = MAX_BODY_BYTES + 1

    def chunks():
        for _ in range(size // 2**20 + 1):
            yield b" " * 2**20

    content = chunks() if chunked else b" " * size
    try:
        reply = http.post(TEXT, content=content, headers={"Content-Type": "application/json"})
    except httpx.WriteError:  # the server hung up while we were still sending
        return
    assert "larger than" in error(reply, 413)["message"]


@pytest.mark.parametrize("field,prompts,param", [
    ("text", ["a", ""], "text[1]"),
    ("text", ["a", "\ud800"], "text[1]"),
    ("input_ids", [[1], [99999]], "input_ids[1]"),
    ("input_ids", [99999], "input_ids"),
])  # fmt: skip
def test_an_error_of_generate_names_the_prompt_at_fault(http, field, prompts, param):
    body = json.dumps({field: prompts})
    assert error(http.post("/generate", content=body, headers={"Content-Type": "application/json"}))["param"] == param
