"""The scheduler against a device in miniature, which remembers what stands in every position of every page."""

import random
import time
from collections import Counter, deque

import numpy as np
import pytest

from jaxspec.request import RequestError
from jaxspec.scheduler import Chunk, Plan, Scheduler, Sequence, State

JUNK = None  # KV of a token that was drafted and not accepted


def make(**sizes):
    defaults = dict(num_slots=4, num_pages=33, page_size=4, width=3, chunk_tokens=16, block=4)
    sizes = {**defaults, "score_tokens": 8, "context_length": 64, **sizes}
    return Scheduler(**{"lookahead": sizes["width"], **sizes})


def sequence(scheduler, tokens, new=8, **fields):
    tokens = list(tokens)
    seq = Sequence(tokens, len(tokens), scheduler.check(len(tokens), new), **fields)
    scheduler.add(seq)
    return seq


def tokens_of(plan):
    return [(chunk.start, chunk.count) for chunk in plan.prefill]


def read(scheduler, plan, tokens=(1,)):
    for seq in plan.first:
        scheduler.append(seq, list(tokens[:1]))
    for _ in range(plan.rounds):
        for seq in plan.rows:
            scheduler.append(seq, list(tokens[: seq.limit - len(seq.tokens)]))


def chain(tokens, start=0):
    """KV of each position: it depends on that token and all before."""
    for token in tokens:
        start = hash((start, token))
        yield start


def continuation(tokens, n):
    """What the model says next: few words, so that texts collide, and a function of everything before."""
    kv, out = list(chain(tokens))[-1], []
    for _ in range(n):
        out.append(kv % 3)
        kv = hash((kv, out[-1]))
    return out


class World:
    """An engine that reads results `lag` rounds late, and a device that executes programs in order.

    The device checks every program: it writes only to pages that no one else can read, and finds the right KV, of the
    target and of a drafter that is one position behind after a round it got all right, wherever it reads.
    """

    def __init__(self, seed, lag, **sizes):
        self.random = random.Random(seed)
        self.scheduler = make(**sizes)
        self.lag = lag
        self.device = {}  # slot -> the sequence's tokens, those the host hasn't read included
        self.target, self.draft = {}, {}  # (page, offset) -> KV
        self.states = {}  # state slot -> KV of the last token in it
        self.borrowed = {}  # sequence -> pages it found in the prefix tree
        self.unread = deque()
        self.arrival = {}
        self.stops = {}
        self.seen = Counter()

    def add(self):
        s, r = self.scheduler, self.random
        stem = [[0], [1], [0, 1]][r.randrange(3)] * 30
        prompt = stem[: r.randint(1, 30)] + [r.randrange(3) for _ in range(r.choice([0, 0, 1, 5]))]
        room = s.check(len(prompt), None) - len(prompt)
        seq = sequence(s, prompt, min(r.choice([1, 2, 3, 10, 25, 99]), room), score=r.random() < 0.2)
        self.arrival[seq] = len(self.arrival)
        # Some end before their limit, maybe in the middle of a round, as at an end token.
        self.stops[seq] = r.randint(seq.prompt_len + 1, seq.limit) if r.random() < 0.5 else seq.limit

    def live(self):
        return [seq for seq in self.arrival if seq.state is not State.FINISHED]

    def disturb(self):
        s, r = self.scheduler, self.random
        if r.random() < 0.1 and self.live():
            seq = r.choice(self.live())
            self.seen[f"abort {seq.state.value}"] += 1
            s.finish(seq)
            s.audit()
        if r.random() < 0.01:
            s.flush()
            s.audit()

    def step(self):
        s = self.scheduler
        before = s.preemptions
        plan = s.plan()
        s.audit()
        self.seen["preempted"] += s.preemptions - before
        if plan.drain:
            assert self.unread, "asked to read results, and there are none"
            assert plan == Plan([], [], [], [], drain=True)
            self.seen["drained"] += 1
        else:
            self.check_plan(plan)
            self.dispatch(plan)
            self.check_tree()
        while len(self.unread) > (0 if plan.drain else self.lag):
            self.read()

    def check_plan(self, plan):
        s = self.scheduler
        assert sum(len(chunk.blocks(s.block)) for chunk in plan.prefill) <= s.chunk_tokens // s.block
        assert all(chunk.count > 0 for chunk in plan.prefill)
        if any(chunk.seq.score for chunk in plan.prefill):
            assert len(plan.prefill) == 1 and plan.prefill[0].count <= s.score_tokens
            self.seen["scored"] += 1
        running = [seq for seq in self.arrival if seq.state is State.RUNNING]
        unread = Counter(seq for flight in self.unread for results in flight for seq, *_ in results)
        unread.update(plan.first)
        assert plan.rows == [seq for seq in running if len(seq.tokens) + unread[seq] < seq.limit]
        for seq in running:
            assert seq.in_flight == unread[seq] + plan.rounds * (seq in plan.rows)
        assert plan.first == [
            seq for seq, start, n, *_ in plan.prefill if start + n == seq.prompt_len == len(seq.tokens)
        ]
        assert plan.rounds in (1, s.rounds)
        if plan.rounds > 1:
            assert not (s.waiting and s._free_slots) and not s.prefilling
            self.seen["several rounds"] += 1
        admitted = [self.arrival[seq] for seq in self.live() if seq.slot >= 0]
        waiting = [self.arrival[seq] for seq in s.waiting]
        assert waiting == sorted(waiting)
        assert max(admitted, default=-1) < min(waiting, default=len(self.arrival)), "someone jumped the queue"

    def dispatch(self, plan):
        s = self.scheduler
        for seq in plan.admit:
            self.device[seq.slot] = list(seq.tokens)
            start = next(chunk.start for chunk in plan.prefill if chunk.seq is seq)
            assert not (seq.score and start)
            self.borrowed[seq] = set(seq.pages[: start // s.page_size])
            self.seen["shared"] += bool(start)
            assert seq.cached == start or seq.preemptions
        for seq, start, count, *_ in plan.prefill:
            for position, kv in list(enumerate(chain(seq.tokens)))[start : start + count]:
                page, offset = self.place(seq, position)
                assert page not in self.borrowed[seq]
                self.target[page, offset] = kv
                self.draft[page, offset] = kv if position < len(seq.tokens) - 1 else JUNK  # its next token isn't known
        for chunk in plan.prefill:
            self.check_kv(chunk.seq, chunk.seq.tokens[: chunk.start])
            if s.snapshots is not None:
                self.run_blocks(chunk)
        firsts = [[self.first(seq) for seq in plan.first]] if plan.first else []
        self.unread.append(firsts + [[self.round(seq) for seq in plan.rows] for _ in range(plan.rounds)])

    def run_blocks(self, chunk):
        """Go from state to state as linear attention does, one block of a program after the other."""
        s, (seq, at, count, source, _) = self.scheduler, chunk
        states = [0, *chain(seq.tokens)]
        for start, n, from_slot, keep in chunk.blocks(s.block):
            assert start == at and 0 < n <= s.block
            found = 0 if from_slot < 0 else self.states[from_slot]
            assert found == states[start], f"{seq} goes on at {start} from another state"
            at += n
            self.states[seq.slot] = states[at]
            if keep >= 0:
                assert keep in s.snapshot_slots
                self.states[keep] = states[at]
                self.seen["snapshots"] += 1
        assert at == chunk.start + count
        self.seen["gone on from a snapshot"] += source is not None

    def place(self, seq, position):
        page = int(self.scheduler.table[seq.slot, position // self.scheduler.page_size])
        assert page and page in seq.pages, f"position {position} of {seq} has no page"
        return page, position % self.scheduler.page_size

    def check_kv(self, seq, tokens, undrafted=0):
        for position, kv in enumerate(chain(tokens)):
            place = self.place(seq, position)
            assert self.target[place] == kv
            assert self.draft[place] == kv or position >= len(tokens) - undrafted

    def write(self, kvs, seq, position, kv):
        place = self.place(seq, position)
        assert self.scheduler.pool.refcount(place[0]) == 1, "a round wrote to a page that others can read"
        kvs[place] = kv

    def first(self, seq):
        tokens = self.device[seq.slot]
        self.check_kv(seq, tokens, undrafted=1)
        new = continuation(tokens, 1)
        tokens += new
        return seq, seq.epoch, new

    def round(self, seq):
        width, tokens = self.scheduler.width, self.device[seq.slot]
        n = len(tokens)
        if n == seq.limit:
            return seq, seq.epoch, []  # it is done, and the device knows
        self.check_kv(seq, tokens[:-1], undrafted=1)
        new = continuation(tokens, min(self.random.randint(1, width), seq.limit - n))
        kvs = [kv for kv in chain(tokens + new)]
        if n > 1 and self.draft[self.place(seq, n - 2)] != kvs[n - 2]:
            self.write(self.draft, seq, n - 2, kvs[n - 2])
            self.seen["drafter caught up"] += 1
        for j in range(self.scheduler.lookahead):
            kv = kvs[n - 1 + j] if j < len(new) else JUNK
            self.write(self.target, seq, n - 1 + j, kv)
            if j != width - 1:
                self.write(self.draft, seq, n - 1 + j, kv)
            elif j < len(new):
                self.draft[self.place(seq, n - 1 + j)] = JUNK  # accepted to the last, which the drafter hasn't seen
        tokens += new
        return seq, seq.epoch, new

    def check_tree(self):
        s = self.scheduler
        kvs = {s.tree.root: 0}
        for node in s.tree.nodes():  # parents first
            for offset, kv in enumerate(chain(node.key, kvs[node.parent])):
                assert self.target[node.page, offset] == self.draft[node.page, offset] == kv
            kvs[node] = kv
            assert node.snapshot is None or self.states[node.snapshot] == kv

    def read(self):
        s = self.scheduler
        for seq, epoch, tokens in [result for results in self.unread.popleft() for result in results]:
            if epoch != seq.epoch:
                self.seen["stale result"] += 1
                continue
            s.append(seq, tokens[: self.stops[seq] - len(seq.tokens)])
            if len(seq.tokens) == self.stops[seq]:
                prompt = seq.tokens[: seq.prompt_len]
                assert seq.tokens == prompt + continuation(prompt, self.stops[seq] - seq.prompt_len)
                s.finish(seq)
                s.audit()
                self.check_tree()
                self.seen["done"] += 1


WORLDS = {
    "roomy": dict(),
    "tight": dict(num_pages=19, page_size=3, context_length=48),
    "one page": dict(num_pages=59, page_size=1, width=4, num_slots=6, context_length=50),
    "plain": dict(width=1, num_pages=14),
    "slots": dict(num_slots=2, chunk_tokens=4, block=4, score_tokens=4),
    "wide": dict(width=6, num_pages=22, chunk_tokens=10, block=3, context_length=60),
    "several rounds": dict(rounds=4, context_length=60),
    "several, tight": dict(rounds=3, num_pages=19, page_size=3, context_length=48, num_slots=2),
    "trees": dict(lookahead=11, num_pages=22),
    "trees, several rounds": dict(width=2, lookahead=5, rounds=4, page_size=3, num_slots=2),
    "no cache": dict(num_pages=20, context_length=50, prefix_cache=False),
    "states": dict(snapshots=range(5, 21), snapshot_interval=4),
    "states, tight": dict(snapshots=range(5, 8), snapshot_interval=6, num_pages=19, page_size=3, context_length=48),
    "one snapshot": dict(snapshots=[9], snapshot_interval=12, num_pages=30, page_size=2, block=3, chunk_tokens=12),
    "no snapshots": dict(snapshots=(), num_pages=22),
}
SEEN = Counter()


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("sizes", WORLDS.values(), ids=WORLDS.keys())
def test_any_mix_of_operations(sizes, lag):
    for seed in range(6):
        world = World(seed, lag, **sizes)
        for _ in range(60):
            for _ in range(world.random.choice([0, 0, 0, 1, 1, 4])):
                if len(world.live()) < 12:
                    world.add()
            world.disturb()
            world.step()
        steps = 0
        while world.scheduler.unfinished:
            world.step()
            steps += 1
            assert steps < 1000, "stuck"
        world.scheduler.flush()
        world.scheduler.audit()
        assert world.scheduler.free_pages == world.scheduler.pool.num_pages - 1
        SEEN.update(world.seen)
        SEEN[f"drained at lag {lag}"] += world.seen["drained"]


def test_the_mix_had_everything_in_it():
    """The test before this one proves little of what never happened in it."""
    if not SEEN:
        pytest.skip("runs after test_any_mix_of_operations")
    aborted = [f"abort {state}" for state in ("waiting", "prefill", "running")]
    events = ("done", "shared", "scored", "several rounds", "preempted", "drained", "stale result", "drafter caught up")
    for event in (*events, "snapshots", "gone on from a snapshot", *aborted):
        assert SEEN[event] > 10, (event, SEEN)
    assert not SEEN["drained at lag 0"]


def test_first_token_and_first_round_come_with_the_last_chunk():
    s = make()
    seq = sequence(s, range(22))
    assert s.plan() == Plan([seq], [Chunk(seq, 0, 16)], [], [])
    assert s.plan() == Plan([], [Chunk(seq, 16, 6)], [seq], [seq])
    assert (seq.state, seq.in_flight, seq.computed) == (State.RUNNING, 2, 22)
    assert s.plan() == Plan([], [], [], [seq])
    assert s.table[seq.slot, : len(seq.pages)].tolist() == seq.pages


def test_a_prompt_of_one_token_starts_like_any_other():
    s = make()
    seq = sequence(s, [7])
    assert s.plan() == Plan([seq], [Chunk(seq, 0, 1)], [seq], [seq])


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
    s.audit()


def test_equal_prompts_share_pages_within_one_plan():
    s = make()
    first, second = sequence(s, range(10)), sequence(s, range(10))
    plan = s.plan()
    assert tokens_of(plan) == [(0, 10), (8, 2)]
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert (first.cached, second.cached) == (0, 8)


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
    """Of N tokens positions 0..N-2 have KV, and the drafter may lack N-2; beyond the prompt it was never prefilled."""
    s = make()
    seq = sequence(s, range(5), 20)
    s.append(s.plan().rows[0], list(range(5, length)))
    s.finish(seq)
    assert s.cached_pages == published
    s.audit()


def test_finish_twice_and_in_flight():
    s = make()
    seq = sequence(s, range(9))
    s.plan()
    s.plan()
    s.finish(seq)
    assert (seq.state, seq.epoch, seq.in_flight, seq.slot, seq.pages) == (State.FINISHED, 1, 0, -1, [])
    assert not s.table.any()
    s.finish(seq)
    assert (seq.epoch, s.unfinished) == (1, 0)
    with pytest.raises(ValueError, match=r"unread rounds of .* aren't in flight"):
        s.append(seq, [1])
    s.audit()


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


def test_head_of_the_queue_is_matched_again_only_when_that_could_help():
    s = make(num_pages=13, context_length=40)
    first = sequence(s, [1] * 16)
    s.plan()
    second, third = sequence(s, [2] * 28), sequence(s, [3] * 2, 1)
    matched, match = [], s.tree.match
    s.tree.match = lambda *arguments: matched.append(1) or match(*arguments)
    for _ in range(5):
        s.plan()
        s.append(first, [1])
    assert len(matched) == 1
    s.finish(second)
    assert s.plan().admit == [third]


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
        s.audit()
    assert plan.rows == [first, second]
    assert (third.state, third.epoch, third.slot, third.computed) == (State.WAITING, 1, -1, 0)
    tokens = list(third.tokens)
    assert tokens == [2] * 8 + [5] + [5, 6] * ((len(tokens) - 9) // 2)
    assert s.preemptions == 1
    sequence(s, [9], 1)
    assert s.waiting[0] is third
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
    s.audit()


def test_drains_before_it_preempts():
    s, seqs, plan = crowd()
    unread = deque([plan])
    while not (plan := s.plan()).drain:
        unread.append(plan)
        read(s, unread.popleft(), [5, 6])
    assert plan == Plan([], [], [], [], drain=True)
    assert s.preemptions == 0
    assert [seq.in_flight for seq in seqs] == [1, 1, 1]
    s.audit()
    assert s.plan().drain  # nothing changes until the results are read
    read(s, unread.popleft(), [5, 6])
    assert not unread
    assert not s.plan().drain
    s.audit()


def test_unfinished_prompt_is_preempted_first():
    s = make(num_pages=15, width=2, context_length=40, chunk_tokens=4)
    first = sequence(s, [1] * 4, 30)
    read(s, s.plan(), [1])
    second = sequence(s, [2] * 36, 1)
    while not s.preemptions:
        plan = s.plan()
        assert plan.rows == [first]
        read(s, plan, [1, 1])
    assert (second.state, second.preemptions) == (State.WAITING, 1)


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
    s.audit()


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
    s.audit()


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
    s.audit()


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
    s.audit()


def test_check_gives_the_limit():
    s = make(num_pages=13)  # 48 positions, less 3 of lookahead
    assert s.check(10, 20) == 30
    assert s.check(10, None) == 45
    assert s.check(44, 1) == 45
    assert make().check(10, None) == make().check(63, 1) == 64


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ((0, 5), "prompt", "prompt is empty"),
        (
            (64, 1),
            "prompt",
            "context length is 64 tokens. However, you requested 65 tokens (64 in the prompt, 1 in the",
        ),
        ((64, None), "prompt", "requested 65 tokens"),
        ((60, 5), "max_tokens", "requested 65 tokens (60 in the prompt, 5 in the completion)"),
        ((30, 16), "max_tokens", "30 prompt tokens + 16 new tokens + 3 of lookahead = 13 pages of 4 tokens"),
        ((45, None), "prompt", "and the page pool has 12"),
        ((30, None, 16), "min_tokens", "leaves room for 15: at most 45 in all"),
    ],
)
def test_check_says_why_not(arguments, param, words):
    with pytest.raises(RequestError) as error:
        make(num_pages=13).check(*arguments)
    assert words in str(error.value)
    assert error.value.param == param


def test_add_takes_only_what_check_lets_pass():
    s = make(num_pages=13)
    for tokens, limit in (([], 5), ([1] * 5, 5), ([1], 65), ([1], 46)):
        with pytest.raises(ValueError, match=r"take the limit from check\(\)"):
            s.add(Sequence(tokens, len(tokens), limit))
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
    s.audit()
    if fault == "leaked page":
        first.pages.pop()
    elif fault == "page held twice":
        s.pool.retain(first.pages[:1])
    elif fault == "leaked slot":
        s._free_slots.pop()
    elif fault == "stale table":
        s.table[-1, 0] = 1
    else:
        first.pages[0], second.pages[1] = second.pages[1], first.pages[1]
    with pytest.raises(RuntimeError, match="don't balance"):
        s.audit()


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
    s.audit()
