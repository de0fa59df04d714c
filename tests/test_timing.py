"""Times of rounds, measured at start: the first runs of a program say nothing."""

import itertools
import time

import jax.numpy as jnp
import pytest

from jaxspec import timing


@pytest.mark.parametrize("most,runs", [(12, 5), (2, 2)])
def test_the_least_counts_once_a_second_run_comes_near_it(monkeypatch, most, runs):
    """A GPU's first two runs set up a graph."""
    clock, made = [0.0], []
    took = itertools.chain([0.04, 0.03, 0.005, 0.0056, 0.0051], itertools.repeat(0.005))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(state):
        made.append(next(took))
        clock[0] += made[-1]
        return state, jnp.zeros(1)

    seconds, _ = timing._time(run, {}, most)
    assert seconds == pytest.approx(min(made)) and len(made) == runs
