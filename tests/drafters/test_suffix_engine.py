"""Suffix drafts in an engine: the text stays plain decoding's, and a repeated request takes fewer rounds."""

import pytest

from jaxspec import LLM, SamplingParams
from tests.support import widths
from tests.support.tiny import tiny_checkpoint

OPTIONS = {"max_running_requests": 3, "context_length": 96, "skip_warmup": True, "few_programs": True}
OPTIONS |= {"chunked_prefill_size": 64, "prefill_sizes": "64"}  # one program
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 3, 4], [5, 6, 7, 8, 5, 6, 9], list(range(10, 40)), [1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = [SamplingParams(temperature=0.6, max_tokens=24, ignore_eos=True, seed=i) for i in range(len(PROMPTS))]


def engine(draft, **options):
    folder = str(tiny_checkpoint(num_hidden_layers=1))
    return widths.several(lambda: LLM(folder, draft, dtype="float32", **OPTIONS | options))


@pytest.fixture(scope="module")
def plain():
    llm = engine("none")
    return [[out.token_ids for out in llm.generate(PROMPTS, how)] for how in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def suffix():
    return engine("suffix?max_requests=8&max_response=64&max_matches=16", num_draft_tokens=4)


@pytest.mark.exhaustive  # tests/drafters/test_combined.py has suffixes beside another drafter
def test_text_is_plain_decodings(plain, suffix):
    for how, expected in zip((GREEDY, SAMPLED), plain, strict=True):
        assert [out.token_ids for out in suffix.generate(PROMPTS, how)] == expected


@pytest.mark.exhaustive  # likewise
def test_a_repeated_request_drafts_from_the_first_ones_response(suffix):
    """A seed's text, which repeats nothing of itself, the second time it is written."""
    how = SamplingParams(temperature=3.0, max_tokens=40, ignore_eos=True, seed=123)
    first, second = (suffix.generate([[2, 3]], how)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.metrics.accept_length > 2 * first.metrics.accept_length > 0


@pytest.mark.exhaustive  # likewise
def test_a_response_written_without_drafts_is_drafted_from(suffix, monkeypatch):
    how = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(suffix.engine, "chooser", widths.Turns((0,)))
        first = suffix.generate([[2, 4]], how)[0]
    second = suffix.generate([[2, 4]], how)[0]
    assert first.token_ids == second.token_ids
    assert first.metrics.verify_rounds == 39 and second.metrics.verify_rounds < 16


@pytest.mark.exhaustive
def test_without_a_pool_requests_are_kept_apart():
    llm = engine("suffix?max_requests=0&max_matches=16", num_draft_tokens=4)
    how = SamplingParams(temperature=3.0, max_tokens=40, ignore_eos=True, seed=123)
    first, second = (llm.generate([[2, 3]], how)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.metrics.accept_length == second.metrics.accept_length
