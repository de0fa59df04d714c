"""The scheduler by itself, and against a device in miniature that checks every program."""

import time
from collections import Counter

import numpy as np
import pytest

from jaxspec.config.request import RequestError
from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.sequence import Chunk, Plan, SequenceState, Status
from tests.support.miniature import World, make, sequence
from tests.support.sample import one_in


def tokens_of(plan):
    return [(chunk.start, chunk.count) for chunk in plan.prefill]


def read(scheduler, plan, tokens=(1,)):
    for seq in plan.first:
        scheduler.append(seq, list(tokens[:1]))
    for _ in range(plan.rounds):
        for seq in plan.rows:
            scheduler.append(seq, list(tokens[: seq.limit - len(seq.tokens)]))


WORLDS = {
    "roomy": dict(),
    "tight": dict(num_pages=19, page_size=3, context_length=48),
    "one page": dict(num_pages=59, page_size=1, width=4, num_slots=6, context_length=50),
    "plain": dict(width=1, num_pages=14),
    "slots": dict(num_slots=2, chunk_tokens=4, block=4, score_tokens=4),
    "wide": dict(width=6, num_pages=22, chunk_tokens=10, block=3, context_length=60),
    "several rounds": dict(rounds=4, context_length=60),
    "several rounds for one": dict(rounds=2, rounds_for=1, context_length=60),
    "several, tight": dict(rounds=3, num_pages=19, page_size=3, context_length=48, num_slots=2),
    "trees": dict(lookahead=11, num_pages=22),
    "trees, several rounds": dict(width=2, lookahead=5, rounds=4, page_size=3, num_slots=2),
    "no cache": dict(num_pages=20, context_length=50, prefix_cache=False),
    "states": dict(snapshots=range(5, 21), snapshot_interval=4),
    "states, tight": dict(snapshots=range(5, 8), snapshot_interval=6, num_pages=19, page_size=3, context_length=48),
    "one snapshot": dict(snapshots=[9], snapshot_interval=12, num_pages=30, page_size=2, block=3, chunk_tokens=12),
    "no snapshots": dict(snapshots=(), num_pages=22),
    "newest by slot": dict(recent=6, num_pages=40),
    "newest by slot, tight": dict(recent=3, num_pages=19, page_size=3, context_length=48),
    "newest by slot, states": dict(recent=7, snapshots=range(5, 21), snapshot_interval=4),
    "crowd": dict(num_slots=12, num_pages=70, chunk_tokens=8, held_tokens=24),
    "replays": dict(replays=True, num_pages=19, page_size=3, context_length=48),
    "replays, several rounds": dict(replays=True, rounds=3, num_pages=19, page_size=3, context_length=48),
    "clients": dict(clients=3, num_pages=45),
    "clients, tight": dict(clients=2, num_pages=19, page_size=3, context_length=48, rounds=3),
    "clients, states": dict(clients=3, snapshots=range(5, 21), snapshot_interval=4, chunk_tokens=8),
    "devices": dict(devices=2, num_pages=66),
    "devices, tight": dict(devices=2, num_pages=38, page_size=3, context_length=48, rounds=3),
    "devices, states": dict(devices=2, num_pages=50, snapshots=range(5, 21), snapshot_interval=4),
    "crowd, tight": dict(num_slots=11, num_pages=30, page_size=3, context_length=48, held_tokens=99),
}
SEEN = Counter()


@pytest.mark.parametrize("name,lag", one_in(3, list(WORLDS), [0, 1, 2]))
def test_any_mix_of_operations(name, lag, monkeypatch):
    sizes = WORLDS[name]
    monkeypatch.setattr("jaxspec.scheduling.scheduler.CROWD", 3)
    for seed in range(6):
        world = World(seed, lag, **sizes)
        for _ in range(60):
            for _ in range(world.random.choice([0, 0, 0, 1, 1, 4])):
                if len(world.live()) < 12:
                    world.add()
            world.disturb()
            if "held_tokens" in sizes:
                world.scheduler.between = world.random.choice([None, None, 0, 6, 40])
            world.step()
        steps = 0
        while world.scheduler.unfinished:
            world.step()
            steps += 1
            assert steps < 1000, "stuck"
        world.scheduler.flush()
        audit(world.scheduler)
        assert world.scheduler.free_pages == sum(pool.num_pages - 1 for pool in world.scheduler.pools)
        SEEN.update(world.seen)
        SEEN[f"drained at lag {lag}"] += world.seen["drained"]


def test_the_mix_had_everything_in_it():
    """The test before this one proves little of what never happened in it."""
    if not SEEN:
        pytest.skip("runs after test_any_mix_of_operations")
    aborted = [f"abort {state}" for state in ("waiting", "prefill", "running")]
    events = ("done", "shared", "scored", "several rounds", "preempted", "drained", "stale result", "drafter caught up")
    for event in (*events, "unfinished prompts of several", "held", "snapshots", "gone on from a snapshot", *aborted):
        assert SEEN[event] > 10, (event, SEEN)
    assert not SEEN["drained at lag 0"]


def test_first_token_and_first_round_come_with_the_last_chunk():
    s = make()
    seq = sequence(s, range(22))
    assert s.plan() == Plan([seq], [Chunk(seq, 0, 16)], [], [])
    assert s.plan() == Plan([], [Chunk(seq, 16, 6)], [seq], [seq])
    assert (seq.status, seq.in_flight, seq.computed) == (Status.RUNNING, 2, 22)
    assert s.plan() == Plan([], [], [], [seq])
    assert s.table[seq.slot, : len(seq.pages)].tolist() == seq.pages


def test_a_cached_prompt_computes_what_a_drafter_keeps_by_slot():
    s = make(recent=6)
    for start in (0, 16, 16):
        seq = sequence(s, range(24), 1)
        assert s.plan().prefill[0].start == start, "24 less 6, in whole pages"
        s.plan()
        s.append(seq, [1])
        s.finish(seq)
    assert s.cached_pages == 5


def test_a_prompt_of_one_token_starts_like_any_other():
    s = make()
    seq = sequence(s, [7])
    assert s.plan() == Plan([seq], [Chunk(seq, 0, 1)], [seq], [seq])


def test_several_rounds_are_for_few_requests():
    s = make(rounds=2, rounds_for=1)
    sequence(s, [7], 9), sequence(s, [8], 5)
    plans = [s.plan()]
    while plans[-1].rows:
        read(s, plans[-1])
        plans.append(s.plan())
    assert [(len(plan.rows), plan.rounds) for plan in plans] == [(2, 1), (2, 1), (2, 1), (2, 1), (1, 2), (1, 2), (0, 1)]


def test_no_round_is_planned_for_what_must_have_ended_by_then():
    s = make(width=1)
    one, three = sequence(s, [7], 1), sequence(s, [8], 3)
    plans = [s.plan() for _ in range(4)]
    assert [plan.rows for plan in plans] == [[three], [three], [], []]
    assert plans[0].first == [one, three]
    assert [seq.in_flight for seq in (one, three)] == [1, 3]


def test_prompts_share_a_program_in_whole_blocks():
    s = make()
    first, second, third = (sequence(s, [i] * n) for i, n in enumerate((6, 4, 20)))
    plan = s.plan()
    assert plan.prefill == [Chunk(first, 0, 6), Chunk(second, 0, 4), Chunk(third, 0, 4)]  # 2 + 1 + 1 blocks of 4
    assert plan.first == plan.rows == [first, second]
    assert [chunk.seq for chunk in s.plan().prefill] == [third]


def test_scored_prompts_travel_alone_and_whole():
    s = make()
    plain = sequence(s, [1] * 9)
    scored = sequence(s, [2] * 13, score=True)
    after = sequence(s, [2] * 13)
    assert s.plan().prefill == [Chunk(plain, 0, 9)]
    assert s.plan().prefill == [Chunk(scored, 0, 8)]
    assert s.plan().prefill == [Chunk(scored, 8, 5)]
    assert scored.cached == 0
    assert s.plan().prefill == [Chunk(after, 12, 1)]
    assert after.cached == 12
    audit(s)


def test_equal_prompts_share_pages_within_one_plan():
    s = make()
    first, second = sequence(s, range(10)), sequence(s, range(10))
    plan = s.plan()
    assert tokens_of(plan) == [(0, 10), (8, 2)]
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert (first.cached, second.cached) == (0, 8)


def test_pages_are_shared_where_all_that_they_depend_on_is_the_same():
    """An image's rows have the tokens of any other's, and an adapter's keys and values are nobody else's."""
    s = make(num_pages=60)
    kinds = {}, {"salt": 7}, {"overridden": {2: 2**63}}, {"overridden": {9: 5}}, {"salt": 7, "overridden": {9: 5}}
    for shared in ([0, 0, 0, 8, 8], [12] * 5):
        for kind, cached in zip(kinds, shared, strict=True):
            seq = sequence(s, range(13), **kind)
            read(s, s.plan())
            s.finish(seq)
            assert seq.cached == cached, kind
    audit(s)


def test_the_last_token_of_a_cached_prompt_is_computed_again():
    s = make()
    first = sequence(s, range(12))
    read(s, s.plan())
    s.finish(first)
    second = sequence(s, range(12))
    assert s.plan().prefill == [Chunk(second, 8, 4)]  # of three full pages, the newest token's isn't taken over
    third = sequence(s, range(9))
    assert s.plan().prefill == [Chunk(third, 8, 1)]


def test_no_prefix_cache():
    s = make(prefix_cache=False)
    first, second = sequence(s, range(10)), sequence(s, range(10))
    s.plan()
    assert not set(first.pages) & set(second.pages)
    s.finish(first)
    assert s.cached_pages == second.cached == 0


@pytest.mark.parametrize(("length", "published"), [(5, 1), (9, 1), (10, 2), (11, 2), (12, 2), (13, 2), (14, 3)])
def test_finish_publishes_all_but_the_newest_committed_position(length, published):
    """N tokens have KV at positions 0..N-2, and the drafter may lack N-2; beyond the prompt it was never prefilled."""
    s = make()
    seq = sequence(s, range(5), 20)
    s.append(s.plan().rows[0], list(range(5, length)))
    s.finish(seq)
    assert s.cached_pages == published
    audit(s)


def test_finish_twice_and_in_flight():
    s = make()
    seq = sequence(s, range(9))
    s.plan()
    s.plan()
    s.finish(seq)
    assert (seq.status, seq.epoch, seq.in_flight, seq.slot, seq.pages) == (Status.FINISHED, 1, 0, -1, [])
    assert not s.table.any()
    s.finish(seq)
    assert (seq.epoch, s.unfinished) == (1, 0)
    with pytest.raises(ValueError, match=r"unread rounds of .* aren't in flight"):
        s.append(seq, [1])
    audit(s)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_queue_is_strict(prefix_cache):
    """A small request doesn't overtake a big one that waits for pages."""
    s = make(num_pages=13, context_length=40, prefix_cache=prefix_cache)
    first = sequence(s, [1] * 16)
    s.plan()
    big, small = sequence(s, [2] * 24, 10), sequence(s, [3] * 2, 1)
    for _ in range(3):
        plan = s.plan()
        assert (plan.admit, plan.rows) == ([], [first])
        read(s, plan)
    s.finish(first)
    assert s.plan().admit == [big]
    assert list(s.waiting) == [small]


@pytest.mark.parametrize("size", [4, 3])
def test_a_prompt_that_fills_the_context_is_scored(size):
    """Its one token needs no position: no round follows it."""
    s = make(context_length=30, page_size=size, num_pages=-(-33 // size) + 1)
    with pytest.raises(RequestError, match=r"requested 31 tokens \(30 in the prompt, 1 in the completion\)"):
        s.check(30, 1)
    with pytest.raises(RequestError, match="requested 32 tokens"):
        s.check(31, 1, no_tokens=True)
    assert (s.check(30, 1, no_tokens=True), s.check(29, 1, no_tokens=True)) == (31, 30)
    seq = SequenceState([1] * 30, 30, 31, score=True)
    s.add(seq)
    plans = []
    while not seq.in_flight:
        plans.append(s.plan())
        audit(s)
    assert sum(chunk.count for plan in plans for chunk in plan.prefill) == 30
    assert (plans[-1].first, plans[-1].rows, s.plan().rows) == ([seq], [], [])
    assert len(seq.pages) <= s.pages_per_seq
    s.append(seq, [7])
    s.finish(seq)
    audit(s)


def test_head_of_the_queue_is_matched_again_only_when_that_could_help():
    s = make(num_pages=13, context_length=40)
    first = sequence(s, [1] * 16)
    s.plan()
    second, third = sequence(s, [2] * 28), sequence(s, [3] * 2, 1)
    matched, match = [], s.trees[0].match
    s.trees[0].match = lambda *arguments: matched.append(1) or match(*arguments)
    for _ in range(5):
        s.plan()
        s.append(first, [1])
    assert len(matched) == 1
    s.finish(second)
    assert s.plan().admit == [third]


def test_check_gives_the_limit():
    s = make(num_pages=13)  # 48 positions, less 3 of lookahead
    assert s.check(10, 20) == 30
    assert s.check(10, None) == 45
    assert s.check(44, 1) == 45
    assert make().check(10, None) == make().check(63, 1) == 64


@pytest.mark.parametrize("arguments,param,words", [
    ((0, 5), "prompt", "prompt is empty"),
    ((64, 1), "prompt", "context length is 64 tokens. However, you requested 65 tokens (64 in the prompt, 1 in the"),
    ((64, None), "prompt", "requested 65 tokens"),
    ((60, 5), "max_tokens", "requested 65 tokens (60 in the prompt, 5 in the completion)"),
    ((30, 16), "max_tokens", "30 prompt tokens + 16 new tokens + 3 of lookahead = 13 pages of 4 tokens"),
    ((45, None), "prompt", "and the page pool has 12"),
    ((30, None, 16), "min_tokens", "leaves room for 15: at most 45 in all"),
])  # fmt: skip
def test_check_says_why_not(arguments, param, words):
    with pytest.raises(RequestError) as error:
        make(num_pages=13).check(*arguments)
    assert words in str(error.value)
    assert error.value.param == param


def test_add_takes_only_what_check_lets_pass():
    s = make(num_pages=13)
    for tokens, limit in (([], 5), ([1] * 5, 5), ([1], 65), ([1], 46)):
        with pytest.raises(ValueError, match=r"take the limit from check\(\)"):
            s.add(SequenceState(tokens, len(tokens), limit))
    seq = sequence(s, [1])
    s.plan()
    with pytest.raises(ValueError, match="this one is running"):
        s.add(seq)


def test_outgrowing_the_limit_is_an_error():
    s = make()
    seq = sequence(s, [1], 5)
    s.plan()
    with pytest.raises(ValueError, match=r"6 more tokens would take .* past its limit"):
        s.append(seq, [1] * 6)


def test_senseless_sizes():
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        make(num_slots=0)
    with pytest.raises(ValueError, match=r"chunk_tokens \(3\) must hold at least one block of 4"):
        make(chunk_tokens=3)


@pytest.mark.parametrize("fault", ["leaked page", "page held twice", "leaked slot", "stale table", "page of another"])
def test_audit_notices(fault):
    s = make()
    first, second = sequence(s, [1] * 6), sequence(s, [2] * 6)
    s.plan()
    audit(s)
    if fault == "leaked page":
        first.pages.pop()
    elif fault == "page held twice":
        s.pools[0].retain(first.pages[:1])
    elif fault == "leaked slot":
        s._free_slots.pop()
    elif fault == "stale table":
        s.table[-1, 0] = 1
    else:
        first.pages[0], second.pages[1] = second.pages[1], first.pages[1]
    with pytest.raises(RuntimeError, match="don't balance"):
        audit(s)


def test_planning_costs_about_a_microsecond_per_sequence():
    s = make(num_slots=256, num_pages=256 * 70, page_size=16, context_length=1024, chunk_tokens=4096)
    seqs = [sequence(s, np.arange(i, i + 10).tolist(), 900) for i in range(256)]
    while s.waiting:
        s.plan()
        for seq in s.running:
            seq.in_flight = 0
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        plan = s.plan()
        for seq in plan.rows:
            s.append(seq, [1, 2])
        best = min(best, time.perf_counter() - start)
    assert len(plan.rows) == len(seqs) == 256
    assert best < 0.001  # measured: 0.07 ms


def test_snapshots_stand_where_they_will_be_wanted():
    """At every interval, at the last published page, and where a prompt leaves what the tree knows."""
    s = make(snapshots=range(5, 25), snapshot_interval=5, num_pages=65)  # an interval is whole pages and blocks: 8
    assert s.snapshot_interval == 8
    first = sequence(s, range(30))
    chunks = s.plan().prefill + s.plan().prefill
    assert [chunk.keeps for chunk in chunks] == [((8, 5), (16, 6)), ((24, 7), (28, 8))]
    assert chunks[0].blocks(16) == [(0, 8, -1, 5), (8, 8, first.slot, 6)]
    second = sequence(s, [*range(22), *[99] * 9])
    (chunk, *_) = s.plan().prefill
    assert (chunk.start, chunk.source, second.cached) == (16, 6, 16)
    # It parts from the first one at 20. Of its own pages behind 16 none is published: the first one's are in use.
    assert [point for point, _ in chunk.keeps] == [20]
    third = sequence(s, [*range(22), 7])
    assert (s.plan().prefill[0].start, third.cached) == (20, 20)
    audit(s)


# -- rounds and prompts in turn ----------------------------------------------------------------------------------------


def burst(count=16, **sizes):
    """`count` prompts of a block each come at once, of which a program holds two."""
    s = make(num_slots=16, num_pages=130, block=8, chunk_tokens=16, held_tokens=64, **sizes)
    return s, [sequence(s, [i] * 8) for i in range(count)]


def test_rounds_wait_while_a_crowd_comes():
    s, _ = burst()
    rows = [len(s.plan().rows) for _ in range(9)]
    # two prompts a program; with 14 and 12 still to come the round waits, with 10 it doesn't
    assert rows == [0, 0, 6, 8, 10, 12, 14, 16, 16]
    s, _ = burst(12)  # 10 more is no crowd
    assert [len(s.plan().rows) for _ in range(4)] == [2, 4, 6, 8]


def test_a_held_round_comes_after_so_many_prompt_tokens():
    s, _ = burst()
    s.held_tokens = 32  # two programs
    assert [len(s.plan().rows) for _ in range(6)] == [0, 4, 6, 8, 10, 12]


def test_no_round_waits_for_a_prompt_that_ends_none():
    s, _ = burst(0)
    sequence(s, [1] * 8)
    read(s, s.plan())
    sequence(s, [2] * 40)  # three programs
    for i in range(14):
        sequence(s, [i] * 8)
    assert [len(s.plan().rows) for _ in range(2)] == [1, 1]
    assert len(s.plan().rows) == 0  # its last one, with the first of the others behind


def test_nothing_is_held_for_requests_that_have_no_slot():
    s = make(num_slots=4, block=8, chunk_tokens=16, held_tokens=64)
    for i in range(20):
        sequence(s, [i] * 8)
    assert [len(s.plan().rows) for _ in range(2)] == [2, 4]


def test_between_limits_prompt_tokens_beside_requests_that_run():
    s = make(num_slots=6, num_pages=99, block=4, chunk_tokens=32, held_tokens=64)
    s.between = 8
    first = sequence(s, [1] * 30)
    plan = s.plan()  # nobody runs, so nobody waits
    assert [chunk.count for chunk in plan.prefill] == [30]
    read(s, plan)
    sequence(s, [2] * 30)
    counts = []
    for _ in range(4):
        plan = s.plan()
        counts.append(sum(chunk.count for chunk in plan.prefill))
        assert plan.rows[0] is first
        read(s, plan)
    assert counts == [8, 8, 8, 6]
    s.between = 1  # less than a block: a block, or prompts would never be done
    sequence(s, [3] * 30)
    assert sum(chunk.count for chunk in s.plan().prefill) == 4


@pytest.mark.parametrize("between", [16, None])
def test_pictures_have_the_time_between_two_rounds_to_themselves(between):
    """If somebody waits, and also while nobody knows how many tokens fit there. They are no prompt's neighbours."""
    s, unread = make(num_slots=6, num_pages=99, block=4, chunk_tokens=32), {"first": 1}
    s.unread = lambda seq: unread.get(seq.owner, 0) > 0
    s.between = between
    first, second = (sequence(s, [i] * 8, owner=name) for i, name in enumerate(("first", "second")))
    plan = s.plan()  # nobody runs: pictures are read with the prompts
    assert [chunk.seq for chunk in plan.prefill] == [first, second] and plan.reads is None
    read(s, plan)
    unread |= {"third": 2}
    text, third = sequence(s, [2] * 8, owner="text"), sequence(s, [3] * 8, owner="third")
    seen = []
    for _ in range(4):
        plan = s.plan()
        assert first in plan.rows and second in plan.rows
        seen.append(([chunk.seq for chunk in plan.prefill], plan.reads))
        unread["third"] -= plan.reads is third
        read(s, plan)
    assert seen == [([text], None), ([], third), ([], third), ([third], None)]
