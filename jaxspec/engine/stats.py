"""The engine's own counts: histograms, the decode log line, and the figures that it reports."""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.runner import Runner
from jaxspec.pallas.hopper import KERNELS
from jaxspec.scheduling.draft_count import Chooser
from jaxspec.scheduling.scheduler import Scheduler

log = logging.getLogger("jaxspec")

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds, as vLLM's


class Tally:
    """A histogram: how many values were at most each of the ascending `bounds`, and above the one before.

    `counts` has one entry more than `bounds`, for larger values. One thread observes, any may read: an observation
    takes well under a microsecond, a tenth of what prometheus_client's locked histogram does.
    """

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def as_dict(self) -> dict[str, Any]:
        """`bounds`, `counts` and `sum` as they are now."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


class Counts:
    """Counts of an engine since its start. `totals` has sums by name, `finished` requests by how they ended.

    `drafted` and `accepted` have drafts by their place in a round, of which the longest yields `yields` tokens.
    `compiles_at_start`: how many programs this process had compiled by then.
    """

    def __init__(self, yields: int, drafts: Sequence[int]):
        self.totals: Counter = Counter()
        self.finished: Counter = Counter()
        self.drafted = [0] * (yields - 1)
        self.accepted = [0] * (yields - 1)
        self.step_tokens = Tally(STEP_TOKENS)
        self.rounds_by_drafts = Counter(dict.fromkeys(drafts, 0))
        self.compiles_at_start = 0

    def verified(self, accepted: int, drafted: int) -> None:
        """Note what a request gained in a round: `accepted` tokens, the bonus token included, with `drafted` drafts."""
        self.totals["verify_rounds"] += 1
        self.totals["verified_tokens"] += accepted
        for i in range(drafted):
            self.drafted[i] += 1
        for i in range(accepted - 1):
            self.accepted[i] += 1


class DecodeLog:
    """Writes a line every `interval` rounds, and one for the rest when the engine falls idle. 0 writes none."""

    def __init__(self, interval: int):
        self.interval = interval
        self._rounds = 0
        self._rows = 0
        self._since = 0.0
        self._before: Counter = Counter()

    def count(self, rows: int, started: float) -> None:
        """Note a round of `rows` live requests, dispatched at `started`."""
        if not rows:
            return  # a round that ran past the end of all its requests
        if not self._rounds:
            self._since = max(self._since, started)  # idle time doesn't count
        self._rounds += 1
        self._rows += rows

    def due(self, idle: bool) -> bool:
        return bool(self.interval and self._rows and (idle or self._rounds >= self.interval))

    def write(self, totals: Counter, scheduler: Scheduler) -> None:
        before, now = self._before, time.monotonic()
        gained = {key: totals[key] - before[key] for key in ("generation_tokens", "verify_rounds", "verified_tokens")}
        pages = sum(pool.num_pages - 1 for pool in scheduler.pools)
        used = max(pages - scheduler.free_pages - scheduler.cached_pages, 0)  # the tree's are free as well
        log.info(
            "decode: running %d, waiting %d, pages in use %.0f%%, accept len %.2f, %.1f tok/s",
            len(scheduler.running),
            len(scheduler.waiting),
            100 * used / pages,
            gained["verified_tokens"] / max(gained["verify_rounds"], 1),
            gained["generation_tokens"] / max(now - self._since, 1e-9),
        )
        self._rounds = self._rows = 0
        self._since, self._before = now, Counter(totals)


def figures(counts: Counts, scheduler: Scheduler, runner: Runner, chooser: Chooser | None) -> dict[str, Any]:
    """Figures of an engine since its start; cheap, and from any thread."""
    totals = counts.totals
    rounds = totals["verify_rounds"]
    return {
        "num_running": len(scheduler.running) + len(scheduler.prefilling) + len(scheduler.loading),
        "num_waiting": len(scheduler.waiting),
        "total_pages": sum(pool.num_pages - 1 for pool in scheduler.pools),
        "free_pages": scheduler.free_pages,
        "cached_pages": scheduler.cached_pages,
        "page_size": runner.config.page_size,
        "state_snapshots": len(scheduler.snapshots.owners) if scheduler.snapshots else 0,
        "prompt_tokens_total": totals["prompt_tokens"],
        "cached_tokens_total": totals["cached_tokens"],
        "host_cached_tokens_total": totals["host_cached_tokens"],
        "disk_cached_tokens_total": totals["disk_cached_tokens"],
        "images_total": totals["images"],
        "image_tokens_total": totals["image_tokens"],
        "encoded_images_total": runner.encoded,
        "generation_tokens_total": totals["generation_tokens"],
        "rounds_total": totals["rounds"],
        "rested_rounds_total": totals["rested_rounds"],
        "verify_rounds_total": rounds,
        "verified_tokens_total": totals["verified_tokens"],
        "forced_tokens_total": totals["forced_tokens"],
        "nonfinite_total": totals["nonfinite"],
        "avg_spec_accept_length": totals["verified_tokens"] / rounds if rounds else 0.0,
        "drafted_per_position": list(counts.drafted),
        "accepted_per_position": list(counts.accepted),
        "step_tokens": counts.step_tokens.as_dict(),
        **_drafting(counts, runner, chooser),
        "preemptions_total": scheduler.preemptions,
        "compiles_total": runner.compiles["compiles"],
        "compiles_since_start": runner.compiles["compiles"] - counts.compiles_at_start,
        "programs_pending": [f"{kind} {size}" for kind, size in runner.programs.pending],
        "dispatches": dict(runner.programs.dispatches),
        "kernels": dict(KERNELS),
        "paths": runner.paths,
        "sums": runner.sums,
        "requests_total": dict(counts.finished),
        "memory_plan": dataclasses.asdict(runner.plan),
        "adapters": _adapters(scheduler, runner),
    }


def _adapters(scheduler: Scheduler, runner: Runner) -> dict[str, Any] | None:
    """How many places there are, and the adapters of requests that run and that wait; None: no adapters are served."""
    if runner.adapters is None:
        return None
    names = lambda seqs: sorted({seq.adapter.name for seq in seqs if seq.adapter is not None})  # noqa: E731
    running = [*scheduler.running, *scheduler.prefilling, *scheduler.loading]
    return {"places": runner.adapters.count, "running": names(running), "waiting": names(scheduler.waiting)}


def _drafting(counts: Counts, runner: Runner, chooser: Chooser | None) -> dict[str, Any]:
    """How many drafts rounds have: now, of all rounds, and by what it is chosen, times in seconds."""
    return {
        "draft_policy": "fixed" if chooser is None else runner.config.draft_policy,
        "drafts": runner.drafts[-1] if chooser is None else chooser.chosen,
        "rounds_by_drafts": dict(counts.rounds_by_drafts),
        "expected_tokens_by_drafts": {} if chooser is None else chooser.expected(),
        "round_times": {f"{kind} {size}": each for (kind, size), each in runner.round_times.items()},
    }


_LOAD = (
    *("num_running", "num_waiting", "total_pages", "free_pages", "cached_pages", "state_snapshots"),
    *(f"{tier}_cache_{what}" for tier in ("host", "disk") for what in ("bytes", "used_bytes", "blocks")),
)


def together(engines: list[dict[str, Any]], lost: list[bool]) -> dict[str, Any]:
    """`figures` of several engines as one's: counts in sum, lost engines' too, and the load of those that are there.

    What can't be added up, such as the memory plan, is the first living engine's.
    """
    living = [each for each, gone in zip(engines, lost, strict=True) if not gone]
    total = dict((living or engines)[0])
    summed = lambda key, of: sum(each[key] for each in of)  # noqa: E731
    total |= {key: summed(key, engines) for key in total if key.endswith("_total") and key != "requests_total"}
    total |= {key: summed(key, living) for key in _LOAD}
    for key in ("drafted_per_position", "accepted_per_position"):
        total[key] = [sum(counts) for counts in zip(*(each[key] for each in engines), strict=True)]
    for key in ("dispatches", "rounds_by_drafts", "requests_total", "kernels"):
        total[key] = dict(sum((Counter(each[key]) for each in engines), Counter()))
    steps = [each["step_tokens"] for each in engines]
    counts = [sum(each) for each in zip(*(step["counts"] for step in steps), strict=True)]
    total["step_tokens"] = steps[0] | {"counts": counts, "sum": summed("sum", steps)}
    if total["adapters"]:
        each = [one["adapters"] for one in living]
        of = {key: sorted(set().union(*(one[key] for one in each))) for key in ("running", "waiting")}
        total["adapters"] = total["adapters"] | of
    total["programs_pending"] = [one for each in living for one in each["programs_pending"]]
    total["compiles_since_start"] = summed("compiles_since_start", engines)
    total |= {key: max((each[key] for each in living), default=0) for key in ("drafts", "step_seconds")}
    rounds = total["verify_rounds_total"]
    return total | {"avg_spec_accept_length": total["verified_tokens_total"] / rounds if rounds else 0.0}
