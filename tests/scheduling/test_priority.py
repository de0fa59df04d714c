"""Urgent requests go first, and nothing starves. Host data and a simulated clock."""

from collections import Counter

import pytest

from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.priority import AGING_SECONDS, KEPT, PriorityQueue
from jaxspec.scheduling.sequence import SequenceState, Status
from tests.support.miniature import World, make, sequence


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def by_priority(**sizes):
    clock = Clock()
    return make(by_priority=True, clock=clock, **sizes), clock


def step(s, clock=None, seconds=0.0):
    """One plan, whose results are read at once. Returns it."""
    plan = s.plan()
    assert not plan.drain
    audit(s)
    if clock is not None:
        clock.now += seconds
    for seq in plan.first + plan.rows:
        if seq.status is Status.RUNNING:
            s.append(seq, [1])
            if len(seq.tokens) == seq.limit:
                s.finish(seq)
    return plan


def test_lower_values_first_then_arrival():
    s, _ = by_priority(num_slots=9, num_pages=400)
    late, urgent, first, second = (sequence(s, [i] * 8, 1, priority=p) for i, p in enumerate((5, -2, 0, 0)))
    assert list(s.waiting) == [urgent, first, second, late] and len(s.waiting) == 4
    assert step(s).admit == [urgent, first] and step(s).admit == [second, late]


def test_an_urgent_request_takes_the_last_slot_of_the_lowest_priority():
    s, clock = by_priority(num_slots=3)
    low, lowest = (sequence(s, [i] * 4, 20, priority=1 + i) for i in range(2))
    step(s)
    later = sequence(s, [2] * 4, 20, priority=2)
    clock.now += 1  # which lifts `later`, but by less than a whole step
    step(s)
    urgent = sequence(s, [9] * 4, 20)
    plan = step(s)
    assert plan.admit == [urgent] and plan.rows == [low, lowest, urgent]
    assert later.status is Status.WAITING and s.preemptions == 1
    behind = sequence(s, [8] * 4, 20, priority=2)
    assert list(s.waiting) == [later, behind], "the queue's place of its own priority"
    s.finish(urgent)
    assert step(s).admit == [later]


def test_equal_priorities_are_never_preempted():
    s, _ = by_priority(num_slots=1)
    runs = sequence(s, [1] * 4, 20, priority=1)
    step(s)
    sequence(s, [2] * 4, 20, priority=1)
    sequence(s, [3] * 4, 20, priority=2)
    for _ in range(5):
        assert step(s).rows == [runs]


def test_pages_are_taken_for_an_urgent_request():
    s, _ = by_priority(num_slots=4, num_pages=18, prefix_cache=False)
    low = [sequence(s, [i] * 20, 5, priority=1) for i in range(2)]
    step(s)
    step(s)
    step(s)
    assert all(seq.status is Status.RUNNING for seq in low)
    urgent = sequence(s, [9] * 30, 5)
    assert step(s).admit == [urgent] and low[1].status is Status.WAITING
    assert low[0].status is Status.RUNNING, "one of them was enough"


def test_pages_run_out_for_the_lowest_priority():
    s, _ = by_priority(num_slots=2, num_pages=17, prefix_cache=False)
    low = sequence(s, [1] * 8, 40, priority=1)
    step(s)
    high = sequence(s, [2] * 8, 40)
    while s.preemptions == 0:
        step(s)
    assert low.status is Status.WAITING and high.status is Status.RUNNING


def test_unread_results_come_before_a_preemption():
    s, _ = by_priority(num_slots=1)
    low = sequence(s, [1] * 4, 20, priority=1)
    s.plan()
    urgent = sequence(s, [2] * 4, 20)
    assert s.plan().drain
    s.append(low, [1])
    s.append(low, [1])
    assert step(s).admit == [urgent]


def served(s, clock, rounds, every=10):
    """Urgent requests' rounds to their first token, one of them coming every so many rounds."""
    waits, open_ = [], {}
    for at in range(rounds):
        if at % every == 0:
            open_[sequence(s, [at % 97] * 8, 2, priority=-20)] = at
        plan = step(s, clock, 1.0)
        waits += [at - open_.pop(seq) for seq in plan.first if seq in open_]
    return waits


def test_an_urgent_request_hardly_waits_behind_a_queue_of_512():
    """Idle, a prompt of 8 tokens has its first token in the first plan."""
    s, clock = by_priority(num_slots=8, num_pages=400)
    crowd = [sequence(s, [i % 7, i % 11] * 4, 40, priority=0, client=str(i % 3)) for i in range(520)]
    step(s)
    assert len(s.waiting) > 500
    waits = served(s, clock, 200)
    assert len(waits) == 20 and max(waits) <= 2
    assert s.preemptions, "it took slots"
    assert any(seq.status is Status.FINISHED for seq in crowd), "the crowd goes on"


@pytest.mark.parametrize("gap", [1, 3])
def test_nothing_starves_under_an_endless_flood(gap):
    s, clock = by_priority(num_slots=2)
    low = sequence(s, [1] * 4, 20, priority=gap)
    waited = 0
    while low.status is not Status.FINISHED:
        while len(s.waiting) < 6:
            sequence(s, [2] * 4, 10)
        step(s, clock, 1.0)
        waited += 1
    assert gap * AGING_SECONDS <= waited <= gap * AGING_SECONDS + 120
    assert low.preemptions <= 1, "lifted, it isn't preempted by the flood any more"


def test_time_that_a_request_runs_does_not_lift_it():
    s, clock = by_priority(num_slots=1)
    low = sequence(s, [1] * 4, 20, priority=1)
    for _ in range(3):
        step(s, clock, AGING_SECONDS)
    urgent = sequence(s, [2] * 4, 2)
    assert step(s).admit == [urgent] and low.since == clock.now


def test_clients_have_equal_shares_within_a_priority():
    s, _ = by_priority(num_slots=60, num_pages=2000, context_length=200)
    for client, priority, count in (("a", 1, 20), ("b", 1, 20), ("c", 0, 4)):
        for i in range(count):
            sequence(s, [ord(client), i] * 8, 1, client=client, priority=priority)
    had = Counter(chunk.seq.client for _ in range(20) for chunk in step(s).prefill)
    assert had == {"c": 4, "a": 8, "b": 8}


def test_shares_of_priorities_that_nobody_has_are_dropped():
    queue = PriorityQueue(Clock())
    for i in range(3 * KEPT):
        queue.add(SequenceState([1], 1, 2, priority=i))
        queue.remove(queue.next((), True))
    assert len(queue._shares) <= KEPT and not len(queue) and not list(queue)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_any_mix_of_operations(lag):
    """Whoever is preempted, pages and slots balance, and texts are as without."""
    seen = Counter()
    for seed in range(6):
        world = World(seed, lag, clients=2, priorities=3, by_priority=True, clock=Clock(), rounds=4)
        for _ in range(60):
            for _ in range(world.random.choice([0, 0, 0, 1, 1, 4])):
                if len(world.live()) < 12:
                    world.add()
            world.disturb()
            world.step()
        while world.scheduler.unfinished:
            world.step()
        seen += world.seen
    assert seen["preempted"] > 10 and seen["done"] > 100
    assert lag == 0 or seen["drained"]
