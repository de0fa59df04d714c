"""Times of rounds, measured at start: the first runs of a program say nothing."""

import time

import pytest

from jaxspec.compiling import round_timing


@pytest.mark.parametrize("most,burst,seconds,least", [
    (12, 1, [0.04, 0.03, 0.005, 0.0056, 0.0051], 0.005),  # a GPU's first two runs set up a graph
    (2, 1, [0.04, 0.03], 0.03),
    (12, 1, [0.2, 0.35], 0.2),  # long enough for half a second
    (12, 3, [0.006, 0.005, 0.0051], 0.005),
    (12, 3, [0.004, 0.006, 0.005, 0.007], 0.004),
    (4, 4, [0.04], 0.04),
])  # fmt: skip
def test_the_least_counts_once_a_second_burst_comes_near_it(monkeypatch, most, burst, seconds, least):
    """The programs of a burst are dispatched without waiting in between."""
    clock, made, waited, bursts = [0.0], [], [0], iter(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Out:
        def block_until_ready(self):
            clock[0] += next(bursts) * (len(made) - waited[-1])
            waited.append(len(made))

    def run(state):
        made.append(state)
        return state, Out()

    assert round_timing._time(run, {}, most, burst)[0] == pytest.approx(least * burst)
    assert waited[1:] == [burst * (i + 1) for i in range(len(seconds))]


HOST, ROUNDS = 0.002, {-1: 0.0052, 0: 0.0054, 1: 0.0062, 3: 0.009}
ALONE = {drafts: HOST + took for drafts, took in ROUNDS.items()}
BURSTS = {drafts: HOST + round_timing.BURST * took for drafts, took in ROUNDS.items()}


def test_what_the_host_takes_around_a_burst_is_no_part_of_a_round():
    assert round_timing._when_serving(ALONE, BURSTS) == pytest.approx(ROUNDS)
    assert round_timing._when_serving(ALONE, {}) == ALONE
    # Long ones have no burst, but the host all the same.
    assert round_timing._when_serving(ALONE | {7: 0.05}, BURSTS) == pytest.approx(ROUNDS | {7: 0.05 - HOST})


def test_a_single_run_that_was_held_up_makes_no_round_fast():
    assert round_timing._when_serving(ALONE | {3: 0.02}, BURSTS)[3] > 0.99 * ROUNDS[3]
    assert round_timing._when_serving({0: 0.02, 1: 0.02}, {0: 0.004, 1: 0.03})[0] == 0.004 / 16
