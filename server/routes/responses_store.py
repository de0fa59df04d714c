"""Responses that later requests may go on from, in memory.

Invariant: at most `max_count` responses and `max_chars` characters are kept; the least recently used go first. A
restart forgets them all.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_COUNT = 1000
MAX_CHARS = 64 * 2**20


@dataclass(slots=True)
class Stored:
    """A response, and all items of its conversation, its own output last."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int


class ResponseStore:
    def __init__(self, max_count: int = MAX_COUNT, max_chars: int = MAX_CHARS):
        self._max_count, self._max_chars = max_count, max_chars
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._chars = 0

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response under its id. One that is larger than all that may be kept is not."""
        size = len(json.dumps(items)) + len(json.dumps(response))
        if size > self._max_chars:
            return
        self._kept[response["id"]] = Stored(response, items, size)
        self._chars += size
        while len(self._kept) > self._max_count or self._chars > self._max_chars:
            self._chars -= self._kept.popitem(last=False)[1].size

    def get(self, name: str) -> Stored | None:
        """A response by its id, which counts as a use; None if it isn't kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def remove(self, name: str) -> bool:
        """Forget a response. False if it wasn't kept."""
        stored = self._kept.pop(name, None)
        if stored is not None:
            self._chars -= stored.size
        return stored is not None
