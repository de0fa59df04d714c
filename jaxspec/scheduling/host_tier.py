"""The second tier of the prefix tree: which pages and snapshots have a copy in the host's memory, by key. No jax.

A block is the copy of one page, in all layers and for target and drafter alike, or of one snapshot. Its key is a digest
of all keys up to there, so blocks are found without the tree's nodes, which may be gone. Pages are copied once they are
published, and at the latest when the tree gives them up. Of snapshots, a prompt's last one is copied and the one where
it leaves the tree. The device's programs run in order, so a copy that is dispatched before the program that fills a
page anew has the old content.

Invariants: `used` is the bytes of all blocks, those that a load still reads included, and never exceeds `capacity`. A
page whose content isn't dispatched yet (`_fresh`) is never copied. Of a chain of blocks the last goes first, so that
each block's predecessors are there or were never copied.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxspec.scheduling.prefix_cache import MISSED, Node, PrefixTree, digest_of

STATE = b"s"  # ends the key of a snapshot, which begins with its page's
FALLBACK = 1 / 16  # share of the way back to the speed measured at start, for each reload that wasn't worth it
MOVE_RATE = 1 / 8  # share of a difference by which the speed moves


@dataclass(eq=False, slots=True)
class Block:
    """One copy: `data` and the `checksums` of the devices' parts are the engine's, which alone looks at them."""

    key: bytes
    parent: bytes
    size: int
    missed: bool  # the drafter has not seen the page
    data: Any = field(repr=False)
    checksums: Any = field(repr=False)
    used: int = 0
    pins: int = 0  # loads that read it
    dropped: bool = False


class Copy(NamedTuple):
    """A page, or a state slot, to be copied to the host under a key."""

    key: bytes
    parent: bytes
    at: int
    state: bool
    missed: bool = False


@dataclass(eq=False)
class Load:
    """Blocks to be brought back for one sequence: `pages`, behind the device's, and the `state` after them.

    `nodes` are the tree's pages between the sequence's match and these, `depth` all pages that it then has, `seen` how
    many of them the drafter has seen.
    """

    nodes: list[Node]
    pages: list[Block]
    state: Block | None
    depth: int
    seen: int

    @property
    def blocks(self) -> list[Block]:
        return self.pages if self.state is None else [*self.pages, self.state]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)


class HostTier:
    """At most `capacity` bytes of blocks, of `page_bytes` a page and `state_bytes` a snapshot.

    `token`, set before each plan, is how many seconds a prompt token's prefill takes, 0 if that isn't known. `speed` is
    how many bytes come back in a second, None if nothing was measured; `backlog`, bytes that are on their way.
    """

    def __init__(self, capacity: int, page_bytes: int, state_bytes: int = 0):
        self.capacity, self.page_bytes, self.state_bytes = capacity, page_bytes, state_bytes
        self.used = self.backlog = 0
        self.token = 0.0
        self.speed: float | None = None
        # reloads that would have been slower; blocks given up; pages that left the device faster than they are copied
        self.declined = self.evicted = self.skipped = 0
        self._at_start: float | None = None
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._next: dict[bytes, set[bytes]] = {}  # keys of blocks by the key before them
        self._clock = 0
        self._since = 0  # nodes that were last used before this time of the tree's are of no use
        self._tree: PrefixTree | None = None
        self._fresh: dict[tuple[Node, bool], None] = {}  # published by the plan that is being made
        self._wanted: dict[tuple[Node, bool], None] = {}  # to be copied; True: the snapshot
        self._leaving: list[Copy] = []  # given up by the tree in the plan that is being made

    def serves(self, tree: PrefixTree) -> None:
        """Be the second tier of this tree."""
        self._tree = tree

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def waits(self) -> bool:
        """Whether something is to be copied."""
        return bool(self._leaving or self._wanted or self._fresh)

    # What the tree says, see `prefix_cache.Leaver`.

    def published(self, node: Node, complete: bool) -> None:
        self._want(node, False, complete)

    def leaves(self, node: Node) -> None:
        self._leave(node, False)

    def loses_snapshot(self, node: Node) -> None:
        if (node, True) in self._wanted or (node, True) in self._fresh:
            self._leave(node, True)

    def want_snapshot(self, node: Node) -> None:
        """Have the snapshot copied that the plan in the making gives a node."""
        self._want(node, True, False)

    def _want(self, node: Node, state: bool, complete: bool) -> None:
        self._wanted.pop((node, state), None)
        (self._wanted if complete else self._fresh)[node, state] = None

    def _leave(self, node: Node, state: bool) -> None:
        fresh = (node, state) in self._fresh
        self._fresh.pop((node, state), None)
        self._wanted.pop((node, state), None)
        if not fresh and node.used > self._since and _key(node, state) not in self._blocks:
            self._leaving.append(_copy(node, state))

    def begin_plan(self) -> None:
        """All that was planned before is dispatched."""
        self._wanted |= self._fresh
        self._fresh.clear()

    def to_copy(self, room: int) -> list[Copy]:
        """Choose what is copied before the plan's programs run, at most `room` bytes. Pages that leave the device in
        this plan come first; those without room are lost."""
        copies, leaving = [], iter(self._leaving)
        while room > 0:
            if (copy := next(leaving, None)) is None:
                if not self._wanted:
                    break
                node, state = next(iter(self._wanted))
                if (self.state_bytes if state else self.page_bytes) > room:
                    break
                del self._wanted[node, state]
                if (block := self._blocks.get(_key(node, state))) is not None:
                    self._touch(block)
                    continue
                copy = _copy(node, state)
            room -= self.bytes_of(copy)
            if room >= 0:
                copies.append(copy)
            else:
                self.skipped += 1
        self.skipped += len([*leaving])
        self._leaving = []
        return copies

    def bytes_of(self, copy: Copy) -> int:
        return self.state_bytes if copy.state else self.page_bytes

    def add(self, copy: Copy, data: Any, checksums: Any) -> Block | None:
        """Enter a copy, for which `make_room` made room. None, and nothing is entered, if it is there already."""
        if copy.key in self._blocks:
            return None
        block = Block(copy.key, copy.parent, self.bytes_of(copy), copy.missed, data, checksums)
        self.used += block.size
        self._blocks[block.key] = block
        self._next.setdefault(block.parent, set()).add(block.key)
        self._touch(block)
        return block

    def make_room(self, size: int) -> bool:
        """Give up blocks, least recently used first, until so many bytes are free. False: there will never be."""
        while self.used + size > self.capacity:
            if (block := self._oldest()) is None:
                return False
            while block is not None and self.used + size > self.capacity:  # then what is before it, if that is as old
                self.evicted += 1
                self.drop(block)
                before = self._blocks.get(block.parent)
                goes = (
                    before is not None and before.used <= block.used and not (before.pins or before.key in self._next)
                )
                block = before if goes else None
        return True

    def _oldest(self) -> Block | None:
        """The last block of the least recently used chain that no load reads."""
        for block in self._blocks.values():
            while following := self._next.get(block.key):
                block = min((self._blocks[key] for key in following), key=lambda each: each.used)
            if not block.pins:
                return block
        return None

    def drop(self, block: Block) -> None:
        """Forget a block. Its memory counts until the last load that reads it has ended."""
        if block.dropped:
            return
        block.dropped = True
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
            following = self._next[block.parent]
            following.discard(block.key)
            if not following:
                del self._next[block.parent]
        if not block.pins:
            self._free(block)

    def pin(self, blocks: list[Block]) -> None:
        """Keep blocks while a load reads them."""
        for block in blocks:
            block.pins += 1

    def unpin(self, blocks: list[Block]) -> None:
        """Undo `pin`."""
        for block in blocks:
            block.pins -= 1
            if block.dropped and not block.pins:
                self._free(block)

    def _free(self, block: Block) -> None:
        self.used -= block.size
        block.data = block.checksums = None

    def clear(self) -> None:
        """Forget everything, and pages that are in the tree now: nobody will ask for them."""
        for block in list(self._blocks.values()):
            self.drop(block)
        self._fresh.clear()
        self._wanted.clear()
        self._leaving.clear()
        self._since = self._tree.clock

    def find(self, keys: list[int], start: Node, limit: int, missed: bool) -> Load | None:
        """The blocks from which a prompt can go on beyond `start`, the node that it matched, within `keys[:limit]`.

        With snapshots, a prompt can go on only where one is. None if there are none, or if computing is faster.
        """
        tree, size = self._tree, self._tree.page_size
        nodes = [] if tree.snapshots is None else tree.path(keys, limit, missed, start)
        digests = [(nodes or [start])[-1].digest]
        pages: list[Block] = []
        first = start.depth + len(nodes)
        for end in range((first + 1) * size, min(limit, len(keys) - tree.reach) + 1, size):
            edge = tuple(keys[end - size : end + tree.reach])
            edges = (edge, (*edge, MISSED)) if missed else (edge,)
            found = (self._blocks.get(digest_of(digests[-1], each)) for each in edges)
            if (block := next(filter(None, found), None)) is None:
                break
            pages.append(block)
            digests.append(block.key)
        self._touch_all(start, nodes, pages)
        unseen = [node.drafter_seen < node.depth for node in nodes] + [block.missed for block in pages]
        seen = start.drafter_seen if start.drafter_seen < start.depth else start.depth + (*unseen, True).index(True)
        load = None
        if tree.snapshots is None:
            load = Load([], pages, None, first + len(pages), seen) if pages else None
        else:
            places = [*(node.digest for node in nodes), *digests[1:]]
            loads = []
            for depth, digest in enumerate(places, start.depth + 1):
                if (state := self._blocks.get(digest + STATE)) is not None:
                    own = depth - start.depth
                    loads.append(Load(nodes[:own], pages[: max(own - len(nodes), 0)], state, depth, min(seen, depth)))
            load = max(loads, key=lambda each: self._saved(each, start), default=None)
        if load is None or self._saved(load, start) >= 0:
            return load
        self.declined += 1
        if self.speed is not None and self._at_start is not None:
            self.speed += FALLBACK * (self._at_start - self.speed)
        return None

    def _saved(self, load: Load, start: Node) -> float:
        """Seconds that a load saves; where one of the times isn't known, its tokens."""
        tokens = (load.depth - start.depth) * self._tree.page_size
        if not self.token or self.speed is None:
            return tokens
        return tokens * self.token - (load.size + self.backlog) / self.speed

    def took(self, size: int, seconds: float, at_start: bool = False) -> None:
        """Note how long a transfer to the device took that nothing else held up."""
        speed = size / max(seconds, 1e-9)
        if at_start:
            self._at_start = self.speed = speed
        else:
            self.speed = speed if self.speed is None else self.speed + MOVE_RATE * (speed - self.speed)

    def _touch(self, block: Block) -> None:
        block.used = self._clock
        self._blocks.move_to_end(block.key)

    def _touch_all(self, start: Node, nodes: list[Node], pages: list[Block]) -> None:
        """Note that a prompt begins with these, from the root on."""
        self._clock += 1
        path = [*nodes[::-1]]
        while start.parent:
            path.append(start)
            start = start.parent
        newest = None  # of the snapshots; earlier ones are superseded
        for key in [*(node.digest for node in reversed(path)), *(block.key for block in pages)]:
            if (block := self._blocks.get(key)) is not None:
                self._touch(block)
            newest = self._blocks.get(key + STATE, newest)
        if newest is not None:
            self._touch(newest)


def _key(node: Node, state: bool) -> bytes:
    return node.digest + STATE if state else node.digest


def _copy(node: Node, state: bool) -> Copy:
    if state:
        return Copy(node.digest + STATE, node.digest, node.snapshot, True)
    return Copy(node.digest, node.parent.digest, node.page, False, node.key[-1] == MISSED)
