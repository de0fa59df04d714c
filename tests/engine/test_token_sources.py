"""`SamplingParams.token_sources`: of each token, how it came. Drafts by rule, so that what is right is known.

Each test leaves the engine idle, as in `tests.engine.test_engine`.
"""

import pytest

from jaxspec import RequestError, SamplingParams
from jaxspec.config.request import TOKEN_SOURCES
from tests.support.engines import COUNT_UP, SELF, engine, params, tokens


def test_nothing_is_reported_unasked():
    out = engine("ngram").generate([tokens(9)], params())[0]
    assert out.completions[0].token_sources is None


def test_drafts_that_are_always_right_are_accepted_and_followed_by_a_bonus():
    sources = report(engine(SELF), max_tokens=9)
    round_ = ["accepted"] * 3 + ["bonus"]
    assert sources == ["plain", *round_, *round_], "the first token follows the prompt's own pass"


def test_a_limit_in_the_midst_of_a_round_cuts_its_own_token_off():
    assert report(engine(SELF), max_tokens=7)[-2:] == ["accepted", "accepted"]


def test_drafts_that_are_always_wrong_are_corrected():
    repeating = {"logit_bias": {65: 100.0}}  # and the drafter counts up
    assert report(engine(COUNT_UP), max_tokens=5, **repeating) == ["plain"] + ["corrected"] * 4


def test_after_the_last_right_draft_comes_a_correction():
    counting = {"repetition_penalty": 2.0, "logit_bias": {65: 100.0, 66: 95.0, 67: 90.0}}  # 65 66 67, and 65 again
    assert report(engine(COUNT_UP), max_tokens=4, **counting) == ["plain", "accepted", "accepted", "corrected"]


def test_without_drafts_all_tokens_are_plain():
    assert report(engine(SELF), max_tokens=5, speculative=False) == ["plain"] * 5


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}, {"stop_token_ids": [65, 70]}])
def test_every_token_has_a_source_and_rounds_add_up(settings):
    """Each verify round that isn't cut short ends with the model's own token."""
    out = engine("ngram").generate([[7, 8, 9] * 12], params(token_sources=True, max_tokens=40, **settings))[0]
    sources = out.completions[0].token_sources
    assert len(sources) == len(out.token_ids) and set(sources) <= set(TOKEN_SOURCES)
    own = sum(source != "accepted" for source in sources[1:])
    assert out.metrics.verify_rounds - own in (0, 1)


def test_it_must_be_true_or_false():
    with pytest.raises(RequestError, match="token_sources must be true or false, got 1"):
        SamplingParams(token_sources=1)


def report(llm, **settings):
    out = llm.generate([tokens(9)], params(token_sources=True, **settings))[0]
    return out.completions[0].token_sources
