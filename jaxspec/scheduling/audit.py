"""Whether a scheduler's pages and slots balance: each page is counted as often as it is held, each slot has one owner.

Tests call it after each step, and the engine when it starts again after a failure.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxspec.scheduling.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """**Raises:** `RuntimeError` listing every page and slot that doesn't balance."""
    admitted, pools, trees = scheduler.admitted, scheduler.pools, scheduler.trees
    usable = [page for pool in pools for page in range(pool.first + 1, pool.first + pool.num_pages)]
    holders = Counter(page for seq in admitted for page in seq.pages)
    nodes = [node for tree in trees for node in tree.nodes()]
    cached = Counter(node.page for node in nodes)
    wrong = [
        f"page {page} is counted {scheduler.device.holders(page)} times, held by {holders[page]} sequences "
        f"and {cached[page]} nodes of the prefix tree"
        for page in usable
        if scheduler.device.holders(page) != holders[page] + cached[page] or cached[page] > 1
    ]
    figures = {
        "free pages": (scheduler.free_pages, sum(not (holders[p] or cached[p]) for p in usable)),
        "cached pages": (scheduler.cached_pages, len(cached)),
        "evictable pages": (sum(tree.evictable for tree in trees), sum(not holders[page] for page in cached)),
        "uses of dummy pages": (
            sum(holders[p] + cached[p] + scheduler.device.holders(p) for p in {x.first for x in pools}),
            0,
        ),
        "slots": (sorted([*scheduler._free_slots, *(s.slot for s in admitted)]), list(range(len(scheduler.table) - 1))),
    }
    if scheduler.snapshots is not None:
        owners = [node for node in nodes if node.snapshot is not None]
        figures["owners of snapshots"] = (set(scheduler.snapshots.owners), set(owners))
        owned = sorted([*scheduler.snapshots.free, *(node.snapshot for node in owners)])
        figures["snapshot slots"] = (owned, sorted(scheduler.snapshot_slots))
    wrong += [f"{name}: {found}, should be {due}" for name, (found, due) in figures.items() if found != due]
    wrong += [
        f"page {node.page} is held, but page {node.parent.page} before it in the prefix tree is not"
        for node in nodes
        if holders[node.page] and node.depth > 1 and not holders[node.parent.page]
    ]
    wrong += [
        f"{seq} holds pages of another device"
        for seq in admitted
        if {*map(scheduler.device.of_page, seq.pages)} - {scheduler.device.of(seq.slot)}
    ]
    table = np.zeros_like(scheduler.table)
    for seq in admitted:
        table[seq.slot, : len(seq.pages)] = seq.pages
    wrong += [
        f"row {row} of the table is not its slot's pages" for row in np.flatnonzero((table != scheduler.table).any(1))
    ]
    wrong += [f"waiting, but owns something: {seq}" for seq in scheduler.waiting if seq.pages or seq.slot >= 0]
    if wrong:
        raise RuntimeError("pages and slots don't balance:\n" + "\n".join(wrong))
