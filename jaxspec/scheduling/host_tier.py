"""The second tier of the prefix tree: which pages and snapshots have a copy in the host's memory, by key. No jax.

A block is the copy of one page, in all layers and for target and drafter alike, or of one snapshot. Its key is a digest
of all keys up to there, so blocks are found without the tree's nodes, which may be gone. Pages are copied once they are
published, and at the latest when the tree gives them up. Of snapshots, a prompt's last one is copied and the one where
it leaves the tree. The device's programs run in order, so a copy that is dispatched before the program that fills a
page anew has the old content.

A page whose content isn't dispatched yet (`_fresh`) is never copied.

With a `disk`, blocks are written to it, the oldest first, once the memory is half full. So most are there by the time
that they are given up. A prompt that wants them has them read into the host's memory first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxspec.scheduling.kept_blocks import STATE, Block, DiskTier, KeptBlocks
from jaxspec.scheduling.prefix_cache import MISSED, Node, PrefixTree, digest_of

FULL = 1 / 2  # share of the memory; above it, the oldest blocks are written to the disk
LOADS = 3  # the last ones, of which the least late counts: a slow moment is no habit
TRIED = 16  # reloads are declined for being late before one is tried again


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


class HostTier(KeptBlocks):
    """At most `capacity` bytes of blocks, of `page_bytes` a page and `state_bytes` a snapshot.

    `token`, set before each plan, is how many seconds a prompt token's prefill takes, 0 if that isn't known.
    """

    def __init__(self, capacity: int, page_bytes: int, state_bytes: int = 0, disk: DiskTier | None = None):
        super().__init__(capacity)
        self.page_bytes, self.state_bytes, self.disk = page_bytes, state_bytes, disk
        self.token = 0.0
        # reloads that would have been slower; pages that left the device faster than they are copied
        self.declined = self.skipped = 0
        self._late: deque[float] = deque(maxlen=LOADS)  # seconds by which the last loads took longer than their bytes
        self._declined_late = 0
        self.to_read: list[Block] = []  # from the disk; they have their memory
        self._unsaved: OrderedDict[bytes, Block] = OrderedDict()  # neither on the disk nor tried; the oldest first
        self._since = 0  # nodes that were last used before this time of the tree's are of no use
        self._tree: PrefixTree | None = None
        self._fresh: dict[tuple[Node, bool], None] = {}  # published by the plan that is being made
        self._wanted: dict[tuple[Node, bool], None] = {}  # to be copied; True: the snapshot
        self._leaving: list[Copy] = []  # given up by the tree in the plan that is being made

    def serves(self, tree: PrefixTree) -> None:
        """Be the second tier of this tree."""
        self._tree = tree

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
        self.enter(block)
        if self.disk is not None and self.disk.get(block.key) is None:
            self._unsaved[block.key] = block
        return block

    @property
    def writes(self) -> bool:
        """Whether blocks are to be written to the disk."""
        return bool(self._unsaved) and self.used > FULL * self.capacity

    def to_write(self, room: int) -> list[Block]:
        """Blocks to be written to the disk now, at most `room` bytes, the oldest first. They are pinned."""
        chosen: list[Block] = []
        while self.writes:
            block = next(iter(self._unsaved.values()))
            room -= block.size
            if room < 0 or isinstance(block.checksums, tuple):  # it isn't here yet
                break
            del self._unsaved[block.key]
            if self.disk.write(block):
                self.pin([block])
                chosen.append(block)
        return chosen

    def drop(self, block: Block) -> None:
        self._unsaved.pop(block.key, None)
        super().drop(block)

    def drop_from_disk(self, block: Block) -> None:
        """Forget the file of a block, if it has one."""
        if self.disk is not None and (kept := self.disk.get(block.key)) is not None:
            self.disk.drop(kept)

    def _touch(self, block: Block) -> None:
        super()._touch(block)
        if block.key in self._unsaved:
            self._unsaved.move_to_end(block.key)

    def clear(self, disk: bool = True) -> None:
        """Forget everything, and pages that are in the tree now: nobody will ask for them."""
        for block in list(self._blocks.values()):
            self.drop(block)
        if disk and self.disk is not None:
            self.disk.clear()
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
        in_memory: int | None = None  # pages before the disk's
        from_disk = self.capacity // 2 // self.page_bytes  # at most
        for end in range((first + 1) * size, min(limit, len(keys) - tree.reach) + 1, size):
            edge = tuple(keys[end - size : end + tree.reach])
            edges = (edge, (*edge, MISSED)) if missed else (edge,)
            found = (self._get(digest_of(digests[-1], each)) for each in edges)
            if (block := next(filter(None, found), None)) is None:
                break
            if self._lacks(block):
                in_memory = len(pages) if in_memory is None else in_memory
                from_disk -= 1
                if from_disk < 0:
                    break
            pages.append(block)
            digests.append(block.key)
        self._touch_all(start, nodes, pages)
        unseen = [node.drafter_seen < node.depth for node in nodes] + [block.missed for block in pages]
        seen = start.drafter_seen if start.drafter_seen < start.depth else start.depth + (*unseen, True).index(True)
        loads = []
        if tree.snapshots is None:
            for count in {len(pages), in_memory or len(pages)} if pages else ():
                loads.append(Load([], pages[:count], None, first + count, min(seen, first + count)))
        else:
            places = [*(node.digest for node in nodes), *digests[1:]]
            for depth, digest in enumerate(places, start.depth + 1):
                if (state := self._get(digest + STATE)) is not None:
                    own = depth - start.depth
                    loads.append(Load(nodes[:own], pages[: max(own - len(nodes), 0)], state, depth, min(seen, depth)))
        load = max(loads, key=lambda each: self._saved(each, start), default=None)
        saved = 0.0 if load is None else self._saved(load, start)
        if load is None or (saved >= 0 and self._fetch(load)):
            return load
        self.declined += 1
        self.fall_back()
        if saved < 0 <= saved + self.late:
            self._declined_late += 1
            if self._declined_late % TRIED == 0:
                self._late.popleft()
        if in_memory is not None:
            self.disk.fall_back()
        return None

    @property
    def late(self) -> float:
        """Seconds for which a load waits beside its bytes' time on the link."""
        return min(self._late) if len(self._late) == LOADS else 0.0

    def lasted(self, load: Load, seconds: float) -> None:
        """Note how long a prompt waited for a load where no program ran meanwhile. Pages that leave use the link and
        the host, too."""
        if self.speed is not None:
            self._late.append(max(seconds - load.size / self.speed, 0.0))

    def used_by_prompt(self, load: Load) -> None:
        """Note that a load has ended well."""
        self.unpin(load.blocks)
        for block in load.blocks:
            block.from_disk = False

    def _get(self, key: bytes) -> Block | None:
        """A block in the memory, or one to be made of the disk's."""
        if (block := self._blocks.get(key)) is not None or self.disk is None or (kept := self.disk.get(key)) is None:
            return block
        return Block(key, kept.parent, self.disk.size_of(kept), kept.missed, from_disk=True)

    def _lacks(self, block: Block) -> bool:
        """Whether a block is on the disk alone."""
        return block.from_disk and block.key not in self._blocks

    def _fetch(self, load: Load) -> bool:
        """Give a load's blocks that are on the disk alone their memory, and have them read. False: there is none."""
        lacking = [block for block in load.blocks if self._lacks(block)]
        self.pin(load.blocks)
        room = self.make_room(sum(block.size for block in lacking))
        self.unpin(load.blocks)
        if not room:
            return False
        for block in lacking:
            self.enter(block)
            self.disk.backlog += block.size
        self.pin(lacking)
        self.to_read += lacking
        return True

    def _saved(self, load: Load, start: Node) -> float:
        """Seconds that a load saves; where one of the times isn't known, its tokens."""
        tokens = (load.depth - start.depth) * self._tree.page_size
        if not self.token or self.speed is None:
            return tokens
        saved = tokens * self.token - (load.size + self.backlog) / self.speed - self.late
        if self.disk is None or all(block.data is not None for block in load.blocks):
            return saved
        read = self.disk.backlog + sum(block.size for block in load.blocks if self._lacks(block))
        return saved - read / self.disk.speed if self.disk.speed else tokens

    def _touch_all(self, start: Node, nodes: list[Node], pages: list[Block]) -> None:
        """Note that a prompt begins with these, from the root on."""
        path = [*nodes[::-1]]
        while start.parent:
            path.append(start)
            start = start.parent
        keys = [*(node.digest for node in reversed(path)), *(block.key for block in pages)]
        self.touch_path(keys)
        if self.disk is not None:
            self.disk.touch_path(keys)


def _key(node: Node, state: bool) -> bytes:
    return node.digest + STATE if state else node.digest


def _copy(node: Node, state: bool) -> Copy:
    if state:
        return Copy(node.digest + STATE, node.digest, node.snapshot, True)
    return Copy(node.digest, node.parent.digest, node.page, False, node.key[-1] == MISSED)
