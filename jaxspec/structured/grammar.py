"""Grammars: a request's, compiled for the model's tokens within limits; where a completion is in it; a round's masks.

Invariant: between two calls a matcher has consumed exactly the generated tokens that the host has read, end tokens
excepted. Walking along drafts is undone before a call returns. So a preempted request needs nothing replayed: its
matcher stands where its tokens end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from jaxspec.checkpoint import Model
from jaxspec.config.request import Busy, RequestError, StructuredOutput
from jaxspec.structured.compiler import Compiler, deeply, refusals, unreadable
from jaxspec.structured.limits import parser_limits
from jaxspec.structured.masks import ALL, allows, only, without
from jaxspec.structured.programs import words
from jaxspec.text.tokenizer import Tokenizer

KEPT = 64  # compiled grammars: agents send the same schemas again and again
KEPT_BYTES = 256 * 2**20  # of those, as they were measured when each was compiled
MAX_COMING = 16  # grammars that compile or wait for that
LIGHT_SECONDS = 0.02  # a grammar that compiles in less may be compiled several times
MOST_LEXERS = min(16, os.cpu_count() or 1)  # of a light grammar
NOWHERE = -1  # in a round: the row of a token that no draft stands for


class Grammar:
    """A compiled grammar, which makes matchers. Thread-safe.

    The library's copies of a matcher cost nothing, and share a lexer: what they find out of the grammar, behind a lock.
    128 masks of one lexer took as long on twelve threads as on one. So the completions of a light grammar have up to
    `most` lexers. They go with the last completion that has them, except one.
    """

    def __init__(self, make: Callable[[], LLMatcher], first: LLMatcher, most: int = 1, bytes: int = 0):
        self.bytes = bytes
        self._make, self._most = make, most
        self._numbers = itertools.count()
        number = next(self._numbers)
        self._fresh = {number: first}  # by the lexer's number, a matcher before its first token
        self._users = {number: 0}
        self._ended: deque[tuple[int, bool]] = deque()
        self._changing = threading.Lock()

    def take(self) -> tuple[int, LLMatcher]:
        """A lexer's number, and a matcher of it before its first token, which is the caller's alone."""
        with self._changing:
            self._forget()
            number = min(self._users, key=lambda each: self._users[each], default=None)
            if number is None or (self._users[number] and len(self._users) < self._most):
                number = next(self._numbers)
                self._fresh[number], self._users[number] = self._make(), 0
            self._users[number] += 1
            return number, self._fresh[number].deep_copy()

    def give_back(self, number: int, failed: bool) -> None:
        """A completion has ended. A lexer in which one has failed is given up, since it may be full."""
        self._ended.append((number, failed))
        if self._changing.acquire(blocking=False):  # the garbage collector may call this within `take`
            try:
                self._forget()
            finally:
                self._changing.release()

    def _forget(self) -> None:
        """Count those who have ended."""
        while self._ended:
            number, failed = self._ended.popleft()
            if number in self._users:
                self._users[number] -= 1
                if failed or (not self._users[number] and len(self._users) > 1):
                    del self._users[number], self._fresh[number]


class GrammarFailed(RequestError):
    """A grammar that can't be followed further: a limit of the library was reached, or a token that it forbids came."""


class Matcher:
    """One completion's. `end_ids` end a text, the first of them by preference; `avoid_end`: where anything else may
    come, they may not. `epoch` is that of the sequence's slot in which the device knows its forced drafts."""

    def __init__(self, grammar: Grammar, end_ids: Sequence[int], avoid_end: bool = False):
        self._grammar, self._closed = grammar, True
        self._lexer, self._matcher = grammar.take()
        self._closed = False
        self._ends, self._avoid_end = tuple(end_ids), avoid_end
        self._last: int | None = None
        self._musts: set[int] = set()  # rows of the last round where one token alone was allowed
        self._leads: dict[tuple[int, int], int] = {}  # from one of its rows, by a token, to another
        self.epoch: int | None = None

    def close(self) -> None:
        """The completion has ended, or will never begin."""
        if not self._closed:
            self._closed = True
            self._grammar.give_back(self._lexer, self._matcher.is_error())

    __del__ = close

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


class Grammars:
    """Compiles grammars over a vocabulary of `vocab` tokens, the model's own, of which some may be padding.

    Thread-safe. The library's own tokenizer is made at the first use, or by `warm_up`; it takes seconds.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: Sequence[int]):
        self._tokenizer, self._vocab, self._end_ids = tokenizer, vocab, tuple(end_ids)
        self._compiled: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._coming: dict[StructuredOutput, Future[Grammar]] = {}
        self._vocabulary: LLTokenizer | None = None
        self._unreadable: str | None = None
        self._making, self._turn = threading.Lock(), threading.Lock()
        end_ids = list(end_ids)
        self._compiler = Compiler(lambda: (tokenizer.to_json(), vocab, end_ids, dict(tokenizer.added_tokens)))

    def warm_up(self) -> None:
        """Read the vocabulary. A tokenizer that the library can't read is reported by `compile`."""
        with self._making:
            if self._vocabulary is None and self._unreadable is None:
                try:
                    text = self._tokenizer.to_json()
                    self._vocabulary = LLTokenizer(text, n_vocab=self._vocab, eos_token=list(self._end_ids))
                except Exception as error:
                    self._unreadable = str(error)

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """A grammar, from the last few dozen if it is among them. Takes up to seconds: not for an event loop.

        **Raises:** `RequestError` naming the field, with the library's reason; `Busy` while others are compiled.
        """
        with refusals(wanted):
            return self._compiling(wanted).result()

    async def compiled(self, wanted: StructuredOutput) -> Grammar:
        """The result of `compile`, for an event loop. Nothing ends when its caller leaves."""
        with refusals(wanted):
            return await asyncio.wrap_future(self._compiling(wanted))

    def _compiling(self, wanted: StructuredOutput) -> Future[Grammar]:
        """A grammar that is there, or comes. All who ask for it meanwhile wait for the same."""
        with self._turn:
            if (found := self._compiled.get(wanted)) is not None:
                self._compiled.move_to_end(wanted)
                done: Future[Grammar] = Future()
                done.set_result(found)
                return done
            if (coming := self._coming.get(wanted)) is not None:
                return coming
            if len(self._coming) >= MAX_COMING:
                raise Busy(f"{len(self._coming)} other grammars are to be compiled; send the request again later")
            coming = self._coming[wanted] = deeply(lambda: self._compile(wanted))
            return coming

    def _compile(self, wanted: StructuredOutput) -> Grammar:
        try:
            self.warm_up()
            if (vocabulary := self._vocabulary) is None:
                raise unreadable(self._unreadable or "")
            with self._compiler.turn():
                proven = self._compiler.prove(wanted)
                limits = parser_limits(wanted.kind)
                compile_here = lambda: LLMatcher(vocabulary, proven.text, log_level=0, limits=limits)  # noqa: E731
                first = compile_here()
            make = lambda: deeply(compile_here).result()  # noqa: E731
            grammar = Grammar(make, first, MOST_LEXERS if proven.seconds < LIGHT_SECONDS else 1, proven.bytes)
            with self._turn:
                self._compiled[wanted] = grammar
                while len(self._compiled) > 1 and (
                    len(self._compiled) > KEPT or sum(each.bytes for each in self._compiled.values()) > KEPT_BYTES
                ):
                    self._compiled.popitem(last=False)
            return grammar
        finally:
            with self._turn:
                del self._coming[wanted]

    def start(self, grammar: Grammar, avoid_end: bool = False) -> Matcher:
        """A completion's matcher, before its first token."""
        return Matcher(grammar, self._end_ids, avoid_end)

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()


def grammars_of(model: Model, lazily: bool) -> Grammars | None:
    """Compiler of grammars for a model; None if it has no tokenizer, or no token that ends a text. It prepares itself
    in a thread, or if `lazily` at the first use."""
    if model.tokenizer is None or not model.eos_ids:
        return None
    grammars = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)
    if not lazily:
        threading.Thread(target=grammars.warm_up, name="jaxspec-vocabulary", daemon=True).start()
    return grammars


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
            count, *ids = drafts[i].tolist()
            tokens, parents = ids[: width - 1], ids[width - 1 :] or chain
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
