"""Prometheus metrics: vLLM's names where vLLM has one, and the engine's own beside them, prefixed `jaxspec_`.

Invariant: nothing is counted twice. What the engine counts is read from `AsyncLLM.stats` when scraped; only what it
can't know for a histogram is observed here, as deltas pass. Each server has its own registry. docs/metrics.md lists
every metric.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import Delta, RequestMetrics, SamplingParams
from jaxspec.engine.stats import Tally

Stats = dict[str, Any]

# Bounds in seconds: vLLM's, so that its dashboards and recording rules fit, and some below its least.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TTFT += (160, 640, 2560)
TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5)
TOKEN += (10, 20, 40, 80)
REQUEST = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
REQUEST += (480, 960, 1920, 7680)
TIMES = {
    **{"first": TTFT, "gap": TOKEN, "per_token": TOKEN, "pace": TOKEN},
    **dict.fromkeys(("whole", "queue", "prefill", "decode", "inference"), REQUEST),
}
LENGTHS = ("prompt", "generated", "max_tokens")  # their bounds go up to the context length

HISTOGRAMS = (
    ("first", "vllm:time_to_first_token_seconds", "From a request's arrival to a completion's first token"),
    ("gap", "vllm:inter_token_latency_seconds", "Between a completion's outputs, of one or several tokens each"),
    ("pace", "vllm:request_time_per_output_token_seconds", "Decode time of a completion, divided by its tokens"),
    ("whole", "vllm:e2e_request_latency_seconds", "From a request's arrival to a completion's last token"),
    ("queue", "vllm:request_queue_time_seconds", "From a request's arrival to the start of a completion's prefill"),
    ("prefill", "vllm:request_prefill_time_seconds", "From the start of the prefill to the first token"),
    ("decode", "vllm:request_decode_time_seconds", "From the first token to the last"),
    ("inference", "vllm:request_inference_time_seconds", "From the start of the prefill to the last token"),
    ("prompt", "vllm:request_prompt_tokens", "Prompt tokens of a completion"),
    ("generated", "vllm:request_generation_tokens", "Tokens generated for a completion"),
    ("max_tokens", "vllm:request_params_max_tokens", "The parameter max_tokens of a completion, where given"),
    ("n", "vllm:request_params_n", "The parameter n of a request"),
    ("first", "jaxspec_time_to_first_token_seconds", "From a request's arrival to a completion's first token"),
    ("per_token", "jaxspec_inter_token_seconds", "Between a completion's outputs, divided by the tokens gained"),
    ("whole", "jaxspec_request_latency_seconds", "From a request's arrival to a completion's last token"),
)
GAUGES = (
    ("num_running", "vllm:num_requests_running", "Completions being prefilled or decoded"),
    ("num_waiting", "vllm:num_requests_waiting", "Completions waiting for a slot or pages"),
    ("num_running", "jaxspec_requests_running", "Completions being prefilled or decoded"),
    ("num_waiting", "jaxspec_requests_waiting", "Completions waiting for a slot or pages"),
    ("total_pages", "jaxspec_kv_pages", "KV pages in the pool"),
    ("free_pages", "jaxspec_kv_pages_free", "KV pages that nobody holds"),
    ("cached_pages", "jaxspec_kv_pages_cached", "KV pages held by the prefix tree"),
    ("host_cache_bytes", "jaxspec_host_cache_bytes", "Host memory for pages and snapshots that left the device"),
    ("host_cache_used_bytes", "jaxspec_host_cache_used_bytes", "Host memory that such pages and snapshots take"),
    ("disk_cache_bytes", "jaxspec_disk_cache_bytes", "Disk for pages and snapshots that left the host's memory"),
    ("disk_cache_used_bytes", "jaxspec_disk_cache_used_bytes", "Disk that such pages and snapshots take"),
    ("avg_spec_accept_length", "jaxspec_spec_accept_length", "Tokens per verify round since start, bonus included"),
    ("drafts", "jaxspec_drafts", "Tokens that a round drafts for each request, as chosen last"),
    ("step_seconds", "jaxspec_step_seconds", "Age of the running engine step; 0 without one"),
)
SET_BACK = "Completions set back to the queue, for want of pages, for an urgent request, or to draft again"
COUNTERS = (
    ("prompt_tokens_total", "vllm:prompt_tokens", "Prompt tokens taken in"),
    ("generation_tokens_total", "vllm:generation_tokens", "Tokens generated"),
    ("cached_tokens_total", "vllm:prefix_cache_hits", "Prompt tokens whose KV came from the prefix cache"),
    ("cached_tokens_total", "vllm:prompt_tokens_cached", "Prompt tokens whose KV came from the prefix cache"),
    ("preemptions_total", "vllm:num_preemptions", SET_BACK),
    ("prompt_tokens_total", "jaxspec_prompt_tokens", "Prompt tokens taken in"),
    ("cached_tokens_total", "jaxspec_cached_prompt_tokens", "Prompt tokens whose KV came from the prefix cache"),
    ("host_cached_tokens_total", "vllm:external_prefix_cache_hits", "Cached prompt tokens that came from the host"),
    ("host_cached_tokens_total", "jaxspec_host_cached_prompt_tokens", "Cached prompt tokens that came from the host"),
    ("disk_cached_tokens_total", "jaxspec_disk_cached_prompt_tokens", "Cached prompt tokens that came from the disk"),
    ("host_cache_stored_bytes_total", "jaxspec_host_cache_stored_bytes", "Bytes copied to the host"),
    ("host_cache_loaded_bytes_total", "jaxspec_host_cache_loaded_bytes", "Bytes brought back from the host"),
    ("host_cache_loads_total", "jaxspec_host_cache_loads", "Prompts for which pages came back from the host"),
    ("host_cache_declined_total", "jaxspec_host_cache_declined", "Reloads not made, since computing was faster"),
    ("host_cache_evicted_blocks_total", "jaxspec_host_cache_evicted", "Pages and snapshots dropped for newer ones"),
    (
        "host_cache_skipped_blocks_total",
        "jaxspec_host_cache_skipped",
        "Pages that left and found no room there",
    ),
    ("host_cache_lost_blocks_total", "jaxspec_host_cache_lost", "Pages and snapshots lost to failed copies"),
    ("host_cache_damaged_blocks_total", "jaxspec_host_cache_damaged", "Pages and snapshots with a wrong checksum"),
    ("disk_cache_written_bytes_total", "jaxspec_disk_cache_written_bytes", "Bytes written to the disk"),
    ("disk_cache_read_bytes_total", "jaxspec_disk_cache_read_bytes", "Bytes read back from the disk"),
    ("disk_cache_evicted_blocks_total", "jaxspec_disk_cache_evicted", "Files deleted for newer ones"),
    ("disk_cache_lost_blocks_total", "jaxspec_disk_cache_lost", "Files that couldn't be written or read"),
    ("images_total", "jaxspec_images", "Pictures of prompts taken in"),
    ("image_tokens_total", "jaxspec_image_tokens", "Prompt tokens that pictures fill"),
    ("encoded_images_total", "jaxspec_encoded_images", "Pictures that the vision tower read"),
    ("generation_tokens_total", "jaxspec_generation_tokens", "Tokens generated"),
    ("verify_rounds_total", "jaxspec_verify_rounds", "Verify rounds, counted per completion"),
    ("rested_rounds_total", "jaxspec_rested_rounds", "Rounds without drafts that didn't keep the drafter's state up"),
    ("verified_tokens_total", "jaxspec_verified_tokens", "Tokens that verify rounds yielded, bonus included"),
    ("forced_tokens_total", "jaxspec_forced_tokens", "Tokens generated that a grammar left no choice about"),
    ("preemptions_total", "jaxspec_preemptions", SET_BACK),
    ("nonfinite_total", "jaxspec_nonfinite_logits", "Completions that ended because their logits were NaN or infinite"),
    ("refused_total", "jaxspec_refused", "Prompts refused with 429 because the queue was full"),
    ("engine_failures_total", "jaxspec_engine_failures", "Engine steps that failed, each with the requests in it"),
    ("compiles_total", "jaxspec_compiles", "Programs compiled; moves after start only with --skip-warmup"),
)
LABELLED = (
    ("requests_total", "jaxspec_requests", "reason", "Completions finished, by finish reason"),
    ("dispatches", "jaxspec_dispatches", "program", "Programs dispatched"),
    ("rounds_by_drafts", "jaxspec_rounds", "drafts", "Rounds, by how many tokens they drafted for each request"),
)
PER_POSITION = (
    ("drafted_per_position", "jaxspec_spec_drafted", "Draft tokens verified, by position in the draft"),
    ("accepted_per_position", "jaxspec_spec_accepted", "Draft tokens accepted, by position in the draft"),
    ("accepted_per_position", "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position"),
)
OF_EACH_ENGINE = (  # of several, with --dp-size
    (GaugeMetricFamily, "ready", "jaxspec_engine_ready", "Whether an engine serves, 1 or 0"),
    (GaugeMetricFamily, "held", "jaxspec_engine_requests", "Completions given to an engine and not ended"),
    (GaugeMetricFamily, "num_waiting", "jaxspec_engine_requests_waiting", "Completions that wait in an engine"),
    (GaugeMetricFamily, "free_pages", "jaxspec_engine_kv_pages_free", "KV pages of an engine that nobody holds"),
    (CounterMetricFamily, "prompt_tokens_total", "jaxspec_engine_prompt_tokens", "Prompt tokens an engine took in"),
    (CounterMetricFamily, "cached_tokens_total", "jaxspec_engine_cached_prompt_tokens", "Those whose KV it had"),
    (CounterMetricFamily, "generation_tokens_total", "jaxspec_engine_generation_tokens", "Tokens an engine generated"),
)
ENGINE = "0"
FINISH_REASONS = ("stop", "length", "abort")


class Family:
    """Makes metric families. Those with vLLM's names carry its labels `model_name` and `engine`, ours don't. Several
    engines count as one here, "0"; `OF_EACH_ENGINE` has them apart."""

    def __init__(self, model: str):
        self._model = model

    def one(self, kind: type[Metric], name: str, text: str, value: float) -> Metric:
        return self.several(kind, name, text, "", {"": value})

    def several(self, kind: type[Metric], name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        """A sample for each of `values`, whose keys are values of `label`. No label: one sample."""
        names, own = self._labels(name)
        family = kind(name, text, labels=[*names, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*own, *([str(key)] if label else [])], value)
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        names, own = self._labels(name)
        family = HistogramMetricFamily(name, text, labels=names)
        ends = [*map(floatToGoString, bounds), "+Inf"]
        family.add_metric(own, list(zip(ends, accumulate(counts), strict=True)), total)
        return family

    def _labels(self, name: str) -> tuple[list[str], list[str]]:
        return (["model_name", "engine"], [self._model, ENGINE]) if name.startswith("vllm:") else ([], [])


class EngineCollector(Collector):
    """Reads the engine's statistics at each scrape."""

    def __init__(self, stats: Callable[[], Stats], config: EngineConfig, model: str):
        self._stats, self._config = stats, config
        self._family = Family(model)

    def collect(self) -> Iterator[Metric]:
        stats, family = self._stats(), self._family
        for key, name, text in GAUGES:
            yield family.one(GaugeMetricFamily, name, text, stats[key])
        waiting = {"capacity": stats["num_waiting"], "deferred": 0}  # nothing here but slots and pages is waited for
        name, text = "vllm:num_requests_waiting_by_reason", "Completions waiting, by what they wait for"
        yield family.several(GaugeMetricFamily, name, text, "reason", waiting)
        used = stats["total_pages"] - stats["free_pages"] - stats["cached_pages"]
        share = max(used, 0) / max(stats["total_pages"], 1)
        for name in ("vllm:kv_cache_usage_perc", "jaxspec_kv_page_usage"):
            yield family.one(GaugeMetricFamily, name, "Share of KV pages that only requests hold, from 0 to 1", share)
        for key, name, text in COUNTERS:
            yield family.one(CounterMetricFamily, name, text, stats[key])
        looked_up = 0 if self._config.disable_prefix_cache else stats["prompt_tokens_total"]
        text = "Prompt tokens looked up in the prefix tree"
        yield family.one(CounterMetricFamily, "vllm:prefix_cache_queries", text, looked_up)
        for key, name, label, text in LABELLED:
            yield family.several(CounterMetricFamily, name, text, label, stats[key])
        finished = dict.fromkeys(FINISH_REASONS, 0) | stats["requests_total"]
        text = "Completions finished, by finish reason"
        yield family.several(CounterMetricFamily, "vllm:request_success", text, "finished_reason", finished)
        for key, name, text in PER_POSITION:
            yield family.several(CounterMetricFamily, name, text, "position", dict(enumerate(stats[key])))
        yield from self._speculation(stats)
        steps = stats["step_tokens"]
        text = "Tokens of an engine step, prompts' and generated"
        yield family.histogram("vllm:iteration_tokens_total", text, steps["bounds"], steps["counts"], steps["sum"])
        yield self._cache_config(stats)
        if adapters := stats["adapters"]:
            labels = {"max_lora": str(adapters["places"])}
            labels |= {f"{state}_lora_adapters": ",".join(adapters[state]) for state in ("waiting", "running")}
            text = "Adapters of requests that wait and that run; the value is the time of the scrape"
            info = GaugeMetricFamily("vllm:lora_requests_info", text, labels=list(labels))
            info.add_metric([*labels.values()], time.time())
            yield info
        if engines := stats.get("engines"):
            for kind, key, name, text in OF_EACH_ENGINE:
                yield family.several(kind, name, text, "engine", {each["engine"]: each[key] for each in engines})

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or registration would scrape the engine

    def _speculation(self, stats: Stats) -> Iterator[Metric]:
        drafted = stats["drafted_per_position"]
        for name, text, value in (
            ("num_drafts", "Drafts verified", drafted[0] if drafted else 0),  # each has a token at position 0
            ("num_draft_tokens", "Draft tokens verified", sum(drafted)),
            ("num_accepted_tokens", "Draft tokens accepted", sum(stats["accepted_per_position"])),
        ):
            yield self._family.one(CounterMetricFamily, f"vllm:spec_decode_{name}", text, value)

    def _cache_config(self, stats: Stats) -> Metric:
        config = self._config
        labels = {
            "engine": ENGINE,
            "block_size": stats["page_size"],
            "num_gpu_blocks": stats["total_pages"],
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": not config.disable_prefix_cache,
            "gpu_memory_utilization": config.mem_fraction_static,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up; always 1", labels=list(labels)
        )
        family.add_metric([str(value) for value in labels.values()], 1)
        return family


class Observations(Collector):
    """Histograms of what requests took and asked for; times in seconds."""

    def __init__(self, context_length: int, model: str):
        lengths = [m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e <= context_length]
        bounds = TIMES | dict.fromkeys(LENGTHS, lengths) | {"n": (1, 2, 5, 10, 20)}
        self._tallies = {key: Tally(each) for key, each in bounds.items()}
        self._family = Family(model)
        self.first, self.gap, self.per_token = (self._tallies[key] for key in ("first", "gap", "per_token"))

    def finished(self, metrics: RequestMetrics, params: SamplingParams) -> None:
        """Note a completion that has ended, perhaps before it began."""
        note = {"whole": metrics.latency, "prompt": metrics.prompt_tokens, "generated": metrics.output_tokens}
        if metrics.queue is not None:
            note |= {"queue": metrics.queue, "inference": metrics.latency - metrics.queue}
        if metrics.ttft is not None:
            note["decode"] = metrics.latency - metrics.ttft
            if metrics.queue is not None:
                note["prefill"] = metrics.ttft - metrics.queue
            if metrics.output_tokens > 1:
                note["pace"] = note["decode"] / (metrics.output_tokens - 1)
        if params.max_tokens is not None:
            note["max_tokens"] = params.max_tokens
        for key, value in note.items():
            self._tallies[key].observe(value)

    def asked(self, params: SamplingParams) -> None:
        """Note a request that the engine has begun to answer."""
        self._tallies["n"].observe(params.n)

    def collect(self) -> Iterator[Metric]:
        for key, name, text in HISTOGRAMS:
            tally = self._tallies[key]
            yield self._family.histogram(name, text, tally.bounds, tally.counts, tally.sum)


class Watch:
    """Times the deltas of one prompt's completions, from its making on."""

    def __init__(self, observations: Observations, params: SamplingParams):
        self._observations, self._params = observations, params
        self._start = time.monotonic()
        self._begun = False
        self._last: dict[int, float] = {}  # by completion

    def see(self, delta: Delta) -> None:
        """Note a delta as it passes."""
        now, noted = time.monotonic(), self._observations
        if not self._begun:
            self._begun = True
            noted.asked(self._params)
        if delta.token_ids:
            since = self._last.get(delta.index)
            self._last[delta.index] = now
            if since is None:
                noted.first.observe(now - self._start)
            else:
                noted.gap.observe(now - since)
                noted.per_token.observe((now - since) / len(delta.token_ids))
        if delta.metrics is not None:
            noted.finished(delta.metrics, self._params)


class HttpRequests(Collector):
    """Answered HTTP requests by route, method and class of status, with the seconds until the end of each answer.

    The names are those of prometheus-fastapi-instrumentator, which vLLM's server has.
    """

    def __init__(self):
        self._tallies: dict[tuple[str, str, str], Tally] = {}

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Note a request. `handler`: the route's path."""
        key = handler, method, f"{status // 100}xx"
        if key not in self._tallies:
            self._tallies[key] = Tally(REQUEST)
        self._tallies[key].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        labels = "handler", "method", "status"
        count = CounterMetricFamily("http_requests", "HTTP requests answered", labels=labels)
        times = HistogramMetricFamily("http_request_duration_seconds", "Until an answer's last byte", labels=labels)
        ends = [*map(floatToGoString, REQUEST), "+Inf"]
        for key, tally in list(self._tallies.items()):
            count.add_metric(key, sum(tally.counts))
            times.add_metric(key, list(zip(ends, accumulate(tally.counts), strict=True)), tally.sum)
        return iter((count, times))


class Metrics:
    """A server's registry, and how many generating requests it has in hand (`load`)."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, stats: Callable[[], Stats], config: EngineConfig, model: str):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats, config, model))
        self._observations = Observations(config.context_length, model)
        self._registry.register(self._observations)
        self.http = HttpRequests()
        self._registry.register(self.http)
        ProcessCollector(registry=self._registry)
        self.load = 0

    def watch(self, params: SamplingParams) -> Watch:
        return Watch(self._observations, params)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
