"""A device in miniature for the scheduler's tests: it remembers what stands in every position of every page."""

from __future__ import annotations

import random
from collections import Counter, deque

from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import Plan, SequenceState, Status

JUNK = None  # KV of a token that was drafted and not accepted


def make(**sizes):
    defaults = dict(num_slots=4, num_pages=33, page_size=4, width=3, chunk_tokens=16, block=4)
    sizes = {**defaults, "score_tokens": 8, "context_length": 64, **sizes}
    return Scheduler(**{"lookahead": sizes["width"], **sizes})


def sequence(scheduler, tokens, new=8, **fields):
    tokens = list(tokens)
    seq = SequenceState(tokens, len(tokens), scheduler.check(len(tokens), new), **fields)
    scheduler.add(seq)
    return seq


def chain(tokens, start=0):
    """KV of each position: it depends on that token and all before."""
    for token in tokens:
        start = hash((start, token))
        yield start


def continuation(tokens, n):
    """Tokens that the model says next: few words, so that texts collide, and a function of everything before."""
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

    def __init__(self, seed, lag, clients=1, priorities=1, **sizes):
        self.random, self.clients, self.priorities = random.Random(seed), clients, priorities
        self.scheduler = make(**sizes)
        self.lag = lag
        self.device = {}  # slot -> the sequence's tokens, those the host hasn't read included
        self.target, self.draft = {}, {}  # (page, offset) -> KV
        self.own = {}  # slot -> positions whose KV the drafter was given since the sequence came
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
        seq = sequence(
            s,
            prompt,
            min(r.choice([1, 2, 3, 10, 25, 99]), room),
            score=r.random() < 0.2,
            client=self.client(),
            priority=r.randrange(self.priorities) if self.priorities > 1 else 0,
        )
        self.seen["unfinished prompts of several"] += len(s.prefilling) > 1
        self.arrival[seq] = len(self.arrival)
        # Some end before their limit, maybe in the middle of a round, as at an end token.
        self.stops[seq] = r.randint(seq.prompt_len + 1, seq.limit) if r.random() < 0.5 else seq.limit

    def client(self):
        return str(self.random.randrange(self.clients)) if self.clients > 1 else ""

    def live(self):
        return [seq for seq in self.arrival if seq.status is not Status.FINISHED]

    def disturb(self):
        s, r = self.scheduler, self.random
        if r.random() < 0.1 and self.live():
            seq = r.choice(self.live())
            self.seen[f"abort {seq.status.value}"] += 1
            s.finish(seq)
            audit(s)
        if r.random() < 0.01:
            s.flush()
            audit(s)

    def step(self):
        s = self.scheduler
        before = s.preemptions
        plan = s.plan()
        audit(s)
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
        running = list(s.running)  # of several clients, priorities or devices, in any order
        if self.clients == self.priorities == len(s.pools) == 1:
            assert running == [seq for seq in self.arrival if seq.status is Status.RUNNING]
        unread = Counter(seq for flight in self.unread for results in flight for seq, *_ in results)
        unread.update(plan.first)
        rows = [seq for seq in running if len(seq.tokens) + unread[seq] < seq.limit]
        if plan.rows != rows:  # the round waits for more prompts
            assert plan.rows == [] and plan.prefill and s.waiting and s._free_slots
            self.seen["held"] += 1
        for seq in running:
            assert seq.in_flight == unread[seq] + plan.rounds * (seq in plan.rows)
        assert plan.first == [
            seq for seq, start, n, *_ in plan.prefill if start + n == seq.prompt_len == len(seq.tokens)
        ]
        assert plan.rounds in (1, s.rounds)
        if plan.rounds > 1:
            assert not (s.waiting and s._free_slots) and not s.prefilling
            self.seen["several rounds"] += 1
        line = lambda seq: (seq.client, seq.priority)  # noqa: E731
        assert len(set(map(line, s.prefilling))) == len(s.prefilling)
        for each in set(map(line, self.arrival)):
            admitted = [self.arrival[seq] for seq in self.live() if seq.slot >= 0 and line(seq) == each]
            waiting = [self.arrival[seq] for seq in s.waiting if line(seq) == each]
            assert waiting == sorted(waiting)
            ahead = max(admitted, default=-1) < min(waiting, default=len(self.arrival))
            assert ahead or len(s.pools) > 1, "someone jumped the queue"  # a preemption concerns one device

    def dispatch(self, plan):
        s = self.scheduler
        for seq in plan.admit:
            self.device[seq.slot], self.own[seq.slot] = list(seq.tokens), set()
            start = next(chunk.start for chunk in plan.prefill if chunk.seq is seq)
            assert not (seq.score and start)
            self.borrowed[seq] = set(seq.pages[: start // s.page_size])
            self.seen["shared"] += bool(start)
            assert seq.cached == start or seq.preemptions
        for seq, start, count, *_ in plan.prefill:
            self.own[seq.slot].update(range(start, start + count))
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
        assert self.scheduler.device.holders(place[0]) == 1, "a round wrote to a page that others can read"
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
        recent = set(range(max(n - 1 - self.scheduler.recent, 0), n - 1))
        assert recent <= self.own[seq.slot], "the drafter lacks some of the newest positions"
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
        self.own[seq.slot].update(range(n - 1, n - 1 + len(new)))
        tokens += new
        return seq, seq.epoch, new

    def check_tree(self):
        s = self.scheduler
        kvs = {tree.root: 0 for tree in s.trees}
        for node in [node for tree in s.trees for node in tree.nodes()]:  # parents first
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
                audit(s)
                self.check_tree()
                self.seen["done"] += 1
