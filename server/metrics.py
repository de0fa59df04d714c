"""Prometheus metrics: the engine's own counters, read when scraped, and latencies, observed as deltas pass.

Invariant: nothing is counted twice. What the engine counts is read from `AsyncLLM.stats`; only what it can't know for
a histogram is kept here. Each server has its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxspec.request import Delta

Stats = dict[str, Any]

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

GAUGES = (
    ("num_running", "requests_running", "Completions being prefilled or decoded"),
    ("num_waiting", "requests_waiting", "Completions waiting for a slot or pages"),
    ("total_pages", "kv_pages", "KV pages in the pool"),
    ("free_pages", "kv_pages_free", "KV pages that nobody holds"),
    ("cached_pages", "kv_pages_cached", "KV pages held by the prefix tree"),
    ("avg_spec_accept_length", "spec_accept_length", "Tokens per verify round since start, the bonus included"),
)
COUNTERS = (
    ("prompt_tokens_total", "prompt_tokens", "Prompt tokens taken in"),
    ("cached_tokens_total", "cached_prompt_tokens", "Prompt tokens whose KV came from the prefix tree"),
    ("generation_tokens_total", "generation_tokens", "Tokens generated"),
    ("verify_rounds_total", "verify_rounds", "Verify rounds, counted per completion"),
    ("verified_tokens_total", "verified_tokens", "Tokens that verify rounds yielded, the bonus included"),
    ("preemptions_total", "preemptions", "Completions set back to the queue for want of pages"),
    ("compiles_total", "compiles", "Programs compiled; moves after start only with --skip-warmup"),
)
LABELLED = (
    ("requests_total", "requests", "reason", "Completions finished, by finish reason"),
    ("dispatches", "dispatches", "program", "Programs dispatched"),
)
PER_POSITION = (
    ("drafted_per_position", "spec_drafted", "Draft tokens verified, by position in the draft (0 is first)"),
    ("accepted_per_position", "spec_accepted", "Draft tokens accepted, by position in the draft (0 is first)"),
)


class EngineCollector(Collector):
    """Reads the engine's statistics at each scrape."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for key, name, text in GAUGES:
            yield GaugeMetricFamily(f"jaxspec_{name}", text, value=stats[key])
        used = stats["total_pages"] - stats["free_pages"] - stats["cached_pages"]
        share = max(used, 0) / max(stats["total_pages"], 1)
        yield GaugeMetricFamily("jaxspec_kv_page_usage", "Share of KV pages that only requests hold", value=share)
        for key, name, text in COUNTERS:
            yield CounterMetricFamily(f"jaxspec_{name}", text, value=stats[key])
        for key, name, label, text in LABELLED:
            yield _labelled(name, text, label, stats[key])
        for key, name, text in PER_POSITION:
            yield _labelled(name, text, "position", dict(enumerate(stats[key])))

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or registration would scrape the engine


def _labelled(name: str, text: str, label: str, values: dict[Any, float]) -> Metric:
    family = CounterMetricFamily(f"jaxspec_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


class Latencies:
    """Histograms over completions, in seconds."""

    def __init__(self, registry: CollectorRegistry):
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"jaxspec_{name}_seconds", text, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token", "From a request's arrival to its first token", TTFT_BUCKETS)
        self._between = histogram("inter_token", "Between rounds, divided by the tokens gained", INTER_TOKEN_BUCKETS)
        self._whole = histogram("request_latency", "From a request's arrival to its last token", LATENCY_BUCKETS)

    def observe(self, delta: Delta, gap: float | None) -> None:
        """Note a delta that came `gap` seconds after the one before it of the same completion (None: the first)."""
        if gap is not None and delta.token_ids:
            self._between.observe(gap / len(delta.token_ids))
        if delta.metrics is not None:
            if delta.metrics.ttft is not None:
                self._first.observe(delta.metrics.ttft)
            self._whole.observe(delta.metrics.latency)


class Metrics:
    """A server's registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, stats: Callable[[], Stats]):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats))
        self.latencies = Latencies(self._registry)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
