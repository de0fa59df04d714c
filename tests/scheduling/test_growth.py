"""The scheduler, when pages run short or several rounds could run: who grows, who gives way, what is evicted."""

from collections import deque

import pytest

from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.sequence import Plan, Status
from tests.scheduling.test_scheduler import read
from tests.support.miniature import make, sequence


def test_admission_leaves_a_page_for_each_that_runs():
    s = make(num_pages=10, context_length=24)
    first = sequence(s, [1] * 3, 4)  # 2 + 6 positions: 2 pages
    s.plan()
    assert (len(first.pages), s.free_pages) == (2, 7)
    second = sequence(s, [2] * 23, 1)  # 22 + 6 positions: all 7
    assert s.plan().admit == []
    s.finish(first)
    assert s.plan().admit == [second]


def crowd(num_pages=16):
    """Three running sequences in a pool that can't take all of them to their limits."""
    s = make(num_pages=num_pages, width=2, context_length=40, chunk_tokens=24)
    seqs = [sequence(s, [i] * 8, 30) for i in range(3)]
    plan = s.plan()
    assert plan.rows == seqs
    return s, seqs, plan


def test_youngest_gives_way_and_nothing_is_lost():
    s, (first, second, third), plan = crowd()
    while not third.preemptions:
        assert not plan.drain
        read(s, plan, [5, 6])
        plan = s.plan()
        audit(s)
    assert plan.rows == [first, second]
    assert (third.status, third.epoch, third.slot, third.computed) == (Status.WAITING, 1, -1, 0)
    tokens = list(third.tokens)
    assert tokens == [2] * 8 + [5] + [5, 6] * ((len(tokens) - 9) // 2)
    assert s.preemptions == 1
    sequence(s, [9], 1)
    assert next(iter(s.waiting)) is third
    s.finish(first)
    plan = s.plan()
    assert third in plan.admit
    assert third.tokens == tokens
    assert third.cached == 0  # of its first admission
    chunk = plan.prefill[0]
    assert chunk.start % s.page_size == 0 < chunk.start  # most of it was still in the tree
    assert chunk.start + chunk.count == len(tokens) - 1  # what was committed; rounds go on from there
    assert third in plan.rows and third not in plan.first


def test_preempts_as_many_as_it_takes():
    s, (first, second, third), _ = crowd(13)
    for seq, gained in ((first, 27), (second, 0), (third, 0)):
        s.append(seq, [1])
        s.append(seq, [1] * gained)
    plan = s.plan()
    assert (plan.admit, plan.rows, list(s.waiting)) == ([], [first], [second, third])
    assert s.preemptions == 2
    audit(s)


def test_drains_before_it_preempts():
    s, seqs, plan = crowd()
    unread = deque([plan])
    while not (plan := s.plan()).drain:
        unread.append(plan)
        read(s, unread.popleft(), [5, 6])
    assert plan == Plan([], [], [], [], drain=True)
    assert s.preemptions == 0
    assert [seq.in_flight for seq in seqs] == [1, 1, 1]
    audit(s)
    assert s.plan().drain  # nothing changes until the results are read
    read(s, unread.popleft(), [5, 6])
    assert not unread
    assert not s.plan().drain
    audit(s)


def test_unfinished_prompt_is_preempted_first():
    s = make(num_pages=15, width=2, context_length=40, chunk_tokens=4)
    first = sequence(s, [1] * 4, 30)
    read(s, s.plan(), [1])
    second = sequence(s, [2] * 36, 1)
    while not s.preemptions:
        plan = s.plan()
        assert plan.rows == [first]
        read(s, plan, [1, 1])
    assert (second.status, second.preemptions) == (Status.WAITING, 1)


def test_growth_takes_pages_for_the_round_in_flight_too():
    s = make(width=4)
    seq = sequence(s, [1] * 2, 40)
    for in_flight in range(4):
        plan = s.plan()
        assert plan.rows == [seq]
        assert len(seq.pages) * s.page_size >= 2 + (in_flight + 1) * s.width


def test_pages_are_for_the_last_rounds_lookahead_and_the_tokens_of_those_before():
    s = make(page_size=1, num_pages=60, lookahead=10)
    seq = sequence(s, [1] * 2, 30)
    for in_flight in range(4):
        s.plan()
        assert len(seq.pages) == 2 - 1 + (in_flight + 1) * s.width + s.lookahead


def test_no_page_is_given_beyond_the_limit():
    s = make(width=4, rounds=5)
    seq = sequence(s, [1] * 2, 7)
    for _ in range(4):
        s.plan()
    assert len(seq.pages) * s.page_size == 16  # limit + width = 13


def test_several_rounds_run_when_nobody_can_be_taken_in():
    s = make(rounds=5, num_slots=3)
    first, second = sequence(s, [1] * 9, 30), sequence(s, [2] * 12, 30)
    plan = s.plan()
    assert (plan.rows, plan.rounds) == ([first], 1)  # the second prompt is unfinished
    read(s, plan)
    plan = s.plan()
    assert (plan.first, plan.rows, plan.rounds) == ([second], [first, second], 5)
    assert (first.in_flight, second.in_flight) == (5, 6)
    for seq in (first, second):
        assert len(seq.pages) * s.page_size >= len(seq.tokens) - 1 + seq.in_flight * s.width
    assert s.plan().rounds == 5
    audit(s)


def test_several_rounds_run_while_those_who_wait_have_no_slot():
    s = make(rounds=5, num_slots=1)
    sequence(s, [1], 30)
    assert s.plan().rounds == 5
    sequence(s, [2], 30)
    assert s.plan().rounds == 5


def test_one_round_runs_while_somebody_waits_for_pages():
    s = make(rounds=5, num_slots=2, num_pages=10)
    sequence(s, [1], 12)
    assert s.plan().rounds == 5
    waiting = sequence(s, [2] * 15, 18)
    plan = s.plan()
    assert (plan.admit, plan.rounds) == ([], 1)
    s.finish(waiting)


def test_the_rounds_of_a_program_are_read_together():
    s = make(rounds=5)
    seq = sequence(s, [1], 30)
    plan = s.plan()
    s.append(seq, [1])
    s.append(seq, [1] * 7, plan.rounds)
    assert (seq.in_flight, len(seq.tokens)) == (0, 9)
    s.plan()
    with pytest.raises(ValueError, match=r"6 unread rounds of .* aren't in flight"):
        s.append(seq, [1], 6)


def test_one_round_runs_near_the_end_of_the_last():
    s = make(rounds=5)
    sequence(s, [1], 3)
    long = sequence(s, [1], 12)
    plan = s.plan()
    assert (len(plan.rows), plan.rounds) == (2, 5)  # most rounds are nobody's but the second's
    read(s, plan)
    assert len(long.tokens) == 7
    plan = s.plan()
    assert (plan.rows, plan.rounds) == ([long], 5)
    read(s, plan)
    plan = s.plan()
    assert (plan.rows, plan.rounds) == ([long], 1)


def test_one_round_runs_when_pages_for_more_are_not_free():
    s = make(rounds=5, num_pages=14, context_length=50)
    first, second = sequence(s, [1] * 8, 30), sequence(s, [2] * 8, 30)
    assert s.plan().rounds == 1  # 7 positions and 6 rounds of 3 would be 7 pages for each, and there are 13
    assert (len(first.pages), len(second.pages)) == (4, 4)
    s.finish(second)
    assert s.plan().rounds == 5
    audit(s)


def test_growth_evicts_cached_pages_before_it_preempts():
    s = make(num_pages=13, width=2, context_length=40)
    old = sequence(s, [8] * 16)
    read(s, s.plan())
    s.finish(old)
    assert s.cached_pages == 4
    seq = sequence(s, [1] * 2, 38)
    while len(seq.tokens) < 39:
        read(s, s.plan(), [1])
    assert s.preemptions == 0
    assert (len(seq.pages), s.cached_pages) == (10, 2)


def test_admission_evicts_no_more_than_it_lacks():
    s = make(num_pages=13, width=2, context_length=40)
    old = sequence(s, [8] * 16)
    s.plan()
    s.finish(old)
    assert (s.free_pages, s.cached_pages) == (9, 3)
    sequence(s, [1] * 35, 5, score=True)  # 34 + 4 positions: 10 pages
    s.plan()
    assert (s.free_pages, s.cached_pages) == (0, 2 + 2)
    audit(s)


def test_flush_keeps_pages_in_use():
    s = make()
    seq = sequence(s, range(20), 20)
    read(s, s.plan())
    old = sequence(s, [5] * 12)
    s.plan()
    s.finish(old)
    held = list(seq.pages)
    assert s.flush() == s.cached_pages + 4 + 2
    assert (s.cached_pages, seq.pages) == (0, held)
    s.plan()
    s.finish(seq)
    assert s.cached_pages == 0  # what was computed before the flush isn't published after it
    assert s.free_pages == 32
    audit(s)
