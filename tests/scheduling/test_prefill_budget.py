"""How many prompt tokens fit between two rounds: learned from a device that takes 10 ms a round, 2 ms a program of
prompts and 20 us a token."""

import pytest

from jaxspec.scheduling.prefill_budget import PrefillBudget

ROUND, PROGRAM, TOKEN = 0.010, 0.002, 20e-6
BLOCK, SIZES = 125, (1, 2, 4, 8)


class Device:
    """Runs what is dispatched at once; the engine reads each round when it is done."""

    def __init__(self, most):
        self.budget, self.now = PrefillBudget(most, BLOCK, SIZES), 100.0

    def step(self, *prompts, slower=1.0, late=0.0):
        for tokens in prompts:
            self.budget.prompts(tokens // BLOCK, self.now)
        dispatched = self.budget.round(self.now)
        self.now += ROUND + sum(PROGRAM + tokens * TOKEN * slower for tokens in prompts) + late
        self.budget.read(dispatched, self.now)

    def serve(self, steps=60, **how):
        """Prompts always wait: each program is as large as the limit allows. How large they were."""
        ran = []
        for _ in range(steps):
            ran.append(self.budget.tokens() or BLOCK * SIZES[-1])
            self.step(ran[-1], **how)
        return ran


def test_the_largest_program_that_fits_beside_a_round():
    device = Device(0.030)  # 1000 tokens take 22 ms, 500 12
    assert device.budget.tokens() is None  # nothing is known
    device.step()
    assert device.serve()[2:] == [500] * 58
    device = Device(0.033)
    device.step()
    assert device.serve() == [1000] * 60


def test_a_high_limit_leaves_room_for_several_programs():
    device = Device(0.080)
    device.step()
    assert device.budget.token == 0
    device.step(1000)
    assert device.budget.tokens() == 3000
    assert device.budget.token == pytest.approx(22e-6), "its share of the program is counted"


def test_small_programs_say_little_of_larger_ones():
    device = Device(0.030)
    device.step()
    for _ in range(20):
        device.step(125)  # 36 us a token
    assert device.serve()[-1] == 500


def test_without_a_limit_there_is_none():
    device = Device(None)
    device.step()
    device.step(500)
    assert device.budget.tokens() is None


def test_the_time_that_pictures_take_is_no_prompts_and_no_rounds():
    """They are read beside a round, or beside a round and its prompts."""
    device = Device(0.033)
    device.step()
    device.step(500)
    before = device.budget.tokens(), device.budget.token, dict(device.budget._rounds)
    for pictures, prompts in ((1, ()), (2, (500,)), (4, (1000, 500))):
        for tokens in prompts:
            device.budget.prompts(tokens // BLOCK, device.now)
        dispatched = device.budget.round(device.now, 1, pictures)
        device.now += 1.0
        assert not dispatched.alone
        device.budget.read(dispatched, device.now)
    assert (device.budget.tokens(), device.budget.token, device.budget._rounds) == before
    assert device.budget.round(device.now, 1, 4).alone


def test_a_limit_below_a_round_leaves_nothing():
    device = Device(0.005)
    device.step()
    device.step(500)
    assert device.budget.tokens() == 0


def test_a_size_that_is_too_slow_now_is_tried_again():
    device = Device(0.033)
    device.step()
    assert device.serve()[-1] == 1000
    assert device.serve(slower=1.3)[2:] == [500] * 58
    later = device.serve(steps=400)
    assert later[-1] == 1000 and 100 < later.count(500) < 300


def test_a_size_that_never_fits_is_tried_seldom():
    device = Device(0.030)
    device.step()
    assert device.serve(steps=1000).count(1000) <= 12


def test_a_busy_host_is_forgotten():
    device = Device(0.040)
    device.step()
    device.step(1000)
    device.step(1000, late=1.0)
    assert device.budget.tokens() < 1000  # for now: it counts as twice what was expected
    assert device.serve(steps=800)[-1] == 1000


def test_time_before_the_dispatch_is_nobodys():
    device = Device(0.033)
    device.step()
    device.now += 60.0  # no request
    device.step()
    device.step(1000)
    assert device.budget.tokens() == 1000


def test_prompts_of_several_programs_are_one_wait():
    budget = PrefillBudget(0.033, BLOCK, SIZES)
    budget.read(budget.round(100.0), 100.0 + ROUND)
    budget.prompts(4, 100.0 + ROUND)
    budget.prompts(3, 100.015)  # and a block of padding
    dispatched = budget.round(100.02)
    assert dispatched == ((4, 4), 100.0 + ROUND, 1, False)
    budget.read(dispatched, 100.0 + 2 * ROUND + 2 * (PROGRAM + 500 * TOKEN))
    assert budget.tokens() == 500 + 500  # of the size that is known, each takes half of the wait


def test_a_round_that_took_all_of_the_time_is_no_measure():
    device = Device(0.033)
    device.step()
    device.step(500, late=-1.0)
    device.step(500)
    device.step(500)
    assert device.serve()[-1] == 1000


def test_a_round_behind_prompts_is_not_taken_for_several():
    """While no prompt waits, programs have several rounds, which take longer than most prompts do."""
    budget, now = PrefillBudget(0.033, BLOCK, SIZES), 100.0
    for rounds, prompts in [(8, ()), (8, ()), *[(1, (8,))] * 3, (8, ())]:
        for blocks in prompts:
            budget.prompts(blocks, now)
        dispatched = budget.round(now, rounds)
        now += (PROGRAM + 1000 * TOKEN if prompts else 0.0) + rounds * ROUND
        budget.read(dispatched, now)
    assert budget.token == pytest.approx(22e-6, rel=0.01)
    assert budget.tokens() == 1000, "beside one round"


def test_a_round_that_was_seen_long_ago_takes_its_share_of_several():
    budget, now = PrefillBudget(1.0, BLOCK, SIZES), 100.0
    for rounds, took in ((1, 0.002), (8, 0.080)):
        dispatched = budget.round(now, rounds)
        now += took
        budget.read(dispatched, now)
    assert budget._takes(1) == pytest.approx(0.010) and budget._takes(8) == pytest.approx(0.080)
