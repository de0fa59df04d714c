"""`/metrics`: vLLM's names with the model's label, our own without, and the dashboard that reads them."""

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import server.metrics
from jaxspec.config.request import Delta, RequestMetrics, SamplingParams
from server.metrics import Metrics
from tests.server.fake import CONTEXT, FakeLLM

ROOT = Path(__file__).parents[2]


def parsed(text):
    families = text_string_to_metric_families(text)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def samples(http):
    return parsed(http.get("/metrics").text)


def of_model(name, **labels):
    return (name, *sorted({"model_name": "fake/model", "engine": "0", **labels}.items()))


def test_requests_are_observed_as_they_pass(http):
    before = samples(http)
    http.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 5})
    after = samples(http)
    gained = {key: after[key] - before.get(key, 0) for key in after}
    for name, observed in {
        "vllm:time_to_first_token_seconds": 2,
        "vllm:inter_token_latency_seconds": 8,  # five deltas each have four gaps
        "vllm:request_time_per_output_token_seconds": 2,
        "vllm:e2e_request_latency_seconds": 2,
        "vllm:request_queue_time_seconds": 2,
        "vllm:request_prefill_time_seconds": 2,
        "vllm:request_decode_time_seconds": 2,
        "vllm:request_inference_time_seconds": 2,
        "vllm:request_params_n": 1,
    }.items():
        assert gained[of_model(f"{name}_count")] == observed, name
    for name, total in {
        "vllm:request_queue_time_seconds": 2 * 0.004,
        "vllm:request_prefill_time_seconds": 2 * (0.01 - 0.004),
        "vllm:request_decode_time_seconds": 2 * (0.05 - 0.01),
        "vllm:request_inference_time_seconds": 2 * (0.05 - 0.004),
        "vllm:e2e_request_latency_seconds": 2 * 0.05,
        "vllm:request_time_per_output_token_seconds": 2 * (0.05 - 0.01) / 4,
        "vllm:request_prompt_tokens": 2,
        "vllm:request_generation_tokens": 10,
        "vllm:request_params_max_tokens": 10,
        "vllm:request_params_n": 2,
    }.items():
        assert gained[of_model(f"{name}_sum")] == pytest.approx(total), name
    assert gained[("jaxspec_time_to_first_token_seconds_count",)] == 2
    assert gained[("jaxspec_request_latency_seconds_count",)] == 2
    assert gained[("jaxspec_inter_token_seconds_count",)] == 8
    assert gained[of_model("vllm:request_queue_time_seconds_bucket", le="0.01")] == 2
    assert gained[of_model("vllm:request_queue_time_seconds_bucket", le="+Inf")] == 2


def test_http_requests_are_counted_and_timed_by_route_and_status(http):
    before = samples(http)
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": True})
    http.post("/v1/completions", json={"prompt": 5})
    http.get("/v1/models/fake%2Fmodel")
    http.put("/nowhere/at-all", timeout=60)  # whose error lists all routes, of a description made then
    after = samples(http)
    gained = {key: after[key] - before.get(key, 0) for key in after if key[0].startswith("http_request")}

    def of(name, handler, method, status, **more):
        return gained[(name, *sorted({"handler": handler, "method": method, "status": status, **more}.items()))]

    assert of("http_requests_total", "/v1/completions", "POST", "2xx") == 2
    assert of("http_requests_total", "/v1/completions", "POST", "4xx") == 1
    assert of("http_requests_total", "none", "PUT", "4xx") == 1
    assert of("http_request_duration_seconds_count", "/v1/completions", "POST", "2xx") == 2
    assert of("http_request_duration_seconds_bucket", "/v1/completions", "POST", "2xx", le="+Inf") == 2
    assert 0 < of("http_request_duration_seconds_sum", "/v1/completions", "POST", "2xx") < 60
    assert not any("at-all" in str(key) for key in after)


def test_those_that_wait_are_told_by_reason(http):
    found = samples(http)
    for reason in ("capacity", "deferred"):
        assert found[of_model("vllm:num_requests_waiting_by_reason", reason=reason)] == 0


def test_adapters_of_requests_are_named():
    llm, adapters = FakeLLM(), {"places": 4, "running": ["poet", "sql"], "waiting": []}
    found = parsed(Metrics(lambda: llm.stats() | {"adapters": adapters}, llm.config, "m").text().decode())
    (labels,) = [dict(labels) for name, *labels in found if name == "vllm:lora_requests_info"]
    assert labels == {"max_lora": "4", "running_lora_adapters": "poet,sql", "waiting_lora_adapters": ""}


def test_what_the_engine_counts_is_read_when_scraped(http):
    found = samples(http)
    for name, value in {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0.2,
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 9,
        "vllm:prefix_cache_queries_total": 5,
        "vllm:prefix_cache_hits_total": 2,
        "vllm:prompt_tokens_cached_total": 2,
        "vllm:num_preemptions_total": 0,
        "vllm:spec_decode_num_drafts_total": 4,
        "vllm:spec_decode_num_draft_tokens_total": 7,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
        "vllm:iteration_tokens_total_count": 3,
        "vllm:iteration_tokens_total_sum": 25,
    }.items():
        assert found[of_model(name)] == value, name
    assert found[of_model("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1")] == 1
    reasons = {reason: found[of_model("vllm:request_success_total", finished_reason=reason)] for reason in REASONS}
    assert reasons == {"stop": 3, "length": 0, "abort": 1}
    assert found[of_model("vllm:iteration_tokens_total_bucket", le="8.0")] == 2
    (info,) = [dict(labels) for name, *labels in found if name == "vllm:cache_config_info"]
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "10")
    assert found[("jaxspec_requests_total", ("reason", "stop"))] == 3
    assert found[("jaxspec_spec_accepted_total", ("position", "1"))] == 1
    assert found[("jaxspec_dispatches_total", ("program", "round"))] == 4
    assert found[("jaxspec_rounds_total", ("drafts", "2"))] == 3
    assert found[("jaxspec_drafts",)] == 2
    assert found[("jaxspec_kv_page_usage",)] == 0.2
    assert found[("jaxspec_spec_accept_length",)] == 2.25
    assert found[("jaxspec_refused_total",)] == 2
    assert found[("jaxspec_engine_failures_total",)] == 1
    assert found[("jaxspec_step_seconds",)] == 0
    assert found[("process_resident_memory_bytes",)] > 0


def test_a_step_that_does_not_return_shows(http, fake):
    fake.step_seconds = 12.5
    assert samples(http)[("jaxspec_step_seconds",)] == 12.5


def test_a_client_may_ask_for_the_header_alone(http):
    """aiperf sends HEAD, to find out whether the server has metrics."""
    whole, head = http.get("/metrics"), http.head("/metrics")
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]


REASONS = ("stop", "length", "abort")


@pytest.fixture
def metrics():
    llm = FakeLLM()
    return Metrics(llm.stats, llm.config, "m")


def value(metrics, name):
    labels = [("engine", "0"), ("model_name", "m")] if name.startswith("vllm:") else []
    return parsed(metrics.text().decode())[(name, *labels)]


def test_a_rounds_time_is_shared_by_its_tokens(metrics, monkeypatch):
    clock = iter([1.0, 3.0, 3.4, 9.0])
    monkeypatch.setattr(server.metrics.time, "monotonic", lambda: next(clock))
    watch = metrics.watch(SamplingParams())
    for tokens in ([1], [1, 2, 3, 4], []):
        watch.see(Delta("id", 0, token_ids=tokens))
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.4), "vLLM's is between outputs"
    assert value(metrics, "jaxspec_inter_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "jaxspec_inter_token_seconds_count") == 1


def test_a_completion_aborted_in_the_queue_has_no_times_but_its_latency(metrics):
    watch = metrics.watch(SamplingParams(max_tokens=None))
    watch.see(Delta("id", 0, finish_reason="abort", metrics=RequestMetrics(latency=2.0, prompt_tokens=3)))
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 2.0
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert value(metrics, f"vllm:{name}_seconds_count") == 0
    assert value(metrics, "vllm:request_params_max_tokens_count") == 0, "none was given"


def test_bounds_of_lengths_reach_the_context(metrics):
    bounds = re.findall(r'vllm:request_prompt_tokens_bucket{engine="0",le="([\d.]+)"', metrics.text().decode())
    assert [float(bound) for bound in bounds] == [1, 2, 5, 10, 20, 50, 100, 200] and CONTEXT == 256


def test_a_delta_costs_a_few_microseconds(metrics):
    """At 128 requests the event loop has a thousand of these a round; the limit is generous for a busy machine."""
    watch, delta = metrics.watch(SamplingParams()), Delta("id", 0, token_ids=[1, 2, 3])
    fastest = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(2000):
            watch.see(delta)
        fastest = min(fastest, time.thread_time() - start)
    assert fastest / 2000 < 5e-6


def test_every_metric_of_the_dashboard_exists(http):
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    known = {name for name, *_ in samples(http)}
    dashboard = json.loads((ROOT / "deploy/grafana/jaxspec.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [entry["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"\b(?:vllm:|jaxspec_|process_)\w+", str(query))}
    assert len(queries) > 15 and used <= known, sorted(used - known)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_each_of_several_engines_has_its_own_figures(http, fake):
    fake.engines = 2
    found = samples(http)
    assert [found[("jaxspec_engine_requests", ("engine", i))] for i in "01"] == [0, 1]
    assert [found[("jaxspec_engine_ready", ("engine", i))] for i in "01"] == [1, 0]
    assert found[("jaxspec_engine_generation_tokens_total", ("engine", "1"))] == 9


def test_the_document_lists_every_metric(http, fake):
    """docs/metrics.md has a row for each family, and no other."""
    fake.engines, fake.adapters = 2, {"poet": "/poet"}
    families = {family.name for family in text_string_to_metric_families(http.get("/metrics").text)}
    ours = {name for name in families if name.startswith(("vllm:", "jaxspec_", "http_"))}
    rows = re.findall(r"^\| `([\w:]+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert {row.removesuffix("_total") for row in rows} == {name.removesuffix("_total") for name in ours}
