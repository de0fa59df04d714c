"""How long rounds take, measured at start: every number of drafts, at every batch size, on requests that are made up.

The requests have random text, pages and slots of their own, so attention reads and experts are chosen as when serving.
What they leave in the state is a finished request's at best: the caller makes a new one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import jax
import numpy as np

from jaxspec.compiling.ladder import narrower
from jaxspec.compiling.programs import Programs
from jaxspec.config.request import SamplingParams
from jaxspec.rounds.packing import fit, pack_admission
from jaxspec.rounds.programs import GREEDY, LOGPROBS, SAMPLED, State
from jaxspec.scheduling.draft_count import Group

CONTEXT = 256  # known tokens of each request, or half of what a slot can hold
PERIOD = 16  # after which a text repeats itself, so that drafters that look for that find something
LEAST, MOST_RUNS, ENOUGH = 2, 12, 0.5  # of a program in a pass: bursts, runs, and seconds after which LEAST are enough
PASSES = 2  # over all programs, so that what held up one of them for a while isn't taken for its time
BURST = 4  # runs dispatched one after the other, as when serving: the device waits for the host once in all
LONG = 0.03  # seconds of a run beside which what the host takes is hardly felt, so that there are no bursts
LEAST_DEVICE = 1 / 4  # of a burst's time, is the device's
NEAR = 1.05  # times the best: another burst as fast as that is asked for


def group(kind: str, mode: str, size: int) -> Group:
    """The group of a batch's programs: "round" or "rounds", one of `MODES`, one of their sizes (`sizes_of`)."""
    return f"{kind}_{mode}", size


def time_rounds(
    programs: Programs,
    state: State,
    pages: int,
    page_size: int,
    modes: tuple[str, ...] = (GREEDY, SAMPLED),
    devices: int = 1,
) -> tuple[State, dict]:
    """For each group of round programs in `modes`, the seconds that each number of drafts takes; and the state, used.

    `pages`: in the pool, dummies included; `devices`: those that divide them. Rounds with log-probabilities aren't
    timed: what they take more hardly depends on drafts, so their times are those of rounds that sample.
    """
    shapes = programs.shapes
    known = max(min(CONTEXT, shapes.capacity // 2), 1)
    step = shapes.rounds * programs.width  # most that a run adds to a text, which must not end
    most = min(max((shapes.capacity - known) // step, 1), MOST_RUNS)
    runs = {"round": programs.round, "rounds": programs.rounds}
    alone: dict[Group, dict[int, float]] = defaultdict(dict)  # seconds of a run by itself, by its drafts
    bursts: dict[Group, dict[int, float]] = defaultdict(dict)  # and of a burst, if a run is short
    for mode in modes * PASSES:
        params = SamplingParams(temperature=float(mode == SAMPLED))
        for size in shapes.batches:
            table = _pages(size, shapes.pages_per_seq, known + most * step, pages, page_size, devices)
            admissions = [_admission(slot, known, params, programs) for slot in range(size)]
            for kind, run in runs.items():
                if kind == "rounds" and not shapes.several((size,)):
                    continue
                one = group(kind, mode, size)
                for drafts, sizes in (*narrower(shapes, mode), (None, shapes.batches)):
                    packed = programs.padding(fit(size, sizes))
                    packed[:size, 0] = range(size)
                    packed[:size, 1:] = table
                    once = partial(run, packed=packed, mode=mode, drafts=drafts)
                    timed = partial(_time_admitted, programs, admissions, once)
                    number = programs.width - 1 if drafts is None else drafts
                    before = alone[one].get(number)
                    single, state = timed(most if before is None else min(most, LEAST), 1, state)
                    alone[one][number] = single if before is None else min(single, before)
                    if before is not None and alone[one][number] < LONG and most >= BURST:
                        bursts[one][number], state = timed(most, BURST, state)
    costs = {each: _when_serving(times, bursts[each]) for each, times in alone.items()}
    for (kind, size), times in list(costs.items()):
        if kind.endswith(SAMPLED) and size in shapes.seldom:
            numbers = *(drafts for drafts, _ in narrower(shapes, LOGPROBS)), programs.width - 1
            costs[group(kind.partition("_")[0], LOGPROBS, size)] = {drafts: times[drafts] for drafts in numbers}
    return state, costs


def _when_serving(alone: Mapping[int, float], bursts: Mapping[int, float]) -> dict[int, float]:
    """Seconds of back-to-back rounds, by their drafts: from a run by itself, and from a burst if it is short.

    Both include what the host takes before the device begins and after it has ended. That is the same for any number of
    drafts, and is taken for the median of what their bursts show: a single run that was held up makes no round fast.
    """
    shares = [max((BURST * alone[n] - took) / (BURST - 1), 0.0) for n, took in bursts.items()]
    host = median(shares) if shares else 0.0
    runs = {n: (bursts[n], BURST) if n in bursts else (took, 1) for n, took in alone.items()}
    return {n: max(took - host, LEAST_DEVICE * took) / count for n, (took, count) in runs.items()}


def _time_admitted(programs: Programs, admissions: list, run: Callable, most: int, burst: int, state: State):
    """Admit the requests again, then time as `_time` does: their text must not end."""
    for each in admissions:
        state = programs.admit(state, each)
    return _time(run, state, most, burst)


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


def _pages(size: int, columns: int, tokens: int, pages: int, page_size: int, devices: int = 1) -> np.ndarray:
    """Page tables of requests with so many tokens, which are the `devices`' in turn. If the pool has too few pages,
    requests share some."""
    each, pages = min(-(-tokens // page_size), columns), pages // devices
    table, device = np.zeros((size, columns), np.int32), np.arange(size)[:, None] % devices
    table[:, :each] = 1 + np.arange(size * each).reshape(size, each) % (pages - 1) + device * pages
    return table


def _admission(slot: int, known: int, params: SamplingParams, programs: Programs) -> np.ndarray:
    rng = np.random.default_rng(slot)
    tokens = np.resize(rng.integers(0, programs.vocab, PERIOD), known).tolist()
    capacity = programs.shapes.capacity
    return pack_admission(slot, tokens, known, capacity, programs.width - 1, slot, [], params, capacity)
