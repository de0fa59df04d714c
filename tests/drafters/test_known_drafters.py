"""The table of known drafters, and the warning when one does far worse than its card says."""

import logging
import random
import re
from pathlib import Path

import pytest

from jaxspec import SamplingParams
from jaxspec.drafters import DRAFTERS, KNOWN, Known
from jaxspec.drafters.known import MODULES, OTHERS, card, entries, find, table
from jaxspec.drafters.watch import FAR, ROUNDS, Watch, constant_rate
from jaxspec.engine.llm import LLM
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

CARD = Known("org/drafter", 7, accept=(("GSM8K", 6.17), ("chat", 3.21)))


# -- the table ---------------------------------------------------------------------------------------------------------


def test_entries_are_whole():
    for method, targets in KNOWN.items():
        assert method in DRAFTERS
        for target, known in targets.items():
            assert target == target.lower() and known.source and known.layout
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", known.source) or known.note == "shipped"
    for method, others in OTHERS.items():
        for target, known in others:
            assert known.source != KNOWN[method][target].source and "only where named" in known.note
    for known in [*(known for _, _, known in entries()), *MODULES.values()]:
        assert not known.accept or known.drafts  # figures mean nothing without the number of drafts
        assert all(1 < tokens <= known.drafts + 1 for _, tokens in known.accept)


def test_names_are_found_in_any_case_and_of_fp8_checkpoints():
    assert find("dspark", "Qwen/Qwen3-8B").source == "deepseek-ai/dspark_qwen3_8b_block7"
    assert find("dflash2", "Qwen/Qwen3.8-27B-FP8") is find("dflash2", "qwen/qwen3.8-27b")
    assert find("dspark", "acme/other") is None and find("ngram", "Qwen/Qwen3-8B") is None


def test_a_card_is_of_the_very_drafter():
    named = card("dflash", "deepseek-ai/DSpark_qwen3_8b_block7", "Qwen/Qwen3-8B")
    assert named.least == ("Arena-Hard", 3.21)
    assert card("dspark", "/my/own", "Qwen/Qwen3-8B") is None
    assert card("dspark", "deepseek-ai/dspark_qwen3_8b_block7", "acme/finetuned") is None
    assert card("mtp", None, "Qwen/Qwen3.8-27B-FP8").least == ("mixed", 2.81)
    other = card("dflash", "deepseek-ai/dflash_qwen3_8b_block7", "Qwen/Qwen3-8B")
    assert other.least == ("Arena-Hard", 2.81) and find("dflash", "Qwen/Qwen3-8B").source != other.source
    assert card("ngram", None, "Qwen/Qwen3-8B") is None


def test_the_table_in_the_docs_is_made_of_it():
    docs = (Path(__file__).resolve().parents[2] / "docs" / "known-drafters.md").read_text()
    assert table() in docs, "run `python -m scripts.drafters_table`"


# -- the warning -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("lookup", [rare(""), "ngram+"])
def test_an_engine_warns_of_a_drafter_for_another_model(lookup, monkeypatch, caplog):
    """A drafter that knows nothing of its target, under the card of one that does; by itself, and behind a lookup."""
    target, drafter = str(tiny_checkpoint()), str(tiny_checkpoint("llama", seed=3))
    monkeypatch.setitem(KNOWN["standalone"], target.lower(), Known(drafter, 4, accept=(("GSM8K", 3.2),)))
    options = {"context_length": 256, "max_running_requests": 8, "skip_warmup": True, "few_programs": True}
    llm = LLM(target, f"{lookup}standalone:{drafter}", **options)
    llm.generate([[i + 1, 2, 3] for i in range(8)], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    assert sum("its card says 3.20 (GSM8K)" in record.getMessage() for record in caplog.records) == 1
