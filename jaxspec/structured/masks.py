"""Masks over the vocabulary as bits, on the host: u32[w] for each row, the lowest bit of a word first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ALL = 0xFFFFFFFF  # a word that allows its 32 tokens


def only(row: np.ndarray, tokens: Iterable[int]) -> None:
    """Make `row` allow these tokens and no other."""
    row[:] = 0
    for token in tokens:
        row[token >> 5] |= np.uint32(1 << (token & 31))


def without(row: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """A copy of `row` that doesn't allow these tokens."""
    row = row.copy()
    for token in tokens:
        row[token >> 5] &= np.uint32(ALL ^ (1 << (token & 31)))
    return row


def allows(row: np.ndarray, token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)
