"""Where a completion is in its grammar, and the masks of a round's rows along its drafts.

Invariant: between two calls a matcher has consumed exactly the generated tokens that the host has read, end tokens
excepted. Walking along drafts is undone before a call returns. So a preempted request needs nothing replayed: its
matcher stands where its tokens end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLExecutor, LLMatcher

from jaxspec.config.request import RequestError
from jaxspec.structured.masks import ALL, allows, only, without
from jaxspec.structured.programs import words

if TYPE_CHECKING:
    from jaxspec.structured.grammar import Grammar

NOWHERE = -1


class GrammarFailed(RequestError):
    """A grammar that can't be followed further: a limit of the library was reached, or a token that it forbids came."""


class Matcher:
    """One completion's. `end_ids` end a text, the first of them by preference; `avoid_end`: where anything else may
    come, they may not. `epoch` is that of the sequence's slot in which the device knows its forced drafts."""

    def __init__(self, grammar: Grammar, end_ids: Sequence[int], avoid_end: bool = False):
        self._grammar, self._matcher = grammar, grammar.take()
        self._ends, self._avoid_end = tuple(end_ids), avoid_end
        self._last: int | None = None
        self._musts: set[int] = set()  # rows of the last round where one token alone was allowed
        self._leads: dict[tuple[int, int], int] = {}  # from one of its rows, by a token, to another
        self.epoch: int | None = None

    def close(self) -> None:
        """The completion has ended: give the library's matcher back to its grammar for another."""
        self._grammar.give_back(self._matcher)

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume these tokens, the outputs of the round that `rows` was last called for. Returns how many of them the
        grammar forced. **Raises:** `GrammarFailed`."""
        row, forced = 0, 0
        for token in tokens:
            forced += row in self._musts
            if token in self._ends:
                break  # the text ends here
            if self._matcher.try_consume_tokens([token]) != 1:
                self._fail(f"token {token} isn't allowed by the grammar here")
            row, self._last = self._leads.get((row, token), NOWHERE), token
        return forced

    def forced_next(self, most: int) -> list[int]:
        """The drafts that follow the newest token because the grammar forced it and them, as a round would leave them
        on the device: at most `most`."""
        if self._last is None or not self._matcher.rollback(1):
            return []
        forced = self._forced(most + 1)
        self._matcher.try_consume_tokens([self._last])
        return forced[1:] if forced[:1] == [self._last] else []

    def rows(
        self, drafts: Sequence[int], parents: Sequence[int], bits: np.ndarray, forced: np.ndarray
    ) -> Iterator[tuple[LLMatcher, int]]:
        """Write the masks of a round's rows, u32[q, w], and the drafts forced after each, i32[q, k].

        Draft i hangs from row `parents[i]`; row 0 is the newest token, row i + 1 draft i. Rows that a forbidden draft
        leads to keep what they have: nothing can reach them. Yields the library's matcher and a row whenever that row's
        mask is to be computed, and goes on once it has been. **Raises:** `GrammarFailed`.
        """
        self._musts, self._leads = set(), {}
        children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        for i, parent in enumerate(parents):
            children[parent].append(i + 1)
        yield from self._visit(0, drafts, children, bits, forced)
        if self._matcher.is_error():
            self._fail()

    def _visit(
        self, row: int, drafts: Sequence[int], children: list[list[int]], bits: np.ndarray, forced: np.ndarray
    ) -> Iterator[tuple[LLMatcher, int]]:
        matcher, mask = self._matcher, bits[row]
        if matcher.is_stopped():
            only(mask, self._ends)
            self._musts.add(row)
            return
        must = self._forced(forced.shape[1])
        if must:
            only(mask, must[:1])
            self._musts.add(row)
            forced[row, 0] = len(must) - 1
            forced[row, 1 : len(must)] = must[1:]
        else:
            yield matcher, row
            if self._avoid_end and (others := without(mask, self._ends)).any():
                mask[:] = others
        for child in children[row]:
            token = drafts[child - 1]
            if token not in self._ends and allows(mask, token) and matcher.try_consume_tokens([token]):
                self._leads.setdefault((row, token), child)
                yield from self._visit(child, drafts, children, bits, forced)
                matcher.rollback(1)

    def _forced(self, most: int) -> list[int]:
        """The tokens that must come next, the end of the text included; at most so many, and often none."""
        tokens = self._matcher.compute_ff_tokens()
        if tokens and len(tokens) < most and self._matcher.try_consume_tokens(tokens) == len(tokens):
            if self._matcher.is_stopped():
                tokens = [*tokens, self._ends[0]]
                self._matcher.rollback(len(tokens) - 1)
            else:
                self._matcher.rollback(len(tokens))
        return tokens[:most]

    def _fail(self, reason: str = "") -> None:
        lines = (self._matcher.get_error() or reason).strip().splitlines()
        reason = lines[0] if lines else "it allows no token"
        raise GrammarFailed(f"the text can't follow its grammar any further: {reason}", "structured")


_executor = cache(LLExecutor)  # its threads hold no lock of Python's


def round_masks(
    matchers: Sequence[Matcher | None], drafts: np.ndarray, width: int, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """The masks of a round: u32[b, q, w], and the forced drafts i32[b, q, k].

    The matchers walk along their drafts in step: one row of each at a time, all in parallel. A matcher that fails
    allows everything: its next `advance` says that it did.

    `drafts` i32[b, ...] are as `structured.programs.draft` tells them; b is at least the number of matchers, of which
    those that are None, and padding, may say anything. `width` is q, which is k too.
    """
    bits = np.full((len(drafts), width, words(vocab)), ALL, np.uint32)
    forced = np.zeros((len(drafts), width, width), np.int32)
    chain = list(range(width - 1))
    walks = {}
    for i, matcher in enumerate(matchers):
        if matcher is not None:
            count, *told = drafts[i].tolist()
            tokens, parents = told[: width - 1], told[width - 1 :] or chain
            walks[i] = matcher.rows(tokens[:count], parents[:count], bits[i], forced[i])
    while walks:
        wanted = []
        for i in list(walks):
            try:
                matcher, row = next(walks[i])
                wanted.append((matcher, i * width + row))
            except StopIteration:
                del walks[i]
            except GrammarFailed:
                del walks[i]
                bits[i], forced[i] = ALL, 0
        if len(wanted) == 1:
            ((matcher, row),) = wanted
            matcher.unsafe_compute_mask_ptr(bits.reshape(-1, bits.shape[2])[row].ctypes.data, bits[0, 0].nbytes)
        elif wanted:
            _executor().unsafe_compute_mask_ptr(wanted, bits.ctypes.data, bits[0, 0].nbytes, bits.size // bits.shape[2])
    return bits, forced


def first_masks(matchers: Sequence[Matcher | None], width: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks and forced drafts of the first token after each prompt: one row each, and no drafts."""
    bits, forced = round_masks(matchers, np.zeros((len(matchers), width), np.int32), width, vocab)
    return bits[:, :1], forced[:, :1]
