"""Times of rounds, measured at start: the first runs of a program say nothing."""

import time

import pytest

from jaxspec import timing


@pytest.mark.parametrize(
    "most,seconds,waited,least",
    [
        (19, [0.04, 0.03, 0.005, 0.0056, 0.0051], [1, 4, 7, 10, 13], 0.005),  # a GPU's first runs set up a graph
        (9, [0.04, 0.03, 0.005], [1, 4, 7], 0.005),
        (2, [0.04, 0.03], [1, 2], 0.03),
        (1, [0.04], [1], 0.04),
        (19, [0.2, 0.35], [1, 2], 0.2),  # long enough for half a second
        (19, [0.11, 0.2, 0.105], [1, 2, 3], 0.105),
    ],
)
def test_the_least_counts_once_a_second_burst_comes_near_it(monkeypatch, most, seconds, waited, least):
    """Short programs are dispatched three by three, without waiting in between, after one alone."""
    clock, made, waits = [0.0], [], []
    bursts = iter(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Out:
        def block_until_ready(self):
            before = waits[-1] if waits else 0
            clock[0] += next(bursts) * (len(made) - before)
            waits.append(len(made))

    def run(state):
        made.append(state)
        return state, Out()

    assert timing._time(run, {}, most)[0] == pytest.approx(least) and waits == waited
