"""Two drafters in one: texts stay plain decoding's, and a request takes the drafts of the likelier one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, load_drafter
from jaxspec.drafters import combined
from jaxspec.drafters.base import DraftBatch, Proposal
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.loading import check_drafter
from jaxspec.drafters.ngram import Ngram
from jaxspec.drafters.suffix import Suffix
from tests.drafters.test_drafter_weights import drafting
from tests.support import heads, widths
from tests.support.tiny import tiny_checkpoint

REPEATED = [5, 6, 7, 8, 9, 3] * 4
PROMPTS = [REPEATED, [9, 3, 4], list(range(10, 40))]
POOL = "suffix?max_requests=8&max_response=64&max_matches=16"  # rounds look through all of it
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def pair():
    """A target and an EAGLE-3 drafter whose drafts are never right, both of one layer."""
    target = tiny_checkpoint(num_hidden_layers=1)
    return str(target), f"eagle3:{heads.random_eagle3(target, tuple(range(40)), (0, 0, 0))}"


@pytest.fixture(scope="module")
def engine():
    target, draft = pair()
    make = lambda: LLM(  # noqa: E731
        target, f"{POOL}+{draft}", dtype="float32", max_running_requests=2, context_length=96,
        skip_warmup=True, few_programs=True, num_draft_tokens=3, disable_structured_output=True,
        chunked_prefill_size=64, prefill_sizes="64",
    )  # fmt: skip
    return widths.several(make)


def test_text_is_plain_decodings(engine):
    expected = [out.token_ids for out in engine.generate(PROMPTS, replace(GREEDY, speculative=False))]
    engine.engine.flush_cache()
    for _ in range(2):  # the second time from a cached prefix, and with responses to look in
        assert [out.token_ids for out in engine.generate(PROMPTS, GREEDY)] == expected


def test_a_response_that_was_given_before_is_looked_up(engine):
    """EAGLE-3's random drafts are never accepted."""
    first, second = (engine.generate([[2, 3]], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and second.metrics.accept_length > 2 > first.metrics.accept_length


def test_a_response_that_was_written_without_drafts_is_looked_up(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine, "chooser", widths.Turns((0,)))
        first = engine.generate([[2, 5]], GREEDY)[0]
    second = engine.generate([[2, 5]], GREEDY)[0]
    assert first.token_ids == second.token_ids
    assert second.metrics.accept_length > 2 > first.metrics.accept_length == 1


def chosen(found, drawn, greedy):
    both = Combined(Ngram(num_draft_tokens=3), Suffix(num_draft_tokens=2))
    return both._chosen(jnp.array([True, False]), found, drawn, greedy)


def test_drafts_keep_the_probabilities_that_they_were_drawn_with():
    """Drafts that were looked up are certain, whatever the other drafter thought."""
    found = Proposal(jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([3, 2]))
    probs = jax.nn.softmax(jnp.arange(2 * 2 * 8.0).reshape(2, 2, 8))
    drawn = Proposal(jnp.array([[7, 7], [6, 5]]), jnp.array([2, 2]), probs)
    both = chosen(found, drawn, greedy=False)
    assert both.tokens.tolist() == [[1, 2, 3], [6, 5, 0]] and both.count.tolist() == [3, 2]
    np.testing.assert_array_equal(both.probs[0], np.eye(8)[[1, 2, 3]])
    np.testing.assert_array_equal(both.probs[1, :2], probs[1])
    assert chosen(found, drawn, greedy=True).probs is None


def test_a_suffix_is_as_sure_of_a_draft_as_the_text_is():
    """1, 2 stands there four times, the last one at its end; 3 followed in three of them, and 4 in two of these."""
    text = jnp.array([[1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3, 4, 9, 1, 2]])
    one, zero = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
    batch = DraftBatch(zero, one * 17, text, text, one > 0, None, greedy=True)
    found, _ = jax.jit(Suffix(num_draft_tokens=2, max_requests=0).propose)((), {}, batch)
    assert found.tokens.tolist() == [[3, 4]] and found.count.tolist() == [2]
    np.testing.assert_allclose(found.confidence, [[3 / 4, 2 / 3]], rtol=1e-6)


def test_names_of_both_sides():
    assert combined.parts("suffix+eagle3:a+b") == ("suffix", "eagle3:a+b")
    assert combined.parts("ngram?max_match=8+mtp") == ("ngram?max_match=8", "mtp")
    assert combined.parts("eagle3:suffix+x") is combined.parts("suffix") is None
    with pytest.raises(ConfigError, match="none drafts nothing"):
        load_drafter("suffix+none", drafting("eagle3")[0])
    with pytest.raises(ConfigError, match="eagle4 is no method"):
        check_drafter(EngineConfig(draft="suffix+eagle4"))
    target, draft = drafting("eagle")
    options = EngineConfig(draft=f"ngram+{draft}", topk=2, num_steps=2, num_draft_tokens=4)
    with pytest.raises(ConfigError, match=r"Eagle drafts trees \(topk is 2\), which can't"):
        load_drafter(options.draft, target, options)
