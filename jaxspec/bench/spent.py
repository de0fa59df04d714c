"""Where a load's time went, from a recording of the engine: by kind of program, padding, idle time, and a chart.

A round that few requests take part in costs nearly as much as one of all, so rounds are counted by that, too. The whole
is held against its parts: prompts by themselves, and as many full rounds as the tokens need at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jaxspec.bench import plots
from jaxspec.bench.results import Row
from jaxspec.engine.timeline import FIRST, PROMPTS, ROUNDS, Program, Recording

FULL = 0.97  # share of the most requests in a round from which on it counts as full
BINS = 240  # of the chart
FEW, MANY, IDLE = "rounds of up to half", "rounds", "idle"  # beside kinds of programs
LANES = PROMPTS, FIRST, MANY, FEW, IDLE
COLOURS = "tab:blue", "tab:orange", "tab:green", "tab:red", "whitesmoke"


def figures(recording: Recording, block: int, burst: int) -> Row:
    """Break down a load: seconds by their use, rows, padding. `block`: prompt tokens in one row of a prefill, `burst`:
    rounds in a program of several."""
    programs = recording.programs
    prompts, firsts, rounds = ([p for p in programs if p.what == what] for what in (PROMPTS, FIRST, ROUNDS))
    count = lambda p: burst if p.kind.startswith("rounds_") else 1  # noqa: E731
    span = programs[-1].ended - programs[0].called if programs else 0.0
    most = max((p.rows for p in rounds), default=0)
    few = [p for p in rounds if 2 * p.rows <= most]
    full = [p.seconds / count(p) for p in rounds if p.rows >= FULL * most]
    gained = sum(step.gained for step in recording.steps)
    steps = [step for step in recording.steps if step.gained or step.prompt_tokens]
    took = {"prompt": prompts, "first": firsts, "round": rounds, "few": few}
    row: Row = {f"{name}_s": sum(p.seconds for p in some) for name, some in took.items()}
    row |= {"device_s": span, "idle_s": span - sum(p.seconds for p in programs)}
    row |= {"idle_share": row["idle_s"] / span if span else None}
    padded = sum(p.size * block - p.tokens for p in prompts)
    row |= {
        "prompt_programs": len(prompts),
        "prefilled_tokens": sum(p.tokens for p in prompts),
        "padded_tokens_share": padded / sum(p.size * block for p in prompts) if prompts else None,
        "rounds": sum(map(count, rounds)),
        "few_rounds": sum(map(count, few)),
        "rows": _mean([p.rows for p in rounds]),
        "most_rows": most,
        "padded_rows_share": 1 - sum(p.rows for p in rounds) / sum(p.size for p in rounds) if rounds else None,
        "full_round_ms": float(np.median(full)) * 1e3 if full else None,
        "tokens_per_step": gained / len(steps) if steps else None,
        "rounds_behind_prompts": _behind_prompts(programs),
        "host_step_ms": _mean([(step.ended - step.began) * 1e3 for step in steps]),
    }
    if full:  # as many rounds as there must be if each had the most requests
        row["rounds_alone_s"] = sum(p.rows * count(p) for p in rounds) / most * row["full_round_ms"] / 1e3
    return row


def _behind_prompts(programs: Sequence[Program]) -> int:
    """Rounds that a program of prompts ran right before, but for first tokens."""
    order = [p.what for p in programs if p.what != FIRST]
    return sum(before == PROMPTS and now == ROUNDS for before, now in pairwise(order))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def bins(recording: Recording) -> dict[str, Any]:
    """For the chart: the share of each moment that went to each of `LANES`, running and waiting requests, and tokens a
    second."""
    programs = recording.programs
    if not programs:
        return {}
    begin, end = programs[0].called, programs[-1].ended
    edges = np.linspace(begin, end, BINS + 1)
    width = edges[1] - edges[0]
    most = max((p.rows for p in programs if p.what == ROUNDS), default=0)
    lane = lambda p: p.what if p.what != ROUNDS else FEW if 2 * p.rows <= most else MANY  # noqa: E731
    shares = {name: np.zeros(BINS) for name in LANES[:-1]}
    for p in programs:
        first, last = (min(int((t - begin) / width), BINS - 1) for t in (p.began, p.ended))
        for i in range(first, last + 1):
            shares[lane(p)][i] += max(min(p.ended, edges[i + 1]) - max(p.began, edges[i]), 0.0) / width
    tokens, _ = np.histogram(
        [step.ended for step in recording.steps], edges, weights=[step.gained for step in recording.steps]
    )
    at = np.clip(np.searchsorted([p.called for p in programs], edges[:-1]), 0, len(programs) - 1)
    found = {name: values.round(4).tolist() for name, values in shares.items()}
    found[IDLE] = np.clip(1 - sum(shares.values()), 0, 1).round(4).tolist()
    return {
        "seconds": (edges[:-1] - begin).round(4).tolist(),
        "shares": found,
        "running": [programs[i].running for i in at],
        "waiting": [programs[i].waiting for i in at],
        "tokens_per_s": (tokens / width).round(1).tolist(),
    }


def draw(row: Row, axes: Sequence[Any]) -> None:
    """Two plots of a row with `bins`: what the device did, and requests and tokens."""
    recorded, (device, requests) = row["bins"], axes
    x = recorded["seconds"]
    device.stackplot(x, [recorded["shares"][name] for name in LANES], labels=LANES, colors=COLOURS)
    device.set(ylim=(0, 1), xlim=(0, x[-1]), ylabel="share of the device's time", title=row["load"])
    device.legend(loc="lower right", fontsize="small")
    requests.plot(x, recorded["running"], label="running")
    requests.plot(x, recorded["waiting"], label="waiting")
    requests.set(xlabel="seconds", ylabel="requests", xlim=(0, x[-1]))
    plots.from_zero(requests)
    plots.whole(requests.yaxis)
    requests.legend(loc="upper left", fontsize="small")
    rate = requests.twinx()
    rate.plot(x, recorded["tokens_per_s"], "k:", linewidth=0.8)
    rate.set(ylabel="tokens a second (dotted)")
    plots.from_zero(rate)
