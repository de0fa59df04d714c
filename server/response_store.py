"""Responses that later requests may go on from.

Invariant: at most `max_count` responses are kept, in at most `max_bytes` of memory, in which they are kept as JSON: as
objects, `{}` takes a hundred times as much. The least recently used go first. An item with an id is found by it as long
as a response that has it is kept. A restart forgets them all.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

MAX_COUNT = 1000
MAX_BYTES = 64 * 2**20
MAX_SHARE = 16  # the largest response that is kept takes this part of all
OVERHEAD = 1024  # bytes of a response beside its JSON
ID_BYTES = 512  # of an item's id, by which it is found


@dataclass(slots=True, frozen=True)
class Stored:
    """A response, and all items of its conversation, its own output last, as JSON."""

    _response: bytes
    _items: bytes
    ids: tuple[str, ...]  # of its items

    @property
    def response(self) -> dict[str, Any]:
        return json.loads(self._response)

    @property
    def items(self) -> list[dict[str, Any]]:
        return json.loads(self._items)

    @property
    def size(self) -> int:
        return OVERHEAD + len(self._response) + len(self._items) + ID_BYTES * len(self.ids)


class ResponseStore:
    def __init__(self, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES):
        self._max_count, self._max_bytes = max_count, max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._owners: defaultdict[str, set[str]] = defaultdict(set)  # of each item, by its id: responses that have it
        self._bytes = 0

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response under its id. One that takes more than a share of what may be kept is not."""
        ids = tuple(item["id"] for item in items if isinstance(item, dict) and "id" in item)
        stored = Stored(_written(response), _written(items), ids)
        if stored.size > self._max_bytes // MAX_SHARE:
            return
        self.remove(response["id"])
        self._kept[response["id"]] = stored
        self._bytes += stored.size
        for item in ids:
            self._owners[item].add(response["id"])
        while len(self._kept) > self._max_count or self._bytes > self._max_bytes:
            self.remove(next(iter(self._kept)))

    def get(self, name: str) -> Stored | None:
        """A response by its id, which counts as a use; None if it isn't kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def item(self, name: str) -> dict[str, Any] | None:
        """An item of a response that is kept, by the item's id."""
        if name not in self._owners:
            return None
        items = self._kept[next(iter(self._owners[name]))].items
        return next(item for item in items if isinstance(item, dict) and item.get("id") == name)

    def remove(self, name: str) -> bool:
        """Forget a response. False if it wasn't kept."""
        stored = self._kept.pop(name, None)
        if stored is not None:
            self._bytes -= stored.size
            for item in stored.ids:
                self._owners[item].discard(name)
                if not self._owners[item]:
                    del self._owners[item]
        return stored is not None


def _written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
