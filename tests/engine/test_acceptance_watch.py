"""The warning when a drafter does far worse than its card says."""

import logging
import random
import re

import pytest

from jaxspec import SamplingParams
from jaxspec.drafters.registry import KNOWN, Known
from jaxspec.engine.acceptance_watch import FAR, ROUNDS, Watch, constant_rate
from jaxspec.engine.llm import LLM
from tests.support.tiny import tiny_checkpoint

CARD = Known("org/drafter", 7, accept=(("GSM8K", 6.17), ("chat", 3.21)))


def serve(rate: float, rounds: int, drafts=7, card=CARD, requests=20) -> Watch:
    """Rounds in which each draft stands with this probability, given those before it."""
    watch, rng = Watch("org/drafter", "acme/big", card), random.Random(0)
    for i in range(rounds):
        accepted = 1 + next((j for j in range(drafts) if rng.random() > rate), drafts)
        watch.count(accepted, drafts, first=i < requests)
    return watch


def test_a_far_lower_acceptance_is_told_once(caplog):
    serve(0.1, 10 * ROUNDS)
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert re.search(r"org/drafter for acme/big: 1\.\d\d tokens a round over 200 rounds", text)
    for words in ("its card says 3.21 (chat)", "revision", "quantised", "chat template", "language", "temperature"):
        assert words in text


@pytest.mark.parametrize("case", [
    {"rate": constant_rate(3.21, 7)},
    {"rate": 0.55},  # 2.2 tokens a round: worse, not far worse
    {"rate": 0.1, "rounds": ROUNDS - 1},
    {"rate": 0.1, "requests": 7},
    {"rate": 0.1, "card": None},
    {"rate": 0.1, "card": Known("org/drafter", 7)},
    {"rate": 0.1, "drafts": 0},
])  # fmt: skip
def test_all_else_is_not(case, caplog):
    serve(**{"rounds": 10 * ROUNDS} | case)
    assert not caplog.records


@pytest.mark.parametrize("drafts", [1, 2, 3, 7, 9])
def test_rounds_of_fewer_drafts_are_compared_with_as_many(drafts, caplog):
    """One draft of a good drafter makes at most 2 tokens a round, which its card's 3.21 must not condemn."""
    rate = constant_rate(3.21, 7)
    serve(rate, 10 * ROUNDS, drafts)
    assert not caplog.records
    serve(rate * FAR / 2, 10 * ROUNDS, drafts)
    assert len(caplog.records) == 1


@pytest.mark.exhaustive  # what is watched is above
@pytest.mark.parametrize("lookup", ["", "ngram+"])
def test_an_engine_warns_of_a_drafter_for_another_model(lookup, monkeypatch, caplog):
    """A drafter that knows nothing of its target, under the card of one that does; by itself, and behind a lookup."""
    target, drafter = str(tiny_checkpoint()), str(tiny_checkpoint("llama", seed=3))
    monkeypatch.setitem(KNOWN["standalone"], target.lower(), Known(drafter, 4, accept=(("GSM8K", 3.2),)))
    options = {"context_length": 256, "max_running_requests": 8, "skip_warmup": True, "few_programs": True}
    llm = LLM(target, f"{lookup}standalone:{drafter}", **options)
    llm.generate([[i + 1, 2, 3] for i in range(8)], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    assert sum("its card says 3.20 (GSM8K)" in record.getMessage() for record in caplog.records) == 1
