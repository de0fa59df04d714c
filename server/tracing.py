"""Traces of requests, sent by OpenTelemetry: one span each, a child of the client's by its `traceparent` header.

Names of attributes are those of vLLM's spans. The packages are an extra (`pip install 'jaxspec[otel]'`), imported only
where `--otlp-traces-endpoint` asks for traces.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec import ConfigError
from jaxspec.config.request import Delta
from server.replies import Job
from server.replies.speculation import Speculation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span
    from opentelemetry.sdk.trace.export import SpanExporter

FLAG = "--otlp-traces-endpoint"


class Tracer:
    """Sends spans to `endpoint`, an OTLP collector's URL over HTTP, from a thread of its own; or to `exporter`.

    **Raises:** `ConfigError` where the packages are missing.
    """

    def __init__(self, endpoint: str, model: str, exporter: SpanExporter | None = None):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"{FLAG} {endpoint} needs OpenTelemetry: pip install 'jaxspec[otel]'") from error
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxspec"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer, self._context = self._provider.get_tracer("jaxspec"), TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], route: str, jobs: Sequence[Job], began: float) -> Trace:
        """A request's trace. `began`: when it arrived, by `time.time()`."""
        span = self._tracer.start_span(
            "llm_request", context=self._context.extract(headers), start_time=int(began * 1e9)
        )
        params = jobs[0].params
        span.set_attributes(
            {
                "http.route": route,
                "gen_ai.response.model": self._model,
                "gen_ai.request.id": jobs[0].response or jobs[0].id,
                "gen_ai.request.n": params.n * len(jobs),
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.prompt_tokens": sum(len(job.ids) for job in jobs),
            }
            | ({} if params.max_tokens is None else {"gen_ai.request.max_tokens": params.max_tokens})
        )
        return Trace(span, began)

    def flush(self) -> None:
        """Send what waits."""
        self._provider.force_flush()


class Trace:
    """The span of one request, which `end` ends whatever became of it."""

    def __init__(self, span: Span, began: float):
        self._span, self._began = span, began
        self._tokens, self._first, self._queue = 0, None, None
        self._speculation = Speculation()

    def see(self, delta: Delta) -> None:
        """Note a delta as it passes."""
        self._tokens += len(delta.token_ids)
        if delta.token_ids and self._first is None:
            self._first = time.time() - self._began
        if delta.metrics is not None:
            self._queue = delta.metrics.queue if self._queue is None else self._queue
            self._speculation.add(delta.metrics)

    def end(self, error: BaseException | None = None) -> None:
        """Send the span, with the error that ended the request early, if one did."""
        figures: dict[str, Any] = {
            "gen_ai.usage.completion_tokens": self._tokens,
            "gen_ai.latency.e2e": time.time() - self._began,
            "gen_ai.latency.time_to_first_token": self._first,
            "gen_ai.latency.time_in_queue": self._queue,
            "error.type": None if error is None else type(error).__name__,
        }
        drafts = self._speculation.fields().get("metrics", {}).get("speculative_decoding", {})
        figures["jaxspec.mean_acceptance_length"] = drafts.get("mean_acceptance_length")
        self._span.set_attributes({name: value for name, value in figures.items() if value is not None})
        self._span.end()
