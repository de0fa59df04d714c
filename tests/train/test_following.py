"""A drafter that follows its target between updates, and the example that trains both."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from examples import policy_gradient
from jaxspec import LLM, ConfigError, RequestError
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.dflash import DERIVED, DFlash
from jaxspec.train.following import Follower
from tests.support.blocks import write_drafter
from tests.support.engines import SMALL, VOCAB, checkpoint, params, tokens
from tests.support.heads import random_eagle3


def drafter() -> str:
    return f"eagle3:{random_eagle3(Path(checkpoint()), tuple(range(VOCAB)), (0, 0, 0))}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(checkpoint(), drafter(), dtype="float32", num_draft_tokens=2, **SMALL)


@pytest.fixture(scope="module")
def follower(llm) -> Follower:
    return Follower(llm)


def test_the_example_trains_both_and_nothing_differs():
    options = {"page_size": 8, "chunked_prefill_size": 64, "num_draft_tokens": 2}
    history = policy_gradient.main(checkpoint(), drafter(), steps=2, samples=1, tokens=4, **options)
    assert len(history) == 2 and [mismatches for *_, mismatches in history] == [0, 0]
    assert all(0 <= reward <= 1 and length >= 1 for reward, length, _ in history)


@pytest.mark.exhaustive
@pytest.mark.parametrize("follow", [True, False])
def test_the_example_on_the_demo(follow):
    history = policy_gradient.main(follow=follow)
    assert not any(mismatches for *_, mismatches in history)
    rewards = [reward for reward, *_ in history]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15


@pytest.mark.exhaustive
def test_a_drafter_learns_its_targets_texts():
    """Many steps over one text: the loss falls, and the engine's own copy stays until it is updated."""
    llm = LLM(checkpoint(), drafter(), dtype="float32", num_draft_tokens=2, **SMALL)
    before = jax.device_get(llm.engine.runner.draft.params["fc"].values)
    follower = Follower(llm, learning_rate=1e-2)
    text = np.array([tokens(24) + [0] * 8])
    losses = [float(follower.learn(text, 4, 24).loss) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.3
    np.testing.assert_array_equal(llm.engine.runner.draft.params["fc"].values, before)
    llm.update_weights(draft=follower.params())
    served = llm.engine.runner.draft.params["fc"].values
    follower.learn(text, 4, 24)
    assert (np.asarray(served) != before).any()  # and wasn't donated to the step
    padded = np.array([tokens(24) + [7] * 8])
    assert float(Follower(llm).learn(text, 4, 24).loss) == float(Follower(llm).learn(padded, 4, 24).loss)


def block(kind, folder, **settings) -> LLM:
    """An engine with a random block drafter."""
    target = checkpoint()
    source = write_drafter(kind, folder / "drafter", target, num_hidden_layers=1, target_layer_ids=[0], **settings)
    return LLM(target, f"{kind.__name__.lower()}:{source}", dtype="float32", **SMALL)


def test_a_block_drafters_context_follows_its_layers(tmp_path):
    """It is made of the layers' weights, so an update of these alone makes it again."""
    llm = block(DFlash, tmp_path)
    given = Follower(llm).params()
    assert {"layers", "fc", "norm"} <= given.keys() and not given.keys() & {*DERIVED, "embed", "head"}
    before = llm.engine.runner.draft.params
    llm.update_weights(draft={"layers": jax.tree.map(lambda x: 2 * x, given["layers"])})
    after = llm.engine.runner.draft.params
    for name in ("context", "context_norm"):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), after[name], before[name])
    with pytest.raises(ConfigError, match=r"unroll is 2, and --draft dflash:.* drafts whole blocks"):
        Follower(llm, unroll=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [DFlash, DSpark])
def test_a_block_drafter_learns_its_targets_texts(kind, tmp_path):
    heads = {"markov_rank": 4, "enable_confidence_head": True, "confidence_head_with_markov": True}
    llm = block(kind, tmp_path, **(heads if kind is DSpark else {}))
    follower, text = Follower(llm, learning_rate=1e-2), np.array([tokens(24) + [0] * 8])
    losses = [float(follower.learn(text, 4, 24).loss) for _ in range(30)]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3
    prompt = tokens(24)[:12]
    rounds = lambda: llm.generate([prompt], params(max_tokens=12))[0].metrics.verify_rounds  # noqa: E731
    assert rounds() > 0
    llm.update_weights(draft=follower.params())
    assert rounds() > 0


def test_a_drafter_that_cant_be_trained_follows_nobody(tmp_path):
    llm = LLM(jaxspec.load_model(checkpoint(), progress=False), "ngram", **SMALL)
    with pytest.raises(ConfigError, match=r"ngram can.t follow its target: it is Ngram, and only EAGLE-3"):
        Follower(llm)
    with pytest.raises(ConfigError, match="it has no Markov head"):
        Follower(block(DSpark, tmp_path, markov_rank=4))


@pytest.mark.parametrize("arguments, said", [
    (["x"], "llm must be a jaxspec.LLM, whose drafter is to follow, got 'x'"),
    ([None, 0], "learning_rate must be a number above 0, got 0"),
    ([None, "fast"], "learning_rate must be a number above 0, got 'fast'"),
    ([None, 1e-4, 0], "unroll must be an integer of at least 1, or None, got 0"),
    ([None, 1e-4, None, "sgd"], "optimizer must be adamw or muon, got 'sgd'"),
])  # fmt: skip
def test_what_cannot_follow_is_named(llm, arguments, said):
    with pytest.raises(ConfigError, match=said):
        Follower(arguments[0] or llm, *arguments[1:])


@pytest.mark.parametrize("texts, said", [
    (([1, 2, 3], 1), r"tokens must be int\[b, t\], got int64\[3\]"),
    (([[1, VOCAB]], 1), f"tokens must be from 0 to {VOCAB - 1}"),
    (([[1, 2, 3]], 4), "prompts must be from 0 to 3"),
    (([[1, 2, 3]], [1, 1]), r"prompts must be int\[1\]"),
    (([[1, 2, 3]], 1, 4), "lengths must be from 1 to 3"),
    (([[1, 2, 3]], 3, 2), "prompts must be from 0 to 2"),
])  # fmt: skip
def test_texts_that_cannot_be_are_named(follower, texts, said):
    with pytest.raises(RequestError, match=said):
        follower.learn(*texts)
