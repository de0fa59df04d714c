"""Which sequence runs when, and in which pages: admit, chunk, grow, preempt, finish. Host data only, no jax.

Invariant: of a sequence that runs, with known tokens x_0..x_{N-1}, KV is committed for positions 0..N-2; the newest
token has none. *Prefill* brings it there, chunk by chunk. Of a new prompt it computes all, and the *first* token
follows from the last position. Of a sequence that had tokens already and was preempted, it computes all but the newest.
A *round* then writes `lookahead` KV slots from N-1 on and yields 1..width new tokens, after which the same holds for
the larger N.

The engine dispatches a round before it has read the one before, so the host's N is up to `in_flight` rounds old, and
pages are reserved for the largest N those rounds can lead to. The device runs programs in the order of dispatch. So a
page freed here may be given away at once: a program that still writes to it runs before its next holder does.

With linear attention, each slot also has a state, of the tokens so far. A prefill leaves snapshots of it at the ends of
pages, from which a later prompt with the same beginning continues. Generated text has none.

A round costs nearly as much for few requests as for many. So while a crowd waits for free slots, prompts go first, and
rounds are *held* for a while.

Of one client, order is strict, first come first served: at most one prompt is unfinished at a time, and those that wait
came later. Clients take turns, so that each has as many prompt tokens computed (`fair_share`). What was admitted last
is preempted first, and returns before all others.

A sequence takes pages of the device that has its slot, and makes way for others there (`device_pages`).

With priorities, all this holds within a priority (`priority`). Where a request waits for a slot or pages, the sequence
of the lowest priority below its own gives way, of several the one admitted last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError
from jaxspec.scheduling.adapter_places import AdapterPlaces
from jaxspec.scheduling.device_pages import DevicePages
from jaxspec.scheduling.fair_share import FairShare
from jaxspec.scheduling.host_tier import HostTier
from jaxspec.scheduling.prefix_cache import PrefixTree, Snapshots
from jaxspec.scheduling.priority import PriorityQueue
from jaxspec.scheduling.sequence import Chunk, Plan, SequenceState, Status

CROWD, CROWD_SHARE = 12, 1 / 8  # requests that could come now and for whom rounds are held, and of those that run


class Scheduler:
    """Plans batches over `num_slots` slots and `num_pages` pages of `page_size` tokens.

    **Arguments:**

    - `width`: most tokens that a round yields per sequence, drafts that it can accept plus one.
    - `lookahead`: KV slots that it may write, from the newest token's on; at least `width`, more for trees.
    - `chunk_tokens`: prompt tokens of one prefill program, in blocks of `block`, each of one sequence. `score_tokens`:
      the most in a chunk that is scored. `prefills`: blocks that programs are made for, ascending; None: each number.
    - `context_length`: most tokens of a sequence. `prefix_cache`: share full pages of a common prefix.
    - `reach`: tokens beyond a page on which its content depends, see `PrefixTree`.
    - `recent`: a prompt's last tokens that are computed at least, whatever is cached: a drafter needs them.
    - `replays`: what rounds computed isn't published, and a preempted sequence starts again from its prompt.
    - `rounds`: rounds in one program when no request can be admitted, and at most `rounds_for` run; None: any number.
    - `held_tokens`: prompt tokens between two rounds while a crowd waits; otherwise one program's.
    - `snapshots`: of a model with linear attention, the state slots for snapshots; None of other models.
      `snapshot_interval`: prompt tokens between two of them, rounded up to whole blocks and pages.
    - `host`: the second tier, in the host's memory; None: there is none. A sequence whose prefix is there has the
      status LOADING until the engine calls `landed`, or `not_landed`; other prompts go on meanwhile.
    - `by_priority`: priorities order and preempt; otherwise nobody looks at them. `clock`: gives seconds, for aging.
    - `adapters`: places that sequences with an adapter hold; None: there are no adapters.
    - `devices`: among how many of them requests are divided, with their slots and pages.

    `table`, i32[num_slots + 1, pages_per_seq], holds the pages of each slot in order, 0 beyond them; the last row is of
    the dummy slot, all 0. It changes in place: copy the rows that a program reads. `waiting`, `prefilling`
    (unfinished prompts, one a client), `loading` and `running` are for looking at. `between`, which may be set before
    each plan, is how many prompt tokens there may be between two rounds, crowd or not, but for a block; None: as above.
    `unread` says whether pictures of a prompt's next chunk are to be read first, and have the time between two rounds
    to themselves. Set it where that time is limited, even if nobody knows yet how many tokens fit.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        width: int,
        lookahead: int,
        chunk_tokens: int,
        block: int,
        score_tokens: int,
        context_length: int,
        prefills: tuple[int, ...] | None = None,
        prefix_cache: bool = True,
        reach: int = 0,
        recent: int = 0,
        replays: bool = False,
        rounds: int = 1,
        rounds_for: int | None = None,
        held_tokens: int = 0,
        snapshots: Iterable[int] | None = None,
        snapshot_interval: int = 256,
        host: HostTier | None = None,
        by_priority: bool = False,
        adapters: AdapterPlaces | None = None,
        devices: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        sizes = {"num_slots": num_slots, "width": width, "block": block, "score_tokens": score_tokens, "rounds": rounds}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if lookahead < width:
            raise ValueError(f"lookahead ({lookahead}) must cover the width ({width})")
        if chunk_tokens < block:
            raise ValueError(f"chunk_tokens ({chunk_tokens}) must hold at least one block of {block} tokens")
        self.width, self.lookahead, self.page_size = width, lookahead, page_size
        self.chunk_tokens, self.block, self.score_tokens = chunk_tokens, block, score_tokens
        self.prefills = prefills or tuple(range(1, chunk_tokens // block + 1))
        self.context_length, self.prefix_cache, self.replays = context_length, prefix_cache, replays
        self.rounds, self.rounds_for, self.held_tokens = rounds, rounds_for or num_slots, held_tokens
        self.between: int | None = None
        self.unread: Callable[[SequenceState], bool] = lambda _: False
        self.snapshot_slots = None if snapshots is None else tuple(snapshots)
        self.snapshots = None if snapshots is None else Snapshots(self.snapshot_slots, host)
        whole = math.lcm(page_size, block)
        self.snapshot_interval = -(-snapshot_interval // whole) * whole
        # The last position is always computed: a first token, or a drafter, needs more of it than its keys and values.
        self.recent = max(recent, 1)
        self.device = DevicePages(devices, num_slots, num_pages, page_size, reach, self.snapshots, host, recent > 1)
        self.pools, self.trees, self.host = self.device.pools, self.device.trees, host
        if host is not None:
            host.serves(self.trees[0])
        self.pages_per_seq = self._pages_for(context_length + lookahead)
        self.table = np.zeros((num_slots + 1, self.pages_per_seq), np.int32)
        self.by_priority, self.adapters = by_priority, adapters
        self.waiting = PriorityQueue(clock) if by_priority else FairShare()
        self.prefilling: list[SequenceState] = []
        self.loading: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.preemptions = 0
        self.resting = False  # prompts may continue from pages that the drafter missed; set by the engine
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._since = 0  # prompt tokens planned since the last round, or since there is a request for one
        self._refused = False  # the next that waits didn't fit, and no sequence has left since: don't match it again

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return sum(pool.free for pool in self.pools)

    @property
    def cached_pages(self) -> int:
        """Pages in the prefix trees, those in use by sequences included."""
        return sum(tree.num_pages for tree in self.trees)

    @property
    def unfinished(self) -> int:
        """Sequences that were added and haven't finished."""
        return len(self.waiting) + len(self.admitted)

    def check(self, prompt_len: int, max_tokens: int | None, min_tokens: int = 0, no_tokens: bool = False) -> int:
        """The most tokens in all that such a request may reach: `prompt_len + max_tokens`, or as many as fit if that is
        None. `no_tokens`: as of `SamplingParams`; then one may be beyond the context, where no round follows it.

        **Raises:** `RequestError` with the arithmetic if it could never be served, however idle the engine.
        """
        context, usable, lookahead = self.context_length, self.pools[0].num_pages - 1, self.lookahead
        if prompt_len < 1:
            raise RequestError("the prompt is empty; it must have at least one token", "prompt")
        completion = 1 if max_tokens is None else max_tokens
        if no_tokens and prompt_len == context:
            completion = 0
        if prompt_len + completion > context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{prompt_len + completion} tokens ({prompt_len} in the prompt, {completion} in the completion). "
                "Shorten the prompt or lower max_tokens; --context-length, in Python context_length, sets the maximum",
                "prompt" if prompt_len >= context else "max_tokens",
                CONTEXT_EXCEEDED,
            )
        if (pages := self._pages_for(prompt_len + completion + lookahead)) > usable:
            raise RequestError(
                f"the request needs {prompt_len} prompt tokens + {completion} new tokens + {lookahead} of lookahead = "
                f"{pages} pages of {self.page_size} tokens, and the page pool has {usable}. Shorten the prompt "
                "or lower max_tokens; or start the server with a larger --max-total-tokens or --mem-fraction-static",
                "prompt" if max_tokens is None else "max_tokens",
            )
        if max_tokens is None:
            completion = min(context, usable * self.page_size - lookahead) - prompt_len
        if min_tokens > completion:
            raise RequestError(
                f"min_tokens is {min_tokens}, but a prompt of {prompt_len} tokens leaves room for {completion}: at "
                f"most {prompt_len + completion} in all, by --context-length {context} and a pool of {usable} pages of "
                f"{self.page_size} tokens. Lower min_tokens or shorten the prompt",
                "min_tokens",
            )
        return prompt_len + max(completion, 1)

    def add(self, seq: SequenceState) -> None:
        """Queue a new sequence. **Raises:** `ValueError` if `check` wouldn't allow its tokens or limit."""
        fits = self._pages_for(self._most(seq)) < self.pools[0].num_pages
        if not (1 <= len(seq.tokens) < seq.limit <= max(self.context_length, len(seq.tokens) + 1) and fits):
            raise ValueError(
                f"a sequence of {len(seq.tokens)} tokens with limit {seq.limit} can't be served within a context of "
                f"{self.context_length} and {self.pools[0].num_pages - 1} pages; take the limit from check()"
            )
        if seq.status is not Status.WAITING:
            raise ValueError(f"only a new sequence can be added; this one is {seq.status.value}")
        self.waiting.add(seq)
        if self.by_priority:
            self._refused = False  # it may be the next now, and fit

    def plan(self) -> Plan:
        """The next programs, with slots and pages assigned; their rounds count as in flight from now on.

        The plan must be dispatched: pages it fills are in the prefix tree already. If that fails, `flush`, and `finish`
        its sequences.
        """
        if self.host is not None:
            self.host.begin_plan()
        if not self._grow() or self._blocked_by_unread():
            return Plan([], [], [], [], drain=True)
        admit, prefill, reads = self._fill()
        first = [chunk.seq for chunk in prefill if chunk.start + chunk.count == len(chunk.seq.tokens)]
        for seq in first:
            seq.in_flight += 1
        rows = [seq for seq in self.running if self._goes_on(seq)]
        self._since += sum(chunk.count for chunk in prefill)
        if first and self._held(len(rows)):
            rows = []
        else:
            self._since = 0
        rounds = self._lookahead(rows)
        for seq in rows:
            seq.in_flight += rounds
        return Plan(admit, prefill, first, rows, rounds, reads=reads)

    def append(self, seq: SequenceState, tokens: list[int], rounds: int = 1) -> int:
        """Read the oldest rounds in flight of `seq`, all those of a program: these are its next tokens.

        Returns how many of them were read before a preemption, too.

        **Raises:** `ValueError` if they aren't in flight, as after a preemption or `finish`: then `epoch` has moved on;
        and for more tokens than the sequence's limit leaves room for.
        """
        if seq.in_flight < rounds:
            raise ValueError(
                f"{rounds} unread rounds of {seq} aren't in flight; results from before its epoch moved on must be "
                "ignored"
            )
        if len(seq.tokens) + len(tokens) > seq.limit:
            raise ValueError(f"{len(tokens)} more tokens would take {seq} past its limit, for which check() found room")
        seq.tokens += tokens
        seq.in_flight -= rounds
        known = min(seq.replayed, len(tokens))
        seq.replayed -= known
        return known

    def finish(self, seq: SequenceState) -> None:
        """Done or aborted, in whatever state: its slot and pages are free at once. A second call does nothing."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self._refused = False
        else:
            self._vacate(seq)
        seq.status = Status.FINISHED

    def withdraw(self, seq: SequenceState) -> None:
        """End a sequence that was never added."""
        seq.status = Status.FINISHED

    def flush(self) -> int:
        """Empty the prefix trees; sequences keep their pages, but no longer publish them. Returns pages dropped."""
        for seq in self.admitted:
            seq.node = None
        dropped = sum(tree.clear() for tree in self.trees)
        if self.host is not None:
            self.host.clear()
        return dropped

    def landed(self, seq: SequenceState) -> None:
        """All that a sequence was loading is dispatched: it goes on behind that."""
        load, seq.load = seq.load, None
        self.host.used_by_prompt(load)
        self.loading.remove(seq)
        self.prefilling.append(seq)
        seq.computed, seq.status = load.depth * self.page_size, Status.PREFILL
        self._publish(seq, seq.computed)

    def not_landed(self, seq: SequenceState) -> None:
        """A load failed, and its blocks are forgotten: the sequence waits again, and computes what it lacks."""
        self._vacate(seq)
        seq.status = Status.WAITING
        self.waiting.set_back(seq)

    @property
    def admitted(self) -> list[SequenceState]:
        """Sequences that have a slot and pages."""
        return self.running + self.prefilling + self.loading

    def _pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def _tree(self, seq: SequenceState) -> PrefixTree:
        return self.trees[self.device.of(seq.slot)]

    def _goes_on(self, seq: SequenceState) -> bool:
        """Whether `seq` may still run once its rounds in flight are read. Each of them yields at least one token."""
        return len(seq.tokens) + seq.in_flight < seq.limit

    def _missing(self, seq: SequenceState, rounds: int) -> int:
        """Pages that `seq` lacks for that many more rounds. The last of all rounds starts below the limit."""
        end = len(seq.tokens) + seq.replayed - 1 + (seq.in_flight + rounds - 1) * self.width + self.lookahead
        return max(self._pages_for(min(end, self._most(seq))) - len(seq.pages), 0)

    def _most(self, seq: SequenceState) -> int:
        """Positions that it may ever have. Of a prompt that fills the context, the token after it has none."""
        return min(seq.limit, self.context_length) + self.lookahead

    def _give(self, seq: SequenceState, pages: int) -> None:
        held = len(seq.pages)
        seq.pages += self.device.take(pages, self.device.of(seq.slot))
        self.table[seq.slot, held : held + pages] = seq.pages[held:]

    def _grow(self) -> bool:
        """Pages for the next round of all running sequences, oldest first. False: there are too few, and results are
        unread."""
        for seq in self.running[:]:
            if seq.status is not Status.RUNNING:
                continue  # it was preempted on the way
            if self._goes_on(seq) and (missing := self._missing(seq, 1)) and not self._extend(seq, missing):
                return False
        return True

    def _extend(self, seq: SequenceState, missing: int) -> bool:
        """Give `seq` that many pages, preempting the youngest of the lowest priority, at worst itself. False: as
        `_grow`."""
        device = self.device.of(seq.slot)
        while missing > self.device.available(device):
            beside = [other for other in self.admitted if self.device.of(other.slot) == device]
            if any(other.in_flight for other in beside):
                return False  # their results may end some of them, and tell how much the others really need
            victim = self._last(beside)
            self.preempt(victim)
            if victim is seq:
                return True
        self._give(seq, missing)
        return True

    def _last(self, seqs: Sequence[SequenceState]) -> SequenceState | None:
        """The one to preempt first: of the lowest priority, in whole steps, and of those the one admitted last."""
        return max(reversed(seqs), key=lambda seq: math.ceil(seq.rank), default=None)

    def _in_the_way(self, planned: Sequence[SequenceState] = ()) -> SequenceState | None:
        """The sequence to preempt for the next that waits, if that finds no slot or pages; not one in the plan."""
        if not self.by_priority or (self._free_slots and not self._refused):
            return None
        seq = self.waiting.next(self.prefilling, True)
        if seq is None or seq.status is not Status.WAITING:
            return None
        return self._last([each for each in self.admitted if each.rank > seq.priority and each not in planned])

    def _blocked_by_unread(self) -> bool:
        """Whether a sequence must be preempted whose results are unread. They may end it, or others."""
        victim = self._in_the_way()
        return victim is not None and victim.in_flight > 0

    def _lookahead(self, rows: list[SequenceState]) -> int:
        """How many rounds to run in one program: several only if no request can be admitted, and there are pages for
        them. If requests wait for a slot, one that ends is replaced after the program instead of after the round. With
        priorities there is one round while any wait, since an urgent request may come and preempt.
        """
        rounds = self.rounds if len(rows) <= self.rounds_for else 1
        admits = self.waiting and (self._free_slots or self.by_priority)
        if rounds == 1 or self.prefilling or admits or any(seq.stepwise for seq in rows):
            return 1
        if all(seq.limit - len(seq.tokens) - seq.in_flight < rounds for seq in rows):
            return 1  # the last few tokens of the last to end: most of the program would run for nobody
        missing = [self._missing(seq, rounds) for seq in rows]
        if not self.device.enough((seq.slot, pages) for seq, pages in zip(rows, missing, strict=True)):
            return 1
        for seq, pages in zip(rows, missing, strict=True):
            self._give(seq, pages)
        return rounds

    def _held(self, rows: int) -> bool:
        """Whether a round for `rows` requests waits for another program of prompts, after one that ended some."""
        coming = 0 if self._refused else min(len(self.waiting), len(self._free_slots))
        most = self.held_tokens if self.between is None else self.between
        crowd = coming >= max(CROWD, CROWD_SHARE * rows)
        return crowd and rows > 0 and self._since + self.chunk_tokens <= most

    def _room(self) -> int:
        """Blocks that the next program may have: where time is limited, so many that it needs no padding."""
        limited = self.between is not None and self.running
        blocks = (self.between - self._since) // self.block if limited else self.prefills[-1]
        return max((size for size in self.prefills if size <= blocks), default=self.prefills[0])

    def _fill(self) -> tuple[list[SequenceState], list[Chunk], SequenceState | None]:
        """Admissions and chunks within one program's budget, in the order of `fair_share`; or whose pictures to read
        first. A prompt that is scored has a program alone, and is charged for all of it."""
        admit, chunks, blocks = [], [], self._room()
        while blocks:
            victim = self._in_the_way([chunk.seq for chunk in chunks])
            if victim is not None and not victim.in_flight:
                self.preempt(victim)
            seq = self.waiting.next(self.prefilling, bool(self._free_slots) and not self._refused)
            if seq is None or (seq.score and chunks):
                break
            if seq.status is Status.WAITING:
                if not self._admitted_now(seq):
                    continue
                admit.append(seq)
                if seq.status is Status.LOADING:
                    continue
            if self.running and self.unread(seq):
                return admit, chunks, None if chunks or self._since else seq
            if chunks and blocks * self.block < self._at_once(seq):
                break  # the next program begins with it
            chunks.append(self._next_chunk(seq, blocks))
            self.waiting.charge(seq, blocks * self.block if seq.score else chunks[-1].count)
            blocks = 0 if seq.score else blocks - len(chunks[-1].blocks(self.block))
        return admit, chunks, None

    def _due(self, seq: SequenceState) -> int:
        """How many positions its prefill computes: the prompt's, or those that were committed before a preemption."""
        return max(seq.prompt_len, len(seq.tokens) - 1)

    def _at_once(self, seq: SequenceState) -> int:
        """How many tokens its next chunk has at least."""
        return next((end - seq.computed for start, end in seq.whole if start <= seq.computed < end), 1)

    def _next_chunk(self, seq: SequenceState, blocks: int) -> Chunk:
        """The next tokens of a prompt, as many as fit in so many blocks, which end where a snapshot is due."""
        due, start, source = self._due(seq), seq.computed, seq.source
        end = start + self.score_tokens if seq.score else due
        for _ in range(blocks):
            stop = next((point for point in seq.points if point > seq.computed), due)
            seq.computed = min(seq.computed + self.block, stop, end, due)
        if cut := next((span for span in seq.whole if span[0] < seq.computed < span[1]), None):
            seq.computed = cut[0] if cut[0] > start else cut[1]
        seq.source = None
        # Published at once: this program is dispatched before any that can read these pages, and within it all KV of a
        # layer is written before it is read. Of the newest token the drafter has seen nothing yet.
        self._publish(seq, min(seq.computed, len(seq.tokens) - 1))
        chunk = Chunk(seq, start, seq.computed - start, source, self._keep(seq, start))
        if seq.computed == due:
            self.prefilling.remove(seq)
            self.running.append(seq)
            seq.status = Status.RUNNING
        return chunk

    def _admitted_now(self, seq: SequenceState) -> bool:
        """Give a sequence that waits a slot and its pages. False: there are too few pages, or no place for its adapter,
        and none is admitted before a sequence has left."""
        if self.adapters is not None and not self.adapters.room(seq.adapter):
            self._refused = True
            return False
        seq.source, seq.points = None, []
        what = seq.keys, self._due(seq) - self.recent, self.resting and not seq.fixed_drafts
        slots = self.device.slots_for(self._free_slots, [each.slot for each in self.admitted], *what)
        self._refused = not any(self._admitted_to(slot, seq, *what) for slot in slots)
        return not self._refused

    def _admitted_to(self, slot: int, seq: SequenceState, keys: list[int], limit: int, missed: bool) -> bool:
        """Admit a sequence to a free slot. False: its device has too few pages."""
        device, load, shares = self.device.of(slot), None, self.prefix_cache and not seq.score
        pool, tree = self.pools[device], self.trees[device]
        pages, node = tree.match(keys, limit, missed) if shares else ([], tree.root)
        if shares and self.host is not None:
            load = self.host.find(keys, node, limit, missed)
        if load is not None and load.nodes:
            own = [each.page for each in load.nodes]
            pool.retain(own)
            pages, node = pages + own, load.nodes[-1]
        missing = self._missing(seq, 2) - len(pages)  # up to the first round, and what comes before it yields a token
        # One page on top for each that runs: admitting into the last pages would only get someone preempted at once.
        if missing + sum(self.device.of(each.slot) == device for each in self.running) > self.device.available(device):
            pool.release(pages)
            return False
        self.waiting.remove(seq)
        seq.slot = slot
        self._free_slots.remove(slot)
        if load is not None:
            self.host.pin(load.blocks)
        depth, seen = (node.depth, node.drafter_seen) if load is None else (load.depth, load.seen)
        if shares and self.snapshots is not None:
            seq.source, seq.points = None if load else node.snapshot, self._points(seq, depth)
        seq.node = node if self.prefix_cache else None
        seq.computed = len(pages) * self.page_size
        seq.drafter_seen = seen * self.page_size if seen < depth else None
        if not seq.preemptions:
            loaded = load.pages if load else []
            seq.cached, seq.from_disk = (n * self.page_size for n in (depth, sum(block.from_disk for block in loaded)))
            seq.from_host = len(loaded) * self.page_size - seq.from_disk
        seq.pages = pages + self.device.take(missing, device)
        self.table[seq.slot, : len(seq.pages)] = seq.pages
        if self.adapters is not None:
            self.adapters.hold(seq.adapter, seq.slot)
        seq.load, seq.status = load, Status.PREFILL if load is None else Status.LOADING
        (self.prefilling if load is None else self.loading).append(seq)
        return True

    def _points(self, seq: SequenceState, depth: int) -> list[int]:
        """Positions at which snapshots of a prompt's state are due, beyond its first `depth` pages: at every interval,
        at the last page that is published, and where the prompt leaves the tree, as another may again.

        A long prompt takes no more than a quarter of all slots for its intervals. Where bits must not depend on what is
        cached, all are at ends of blocks: a block's sums depend on where it ends.
        """
        size, due = self.page_size, self._due(seq)
        whole = math.lcm(size, self.block) if self.replays else size
        last = min(due, len(seq.tokens) - max(self.trees[0].reach, 1)) // whole * whole
        first, interval = depth * size, self.snapshot_interval
        while (last - first) // interval > max(len(self.snapshot_slots) // 4, 1):
            interval *= 2
        parting = self._tree(seq).find(seq.keys, due - self.recent).depth * size // whole * whole
        points = {*range(0, last, interval), parting, last}
        return sorted(point for point in points if first < point <= last)

    def _keep(self, seq: SequenceState, start: int) -> tuple[tuple[int, int], ...]:
        """Give slots for the snapshots due from `start` to where `seq` is computed, at positions that the tree has."""
        keeps = []
        for point in seq.points:
            if not start < point <= seq.computed:
                continue
            node = self._tree(seq).find(seq.keys, point)
            if node.depth * self.page_size != point:
                continue  # another sequence has the pages before this place in the tree, and still uses them
            if node.snapshot is not None:
                self.snapshots.use(node)
            elif (slot := self.snapshots.give(node)) is not None:
                keeps.append((point, slot))
                if self.host is not None and (point == seq.points[-1] or node.children):
                    self.host.want_snapshot(node)
        return tuple(keeps)

    def _publish(self, seq: SequenceState, end: int, leaving: bool = False) -> None:
        end = min(end, seq.prompt_len) if self.replays else end
        if seq.node:
            seq.node = self._tree(seq).insert(
                seq.keys, seq.pages, end, seq.node, leaving=leaving, drafter_seen=seq.drafter_seen
            )

    def preempt(self, seq: SequenceState) -> None:
        """Back to the queue, before all others of its priority. All its results have been read: only its KV is lost."""
        self._vacate(seq)
        if self.replays:
            seq.replayed += len(seq.tokens) - seq.prompt_len
            seq.lost = max(seq.lost, seq.tokens[seq.prompt_len :], key=len)
            del seq.tokens[seq.prompt_len :]
        seq.status = Status.WAITING
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.set_back(seq)

    def retract(self) -> None:
        """Preempt all sequences, whose results have all been read."""
        for seq in self.admitted[::-1]:
            self.preempt(seq)

    def change_version(self, marks: int) -> None:
        """Have other weights: pages of before aren't found any more, nor is anything published that depends on them.

        What was read before can't be made again, so a sequence that would be replayed goes on from there. `marks`: of
        the versions before and after, one xor the other, for salts.
        """
        for seq in self.admitted[::-1]:
            if seq.replayed:
                self.preempt(seq)
            seq.node = None
        if self.host is not None:
            self.host.clear(disk=False)  # weights of before may come back, and have their files' keys
        for seq in [*self.admitted, *self.waiting]:
            seq.salt ^= marks
            if seq.replayed:
                seq.tokens[seq.prompt_len :], seq.replayed = seq.lost, 0

    def _vacate(self, seq: SequenceState) -> None:
        """Publish the committed pages, then give back slot and pages."""
        if seq.status is Status.RUNNING:
            # The drafter may not have caught up with the newest committed position, so that one is kept out.
            self._publish(seq, len(seq.tokens) - 2, leaving=True)
            self.running.remove(seq)
        else:
            self._publish(seq, seq.computed, leaving=True)
            (self.loading if seq.status is Status.LOADING else self.prefilling).remove(seq)
        if seq.load is not None:
            self.host.unpin(seq.load.blocks)
        self.pools[self.device.of(seq.slot)].release(seq.pages)
        if self.adapters is not None:
            self.adapters.leave(seq.adapter, seq.slot)
        self.table[seq.slot] = 0
        self._free_slots.append(seq.slot)
        seq.pages, seq.slot, seq.node, seq.drafter_seen, seq.load = [], -1, None, None, None
        seq.computed = seq.in_flight = 0
        seq.epoch += 1
        self._refused = False
