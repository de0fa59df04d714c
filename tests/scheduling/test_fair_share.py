"""Clients have prompts computed in equal shares, whatever one of them sends."""

from collections import Counter

import pytest

from jaxspec.scheduling.fair_share import KEPT, FairShare
from jaxspec.scheduling.sequence import SequenceState, Status
from tests.support.miniature import make, sequence


def served(scheduler, plans):
    """By client, prompt tokens of so many plans."""
    had = Counter()
    for _ in range(plans):
        for chunk in scheduler.plan().prefill:
            had[chunk.seq.client] += chunk.count
    return had


def test_a_long_prompt_shares_its_programs_with_other_clients():
    s = make(num_slots=9, num_pages=400, context_length=1000)
    long = sequence(s, [1] * 800, 1, client="a")
    assert s.plan().prefill[0].count == 16
    short = [sequence(s, [2, i] * 8, 1, client="b") for i in range(8)]
    had = served(s, 8)
    assert had == {"a": 4 * 16, "b": 4 * 16}
    assert [seq.status is Status.WAITING for seq in short] == [False] * 4 + [True] * 4, "a client's own are in order"
    had = served(s, 8)
    assert had == {"a": 4 * 16, "b": 4 * 16} and s.prefilling == [long]
    assert served(s, 2) == {"a": 32}, "nobody else is there"


def test_a_prompt_that_is_scored_counts_by_programs():
    s = make(num_slots=9, num_pages=400, context_length=1000)
    scored = sequence(s, [1] * 400, 1, client="a", score=True)
    s.plan()
    for i in range(6):
        sequence(s, [2, i] * 8, 1, client="b")
    plans = [[chunk.seq.client for chunk in s.plan().prefill] for _ in range(10)]
    assert plans == [["a"], ["b"]] * 5
    assert scored.computed == 6 * s.score_tokens


def test_each_of_many_clients_gets_its_turn():
    """A crowd of one client's requests, ahead of them all, holds nobody up for more than a program."""
    s = make(num_slots=40, num_pages=400, context_length=200)
    for i in range(20):
        sequence(s, [1, i] * 16, 1, client="a")
    s.plan()
    late = [sequence(s, [2, i] * 4, 1, client=f"late {i}") for i in range(6)]
    plans = 0
    while any(seq.status is not Status.RUNNING for seq in late):
        s.plan()
        plans += 1
    assert plans == 4  # one that was a's turn, then 6 prompts of 8 tokens, two in a program of 16


def test_who_was_away_has_saved_nothing():
    share = FairShare()

    def new(client):
        seq = SequenceState([1], 1, 2, client=client)
        share.add(seq)
        return seq

    def take(tokens):
        seq = share.next((), True)
        share.remove(seq)
        share.charge(seq, tokens)
        return seq.client

    for client in "aaaabbbb":
        new(client)
    assert [take(10) for _ in range(4)] == ["a", "b", "a", "b"]
    assert [take(100), take(10)] == ["a", "b"]
    for _ in range(4):
        new("c")  # starts at 75, half of what the two have had, behind b, which has had 30, and before a with its 120
    assert [take(10) for _ in range(4)] == ["b", "c", "c", "c"]
    assert len(share) == 2 and [seq.client for seq in share] == ["a", "c"]


def test_who_was_preempted_goes_first():
    share = FairShare()
    seqs = [SequenceState([1], 1, 2, client=client) for client in "abab"]
    for seq in seqs:
        share.add(seq)
        share.charge(seq, 10 if seq.client == "a" else 0)
    back = seqs[2]
    share.remove(back)
    back.preemptions = 1
    share.set_back(back)
    assert share.next((), True) is back and next(iter(share)) is back
    assert share.next([seqs[1]], True) is back and share.next([seqs[1]], False) is seqs[1]
    assert share.next([back], True) is back
    assert FairShare().next((), True) is None


def test_tags_of_clients_that_left_are_dropped():
    share = FairShare()
    for i in range(3 * KEPT):
        seq = SequenceState([1], 1, 2, client=str(i))
        share.add(seq)
        share.remove(share.next((), True))
        share.charge(seq, 5)
    assert len(share._had) <= KEPT + 1 and not share._queues


@pytest.mark.parametrize("admits", [True, False])
def test_a_prompt_goes_on_where_nobody_else_can_be_admitted(admits):
    s = make(num_slots=2 if admits else 1, num_pages=60, context_length=200)
    sequence(s, [1] * 100, 1, client="a")
    s.plan()
    sequence(s, [2] * 100, 1, client="b")
    assert served(s, 4) == ({"a": 32, "b": 32} if admits else {"a": 64})
