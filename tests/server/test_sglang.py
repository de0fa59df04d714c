"""SGLang's `/generate` and `/abort_request`, against the fake engine."""

import json
import threading
from functools import partial

import httpx
import pytest

from jaxspec.config.request import RequestMetrics
from tests.server import fake as fake_rules
from tests.server.fake import TEXT
from tests.server.live import wait_for

TOKENS = list(TEXT.encode())
LENGTH = {"sampling_params": {"max_new_tokens": 4}}


def ask(http, **body):
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http, **body):
    reply = http.post("/generate", json=body | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    *chunks, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert done == "[DONE]"
    return list(map(json.loads, chunks))


def test_one_prompt(http, fake):
    out = ask(http, text="hi", rid="mine")
    assert (out["text"], out["output_ids"]) == (TEXT, TOKENS)
    assert fake.started[-1][0] == list(b"hi") and fake.names == ["mine"]
    assert fake.started[-1][1].max_tokens == 128, "SGLang's default"
    meta = out["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "stop", "matched": TOKENS[-1]}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(TOKENS), 2)
    assert meta["e2e_latency"] == 0.05
    assert (meta["spec_verify_ct"], meta["spec_accept_length"], meta["spec_accept_rate"]) == (5, 9 / 5, 0.625)
    assert (meta["spec_accept_token_num"], meta["spec_draft_token_num"]) == (5, 8)
    assert "output_token_logprobs" not in meta


def test_cached_tokens_are_told_by_tier(http, monkeypatch):
    for own, told in (
        ({}, None),
        ({"cached_on_host": 1}, {"device": 1, "host": 1}),
        ({"cached_on_disk": 1}, {"device": 1, "host": 0, "storage": 1}),
    ):
        monkeypatch.setattr(fake_rules, "RequestMetrics", partial(RequestMetrics, **own))
        meta = http.post("/generate", json={"input_ids": [1, 2]}).json()["meta_info"]
        body = {"messages": [{"role": "user", "content": "a"}]}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens_details"]
        assert meta.get("cached_tokens_details") == told == usage.get("cached_tokens_details")


def test_the_end_for_length_says_how_long(http):
    assert ask(http, text="hi", **LENGTH)["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


def test_a_stream_says_all_so_far_and_ends_with_the_whole(http):
    whole = ask(http, text="hi", rid="a", **LENGTH)
    chunks = events(http, text="hi", rid="a", **LENGTH)
    assert [chunk["output_ids"] for chunk in chunks] == [TOKENS[: n + 1] for n in range(4)]
    assert [chunk["text"] for chunk in chunks] == [bytes(TOKENS[: n + 1]).decode("utf-8", "ignore") for n in range(4)]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1] == whole


@pytest.mark.parametrize("prompts,given", [
    ({"text": ["hi", "ho"]}, [b"hi", b"ho"]),
    ({"input_ids": [[104, 105], [111]]}, [b"hi", b"o"]),
    ({"input_ids": [104, 105]}, [b"hi"]),
    ({"text": ["hi"]}, [b"hi"]),
])  # fmt: skip
def test_batches_are_lists(http, fake, prompts, given):
    out = ask(http, **prompts, rid="r", **LENGTH)
    assert [bytes(prompt) for prompt, _ in fake.started] == given
    assert isinstance(out, list) == (prompts != {"input_ids": [104, 105]})
    ids = [each["meta_info"]["id"] for each in (out if isinstance(out, list) else [out])]
    assert ids == (["r"] if len(given) == 1 else ["r_0", "r_1"]) == fake.names


def test_each_prompt_of_a_batch_has_its_settings(http, fake):
    settings = [{"max_new_tokens": 1, "temperature": 0}, {"max_new_tokens": 2}]
    first, second = ask(http, text=["a", "b"], sampling_params=settings, rid=["x", "y"])
    assert (first["output_ids"], second["output_ids"]) == (TOKENS[:1], TOKENS[:2])
    assert [params.temperature for _, params in fake.started] == [0, 1.0] and fake.names == ["x", "y"]


def test_several_completions_are_a_list_in_order(http):
    settings = {"n": 2, "max_new_tokens": 2}
    out = ask(http, text=["a", "b"], sampling_params=settings, rid="r")
    assert [each["meta_info"]["id"] for each in out] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    chunks = events(http, text=["a", "b"], sampling_params=settings, rid="r")
    last = {chunk.pop("index"): chunk for chunk in chunks}
    assert [last[index] for index in range(4)] == out


def test_log_probabilities_are_triples(http, fake):
    fields = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 1, "return_text_in_logprobs": True}
    meta = ask(http, input_ids=[65, 66, 67], **fields, **LENGTH)["meta_info"]
    assert (fake.started[-1][1].logprobs, fake.started[-1][1].prompt_logprobs) == (2, 2)
    assert meta["output_token_logprobs"][0] == [-1.5, TOKENS[0], "h"] and len(meta["output_token_logprobs"]) == 4
    assert meta["output_top_logprobs"][0] == [[-0.1, 63, "?"], [-1.5, 104, "h"]]
    assert meta["input_token_logprobs"] == [[None, 66, "B"], [-1.5, 67, "C"]]
    assert meta["input_top_logprobs"] == [None, [[-0.1, 63, "?"], [-1.5, 67, "C"]]]
    meta = ask(http, text="hi", return_logprob=True, **LENGTH)["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs"][0] == [-1.5, TOKENS[0], None]
    assert "output_top_logprobs" not in meta and fake.started[-1][1].prompt_logprobs is None


def test_a_prompt_is_scored_without_a_token(http):
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    out = ask(http, input_ids=[65, 66], **fields)
    assert (out["text"], out["output_ids"], out["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert out["meta_info"]["input_token_logprobs"] == [[None, 65, None], [-1.5, 66, None]]
    assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_the_body_of_sglangs_send_one(http, fake):
    """With --json and --stream: the schema is a word for any object."""
    fake.text = "{}"
    settings = {"temperature": 0.0, "max_new_tokens": 50, "json_schema": "$$ANY$$", "frequency_penalty": 0.0}
    body = {"text": "Human: Hi\n\nAssistant:", "sampling_params": settings, "return_logprob": False, "stream": True}
    events = http.post("/generate", json=body).text.split("\n\n")
    last = json.loads([each for each in events if each.startswith("data: {")][-1].removeprefix("data: "))
    assert last["text"] == "{}" and {"completion_tokens", "e2e_latency", "spec_verify_ct"} <= last["meta_info"].keys()
    structured = fake.started[-1][1].structured
    assert structured.kind == "json" and json.loads(structured.text) == {"type": "object"}


@pytest.mark.parametrize("grammar", [{"json_schema": '{"type": "object"}'}, {"regex": "a+"}, {"ebnf": 'root ::= "a"'}])
def test_grammars_reach_the_engine(http, fake, grammar):
    ask(http, text="hi", sampling_params=grammar)
    ((name, value),) = grammar.items()
    structured = fake.started[-1][1].structured
    assert (structured.kind, structured.text) == ({"json_schema": "json", "ebnf": "grammar"}.get(name, name), value)


def test_settings_are_sglangs(http, fake):
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "stop": "x",
        "stop_token_ids": [9],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "sampling_seed": 3,
        "logit_bias": {"65": 1.0},
        "spaces_between_special_tokens": True,
        "json_schema": None,
    }
    ask(http, text="hi", sampling_params=given, lora_path=None, return_logprob=False, logprob_start_len=-1)
    params = fake.started[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 4, 0.1)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (7, 2, ("x",), (9,))
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (True, False, True)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.2)
    assert (params.seed, params.logit_bias, params.logprobs) == (3, {65: 1.0}, None)


def test_what_bench_serving_always_sends_is_taken(http):
    """It names tokens, and asks for no log-probabilities."""
    asked = {
        "return_logprob": False,
        "logprob_start_len": 1,
        "top_logprobs_num": 3,
        "token_ids_logprob": [9370, 105180],
    }
    assert ask(http, text="hi", lora_path=None, stream=False, **asked)["text"]


@pytest.mark.parametrize("body,param,says", [
    ({}, "text", "neither was given"),
    ({"text": "a", "input_ids": [1]}, "text", "both was given"),
    ({"text": []}, "text", "not empty"),
    ({"input_ids": []}, "input_ids", "none of them empty"),
    ({"input_ids": [[1], []]}, "input_ids", "none of them empty"),
    ({"input_ids": [[1], [2, "a"]]}, "input_ids[1][1]", "must be a token id, an integer, got 'a'"),
    ({"text": ["a", 5]}, "text[1]", "must be a string, got 5"),
    ({"text": ["a", "b"], "logprob_start_len": [0, "a"]}, "logprob_start_len[1]", "must be an integer, got 'a'"),
    ({"input_ids": [999]}, "input_ids", "outside the vocabulary"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "from 0 to"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "temperature must"),
    ({"text": "a", "sampling_params": {"stop_regex": "b"}}, "sampling_params.stop_regex", "not supported"),
    ({"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature", "temperature?"),
    ({"text": "a", "sampling_params": [{"temprature": 1}]}, "sampling_params[0].temprature", "temperature?"),
    (
        {"text": "a", "sampling_params": {"temperature": "a", "stop": 5}},
        "sampling_params.temperature",
        "got 'a'; sampling_params.stop: must be a string",
    ),
    ({"text": "a", "sampling_params": 5}, "sampling_params", "must be an object, or a list with one for each prompt"),
    ({"text": "a", "sampling_params": [5]}, "sampling_params[0]", "sampling_params[0]: must be an object, got 5"),
    (
        {"text": "a", "sampling_params": {"max_new_tokens": 0, "min_new_tokens": 5}},
        "sampling_params.min_new_tokens",
        "min_new_tokens (5) must not exceed max_new_tokens (0)",
    ),
    (
        {"text": "a", "sampling_params": {"json_schema": "{"}},
        "sampling_params.json_schema",
        "json_schema is not a JSON",
    ),
    ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params", "2 entries for 1 prompts"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 entries for 2 prompts"),
    ({"text": ["a", "b", "c"], "rid": ["y", "x", "x"]}, "rid", "is 'x' for several prompts; give each"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "sampling_params", "the same"),
    ({"text": ["a"] * 100, "sampling_params": {"n": 100}}, "text", "at most 2048"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf", "send one"),
    ({"text": "a", "rid": 5}, "rid", "must be a string or a list"),
    ({"text": [1]}, "text[0]", "must be a string, got 1"),
    ({"text": "a", "image_data": ["x"]}, "image_data[0]", "fake/model has no vision"),
    ({"text": ["a", "b"], "image_data": ["x", "x", "x"]}, "image_data", "has 3 entries for 2 prompts"),
    ({"text": "a", "image_data": 5}, "image_data", "URL or base64"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [1]}, "token_ids_logprob", "not supported"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num", "0 to 20"),
])  # fmt: skip
def test_bad_requests_are_named_in_sglangs_words(http, fake, body, param, says):
    reply = http.post("/generate", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], fake.started) == (param, []) and says in error["message"]


@pytest.mark.parametrize("abort", [{"rid": "mine"}, {"abort_all": True}])
def test_an_aborted_request_is_answered_with_what_it_has(url, http, fake, abort):
    fake.open, answers = False, []
    asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/generate", json=BODY, timeout=60)))
    asking.start()
    wait_for(lambda: fake.running == 1)
    assert http.post("/abort_request", json={"rid": "another"} if "rid" in abort else abort).status_code == 200
    assert fake.aborts == {abort.get("rid") and "another"}
    assert http.post("/abort_request", json=abort).status_code == 200
    asking.join(60)
    meta = answers[0].json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["e2e_latency"] == 0.05


BODY = {"text": "hi", "rid": "mine"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path,body,prefix", [
    ("/v1/chat/completions", CHAT, "chatcmpl-"),
    ("/v1/completions", {"prompt": ["hi", "ho"]}, "cmpl-"),
    ("/v1/responses", {"input": "hi"}, "resp_"),
])  # fmt: skip
def test_a_response_is_aborted_by_its_id(url, http, fake, path, body, prefix):
    fake.open = False
    with http.stream("POST", path, json=body | {"stream": True}, headers={"X-Request-Id": "a"}) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines)[6:])
        name = first.get("response", first)["id"]
        assert name.startswith(prefix)
        for other in (name[:-1], f"{name}-"):
            assert httpx.post(f"{url}/abort_request", json={"rid": other}).status_code == 200
        assert fake.running == len(body.get("prompt", "1"))
        assert httpx.post(f"{url}/abort_request", json={"rid": name}).status_code == 200
        assert "abort" in "".join(lines)
    wait_for(lambda: fake.running == 0)


@pytest.mark.parametrize("first, second", [
    (("/v1/chat/completions", CHAT), ("/v1/chat/completions", CHAT)),
    (("/v1/completions", {"prompt": ["hi", "ho"]}), ("/generate", {"text": "hi"})),
    (("/generate", {"text": "hi"}), ("/v1/chat/completions", CHAT)),
    (("/generate", {"text": "hi"}), ("/generate", {"text": "ho"})),
])  # fmt: skip
def test_a_rid_that_is_in_use_is_refused(http, fake, first, second):
    """An abort would end both, and no client could say which answer is whose."""
    fake.open, rid = False, {"rid": "mine"}
    path, body = first
    with http.stream("POST", path, json=body | rid | {"stream": True}) as reply:
        wait_for(lambda: fake.running == len(body.get("prompt", "1")))
        for stream in (False, True):
            refused = http.post(second[0], json=second[1] | rid | {"stream": stream})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "rid"
            assert "rid 'mine' is running" in refused.json()["error"]["message"]
        fake.open = True
        assert b"[DONE]" in reply.read()
    assert http.post(second[0], json=second[1] | rid).status_code == 200


def test_abort_needs_a_name(http):
    assert http.post("/abort_request", json={}).status_code == 400


def test_a_late_failure_is_an_event_of_the_stream(http):
    *_, error = events(http, text="late failure")
    assert error["error"]["type"] == "server_error"
