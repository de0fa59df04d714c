"""Which device has which slots and pages. Host data only, no jax.

Where requests are divided among devices (`--dp-attention`), each has as many of the slots and of the pages, one behind
the other's, and a prefix tree of its own: a request reads the pages of its device alone. Otherwise there is one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from jaxspec.scheduling.prefix_cache import Leaver, PagePool, PrefixTree, Snapshots


class DevicePages:
    """The page pools and prefix trees of so many `devices`, by number; `num_slots` and `num_pages` are those of all.

    `reach` and all that comes behind it: as of `PrefixTree`.
    """

    def __init__(
        self,
        devices: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        reach: int = 0,
        snapshots: Snapshots | None = None,
        host: Leaver | None = None,
        replaces: bool = False,
    ):
        if num_slots % devices or num_pages % devices:
            raise ValueError(f"{num_slots} slots and {num_pages} pages can't be divided among {devices} devices")
        self.each = num_slots // devices  # slots of a device
        pages = num_pages // devices
        self.pools = [PagePool(pages, device * pages) for device in range(devices)]
        self.trees = [PrefixTree(pool, page_size, reach, snapshots, host, replaces) for pool in self.pools]

    def of(self, slot: int) -> int:
        """The device that has a slot."""
        return slot // self.each

    def of_page(self, page: int) -> int:
        """The device that has a page."""
        return page // self.pools[0].num_pages

    def holders(self, page: int) -> int:
        """How many sequences and trees hold a page."""
        return self.pools[self.of_page(page)].refcount(page)

    def available(self, device: int) -> int:
        """Pages of a device that are free, or could be."""
        return self.pools[device].free + self.trees[device].evictable

    def take(self, n: int, device: int) -> list[int]:
        """Take so many pages of a device, out of its tree if need be. **Raises:** `OutOfPages`."""
        pool = self.pools[device]
        if n > pool.free:
            self.trees[device].evict(n - pool.free)
        return pool.alloc(n)

    def enough(self, needed: Iterable[tuple[int, int]]) -> bool:
        """Whether there are pages for all of these slots, each with the pages that it needs."""
        total: Counter[int] = Counter()
        for slot, pages in needed:
            total[self.of(slot)] += pages
        return all(pages <= self.available(device) for device, pages in total.items())

    def slots_for(
        self, free: Collection[int], taken: Iterable[int], keys: list[int], limit: int, missed: bool = False
    ) -> list[int]:
        """A free slot of each device that has one, the best first: of the device with most pages of `keys[:limit]`, as
        of `PrefixTree.path`, if it isn't busier than the least busy one by a quarter of its slots; else of the one with
        the most room. `taken`: the other slots."""
        slots = {self.of(slot): slot for slot in free}  # the last of each
        if len(self.pools) == 1:
            return list(slots.values())
        busy = Counter(map(self.of, taken))
        most = min(busy[device] for device in slots) + self.each // 4

        def worse(device: int) -> tuple[bool, int, int]:
            held = len(self.trees[device].path(keys, limit, missed))
            return busy[device] > most, -held, -self.available(device)

        return [slots[device] for device in sorted(sorted(slots), key=worse)]


def rows_for(slots: Collection[int], each: int, devices: int) -> int:
    """The least size of a batch of which every device has a share, rounded up, that holds those of these slots that it
    has. `each`: slots of a device."""
    most = max(Counter(slot // each for slot in slots).values(), default=0)
    return max(len(slots), (most - 1) * devices + 1)
