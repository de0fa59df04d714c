"""A closed load on an engine: N requests queued at once, served to the end, and the rounds in which all of them decode.

Invariant: the time is that of the engine's own loop. Between two steps the benchmark only reads counters.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxspec.bench import traffic
from jaxspec.bench.replay import Replay
from jaxspec.bench.results import Result, Row
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine

SETTLING_STEPS = 2  # after the last first token: the program in flight then may still be a prefill's neighbour
LEAST_ROUNDS = 4  # fewer say nothing
FIGURES = "rounds", "ms_per_round", "mean_ms", "p99_ms", "tokens_per_s", "accept_length", "context"


@dataclass(frozen=True)
class Sample:
    """The engine's counters after a step, and the time."""

    time: float
    totals: dict[str, int]

    @classmethod
    def take(cls, engine: Engine) -> Sample:
        return cls(time.perf_counter(), dict(engine.counts.totals))

    def since(self, before: Sample, name: str) -> int:
        return self.totals.get(name, 0) - before.totals.get(name, 0)


def figures(samples: list[Sample], start: Sample, count: int, prompt_len: int) -> Row | None:
    """Figures of the rounds between the first and the last of `samples`, in which all of `count` requests decoded; None
    if they are too few to say anything."""
    first, last = (samples[0], samples[-1]) if samples else (start, start)
    rounds, seconds = last.since(first, "rounds"), last.time - first.time
    if rounds < LEAST_ROUNDS:
        return None
    each = [(b.time - a.time) / b.since(a, "rounds") for a, b in pairwise(samples) if b.since(a, "rounds")]
    halfway = (first.since(start, "generation_tokens") + last.since(start, "generation_tokens")) / 2
    return {
        "rounds": rounds,
        "ms_per_round": float(np.median(each)) * 1e3,
        "mean_ms": seconds / rounds * 1e3,
        "p99_ms": float(np.percentile(each, 99)) * 1e3,
        "tokens_per_s": last.since(first, "generation_tokens") / seconds,
        "accept_length": last.since(first, "verified_tokens") / last.since(first, "verify_rounds"),
        "context": prompt_len + halfway / count,  # mean tokens of a request
    }


class Load:
    """`count` requests of `prompt_len` random tokens each, other ones in every run. They have `adapters` in turn."""

    def __init__(
        self,
        engine: Engine,
        rng: np.random.Generator,
        count: int,
        prompt_len: int,
        temperature: float = 0.0,
        adapters: Sequence[str | None] = (None,),
    ):
        self._adapters = adapters
        self._engine, self._rng, self._count, self._prompt_len = engine, rng, count, prompt_len
        self._temperature = temperature
        self._burst = 1  # rounds in a program, as far as seen

    def run(self, output_len: int, back_to_back: bool = False, profiled: bool = False) -> Row:
        """Serve them, `output_len` new tokens each; the figures. Those of too few steady rounds are None.

        With `back_to_back` the round program is timed by itself as well, once the steady rounds are over, and if
        `profiled` its kernels are.

        **Raises:** `RequestError` for lengths that don't fit the engine.
        """
        engine, before = self._engine, self._engine.stats()
        replay = Replay(engine.runner) if back_to_back else None
        start, samples, program = Sample.take(engine), [], None
        apart = Counter()  # what timing the program cost: it is no part of the run
        try:
            for phase in self._steps(output_len):
                if phase == "steady":
                    samples.append(Sample.take(engine))
                elif phase == "closing" and replay is not None:
                    steady = figures(samples, start, self._count, self._prompt_len)
                    began, compiled = time.perf_counter(), engine.stats()["compiles_total"]
                    if steady is not None:
                        program = replay.figures(steady["context"], steady["accept_length"], profiled)
                    apart["seconds"] = time.perf_counter() - began
                    apart["compiles"] = engine.stats()["compiles_total"] - compiled
        finally:
            if replay is not None:
                replay.close()
        end, after = Sample.take(engine), engine.stats()
        row = figures(samples, start, self._count, self._prompt_len) or dict.fromkeys(FIGURES)
        row["run_tokens_per_s"] = end.since(start, "generation_tokens") / (end.time - start.time - apart["seconds"])
        for name in ("preemptions", "compiles"):
            row[name] = after[f"{name}_total"] - before[f"{name}_total"] - apart[name]
        if back_to_back:
            row |= program or {"program_ms": None}
            row["engine_overhead"] = None if program is None else row["mean_ms"] / row["program_ms"] - 1
        return row

    def params(self, output_len: int) -> SamplingParams:
        """Sampling params of every request."""
        return SamplingParams(temperature=self._temperature, max_tokens=output_len, ignore_eos=True)

    def _steps(self, output_len: int) -> Iterator[str]:
        """Step until all requests have ended; yields where each step left them.

        "filling" until all have a first token and the loop has settled, "steady" while all decode, "closing" once, when
        the first to end is about to, then "ending".
        """
        engine, params = self._engine, self.params(output_len)
        of = self._rng, self._count, self._prompt_len, params, self._adapters
        gained = dict.fromkeys(traffic.queue(engine, *of), 0)
        phase, settling = "filling", SETTLING_STEPS
        while engine.busy:
            rounds = engine.counts.totals["rounds"]
            deltas = engine.step()
            self._burst = max(self._burst, engine.counts.totals["rounds"] - rounds)
            for delta in deltas:
                gained[delta.request_id] += len(delta.token_ids)
            # as much may be gained by the program in flight, and by the one that the next step dispatches
            margin = 2 * self._burst * engine.runner.width
            if phase in ("closing", "ending"):
                phase = "ending"
            elif max(gained.values()) + margin >= output_len:
                phase = "closing"
            elif all(gained.values()):
                phase, settling = "filling" if settling else "steady", max(settling - 1, 0)
            yield phase


def tell(result: Result, name: str, row: Row, args: argparse.Namespace) -> None:
    """Note in `result` why the row of this name may mislead."""
    if row["ms_per_round"] is None:
        result.note(
            f"{name}: all requests decoded together too briefly or never; raise --output-len {args.output_len}, or "
            f"lower --prompt-len {args.prompt_len}"
        )
    elif row.get("program_ms", 0) is None:
        result.note(f"{name}: too few rounds to time the program by itself; raise --output-len {args.output_len}")
    if row["preemptions"]:
        result.note(f"{name}: {row['preemptions']} preemptions, because the load needs more KV pages than there are")
    if row["compiles"]:
        result.note(f"{name}: programs compiled during the run: {row['compiles']}; its time includes that")
