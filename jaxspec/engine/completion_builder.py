"""Deltas put together: completions, and the request's output."""

from __future__ import annotations

from jaxspec.config.request import Completion, Delta, RequestMetrics, RequestOutput
from jaxspec.engine.admission import Request


class Gathered:
    """One completion put together from its deltas."""

    def __init__(self, index: int):
        self.completion = Completion(index)
        self.metrics: RequestMetrics | None = None
        self._text: list[str] = []

    def take(self, delta: Delta) -> None:
        done = self.completion
        self._text.append(delta.text)
        done.token_ids += delta.token_ids
        if delta.logprobs is not None:
            done.logprobs = (done.logprobs or []) + delta.logprobs
        if delta.token_sources is not None:
            done.token_sources = (done.token_sources or []) + delta.token_sources
        if delta.finish_reason is not None:
            done.text = "".join(self._text)
            done.finish_reason, done.stop_reason, self.metrics = delta.finish_reason, delta.stop_reason, delta.metrics


def output(request: Request, gathered: list[Gathered]) -> RequestOutput:
    """A request's completions with figures of all of them: the first token's time, the sum of rounds."""
    metrics = RequestMetrics(prompt_tokens=len(request.tokens))
    each = [g.metrics for g in gathered]
    metrics.queue = min(m.queue for m in each)
    metrics.ttft = min(m.ttft for m in each)
    metrics.latency = max(m.latency for m in each)
    metrics.cached_tokens = each[0].cached_tokens
    for name in ("output_tokens", "verify_rounds", "verified_tokens", "preemptions", "drafted_tokens"):
        setattr(metrics, name, sum(getattr(m, name) for m in each))
    metrics.acceptance_histogram = [sum(counts) for counts in zip(*(m.acceptance_histogram for m in each), strict=True)]
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.tokens,
        completions=[g.completion for g in gathered],
        metrics=metrics,
        prompt_logprobs=request.prompt_logprobs,
    )
