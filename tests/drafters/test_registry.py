"""The table of known drafters."""

import re
from pathlib import Path

from jaxspec.drafters.registry import DRAFTERS, KNOWN, MODULES, OTHERS, card, entries, find, table


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
