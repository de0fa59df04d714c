"""The scheduler and its budget on a made-up device with a clock: what bursts take, and how long streams stall.

The device's times are roughly an H200's with Qwen3-8B: reading the weights takes as long as 200 prompt tokens. Padding
of prompts takes as long as tokens do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxspec.rounds.packing import fit
from jaxspec.scheduling.prefill_budget import PrefillBudget
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import SequenceState

WEIGHTS, TOKEN, ROW = 4.5e-3, 21e-6, 45e-6  # seconds: to read all weights, for a prompt's token, for a request's round
SLOTS, CHUNK, OUTPUT = 64, 2048, 48
PREFILLS = (1, 2, 4, 8, 16, 32)  # blocks of 64 tokens


@dataclass
class Told:
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # from a request's arrival to its first token
    gaps: list[float] = field(default_factory=list)  # between two outputs of a request


def serve(arrivals: list[tuple[float, int]], held: int = 0, most: float | None = None) -> Told:
    """Serve prompts of these times and lengths. `held`: as the scheduler's, `most`: as the pace's."""
    s = Scheduler(
        num_slots=SLOTS,
        num_pages=2000,
        page_size=64,
        width=1,
        lookahead=1,
        chunk_tokens=CHUNK,
        block=64,
        score_tokens=64,
        context_length=9000,
        prefills=PREFILLS,
        prefix_cache=False,
        held_tokens=held,
    )
    budget, told, now = PrefillBudget(most, 64, PREFILLS), Told(), 0.0
    left, last = sorted(arrivals), {}
    while left or s.unfinished:
        if not s.unfinished:
            now = max(now, left[0][0])
        while left and left[0][0] <= now:
            at, length = left.pop(0)
            seq = SequenceState([0] * length, length, length + OUTPUT)
            last[seq] = at
            s.add(seq)
        s.between = budget.tokens()
        plan = s.plan()
        began = now
        if plan.prefill:
            blocks = sum(len(chunk.blocks(64)) for chunk in plan.prefill)
            budget.prompts(blocks, began)
            now += max(WEIGHTS, fit(blocks, PREFILLS) * 64 * TOKEN)
        for seq in plan.first:
            s.append(seq, [1])
            told.first.append(now - last[seq])
            last[seq] = now
        if plan.rows:
            dispatched = budget.round(began)
            now += WEIGHTS + len(plan.rows) * ROW
            budget.read(dispatched, now)
        for seq in plan.rows:
            s.append(seq, [1])
            told.gaps.append(now - last[seq])
            last[seq] = now
            if len(seq.tokens) >= seq.limit:
                s.finish(seq)
    told.seconds = now
    return told


def test_a_burst_is_over_sooner_if_rounds_are_held():
    burst = [(0.0, 1024)] * SLOTS
    before, held = serve(burst), serve(burst, held=4 * CHUNK)
    assert held.seconds < 0.96 * before.seconds
    assert np.mean(held.first) < 0.95 * np.mean(before.first)
    one = CHUNK * TOKEN
    assert max(before.gaps) < one + 8e-3 and 4 * one < max(held.gaps) < 4 * one + 8e-3


@pytest.fixture(scope="module")
def arrivals():
    """Short prompts at two thirds of what the device can do, with one of 8192 tokens after each 20."""
    at = np.cumsum(np.random.default_rng(0).exponential(1 / 60, 300))
    return [(float(time), 8192 if i % 20 == 19 else 128) for i, time in enumerate(at)]


def test_arrivals_are_served_as_without_holding(arrivals):
    before, held = serve(arrivals), serve(arrivals, held=4 * CHUNK)
    assert held.seconds == pytest.approx(before.seconds, rel=0.01)
    assert np.percentile(held.gaps, 99) <= 1.1 * np.percentile(before.gaps, 99)


@pytest.mark.parametrize("most", [0.018, 0.025])
def test_streams_stall_no_longer_than_they_may(arrivals, most):
    usual, limited = serve(arrivals), serve(arrivals, held=4 * CHUNK, most=most)
    assert max(usual.gaps) > 0.045  # a program of a long prompt
    assert np.percentile(limited.gaps, 99) < 1.05 * most
    assert np.mean(np.array(limited.gaps) > 1.2 * most) < 0.001  # while nothing is known yet
    assert limited.seconds < 1.1 * usual.seconds
    assert len(limited.first) == len(arrivals)  # long prompts come through


def test_a_high_limit_puts_prompts_first():
    burst = [(0.0, 1024)] * SLOTS
    first = serve(burst, held=4 * CHUNK, most=5.0)
    assert first.seconds < serve(burst, held=4 * CHUNK).seconds
