"""Engines whose rounds have now so many drafts, now others: what was chosen must show in nothing but time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from jaxspec import LLM
from jaxspec.engine import runner
from jaxspec.rounds import ragged_verification as sharing
from jaxspec.rounds.programs import LOGPROBS
from jaxspec.scheduling.draft_count import SKIP_DRAFTER, rungs


class Turns:
    """In place of a `Chooser`: each number of drafts in turn, none twice in a row before the last. With
    log-probabilities it is the first or the last, for which alone there are programs."""

    def __init__(self, numbers: tuple[int, ...]):
        self.chosen = numbers[-1]
        self._ends = numbers[0], numbers[-1]
        self._turns = itertools.cycle((*numbers, *numbers[:1], *reversed(numbers)))

    missed, resting = 0.0, False

    def choose(self, group, share, able=None):
        self.chosen = next(n for n in self._turns if n in self._ends or LOGPROBS not in group[0])
        return self.chosen

    def expected(self):
        return {}

    def accepted(self, drafts, rows):
        pass

    def took(self, group, drafts, seconds):
        assert seconds >= 0


def several(make: Callable[[], LLM], ragged: bool = False) -> LLM:
    """An engine as `make` makes it with one batch size, and programs for fewer drafts too, compiled when first used.
    `ragged`: those drafts are shared out among requests."""
    shapes = runner.shapes_of

    def wider(config, drafter, **options):
        found = shapes(config, drafter, **options)
        most = drafter.num_draft_tokens
        fewer = () if not most else rungs(most) if drafter.topk == 1 else (0,)
        shared = tuple((n, sharing.most(drafter, n)) for n in fewer if n > 0) if ragged else ()
        fewer = (SKIP_DRAFTER, *fewer) if most and drafter.rests else fewer
        return dataclasses.replace(found, narrower=tuple((n, found.batches) for n in fewer), ragged=shared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "shapes_of", wider)
        return make()


def switch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rounds of an engine that `several` made take turns, for the rest of a test."""
    assert len(llm.engine.runner.drafts) > 1
    monkeypatch.setattr(llm.engine, "chooser", Turns(llm.engine.runner.drafts))
    monkeypatch.setattr(llm.engine.counts, "rounds_by_drafts", dict.fromkeys(llm.engine.runner.drafts, 0))


def took_turns(llm: LLM) -> bool:
    """Whether rounds of each number of drafts were run, since `switch`."""
    return min(llm.engine.counts.rounds_by_drafts.values()) > 5
