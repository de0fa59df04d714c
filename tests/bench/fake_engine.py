"""An engine with a script instead of a model, and a clock that only its steps move."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

from jaxspec.config.request import Delta, RequestMetrics


class Clock:
    """Stands in for the `time` module."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeEngine:
    """Prefills one prompt a step, then every request that has its first token gains `gain` tokens in each round.

    A prefill takes `prefill_s`, half of which the next step waits for, as it does with overlap; a round takes
    `round_s`. `slow` adds seconds to the n-th round.
    """

    def __init__(self, clock, gain=1, width=1, burst=1, prefill_s=1.0, round_s=0.01, slow=None):
        self.clock, self.gain, self.burst = clock, gain, burst
        self.prefill_s, self.round_s, self.slow = prefill_s, round_s, slow or {}
        self.runner = SimpleNamespace(width=width)
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.counts = SimpleNamespace(totals=Counter())
        self.requests = {}
        self.prompts = []
        self.tokenizer = None
        self.most = 0  # requests at once
        self._late = 0.0
        self._ids = itertools.count()

    def prepare(self, prompt, params, lora=None):
        self.prompts.append(prompt)
        left = params.max_tokens
        return SimpleNamespace(id=str(next(self._ids)), tokens=prompt, left=left, started=False, ttft=None, added=0.0)

    def add(self, request):
        self.requests[request.id] = request
        self.most = max(self.most, len(self.requests))

    @property
    def busy(self):
        return bool(self.requests)

    def stats(self):
        return {"preemptions_total": 0, "compiles_total": 0}

    def step(self):
        deltas = []
        running = [request for request in self.requests.values() if request.started]
        self.clock.now += self._late
        self._late = 0.0
        if waiting := next((request for request in self.requests.values() if not request.started), None):
            self.clock.now += self.prefill_s / 2
            self._late = self.prefill_s / 2
            waiting.started = True
            deltas.append(self._gain(waiting, 1))
        for _ in range(self.burst if running else 0):
            self.counts.totals["rounds"] += 1
            self.clock.now += self.round_s + self.slow.get(self.counts.totals["rounds"], 0.0)
            for request in running:
                if request.left:
                    self.counts.totals["verify_rounds"] += 1
                    self.counts.totals["verified_tokens"] += self.gain
                    deltas.append(self._gain(request, self.gain))
        return deltas

    def _gain(self, request, most):
        tokens = min(most, request.left)
        request.left -= tokens
        self.counts.totals["generation_tokens"] += tokens
        if not request.left:
            del self.requests[request.id]
        request.ttft = request.ttft or self.clock.now - request.added
        delta = Delta(request.id, 0, token_ids=[7] * tokens)
        if not request.left:
            delta.finish_reason, delta.metrics = "length", RequestMetrics(ttft=request.ttft)
        return delta
