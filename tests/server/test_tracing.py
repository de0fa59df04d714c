"""Traces of requests. The packages are an extra, so those tests are skipped where they aren't installed."""

import sys

import httpx
import pytest

from jaxspec import ConfigError
from server.app import create_app
from server.tracing import Tracer
from tests.server.fake import TEXT, FakeLLM
from tests.server.live import serving

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'jaxspec\[otel\]'"):
        Tracer("http://127.0.0.1:4318/v1/traces", "m")


def test_each_request_is_a_span_of_the_clients_trace():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer("http://127.0.0.1:4318/v1/traces", "m", exporter)
    with serving(create_app(FakeLLM(), tracer=tracer)) as url, httpx.Client(base_url=url) as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 99}, headers={"traceparent": PARENT})
        http.post("/v1/completions", json={"prompt": "late failure"})
        http.post("/v1/completions", json={"prompt": 5})
    tracer.flush()
    span, failed = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1] and f"{span.parent.span_id:016x}" in PARENT
    told = span.attributes
    assert told["gen_ai.usage.completion_tokens"] == len(TEXT.encode()) and told["gen_ai.usage.prompt_tokens"] == 1
    assert (told["http.route"], told["gen_ai.request.max_tokens"]) == ("/v1/completions", 99)
    assert told["gen_ai.latency.time_in_queue"] == 0.004 and told["jaxspec.mean_acceptance_length"] == 2.25
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"] and "error.type" not in told
    assert failed.parent is None and failed.attributes["error.type"] == "KeyError"
