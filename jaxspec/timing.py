"""How long rounds take, measured at start: every number of drafts, at every batch size, on requests that are made up.

The requests have random text, pages and slots of their own, so attention reads and experts are chosen as when serving.
What they leave in the state is a finished request's at best: the caller makes a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jaxspec.adaptive import Group
from jaxspec.batch import fit, pack_admission
from jaxspec.ladder import narrower
from jaxspec.programs import Programs
from jaxspec.request import SamplingParams
from jaxspec.round import GREEDY, LOGPROBS, SAMPLED, State

CONTEXT = 256  # known tokens of each request, or half of what a slot can hold
PERIOD = 16  # after which a text repeats itself, so that drafters that look for that find something
LEAST, MOST_RUNS, ENOUGH = 2, 12, 0.5  # of a program in a pass: bursts, runs, and seconds after which LEAST are enough
PASSES = 2  # over all programs, so that what held up one of them for a while isn't taken for its time
BURST = 4  # runs dispatched one after the other, as when serving: the device waits for the host once in all
LONG = 0.03  # seconds of a run beside which what the host takes is hardly felt, so that there are no bursts
NEAR = 1.05  # times the best: another burst as fast as that is asked for


def group(kind: str, mode: str, size: int) -> Group:
    """The group of a batch's programs: "round" or "rounds", one of `round.MODES`, one of their sizes (`sizes_of`)."""
    return f"{kind}_{mode}", size


def time_rounds(
    programs: Programs, state: State, pages: int, page_size: int, modes: tuple[str, ...] = (GREEDY, SAMPLED)
) -> tuple[State, dict]:
    """For each group of round programs in `modes`, the seconds that each number of drafts takes; and the state, used.

    `pages`: in the pool, the dummy included. Rounds with log-probabilities aren't timed: what they take more hardly
    depends on drafts, so their times are those of rounds that sample.
    """
    shapes, costs = programs.shapes, {}
    known = max(min(CONTEXT, shapes.capacity // 2), 1)
    step = shapes.rounds * programs.width  # most that a run adds to a text, which must not end
    most = min(max((shapes.capacity - known) // step, 1), MOST_RUNS)
    runs = {"round": programs.round, "rounds": programs.rounds}
    alone: dict[tuple, float] = {}  # seconds of a run by itself, which the device waits for
    for mode in modes * PASSES:
        params = SamplingParams(temperature=float(mode == SAMPLED))
        for size in shapes.batches:
            table = _pages(size, shapes.pages_per_seq, known + most * step, pages, page_size)
            admissions = [_admission(slot, known, params, programs) for slot in range(size)]
            for kind, run in runs.items():
                if kind == "rounds" and not shapes.several((size,)):
                    continue
                times = costs.setdefault(group(kind, mode, size), {})
                for drafts, sizes in (*narrower(shapes, mode), (None, shapes.batches)):
                    packed = programs.padding(fit(size, sizes))
                    packed[:size, 0] = range(size)
                    packed[:size, 1:] = table
                    once = partial(run, packed=packed, mode=mode, drafts=drafts)
                    bursts = partial(_bursts, programs, admissions, once)
                    number = programs.width - 1 if drafts is None else drafts
                    one = kind, mode, size, number
                    before = alone.get(one)
                    single, state = bursts(most if before is None else min(most, LEAST), 1, state)
                    times[number] = alone[one] = single if before is None else min(single, before)
                    if before is not None and alone[one] < LONG and most >= BURST:
                        several, state = bursts(most, BURST, state)
                        times[number] = _next(alone[one], several)
    for (kind, size), times in list(costs.items()):
        if kind.endswith(SAMPLED) and size in shapes.seldom:
            numbers = *(drafts for drafts, _ in narrower(shapes, LOGPROBS)), programs.width - 1
            costs[group(kind.partition("_")[0], LOGPROBS, size)] = {drafts: times[drafts] for drafts in numbers}
    return state, costs


def _bursts(programs: Programs, admissions: list, run: Callable, most: int, burst: int, state: State):
    """As `_time`, once the requests are admitted again: their text must not end."""
    for each in admissions:
        state = programs.admit(state, each)
    return _time(run, state, most, burst)


def _next(single: float, several: float) -> float:
    """What each further run of a burst takes, by the seconds of a run by itself and of a whole burst. Both include what
    the host takes before the device begins and after it has ended, which rounds don't wait for when serving."""
    return (several - single) / (BURST - 1) if several > single else several / BURST


def _time(run: Callable, state: State, most: int, burst: int) -> tuple[float, State]:
    """The least that a burst of so many runs takes, with `most` runs in all. Its requests' text grows from run to run,
    by less than is felt.

    On a GPU the first runs set up a graph, which takes several times as long as a round. So the least counts once a
    second burst comes near it.
    """
    jax.block_until_ready(state)
    took: list[float] = []
    enough = lambda: len(took) >= LEAST and (sum(took) >= ENOUGH or took[1] <= NEAR * took[0])  # noqa: E731
    while (len(took) + 1) * burst <= most and not enough():
        began = time.perf_counter()
        for _ in range(burst):
            state, out = run(state)
        out.block_until_ready()
        took = sorted([*took, time.perf_counter() - began])
    return took[0], state


def _pages(size: int, columns: int, tokens: int, pages: int, page_size: int) -> np.ndarray:
    """Page tables of requests with so many tokens. If the pool has too few pages, requests share some."""
    each = min(-(-tokens // page_size), columns)
    table = np.zeros((size, columns), np.int32)
    table[:, :each] = 1 + np.arange(size * each).reshape(size, each) % (pages - 1)
    return table


def _admission(slot: int, known: int, params: SamplingParams, programs: Programs) -> np.ndarray:
    rng = np.random.default_rng(slot)
    tokens = np.resize(rng.integers(0, programs.vocab, PERIOD), known).tolist()
    capacity = programs.shapes.capacity
    return pack_admission(slot, tokens, known, capacity, programs.width - 1, slot, [], params, capacity)
