"""Recording of an engine's programs and of its requests' gains meanwhile: made on demand, shown by Perfetto.

Invariant: while nothing is recorded, nothing is kept, and serving pays a comparison a program. While it is, a thread
waits for each program's result in turn, so the engine's loop never does.

A program's time begins at the end of the one before it, or at its dispatch if that is later, and ends when its result
is there. Setting up a slot has no result: its time counts to the program behind it. So does a structured forward.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.compiling.ladder import ADAPTED
from jaxspec.config.request import Delta
from jaxspec.engine.engine import Engine

PROMPTS, FIRST, ROUNDS = "prompts", "first tokens", "rounds"  # what a program does
MOST = 1_000_000  # programs and gains of requests kept; recording ends there
SWITCH_SECONDS = 0.0005  # between threads, while recording: an end is noted that late at most
PROGRAMS, STEPS, REQUESTS = range(1, 4)  # processes of a trace: groups of tracks


@dataclass(slots=True)
class Program:
    """A program that ran. Times are of the monotonic clock, in seconds.

    `rows` of `size` were no padding: requests, or blocks of prompts. `tokens` are the prompts'. `running` and `waiting`
    are the requests at its dispatch.
    """

    kind: str
    size: int
    rows: int
    tokens: int
    running: int
    waiting: int
    called: float
    began: float
    ended: float

    @property
    def what(self) -> str:
        name = self.kind.removeprefix(ADAPTED).partition("_")[0]
        return PROMPTS if name in ("prefill", "score") else FIRST if name in ("first", "masked") else ROUNDS

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Step(NamedTuple):
    """A turn of the engine's loop: prompt tokens that it dispatched, tokens that requests gained."""

    began: float
    ended: float
    prompt_tokens: int
    gained: int


class Gain(NamedTuple):
    """Tokens that a request gained at a time. `reason`: why it ended, if it did."""

    time: float
    tokens: int
    reason: str | None


@dataclass
class Track:
    """A completion: when it was added and admitted, and all that it gained. `admitted` None: it still waits."""

    added: float
    admitted: float | None
    prompt_tokens: int
    gains: list[Gain]


@dataclass
class Recording:
    """Everything between `began` and `ended`; `full`: there was more than is kept."""

    began: float
    ended: float
    programs: list[Program]
    steps: list[Step]
    tracks: dict[str, Track]
    full: bool

    def trace(self) -> dict[str, Any]:
        """In Chrome's trace event format, which ui.perfetto.dev opens: a track for programs, for steps, and for each
        request; running and waiting requests as counters."""
        events = [*_names(PROGRAMS, "device", {0: "programs"}), *_names(STEPS, "host", {0: "steps"})]
        for p in self.programs:
            args = {"rows": p.rows, "size": p.size, "tokens": p.tokens, "called": self._us(p.called)}
            events.append(self._slice(PROGRAMS, 0, f"{p.kind} {p.size}", p.began, p.ended, args))
            for name, count in (("running", p.running), ("waiting", p.waiting)):
                counter = {"ph": "C", "pid": PROGRAMS, "name": name, "ts": self._us(p.called)}
                events.append(counter | {"args": {name: count}})
        for step in self.steps:
            args = {"prompt tokens": step.prompt_tokens, "gained": step.gained}
            events.append(self._slice(STEPS, 0, "step", step.began, step.ended, args))
        order = sorted(self.tracks, key=lambda name: self.tracks[name].added)
        events += _names(REQUESTS, "requests", dict(enumerate(order)))
        for i, name in enumerate(order):
            events += self._request(i, self.tracks[name])
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"full": self.full}}

    def _request(self, i: int, track: Track) -> Iterator[dict[str, Any]]:
        """It waits, its prompt is computed, then a slice for each gain."""
        admitted = self.ended if track.admitted is None else track.admitted
        yield self._slice(REQUESTS, i, "waits", track.added, admitted, {})
        if track.admitted is None:
            return
        before = admitted
        for n, gain in enumerate(track.gains):
            count = f"{gain.tokens} token{'s' * (gain.tokens != 1)}"
            name = "prompt" if not n else count if gain.reason is None else gain.reason
            args = {"tokens": gain.tokens} | ({} if n else {"prompt tokens": track.prompt_tokens})
            yield self._slice(REQUESTS, i, name, before, gain.time, args)
            before = gain.time
        if not track.gains:
            yield self._slice(REQUESTS, i, "prompt", before, self.ended, {"prompt tokens": track.prompt_tokens})

    def _slice(self, pid: int, tid: int, name: str, began: float, ended: float, args: dict) -> dict[str, Any]:
        began = max(began, self.began)  # what began before the recording
        times = {"ts": self._us(began), "dur": max(self._us(ended) - self._us(began), 0.0)}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}

    def _us(self, seconds: float) -> float:
        return round((seconds - self.began) * 1e6, 1)


def _names(pid: int, process: str, tracks: dict[int, str]) -> list[dict[str, Any]]:
    names = [("process_name", 0, process), *(("thread_name", tid, name) for tid, name in tracks.items())]
    return [{"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}} for what, tid, name in names]


class Timeline:
    """Records an engine between `start` and `stop`, which any thread may call, each once."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._dispatched: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._programs: list[Program] = []
        self._steps: list[Step] = []
        self._tracks: dict[str, Track] = {}
        self._gains = 0
        self._last = 0.0  # when the newest program of those that ended did
        self._waiter = threading.Thread(target=self._wait, name="jaxspec-timeline", daemon=True)
        self.full = False

    def start(self) -> None:
        """**Raises:** `RuntimeError` if the engine is recorded already."""
        if self._engine.timeline is not None:
            raise RuntimeError("the engine is recorded already; stop that recording first")
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._switch))
        self._began = self._last = time.monotonic()
        self._waiter.start()
        self._engine.timeline = self
        self._engine.runner.programs.watch = self._watch

    def stop(self) -> Recording:
        """Wait for the programs in flight; what was recorded."""
        engine, ended = self._engine, time.monotonic()
        engine.runner.programs.watch = engine.timeline = None
        self._dispatched.put(None)
        self._waiter.join()
        sys.setswitchinterval(self._switch)
        for request in list(engine.requests.values()):  # those that still wait, or whose prompt isn't done
            for choice in list(request.choices):
                self._track(request.id, choice.index, request.added, choice.metrics)
        return Recording(self._began, ended, self._programs, self._steps, self._tracks, self.full)

    def step(self, began: float, prompt_tokens: int, deltas: list[Delta]) -> None:
        """Note a turn of the loop that began then, and what requests gained in it. The engine calls it."""
        now, gained = time.monotonic(), sum(len(delta.token_ids) for delta in deltas)
        self._steps.append(Step(began, now, prompt_tokens, gained))
        ended = {(delta.request_id, delta.index): delta.metrics for delta in deltas if delta.metrics is not None}
        for delta in deltas:
            if (metrics := ended.get((delta.request_id, delta.index))) is not None:
                added = now - metrics.latency
            else:
                request = self._engine.requests[delta.request_id]
                added, metrics = request.added, request.choices[delta.index].metrics
            track = self._track(delta.request_id, delta.index, added, metrics)
            track.gains.append(Gain(now, len(delta.token_ids), delta.finish_reason))
        self._gains += len(deltas)
        if self._gains + len(self._programs) > MOST:
            self.full = True
            self._engine.runner.programs.watch = self._engine.timeline = None

    def _track(self, request_id: str, index: int, added: float, metrics: Any) -> Track:
        name = request_id if not index else f"{request_id} {index}"
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = Track(added, None, metrics.prompt_tokens, [])
        if track.admitted is None and metrics.queue is not None:
            track.admitted = track.added + metrics.queue
        return track

    def _watch(self, kind: str, packed: np.ndarray | jax.Array, called: float, results: tuple) -> None:
        """Take note of a dispatch, on the engine's thread: as little as possible."""
        if kind.removeprefix(ADAPTED) != "forward":  # its logits are large, and aren't to be kept any longer
            scheduler = self._engine.scheduler
            counts = len(scheduler.running) + len(scheduler.prefilling), len(scheduler.waiting)
            self._dispatched.put((kind, packed, called, results[-1], *counts))

    def _wait(self) -> None:
        slots = self._engine.runner.shapes.num_slots
        while (one := self._dispatched.get()) is not None:
            kind, packed, called, result, running, waiting = one
            try:
                jax.block_until_ready(result)
            except Exception:  # the engine's loop reports it
                continue
            ended = time.monotonic()
            packed = np.asarray(packed)
            of_prompts = kind.removeprefix(ADAPTED) in ("prefill", "score")
            tokens = int(packed[:, 2].sum()) if of_prompts else 0
            rows = int(((packed[:, 2] > 0) if of_prompts else (packed[:, 0] < slots)).sum())
            began = max(called, self._last)
            self._programs.append(Program(kind, len(packed), rows, tokens, running, waiting, called, began, ended))
            self._last = ended
