"""Texts side by side in rows of one length, and which rows make up the batch of a step.

A batch is a function of (texts, row length, seed, step) alone, so a training that resumes at a step goes on exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.train.data import Text, TrainError
from jaxspec.train.features import KeptText
from jaxspec.train.objective import Batch

OPEN_ROWS = 64  # rows that a text may still go into; more of them pack a little tighter, and take longer


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of texts, by index. A text longer than a row loses its end."""

    texts: list[Text]
    rows: list[list[int]]
    row_length: int
    batch_size: int
    seed: int
    feature_layers: tuple[int, ...] = ()  # of features from disk

    @property
    def steps(self) -> int:
        """Batches in an epoch; the few rows left over differ from one epoch to the next."""
        return len(self.rows) // self.batch_size

    def batch(self, step: int) -> Batch:
        """Batch of this step, as host arrays [batch size, row length]."""
        epoch, at = divmod(step, self.steps)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))
        chosen = order[at * self.batch_size :][: self.batch_size]
        shape = self.batch_size, self.row_length
        tokens, first, answer = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        kept = None
        for r, row in enumerate(chosen):
            begin = 0
            for text in (self.texts[i] for i in self.rows[row]):
                end = min(begin + len(text.tokens), self.row_length)
                tokens[r, begin:end] = text.tokens[: end - begin]
                first[r, begin:] = begin
                if isinstance(text, KeptText):
                    kept = _put(kept, shape, (r, slice(begin, end)), text.rows(end - begin, self.feature_layers))
                for low, high in text.answers:
                    answer[r, begin + low : min(begin + high, end)] = True
                begin = end
            if begin < self.row_length:
                first[r, begin:] = begin  # padding
        return Batch(tokens, first, answer, kept)


def _put(kept: Any, shape: tuple[int, int], at: tuple, rows: tuple[np.ndarray, list[np.ndarray]]) -> Any:
    """A batch's rows from disk, with those of one text; made by the first."""
    last, features = rows
    if kept is None:
        empty = lambda: np.zeros((*shape, last.shape[-1]), last.dtype)  # noqa: E731
        kept = empty(), tuple(empty() for _ in features)
    for whole, own in zip((kept[0], *kept[1]), (last, *features), strict=True):
        whole[at] = own
    return kept


def pack(texts: list[Text], row_length: int, batch_size: int, seed: int, alone: bool = False) -> Packed:
    """Put texts, shuffled, each into the first open row that it fits; `alone`, into a row of its own.

    **Raises:** `TrainError` if they don't fill one batch.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # space left, the row
    for i in np.random.default_rng((seed, 2**32)).permutation(len(texts)).tolist():
        need = row_length if alone else min(len(texts[i].tokens), row_length)
        for at, (space, row) in enumerate(open_rows):
            if need <= space:
                row.append(i)
                open_rows[at] = space - need, row
                break
        else:
            rows.append([i])
            open_rows.append((row_length - need, rows[-1]))
            if len(open_rows) > OPEN_ROWS:
                open_rows.remove(min(open_rows, key=lambda entry: entry[0]))
    if len(rows) < batch_size:
        raise TrainError(
            f"the data fills {len(rows)} rows of {row_length} tokens, and a batch takes {batch_size}: give more data, "
            "or lower --batch-size or --row-length"
        )
    return Packed(texts, rows, row_length, batch_size, seed)
