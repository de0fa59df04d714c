"""Which adapter stands in which of the device's places, counted on the host. No jax.

A sequence holds its adapter's place from its admission until it leaves its slot. An adapter that nobody holds keeps its
place until another needs one; then the least recently used one gives way.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

NO_ADAPTER = -1  # as a place


class AdapterPlaces:
    """`places` for adapters, which are any hashable objects, and the place of each of `num_slots` request slots.

    **Attributes:** `of_slot`, i32[num_slots + 1], changed in place; `due`, adapters to be written into their places
    before the next program, by place.
    """

    def __init__(self, places: int, num_slots: int):
        self.of_slot = np.full(num_slots + 1, NO_ADAPTER, np.int32)
        self.due: dict[int, Any] = {}
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[Any, int] = {}  # the least recently used first
        self._holders: Counter = Counter()

    @property
    def resident(self) -> list[Any]:
        """Adapters that have a place."""
        return list(self._places)

    def room(self, adapter: Any) -> bool:
        """Whether `hold` can give this one a place, or None, which needs none."""
        return adapter is None or adapter in self._places or bool(self._free) or self._idle() is not None

    def hold(self, adapter: Any, slot: int) -> None:
        """Give a sequence in this slot its adapter's place. There must be `room`."""
        if adapter is None:
            return
        place = self._places.pop(adapter, None)
        if place is None:
            if not self._free:
                self.drop(self._idle())
            place = self._free.pop()
            self.due[place] = adapter
        self._places[adapter] = place
        self._holders[adapter] += 1
        self.of_slot[slot] = place

    def leave(self, adapter: Any, slot: int) -> None:
        """Undo `hold`. The adapter keeps its place for now."""
        if adapter is not None:
            self._holders[adapter] -= 1
            self.of_slot[slot] = NO_ADAPTER

    def drop(self, adapter: Any) -> bool:
        """Take the place of an adapter that nobody holds. False: somebody does, or it has none."""
        if self._holders[adapter] or adapter not in self._places:
            return False
        del self._holders[adapter]
        place = self._places.pop(adapter)
        self.due.pop(place, None)
        self._free.append(place)
        return True

    def _idle(self) -> Any:
        """The least recently used adapter that nobody holds, if there is one."""
        return next((adapter for adapter in self._places if not self._holders[adapter]), None)
