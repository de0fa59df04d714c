"""How many prompt tokens fit between two rounds: learned from a device that takes 10 ms a round and 20 us a token."""

import pytest

from jaxspec.pace import Pace

ROUND, TOKEN = 0.010, 20e-6


class Device:
    """Runs what is dispatched at once; the engine reads each round when it is done."""

    def __init__(self, pace):
        self.pace, self.now = pace, 100.0

    def step(self, prompts=0, token=TOKEN, late=0.0):
        if prompts:
            self.pace.prompts(prompts, self.now)
        behind = self.pace.round(self.now)
        self.now += ROUND + prompts * token + late
        self.pace.read(behind, self.now)


def test_tokens_are_what_the_limit_leaves_beside_a_round():
    device = Device(Pace(0.030))
    assert device.pace.tokens() is None  # nothing is known
    device.step()
    device.step(500)
    assert device.pace.tokens() == pytest.approx(1000, abs=1)


def test_without_a_limit_there_is_none():
    device = Device(Pace(None))
    device.step()
    device.step(500)
    assert device.pace.tokens() is None


def test_a_limit_below_a_round_leaves_nothing():
    device = Device(Pace(0.005))
    device.step()
    device.step(500)
    assert device.pace.tokens() == 0


def test_slower_tokens_count_at_once_and_faster_ones_slowly():
    device = Device(Pace(0.030))
    device.step()
    device.step(500)
    device.step(500, token=1.5 * TOKEN)
    assert device.pace.tokens() == pytest.approx(667, abs=1)
    device.step(500)
    assert 667 < device.pace.tokens() < 750
    for _ in range(60):
        device.step(500)
    assert device.pace.tokens() == pytest.approx(1000, rel=0.01)


def test_a_busy_host_is_forgotten():
    device = Device(Pace(0.030))
    device.step()
    device.step(500)
    device.step(500, late=1.0)
    assert device.pace.tokens() >= 499
    for _ in range(60):
        device.step(500)
    assert device.pace.tokens() == pytest.approx(1000, rel=0.01)


def test_time_before_the_dispatch_is_nobodys():
    device = Device(Pace(0.030))
    device.step()
    device.now += 60.0  # no request
    device.step()
    device.step(500)
    assert device.pace.tokens() == pytest.approx(1000, abs=1)


def test_prompts_of_several_programs_are_one_wait():
    pace = Pace(0.030)
    pace.read(pace.round(100.0), 100.0 + ROUND)
    pace.prompts(500, 100.0 + ROUND)
    pace.prompts(500, 100.015)
    behind = pace.round(100.02)
    assert (behind.prompts, behind.began) == (1000, 100.0 + ROUND)
    pace.read(behind, 100.0 + 2 * ROUND + 1000 * TOKEN)
    assert pace.tokens() == pytest.approx(1000, abs=1)
