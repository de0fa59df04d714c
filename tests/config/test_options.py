"""Options stand in one place: flags and docs are made of it, and drafters' own options follow their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxspec.checkpoint import load_model
from jaxspec.config.engine_config import SERVER_DEFAULTS, EngineConfig
from jaxspec.config.flags import table
from jaxspec.config.options import ConfigError, option
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.loading import load_drafter
from jaxspec.drafters.ngram import Ngram
from tests.support.tiny import tiny_checkpoint


@dataclass(frozen=True)
class Mine(Drafter):
    """Drafter as a user writes it."""

    num_draft_tokens: int = 2
    depth: int = option(3, "how far it looks", least=1)
    share: float = option(0.5, "of the best", between=(0, 1))
    eager: bool = option(False, "don't wait")
    unmentioned: int = 7


@pytest.fixture(scope="module")
def model():
    return load_model(str(tiny_checkpoint("llama")), progress=False)


def loaded(draft, model):
    options = EngineConfig(draft=draft)
    return load_drafter(options.draft, model, options).drafter


def test_the_table_of_flags_in_the_docs_is_made_of_the_options():
    docs = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text()
    assert table(SERVER_DEFAULTS) in docs, "run `python -m scripts.flags_table`"


def test_a_drafter_takes_its_own_options_behind_its_name(model):
    assert loaded("ngram?min_match=1&max_match=3", model) == Ngram(4, 1, 3)
    assert loaded("NGRAM?max_match=9", model) == Ngram(4, 2, 9)
    assert loaded(f"{__name__}:Mine?depth=5&share=0.25&eager", model) == Mine(3, 5, 0.25, True)
    assert loaded(f"{__name__}:Mine?eager=false", model) == Mine(3)


@pytest.mark.parametrize("draft,words", [
    ("ngram?max_mach=3", ["no option 'max_mach'", "did you mean max_match?", "min_match: shortest match"]),
    ("ngram?max_match=x", ["option max_match takes an integer, got 'x'"]),
    ("ngram?min_match=0", ["min_match must be an integer of at least 1, got 0"]),
    ("ngram?min_match=6", ["min_match (6) must not exceed max_match (5)"]),
    (f"{__name__}:Mine?share=2", ["share must be between 0 and 1, got 2.0"]),
    (f"{__name__}:Mine?eager=maybe", ["option eager takes true or false, got 'maybe'"]),
    (f"{__name__}:Mine?unmentioned=1", ["has no option 'unmentioned'"]),
    ("standalone:org/nowhere?depth=1", ["has no option 'depth'; it has none"]),
])  # fmt: skip
def test_an_option_that_a_drafter_cannot_take_is_named(model, draft, words):
    with pytest.raises(ConfigError) as error:
        loaded(draft, model)
    for word in words:
        assert word in str(error.value)


def test_a_flag_that_moved_to_its_drafter_is_explained():
    with pytest.raises(ConfigError, match="the drafter takes it: --draft 'ngram"):
        EngineConfig.from_options(ngram_max=3)
