"""Probes: `/health`, `/ready`, `/ping`, `/health_generate`, `/load`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import jaxspec
import server.routes.health as health
from server.app import create_app
from server.routes.health import Probe
from tests.server.fake import FakeLLM
from tests.server.live import meanwhile, serving, wait_for

PROBES = [(method, path) for method in ("GET", "HEAD") for path in ("/health", "/ready", "/ping")]


@pytest.mark.parametrize("method, path", [*PROBES, ("POST", "/ping")])
def test_probes_say_whether_requests_can_be_served(http, fake, method, path):
    reply = http.request(method, path)
    assert reply.status_code == 200 and (method == "HEAD" or reply.json() == {"status": "ok"})
    fake.ready = False
    assert http.request(method, path).status_code == 503
    fake.ready, fake.error = True, RuntimeError("broken")
    assert http.request(method, path).status_code == 503


def test_probes_say_that_an_engine_of_several_has_ended(http, fake):
    fake.engines = 3
    assert http.get("/health").json() == {"status": "ok"}
    fake.lost[1] = "SIGKILL ended its process, perhaps for lack of memory"
    for path in ("/health", "/ready", "/ping", "/health_generate"):
        reply = http.get(path)
        assert reply.status_code == 200 and reply.json() == {"status": "degraded", "lost": {"1": fake.lost[1]}}


def test_probes_need_no_key_and_others_do():
    with serving(create_app(FakeLLM(), api_key="secret")) as url:
        for path in ("/health", "/ready", "/ping", "/health_generate", "/metrics"):
            assert httpx.get(url + path).status_code == 200, path
        for path in ("/load", "/version", "/server_info", "/get_model_info", "/tokenizer_info"):
            assert httpx.get(url + path).status_code == 401, path
        for path in ("/generate", "/tokenize", "/abort_request"):
            assert httpx.post(url + path, json={}).status_code == 401, path


def test_health_generate_generates_a_token(http, fake):
    assert http.get("/health_generate").status_code == 200
    ((prompt, params),) = fake.started
    assert len(prompt) == 1 and params.max_tokens == 1
    fake.error = RuntimeError("broken")
    assert http.get("/health_generate").status_code == 503


class Stuck(FakeLLM):
    """Generates nothing; its count of tokens is `tokens`."""

    tokens = 0

    async def generate(self, prompt, params, request_id=None):
        self.started.append((prompt, params))
        await asyncio.sleep(1000)
        yield

    def stats(self):
        return super().stats() | {"generation_tokens_total": self.tokens}


def test_an_engine_that_generates_nothing_is_unwell_and_is_asked_once(monkeypatch):
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.3)
    llm = Stuck()
    with serving(create_app(llm)) as url, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: httpx.get(f"{url}/health_generate", timeout=60), range(4)))
    assert [reply.status_code for reply in replies] == [503] * 4 and len(llm.started) == 1
    assert "no token for 0.3 seconds" in replies[0].json()["error"]["message"]


async def test_an_engine_busy_with_others_is_well(monkeypatch):
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.01)
    llm = Stuck()
    probing = asyncio.create_task(Probe(llm)())
    await asyncio.sleep(0.1)
    assert not probing.done()
    llm.tokens += 1
    await asyncio.wait_for(probing, 10)


def test_load_counts_requests_in_hand(url, http, fake):
    assert http.get("/load").json() == {"server_load": 0}
    fake.open = False
    with meanwhile(lambda prompt: httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, timeout=60), "a"):
        wait_for(lambda: http.get("/load").json() == {"server_load": 1})
        fake.open = True
    assert http.get("/load").json() == {"server_load": 0}


def test_versions_and_models_in_sglangs_words(http):
    assert http.get("/version").json() == {"version": jaxspec.__version__}
    for path in ("/get_model_info", "/model_info"):
        info = http.get(path).json()
        assert (info["model_path"], info["is_generation"], info["model_type"]) == ("fake/model", True, "qwen3")
    for path in ("/get_server_info", "/server_info"):
        assert http.get(path).json()["internal_states"] == [{"avg_spec_accept_length": 2.25}], path
