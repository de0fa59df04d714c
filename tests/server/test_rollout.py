"""Routes that trainers call, with bodies as slime's and AReaL's disk modes send them, and vLLM's names."""

import httpx
import pytest

from jaxspec import AsyncLLM
from server.app import create_app
from server.http.gate import GUARDED_PATHS
from tests.server.fake import FakeLLM
from tests.server.live import serving
from tests.support.engines import SMALL, checkpoint, tokens
from tests.support.tiny import tiny_checkpoint

PROMPT = tokens(20)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def live():
    llm = AsyncLLM(checkpoint(), "ngram", max_running_requests=3, num_draft_tokens=3, **SMALL)
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
    text = post(live, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
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
    assert "must be some of" in live.post("/release_memory_occupation", json={"tags": ["all"]}).text


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
