"""`logits`, `hidden_states` and `propose`: plain functions, checked against each other and against greedy decoding."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, RequestError, load_drafter, load_model
from jaxspec.decoder.forward import unembed
from jaxspec.decoder.functions import rms_norm
from jaxspec.drafters.base import Drafter, Proposal
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

PROMPT = [5, 9, 2, 33, 60, 9, 2]


@pytest.fixture(scope="module")
def model():
    return load_model(str(tiny_checkpoint()), progress=False)


@pytest.fixture(scope="module")
def other():
    return load_model(str(tiny_checkpoint("llama", seed=5)), progress=False)


class Fixed(Drafter):
    """Not a dataclass, so the number of its drafts can't be changed."""

    num_draft_tokens = 2

    @classmethod
    def load(cls, target, source, options):
        return cls(), {}

    def propose(self, params, state, batch):
        return Proposal(batch.tokens(-2, 2), jnp.full(batch.length.shape, 2)), state


class Unhashable(Fixed):
    """Drafter without a hash, like one with an array among its fields."""

    __hash__ = None


def last_logits(model, tokens):
    padded = [*tokens, *[0] * (40 - len(tokens))]  # so that one program serves all lengths
    return np.asarray(jaxspec.logits(model, [padded])[0, len(tokens) - 1])


# -- logits and hidden states ------------------------------------------------------------------------------------------


def test_logits_are_causal_and_float32(model):
    tokens = np.array([PROMPT, PROMPT[::-1]])
    whole = jaxspec.logits(model, tokens)
    assert whole.shape == (2, len(PROMPT), 64) and whole.dtype == jnp.float32
    np.testing.assert_allclose(jaxspec.logits(model, tokens[:1, :4])[0], whole[0, :4], atol=1e-5)


def test_hidden_states_lead_to_the_logits(model):
    first, last = jaxspec.hidden_states(model, [PROMPT], (0, 1))
    assert first.shape == last.shape == (1, len(PROMPT), 32) and last.dtype == jnp.float32
    normed = rms_norm(last, model.params["norm"], model.config.decoder.norm.eps)
    logits = unembed(model.params, normed, model.config.decoder)
    np.testing.assert_allclose(logits, jaxspec.logits(model, [PROMPT]), atol=1e-5)
    swapped = jaxspec.hidden_states(model, [PROMPT], [1, 0])
    np.testing.assert_array_equal(swapped, np.stack([last, first]))


def test_traced_tokens_have_their_shape_checked(model):
    with pytest.raises(RequestError, match=r"int\[b, t\], got float32\[1, 3\]"):
        jax.jit(lambda t: jaxspec.logits(model, t))(np.ones((1, 3), np.float32))


@pytest.mark.parametrize("tokens", [[], [[]], [1, 2], [[[1]]], [[1.5]], [[True]], [[64]], [[-1]], [[1], [2, 3]]])
def test_tokens_that_are_refused(model, tokens):
    for call in (jaxspec.logits, lambda m, t: jaxspec.hidden_states(m, t, (0,))):
        with pytest.raises(RequestError, match="token"):
            call(model, tokens)


@pytest.mark.parametrize("tokens", ["text", ["text"], [1, 2]])
def test_an_error_says_how_tokens_are_made(model, tokens):
    with pytest.raises(RequestError, match=r"tokens must be int\[b, t\], got .*model.tokenizer.encode makes them"):
        jaxspec.logits(model, tokens)


def test_a_prompt_beyond_the_models_positions_is_refused(model):
    drafter, most = load_drafter("ngram", model), model.config.max_position
    with pytest.raises(RequestError, match=f"prompt_tokens: {most + 1} tokens are more than the model's {most}"):
        jaxspec.propose(model, drafter, [1] * (most + 1), 2)


@pytest.mark.parametrize("layers", [(3,), (-2,), (0, 5)])
def test_layers_that_are_refused(model, layers):
    with pytest.raises(RequestError, match="layers 0 to 1"):
        jaxspec.hidden_states(model, [PROMPT], layers)


@pytest.mark.parametrize("layers", [3, (), "ab", (1.7,)])
def test_what_names_no_layers_is_refused(model, layers):
    with pytest.raises(RequestError, match="layers must"):
        jaxspec.hidden_states(model, [PROMPT], layers)


# -- propose -----------------------------------------------------------------------------------------------------------


def test_ngram_proposes_what_followed(model):
    drafter = load_drafter("ngram", model)
    prompts = ([20, filler, 40, 41, 42, 20] for filler in range(64))
    # The greedy next token completes a pair that the prompt begins with.
    prompt = next(p for p in prompts if last_logits(model, p).argmax() == p[1])
    prop = jaxspec.propose(model, drafter, prompt, 3)
    assert (prop.next_token, prop.count, prop.tokens.tolist()) == (prompt[1], 3, [40, 41, 42])
    assert prop.logits is None


def test_no_match_proposes_nothing(model):
    assert jaxspec.propose(model, load_drafter("ngram", model), [1], 3).count == 0


@pytest.mark.parametrize("prompt,n", [rare(PROMPT, 4), rare(PROMPT * 5, 1), rare([7], 2)])
def test_standalone_continues_greedily_with_its_own_model(model, other, prompt, n):
    drafter = load_drafter(f"standalone:{other.path}", model)
    prop = jaxspec.propose(model, drafter, prompt, n)
    assert prop.next_token == int(last_logits(model, prompt).argmax())
    assert prop.tokens.shape == (n,) and prop.count == n and prop.logits.shape == (n, 64)
    context = [*prompt, prop.next_token]
    for token, logits in zip(prop.tokens.tolist(), prop.logits, strict=True):
        expected = last_logits(other, context)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert token == int(expected.argmax())
        context.append(token)


@pytest.mark.parametrize("name", ["Fixed", "Unhashable"])
def test_a_drafter_of_fixed_length_drafts_that_many_only(model, name):
    drafter = load_drafter(f"{__name__}:{name}", model)
    prop = jaxspec.propose(model, drafter, PROMPT, 2)
    assert prop.tokens.tolist() == [PROMPT[-1], prop.next_token]
    with pytest.raises(ConfigError, match="drafts 2 tokens; make it a dataclass"):
        jaxspec.propose(model, drafter, PROMPT, 3)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, 10**6])
def test_an_n_that_is_refused(model, n):
    with pytest.raises(ConfigError, match=r"an integer from 1 to \d+, the model's positions"):
        jaxspec.propose(model, load_drafter("ngram", model), PROMPT, n)


@pytest.mark.parametrize("drafter,advice", [
    ("ngram", "got 'ngram'; load it first: jaxspec.load_drafter('ngram', model)"),
    (None, "got None; load it first"),
    (Fixed(), "drafter must be a loaded one, got <"),
])  # fmt: skip
def test_a_drafter_that_is_not_loaded_is_refused(model, drafter, advice):
    with pytest.raises(ConfigError, match=re.escape(advice)):
        jaxspec.propose(model, drafter, PROMPT, 2)


@dataclasses.dataclass(frozen=True)
class Wrong(Fixed):
    """Proposals that aren't as `Proposal` says, one for each number of drafts."""

    num_draft_tokens: int = 1

    def propose(self, params, state, batch):
        b, zeros = len(batch.length), lambda *shape: jnp.zeros(shape, jnp.int32)
        return {
            1: Proposal(zeros(b, 1), zeros(b)),
            2: (Proposal(zeros(b, 2).astype(float), zeros(b)), state),
            3: (Proposal(zeros(b, 3), zeros(b, 3)), state),
            4: (Proposal(zeros(b, 4), zeros(b), probs=zeros(b, 3, 7)), state),
            5: (Proposal(zeros(b, 5), zeros(b) + 9), state),
            6: (Proposal(zeros(b, 6), zeros(b)), {"more": zeros(2)}),
        }[self.num_draft_tokens]


@pytest.mark.parametrize("n,says", [
    (1, "Wrong.propose must return a Proposal and the drafter's state, got Proposal"),
    (2, "Wrong.propose: tokens must be integers, got float32"),
    (3, "Wrong.propose: count must be [1], got [1, 3]"),
    (4, "Wrong.propose: probs must be [1, 4, 'vocabulary'], got [1, 3, 7]"),
    (6, "Wrong.propose must return a state of init_state's structure, shapes and dtypes, {}, got {'more': 'int32[2]'}"),
])  # fmt: skip
def test_a_proposal_that_is_none_is_named(model, n, says):
    drafter = load_drafter(f"{__name__}:Wrong", model)
    with pytest.raises(ConfigError, match=re.escape(says)):
        jaxspec.propose(model, drafter, PROMPT, n)


def test_no_more_drafts_are_counted_than_there_are(model):
    assert jaxspec.propose(model, load_drafter(f"{__name__}:Wrong", model), PROMPT, np.int64(5)).count == 5


def test_nothing_to_draft_with_is_refused(model):
    with pytest.raises(ConfigError, match="none drafts nothing"):
        jaxspec.propose(model, load_drafter("none", model), PROMPT, 2)


def test_prompts_that_are_refused(model):
    drafter = load_drafter("ngram", model)
    for prompt in ([], [64], [[1]], None, 5, np.array(5), np.array([[1, 2]])):
        with pytest.raises(RequestError, match="token"):
            jaxspec.propose(model, drafter, prompt, 2)


@pytest.mark.parametrize(("given", "advice"), [("a/b", "load it first: jaxspec.load_model('a/b')"), (3, "got 3; load")])
@pytest.mark.parametrize("call", [
    lambda given: jaxspec.logits(given, [PROMPT]),
    lambda given: jaxspec.hidden_states(given, [PROMPT], (0,)),
    lambda given: jaxspec.propose(given, None, PROMPT, 2),
], ids=["logits", "hidden_states", "propose"])  # fmt: skip
def test_a_model_that_is_not_loaded_is_refused(call, given, advice):
    with pytest.raises(ConfigError, match=re.escape(advice)):
        call(given)
