"""Pages of KV, counted on the host: who holds each page, and which cached prefixes they spell. No jax.

A page is `page_size` consecutive positions of one sequence, in every layer. `PagePool` counts the holders of each page.
`PrefixTree` remembers what the full pages hold, so that a prompt with a known beginning needs no prefill for it. It
knows tokens by keys, numbers that the host makes (`Sequence.keys`). A model with recurrent layers needs more than
pages: it can continue only where a copy of the state was kept, a *snapshot*, in a slot that a node owns (`Snapshots`).

Invariants: a page is free exactly when nobody holds it. The holder of a tree node's page holds the pages of all its
ancestors too. So a page that only the tree holds has no descendant in use, and everything `evictable` can be freed. A
snapshot's slot is free, or is owned by one node that is in the tree.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

MISSED = -1  # ends the edge of a page that the drafter missed; no key is negative


class OutOfPages(RuntimeError):
    """Fewer pages are free than were requested."""


class PagePool:
    """Reference counts of `num_pages` pages, numbered from `first` on. The first one is the dummy that padding writes
    to; it is never handed out.

    `idle` counts the pages that the prefix tree alone holds.
    """

    def __init__(self, num_pages: int, first: int = 0):
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages, the dummy page 0 and one to use; got {num_pages}")
        self.num_pages = num_pages
        self.idle = 0
        self.first = first
        self._free = list(range(first + num_pages - 1, first, -1))
        self._holders = [0] * (first + num_pages)
        self._cached = bytearray(first + num_pages)  # 1: one of the holders is the prefix tree

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def refcount(self, page: int) -> int:
        """The number of holders of `page`, the prefix tree included."""
        return self._holders[page]

    def alloc(self, n: int) -> list[int]:
        """Take `n` free pages, each held once. **Raises:** `OutOfPages`, taking none, if fewer are free."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages requested, {len(self._free)} of {self.num_pages - 1} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold each page once more. **Raises:** `ValueError` for a page that nobody holds."""
        for page in pages:
            holders = self._holders[page]
            if not holders:
                raise ValueError(f"page {page} can't be retained: it is free (alloc hands out free pages)")
            self._holders[page] = holders + 1
            if holders == 1 and self._cached[page]:
                self.idle -= 1

    def release(self, pages: Iterable[int]) -> None:
        """Undo one hold of each page. **Raises:** `ValueError` for a page that only the tree holds, or nobody."""
        for page in pages:
            holders = self._holders[page] - 1
            if holders < self._cached[page]:
                raise ValueError(f"page {page} was released more often than it was retained")
            self._holders[page] = holders
            if not holders:
                self._free.append(page)
            elif holders == 1 and self._cached[page]:
                self.idle += 1

    def cache(self, page: int) -> None:
        """Hold a page for the prefix tree. **Raises:** `ValueError` if the tree holds it already."""
        if self._cached[page]:
            raise ValueError(f"page {page} is in the prefix tree already; a page has one place there")
        self.retain((page,))
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """Undo `cache`."""
        if self._holders[page] == 1:
            self.idle -= 1
        self._cached[page] = 0
        self.release((page,))


class Node:
    """One cached page: `key` has its tokens' keys, the path from the root those before them. The root has no page.

    `snapshot` is the slot that holds the state after all of these tokens, if one does.
    """

    __slots__ = ("_digest", "children", "depth", "key", "page", "parent", "queued", "snapshot", "used")

    def __init__(self, key: tuple[int, ...], page: int, parent: Node | None):
        self.key = key
        self.page = page
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0  # pages from the root to here
        self.children: dict[tuple[int, ...], Node] = {}
        self.used = 0  # the tree's clock when it was last matched or inserted
        self.queued = False  # has its entry in the queue of leaves
        self.snapshot: int | None = None
        self._digest: bytes | None = None if parent else b""

    @property
    def digest(self) -> bytes:
        """The page's key on the host: a digest of all keys from the root to here."""
        node, path = self, []
        while node._digest is None:
            path.append(node)
            node = node.parent
        for each in reversed(path):
            each._digest = digest_of(each.parent._digest, each.key)
        return self._digest

    @property
    def drafter_seen(self) -> int:
        """Pages from the root to here that a drafter has seen, too."""
        node = self
        while node.parent and node.key[-1] == MISSED:
            node = node.parent
        return node.depth


def digest_of(before: bytes, edge: tuple[int, ...]) -> bytes:
    """The digest of a page behind the one that has the digest `before`."""
    try:
        content = array("q", edge).tobytes()
    except OverflowError:  # a salt, or a picture's content
        content = repr(edge).encode()
    return hashlib.blake2b(before + content, digest_size=16).digest()


class Leaver(Protocol):
    """Who is asked before a page or a snapshot leaves the device, and may copy it before the next program runs."""

    def published(self, node: Node, complete: bool) -> None:
        """`complete`: all programs that fill the page were dispatched; otherwise, those planned now do."""

    def leaves(self, node: Node) -> None: ...

    def loses_snapshot(self, node: Node) -> None: ...


class Snapshots:
    """State slots for snapshots, and the nodes that own them. When all are owned, the least recently used is given up.

    Nobody holds a snapshot. Its reader is in a program that is planned at once, and the device runs programs in order.
    So its slot can be given away the moment after. `host`: is asked before a slot is taken from a node.
    """

    def __init__(self, slots: Iterable[int], host: Leaver | None = None):
        self._host = host
        self._free = list(slots)[::-1]
        self._owners: dict[Node, int] = {}  # least recently used first

    @property
    def free(self) -> list[int]:
        """Slots that no node owns."""
        return self._free

    @property
    def owners(self) -> Collection[Node]:
        """Nodes that own a slot."""
        return self._owners.keys()

    def give(self, node: Node) -> int | None:
        """A slot for a node that has none; None if there are no slots at all."""
        if not self._free:
            if not self._owners:
                return None
            self.drop(next(iter(self._owners)))
        node.snapshot = self._owners[node] = self._free.pop()
        return node.snapshot

    def use(self, node: Node) -> None:
        """Note that a request continues from a node's snapshot."""
        self._owners[node] = self._owners.pop(node)

    def drop(self, node: Node) -> None:
        """Take back a node's slot, if it has one."""
        if node.snapshot is not None:
            if self._host is not None:
                self._host.loses_snapshot(node)
            self._free.append(self._owners.pop(node))
            node.snapshot = None


class PrefixTree:
    """Full pages by the keys of their tokens and of all tokens before: a trie whose edges are one page of keys.

    Each node holds its page once. The queue of leaves is a heap by time of last use, corrected lazily. Each leaf has
    one entry, whose time may be out of date. An entry whose node has children by now is dropped when it comes up.

    Pages that hold keys and values of the target alone, since the drafter missed their tokens, have edges of their own
    (`MISSED`). So a request that drafts never gets them, and both kinds may lie side by side.

    With `reach`, a page's content also depends on that many tokens after it (a drafter's cache may depend on the token
    that comes next). An edge then has them too, and a page is published and matched once they are known.

    With `snapshots`, a match ends at the deepest node that has one. A request that continues there computes the tree's
    further pages again, and its own take their place. Otherwise nothing new could be published beyond those. With
    `replaces` they do so too: requests compute pages that the tree has, for a drafter that keeps its own by slot.

    `host`: is shown pages that come and go. `clock` counts matches and insertions.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        reach: int = 0,
        snapshots: Snapshots | None = None,
        host: Leaver | None = None,
        replaces: bool = False,
    ):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self.reach = reach
        self.snapshots = snapshots
        self.replaces = replaces or snapshots is not None
        self._host = host
        self._pool = pool
        self.clock = 0
        self._first = b""  # the root's digest
        self._reset()

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self._pool.idle

    def match(self, keys: list[int], limit: int, missed: bool = False) -> tuple[list[int], Node]:
        """The longest cached prefix of full pages within `keys[:limit]` from which a request can continue.

        Returns its pages, retained for the caller, and the node reached, from which the caller may `insert` on.
        `missed`: those will do that the drafter missed.
        """
        self.clock += 1
        path = self.path(keys, limit, missed)
        for node in path:
            node.used = self.clock
        if self.snapshots is not None:
            while path and path[-1].snapshot is None:
                path.pop()
            if path:
                self.snapshots.use(path[-1])
        pages = [node.page for node in path]
        self._pool.retain(pages)
        return pages, path[-1] if path else self.root

    def path(self, keys: list[int], limit: int, missed: bool = False, start: Node | None = None) -> list[Node]:
        """The nodes behind `start` that spell full pages of `keys[:limit]`, with snapshots or without."""
        node, size, found = start or self.root, self.page_size, []
        for end in range((node.depth + 1) * size, min(limit, len(keys) - self.reach) + 1, size):
            edge = tuple(keys[end - size : end + self.reach])
            node = node.children.get(edge) or (node.children.get((*edge, MISSED)) if missed else None)
            if node is None:
                break
            found.append(node)
        return found

    def find(self, keys: list[int], limit: int) -> Node:
        """The deepest node that spells full pages of `keys[:limit]`, with a snapshot or without."""
        path = self.path(keys, limit)
        return path[-1] if path else self.root

    def insert(
        self,
        keys: list[int],
        pages: list[int],
        limit: int,
        start: Node | None = None,
        *,
        leaving: bool = False,
        drafter_seen: int | None = None,
    ) -> Node:
        """Publish the full pages of `keys[:limit]`, where `pages[i]` holds the i-th page of tokens.

        A node that is there already keeps its own page. If that isn't the caller's page, a caller that keeps its pages
        must stop (later nodes would be held while this one is not). One that is `leaving`, about to release all of
        them, continues. With `replaces`, the caller's page takes the place of one that nobody else holds.

        **Arguments:**

        - `start`: the node an earlier `match` or `insert` of the same keys returned, so that a growing prefix isn't
          walked again. Its page must still be held by the caller; `clear` ends its use.
        - `drafter_seen`: positions that the drafter has seen, None for all.

        Returns the node reached.
        """
        self.clock += 1
        node, size = start or self.root, self.page_size
        for depth in range(node.depth, max(min(limit, len(keys) - self.reach), 0) // size):
            end = (depth + 1) * size
            missed = () if drafter_seen is None or end <= drafter_seen else (MISSED,)
            edge = *keys[end - size : end + self.reach], *missed
            child = node.children.get(edge)
            if child is None:
                self._pool.cache(pages[depth])
                child = node.children[edge] = Node(edge, pages[depth], node)
                self.num_pages += 1
                if self._host is not None:
                    self._host.published(child, leaving)
            elif child.page != pages[depth] and not leaving:
                if not self.replaces or self._pool.refcount(child.page) > 1:
                    break
                self._pool.uncache(child.page)
                self._pool.cache(pages[depth])
                child.page = pages[depth]
                if self._host is not None:
                    self._host.published(child, leaving)
            child.used = self.clock
            node = child
        self._queue_if_leaf(node)
        return node

    def evict(self, n: int) -> int:
        """Free up to `n` pages, least recently used leaves first, none that anybody else holds. Returns how many."""
        freed = 0
        while freed < n and self._pool.idle:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if self._pool.refcount(node.page) > 1:
                node.used = self.clock  # being held is being used; queued last, it won't be met again in this call
            elif node.used == used and not node.children:
                self._drop(node)
                freed += 1
                continue
            self._queue_if_leaf(node)
        return freed

    def clear(self) -> int:
        """Forget everything; pages that others hold stay theirs. Returns how many pages were cached."""
        dropped = self.num_pages
        for node in self.nodes():
            self._forget(node)
        self._reset()
        return dropped

    def begin_with(self, digest: bytes) -> None:
        """Have pages depend on this, too, in their keys below the device. Nothing of before may be matched any more."""
        self._first = self.root._digest = digest

    def nodes(self) -> Iterator[Node]:
        """Every node except the root, parents before children."""
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _reset(self) -> None:
        self.root = Node((), 0, None)
        self.root._digest = self._first
        self.num_pages = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._entries = 0  # ever queued: orders leaves of the same time, first come first

    def _queue_if_leaf(self, node: Node) -> None:
        if not (node.children or node.queued or node is self.root):
            node.queued = True
            self._entries += 1
            heapq.heappush(self._leaves, (node.used, self._entries, node))

    def _drop(self, node: Node) -> None:
        parent = node.parent
        if self._host is not None:
            self._host.leaves(node)
        del parent.children[node.key]
        self.num_pages -= 1
        self._forget(node)
        self._queue_if_leaf(parent)

    def _forget(self, node: Node) -> None:
        self._pool.uncache(node.page)
        if self.snapshots is not None:
            self.snapshots.drop(node)
