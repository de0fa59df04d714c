"""Descriptions of what a token's position decides in attention, frozen and without arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ScaleByPosition:
    """Factor of a query, 1 + beta log(1 + floor((position + offset) / period)): Ministral 3's, and with an `offset` of
    one Llama 4's, by which long texts' attention stays as sharp as short ones'."""

    beta: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class Chunks:
    """Chunks of `size` positions, a power of two: a token sees its own chunk, up to itself (Llama 4's)."""

    size: int


Window = int | Chunks  # positions up to a token's own that it sees: so many, or those of its chunk


def first_seen(position: Any, window: Window) -> Any:
    """The first position that a token sees, an integer or an array of them; a window's may be negative."""
    return position & -window.size if isinstance(window, Chunks) else position - (window - 1)


def most_seen(window: Window) -> int:
    """How many positions a token sees at most."""
    return window.size if isinstance(window, Chunks) else window
