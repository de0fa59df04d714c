"""Routes that trainers call, with bodies as slime's and AReaL's disk modes send them, and vLLM's names."""

import base64
import io
import json

import httpx
import numpy as np
import pytest

from jaxspec import AsyncLLM, Delta, SamplingParams
from jaxspec.config.request import RequestMetrics
from server.app import create_app
from server.http.gate import GUARDED_PATHS
from server.protocol import ChatRequest
from server.protocol.responses import ResponsesRequest
from server.replies import Job, Prompt
from server.replies.logprobs import TokenNames
from server.replies.sglang import GenerateReply
from server.replies.token_ids import TokensReply
from tests.server.fake import FakeLLM
from tests.server.live import serving
from tests.support.engines import SMALL, checkpoint, tokens
from tests.support.tiny import tiny_checkpoint

PROMPT = tokens(20)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def live():
    options = SMALL | {"max_running_requests": 3, "num_draft_tokens": 3, "enable_return_hidden_states": True}
    llm = AsyncLLM(checkpoint(), "ngram", **options)
    with serving(create_app(llm, api_key="key")) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.headers["Authorization"] = "Bearer key"
        yield client
    llm.close()


def post(live, path, body=None, **query):
    reply = live.post(path, json=body, params=query) if body is not None else live.post(path, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def generate(live):
    """A rollout as slime and AReaL ask for it."""
    asked = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "stream": False}
    out = post(live, "/generate", asked)
    pairs = [(token, logprob) for logprob, token, _ in out["meta_info"]["output_token_logprobs"]]
    assert [token for token, _ in pairs] == out["output_ids"] and all(logprob <= 0 for _, logprob in pairs)
    return out["meta_info"]


def test_slime_updates_from_disk_in_a_pause(live):
    folder = str(tiny_checkpoint("qwen3", 272, 4, tokenizer=True, num_hidden_layers=1))
    assert generate(live)["weight_version"] == "default"
    post(live, "/pause_generation", {"mode": "retract"})
    assert live.get("/flush_cache").status_code == 200
    post(live, "/release_memory_occupation", {})
    assert live.get("/is_sleeping").json() == {"is_sleeping": True}
    post(live, "/resume_memory_occupation", {"tags": ["weights"]})
    reply = post(live, "/update_weights_from_disk", {"model_path": folder, "load_format": None, "weight_version": "7"})
    assert reply["success"] is True and isinstance(reply["message"], str) and reply["num_paused_requests"] == 0
    post(live, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    post(live, "/continue_generation", {})
    assert live.get("/get_weight_version").json() == {"weight_version": "7"}
    meta = generate(live)
    assert meta["weight_version"] == "7" and meta["cached_tokens"] == 0
    text = post(live, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "logprobs": 0})
    assert text["weight_version"] == "7"


def test_areal_updates_from_disk_and_has_requests_aborted(live):
    post(live, "/pause_generation", {})
    reply = post(live, "/update_weights_from_disk", {"model_path": checkpoint(), "abort_all_requests": True})
    assert reply["success"] is True
    post(live, "/continue_generation", {})
    assert post(live, "/update_weight_version", {"new_version": "v2"})["success"] is True
    assert generate(live)["weight_version"] == "v2"


def test_what_cannot_be_loaded_is_a_400_with_the_same_fields(live):
    for body in ({"model_path": "/no/such/folder"}, {"draft_model_path": checkpoint()}, {}):
        reply = live.post("/update_weights_from_disk", json=body)
        assert reply.status_code == 400 and reply.json()["success"] is False and reply.json()["message"], body
    assert "must be one of" in live.post("/pause_generation", json={"mode": "soon"}).text
    assert "must be a list of some of" in live.post("/release_memory_occupation", json={"tags": ["all"]}).text


def test_the_names_of_vllm(live):
    post(live, "/pause", mode="keep")
    assert live.get("/is_paused").json() == {"is_paused": True}
    assert post(live, "/resume") == {"status": "resumed"}
    post(live, "/sleep", level=1)
    assert live.get("/is_sleeping").json() == {"is_sleeping": True}
    post(live, "/wake_up", tags=["weights", "kv_cache"])
    assert live.get("/is_sleeping").json() == {"is_sleeping": False}
    assert post(live, "/reset_prefix_cache") == {"success": True}
    generate(live)


@pytest.mark.parametrize("path", sorted(GUARDED_PATHS))
def test_without_the_key_nothing_is_done(live, path):
    assert httpx.post(f"{live.base_url}{path}", json={}).status_code == 401


def test_a_server_without_a_key_takes_none_of_them_unless_told_to():
    app, opened = create_app(FakeLLM()), create_app(FakeLLM(), rollout_routes=True)
    with serving(app) as url, serving(opened) as other:
        for path in (*GUARDED_PATHS, "/abort_request"):
            reply = httpx.post(f"{url}{path}", json={"abort_all": True, "rid": "mine"})
            message = reply.json()["error"]["message"]
            assert reply.status_code == 403 and "--api-key" in message and "--enable-rollout-routes" in message
        assert httpx.post(f"{url}/flush_cache").json() == {"flushed": True}  # which costs time alone
        assert httpx.post(f"{url}/abort_request", json={"rid": "mine"}).status_code == 200
        assert httpx.post(f"{other}/abort_request", json={"abort_all": True}).status_code == 200
        assert httpx.post(f"{other}/pause_generation", json={}).status_code == 200


def test_every_route_that_acts_on_all_requests_is_guarded():
    modules = ("server.routes.rollout", "server.routes.profile")
    routes = [r for r in create_app(FakeLLM()).routes if r.endpoint.__module__ in modules]
    assert {r.path for r in routes if "POST" in r.methods} - {"/reset_prefix_cache"} == GUARDED_PATHS


def test_hidden_states_are_the_prompts_then_one_a_token(live):
    asked = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"ignore_eos": True}, "return_logprob": True}
    asked["return_hidden_states"] = True
    out = post(live, "/generate", asked)
    prompt, *rows = out["meta_info"]["hidden_states"]
    assert len(prompt) == len(PROMPT) and len(rows) == len(out["output_ids"]) - 1
    assert {len(row) for row in (*prompt, *rows)} == {len(prompt[0])} and all(map(np.isfinite, prompt[0]))
    reply = live.post("/generate", json={**asked, "return_hidden_states": False, "return_routed_experts": [True]})
    assert reply.status_code == 400 and "--enable-return-routed-experts" in reply.text
    assert reply.json()["error"]["param"] == "return_routed_experts"
    assert "hidden_states" not in post(live, "/generate", {**asked, "return_hidden_states": [False]})["meta_info"]


TOKENS = {"model": None, "token_ids": PROMPT, "stream": False, "priority": 0, "features": None}


def test_tokens_in_and_tokens_out(live):
    """Ask as vLLM's clients do; log-probabilities are those that /generate reports."""
    sampling = {"temperature": 0.0, "max_tokens": 8, "logprobs": 1, "prompt_logprobs": 0, "detokenize": False}
    out = post(live, "/inference/v1/generate", TOKENS | {"request_id": "a-1", "sampling_params": sampling})
    (choice,) = out["choices"]
    asked = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}, "return_logprob": True}
    same = post(live, "/generate", asked | {"logprob_start_len": 0})
    assert out["request_id"] == out["id"] == "a-1" and choice["token_ids"] == same["output_ids"]
    assert choice["finish_reason"] == same["meta_info"]["finish_reason"]["type"] and "text" not in choice
    told = [(item["logprob"], item["token"]) for item in choice["logprobs"]["content"]]
    mine = [(logprob, f"token_id:{token}") for logprob, token, _ in same["meta_info"]["output_token_logprobs"]]
    assert told == mine and out["usage"]["completion_tokens"] == len(mine)
    first, *others = out["prompt_logprobs"]
    assert first is None and [list(each) for each in others] == [[str(token)] for token in PROMPT[1:]]
    body = TOKENS | {"sampling_params": sampling, "stream": True, "stream_options": {"include_usage": True}}
    with live.stream("POST", "/inference/v1/generate", json=body) as reply:
        *parts, done = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    parts = [json.loads(part) for part in parts]
    assert done == "[DONE]" and parts[-1]["usage"] == out["usage"] and parts[0]["choices"][0]["prompt_logprobs"]
    streamed = [token for part in parts for each in part["choices"] for token in each["token_ids"]]
    assert streamed == choice["token_ids"]
    unlimited = post(
        live, "/inference/v1/generate", TOKENS | {"sampling_params": {"seed": 1, "ignore_eos": True, "logprobs": 0}}
    )
    assert len(unlimited["choices"][0]["token_ids"]) == SMALL["context_length"] - len(PROMPT)


@pytest.mark.parametrize(
    "name,value",
    [("cache_salt", ""), ("token_ids", []), ("sampling_params", {"bad_words": [""]}), ("features", {"mm_hashes": {}})],
)
def test_tokens_that_cant_be_served_are_refused(live, name, value):
    reply = live.post("/inference/v1/generate", json=TOKENS | {"sampling_params": {}} | {name: value})
    assert reply.status_code == 400 and (name in reply.text or "bad_words" in reply.text)


def test_the_prefix_cache_is_shared_with_requests_of_one_salt(live):
    """By vLLM's name of the field on each route, and by SGLang's."""
    prompt, cached = tokens(24, 5), []
    for salt in ("a", "a", "b", None, None, "b"):
        asked = {"token_ids": prompt, "cache_salt": salt, "sampling_params": {"max_tokens": 1, "logprobs": 0}}
        out = post(live, "/inference/v1/generate", asked)
        cached.append(out["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 16, 0, 0, 16, 16]
    asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    out = post(live, "/generate", asked | {"extra_key": "a"})
    assert out["meta_info"]["cached_tokens"] == 16
    for salt, wanted in (("a", 16), ("c", 0)):
        out = post(live, "/v1/completions", {"prompt": prompt, "cache_salt": salt, "max_tokens": 1, "logprobs": 0})
        assert out["usage"]["prompt_tokens_details"]["cached_tokens"] == wanted
    reply = live.post("/generate", json={"input_ids": prompt, "extra_key": ["a", "b"]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "extra_key"
    response = ResponsesRequest(input="a", cache_salt="d")
    assert ChatRequest.model_validate(response.chat(response.input)[0]).sampling({}).cache_salt == "d"


def test_experts_travel_as_sglang_and_vllm_send_them():
    experts, names = np.arange(24, dtype=np.int32).reshape(4, 3, 2), TokenNames(None)
    last = Delta("a", 0, token_ids=[5], finish_reason="length", metrics=RequestMetrics(), routed_experts=experts)
    params = SamplingParams(return_routed_experts=True)
    generated = GenerateReply([Job([1, 2, 3, 4], params, "a")], [-1], [False], names, several=False, name_tokens=False)
    generated.take(0, last)
    sent = base64.b64decode(generated.whole()["meta_info"]["routed_experts"])
    np.testing.assert_array_equal(np.frombuffer(sent, np.int32).reshape(-1, 3, 2), experts)
    reply = TokensReply([Prompt([1, 2, 3, 4])], params, "m", names, id="a", return_token_ids=True)
    reply.take(0, last)
    sent = base64.b64decode(reply.whole()["choices"][0]["routed_experts"])
    np.testing.assert_array_equal(np.load(io.BytesIO(sent)), experts)
