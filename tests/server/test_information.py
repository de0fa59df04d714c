"""The routes that tell about the server: models, server_info, flush_cache."""

import time

import httpx

from server.app import create_app
from tests.server.fake import CONTEXT, FakeLLM
from tests.server.live import serving


def test_models(client):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == ("fake/model", CONTEXT)
    assert client.models.retrieve("fake/model") == card


def test_served_name_replaces_the_models():
    with serving(create_app(FakeLLM(), served_name="mine")) as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
        reply = httpx.post(f"{url}/v1/completions", json={"model": "mine", "prompt": "a"})
        assert reply.json()["model"] == "mine"
        assert httpx.post(f"{url}/v1/completions", json={"model": "fake/model", "prompt": "a"}).status_code == 404
        info = httpx.get(f"{url}/server_info").json()
        assert (info["served_model_name"], info["model"]) == ("mine", "fake/model")


def test_server_info(http):
    info = http.get("/server_info").json()
    assert (info["model"], info["draft"], info["avg_spec_accept_length"]) == ("fake/model", "none", 2.25)
    assert info["engine"]["page_size"] is None and info["model_config"]["vocab_size"] and info["versions"]["jax"]
    assert info["stats"]["accepted_per_position"] == [3, 1]


def test_a_clock_that_is_set_back_changes_no_uptime(http, monkeypatch):
    before = http.get("/server_info").json()["uptime_seconds"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 10**6)
    assert http.get("/server_info").json()["uptime_seconds"] >= before >= 0


def test_flush_cache(http, fake):
    assert http.post("/flush_cache").json() == http.get("/flush_cache").json() == {"flushed": True}
    assert fake.flushed == 2
    fake.running = 1
    assert http.post("/flush_cache").status_code == 409
    fake.running = 0


def test_api_description_is_complete(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
