"""The routes that tell about the server: models, health, server_info, metrics, flush_cache."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.request import Delta
from server.app import create_app
from server.metrics import Metrics
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


def test_health(http, fake):
    assert http.get("/health").json() == {"status": "ok"}
    fake.ready = False
    assert http.get("/health").status_code == 503


def test_server_info(http):
    info = http.get("/server_info").json()
    assert (info["model"], info["draft"], info["avg_spec_accept_length"]) == ("fake/model", "none", 2.25)
    assert info["engine"]["ngram_max"] == 5 and info["model_config"]["vocab_size"] and info["versions"]["jax"]
    assert info["stats"]["accepted_per_position"] == [3, 1]


def samples(http):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics(http):
    before = samples(http)
    http.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 5})
    after = samples(http)
    gained = {key: after[key] - before.get(key, 0) for key in after}
    assert gained[("jaxspec_time_to_first_token_seconds_count",)] == 2
    assert gained[("jaxspec_request_latency_seconds_count",)] == 2
    assert gained[("jaxspec_inter_token_seconds_count",)] == 8, "five deltas each have four gaps"
    assert after[("jaxspec_requests_total", "stop")] == 3
    assert after[("jaxspec_spec_accepted_total", "1")] == 1
    assert after[("jaxspec_dispatches_total", "round")] == 4
    assert after[("jaxspec_kv_page_usage",)] == 0.2
    assert after[("jaxspec_spec_accept_length",)] == 2.25


def test_a_rounds_time_is_shared_by_its_tokens():
    metrics = Metrics(FakeLLM().stats)
    metrics.latencies.observe(Delta("id", 0, token_ids=[1, 2, 3, 4]), 0.4)
    metrics.latencies.observe(Delta("id", 0, token_ids=[]), 0.4)
    assert "jaxspec_inter_token_seconds_sum 0.1\n" in metrics.text().decode()
    assert "jaxspec_inter_token_seconds_count 1.0\n" in metrics.text().decode()


def test_flush_cache(http, fake):
    assert http.post("/flush_cache").json() == http.get("/flush_cache").json() == {"flushed": True}
    assert fake.flushed == 2
    fake.running = 1
    assert http.post("/flush_cache").status_code == 409
    fake.running = 0


def test_api_description_is_complete(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
