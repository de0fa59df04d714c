"""Copies of pages and snapshots by key, within a bound: blocks in the host's memory, or files. No jax.

A block's `parent` is the key of the page before it. Of a chain of blocks the last goes first, so that each block's
predecessors are there or were never kept.

Invariant: `used` is the bytes of all blocks, those that a copy still reads included, and never exceeds `capacity`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

FALLBACK = 1 / 16  # share of the way back to the speed measured at start, for each reload that wasn't worth it
STATE = b"s"  # ends the key of a snapshot, which begins with its page's
MOVE_RATE = 1 / 8  # share of a difference by which the speed moves


@dataclass(eq=False, slots=True)
class Block:
    """One copy: `data` and the `checksums` of the devices' parts are the engine's, which alone looks at them."""

    key: bytes
    parent: bytes
    size: int
    missed: bool  # the drafter has not seen the page
    data: Any = field(default=None, repr=False)  # None: on the disk, or on its way from there
    checksums: Any = field(default=None, repr=False)
    used: int = 0
    pins: int = 0  # copies that read it or make it
    dropped: bool = False
    from_disk: bool = False  # and no prompt has used it since


class KeptBlocks:
    """At most `capacity` bytes of blocks. `speed` is how many bytes come back in a second, None if nothing was
    measured; `backlog`, bytes that are on their way."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = self.backlog = 0
        self.speed: float | None = None
        self.evicted = 0  # blocks given up
        self._at_start: float | None = None
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._next: dict[bytes, set[bytes]] = {}  # keys of blocks by the key before them
        self._clock = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def enter(self, block: Block) -> None:
        """Keep a block, for which `make_room` made room, and whose key isn't there."""
        self.used += block.size
        self._blocks[block.key] = block
        self._next.setdefault(block.parent, set()).add(block.key)
        self._touch(block)

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
        """The last block of the least recently used chain that no copy reads."""
        seen: set[bytes] = set()
        for block in self._blocks.values():
            while block.key not in seen and (following := self._next.get(block.key)):
                seen.add(block.key)
                block = min((self._blocks[key] for key in following), key=lambda each: each.used)
            if not block.pins and block.key not in seen:
                return block
        return None

    def drop(self, block: Block) -> None:
        """Forget a block. Its memory counts until the last copy that reads it has ended."""
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
        """Keep blocks while a copy reads them."""
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

    def _touch(self, block: Block) -> None:
        block.used = self._clock
        self._blocks.move_to_end(block.key)

    def touch_path(self, keys: list[bytes]) -> None:
        """Note that a prompt begins with these pages. Of their snapshots the last counts; it supersedes the others."""
        self._clock += 1
        newest = None
        for key in keys:
            if (block := self._blocks.get(key)) is not None:
                self._touch(block)
            newest = self._blocks.get(key + STATE, newest)
        if newest is not None:
            self._touch(newest)

    def took(self, size: int, seconds: float, at_start: bool = False) -> None:
        """Note how long bytes took to come back, where nothing else held them up."""
        speed = size / max(seconds, 1e-9)
        if at_start:
            self._at_start = self.speed = speed
        else:
            self.speed = speed if self.speed is None else self.speed + MOVE_RATE * (speed - self.speed)

    def fall_back(self) -> None:
        """Move the speed towards the one at start, so that one slow moment doesn't end reloads for good."""
        if self.speed is not None and self._at_start is not None:
            self.speed += FALLBACK * (self._at_start - self.speed)


class DiskTier(KeptBlocks):
    """Which blocks have a file, `overhead` bytes longer than they are. `gone`: keys of files to be deleted."""

    def __init__(self, capacity: int, overhead: int = 0):
        super().__init__(capacity)
        self._overhead = overhead
        self.gone: list[bytes] = []

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def write(self, block: Block) -> bool:
        """Make room for a block's file, and count it from now on. False: it has one, or is too large."""
        size = block.size + self._overhead
        if block.key in self._blocks or not self.make_room(size):
            return False
        self.gone = [key for key in self.gone if key != block.key]  # which are deleted once the writes are done
        self.enter(Block(block.key, block.parent, size, block.missed))
        return True

    def found(self, block: Block) -> None:
        """Count a file that is there from before, in the order of their times. Without room it goes."""
        if block.key in self._blocks:
            return
        if self.make_room(block.size):
            self.enter(block)
        else:
            self.gone.append(block.key)

    def size_of(self, block: Block) -> int:
        """Bytes of a block's content."""
        return block.size - self._overhead

    def drop(self, block: Block) -> None:
        if not block.dropped:
            self.gone.append(block.key)
        super().drop(block)

    def clear(self) -> None:
        """Delete all files."""
        for block in list(self._blocks.values()):
            self.drop(block)
