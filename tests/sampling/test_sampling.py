"""Settings against the float64 reference of `support.exact`; random numbers that follow seed, position and purpose."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.request import SamplingParams
from jaxspec.sampling import sampling
from jaxspec.sampling.sampling import adjusts
from tests.support.exact import ALPHA, adjusted, distribution, fit_p_value, slots_for

B, Q, CAPACITY = 4, 3, 24
VOCABS = (1, 6, 64, 2000)  # few, since each is a compilation

_adjust = jax.jit(sampling.adjust)
_probabilities = jax.jit(sampling.probabilities)


def number(low, high, *also):
    return st.floats(low, high, allow_subnormal=False) | st.sampled_from((low, high, *also))


@st.composite
def truncations(draw):
    return SamplingParams(
        temperature=draw(number(0.05, 5, 0.0, 1.0, 100.0, 1e-3, 1e-6, 1e-20, 1e-37)),
        top_k=draw(st.integers(-1, 12) | st.sampled_from((0, 63, 64, 1999, 2000, 2**31 - 1))),
        top_p=draw(number(0.0625, 1, 1e-6, 0.999999)),
        min_p=draw(number(0, 1, 1e-6)),
    )


def logits_of(data, vocab):
    """Logits f32[B, Q, vocab] of every kind that gives trouble: flat, tied, far apart, partly impossible."""
    seed = data.draw(st.integers(0, 2**32), "seed")
    scale = data.draw(st.sampled_from((0.0, 0.3, 3.0, 100.0, 1e4)), "scale")
    ties, impossible = data.draw(st.booleans(), "ties"), data.draw(st.booleans(), "impossible")
    offset = data.draw(st.sampled_from((0.0, -3e4)), "offset")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((B, Q, vocab)) * scale + offset
    if ties:
        x = np.round(x * 4) / 4
    if impossible:
        x[..., 1:] = np.where(rng.random((B, Q, vocab - 1)) < 0.4, -np.inf, x[..., 1:])
    return x.astype(np.float32)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_probabilities(data):
    vocab = data.draw(st.sampled_from(VOCABS), "vocab")
    logits = logits_of(data, vocab)
    params = data.draw(st.lists(truncations(), min_size=B, max_size=B), "params")
    slots = slots_for(params, [[0]] * B, [[]] * B, capacity=CAPACITY)
    got = np.asarray(_probabilities(logits, jax.tree.map(lambda x: x[:B], slots.sampling)))
    for i, j in np.ndindex(B, Q):
        allowed = (distribution(logits[i, j], setting) for setting in nearby(params[i]))
        assert any(close(got[i, j], p) for p in allowed), (params[i], got[i, j], distribution(logits[i, j], params[i]))


def nearby(params):
    """The settings, and others that differ by float32's rounding of a mass: a threshold may fall either way."""
    changes = [(p, m) for p in (0, -3e-6, 3e-6) for m in (0, -1e-6, 1e-6)]
    top_p = lambda d: min(max(params.top_p + d, 1e-9), 1.0) if params.top_p < 1 else 1.0  # noqa: E731
    return [
        SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=top_p(dp), min_p=min(params.min_p * (1 + dm), 1.0)
        )
        for dp, dm in changes
    ]


def close(got, want):
    return np.allclose(got, want, rtol=1e-4, atol=1e-7) and not (got[want == 0] > 0).any()


@st.composite
def adjustments(draw, vocab):
    token = st.integers(0, vocab - 1)
    signed = number(-2, 2, 0.0)
    return SamplingParams(
        presence_penalty=draw(signed),
        frequency_penalty=draw(signed),
        repetition_penalty=draw(number(0.125, 4, 1.0)),
        logit_bias=draw(st.dictionaries(token, number(-100, 100), max_size=4)),
        min_tokens=draw(st.integers(0, 8)),
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_adjust(data):
    """Each row is adjusted as if the drafts before it had been generated one by one."""
    vocab = data.draw(st.sampled_from(VOCABS[1:]), "vocab")
    logits = logits_of(data, vocab)
    params = data.draw(st.lists(adjustments(vocab), min_size=B, max_size=B), "params")
    tokens = partial(st.lists, st.integers(0, min(vocab, 8) - 1))  # few, so that they repeat
    prompts = data.draw(st.lists(tokens(min_size=1, max_size=8), min_size=B, max_size=B), "prompts")
    outputs = data.draw(st.lists(tokens(max_size=8), min_size=B, max_size=B), "outputs")
    drafts = data.draw(st.lists(tokens(min_size=Q - 1, max_size=Q - 1), min_size=B, max_size=B), "drafts")
    stop_ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=3), "stop_ids")
    slots = slots_for(params, prompts, outputs, capacity=CAPACITY, stop_ids=[stop_ids] * B)
    slots = jax.tree.map(lambda x: x[:B], slots)
    got = _adjust(logits, slots.sampling, slots.history, slots.prompt, slots.length, jnp.array(drafts))
    for i, j in np.ndindex(B, Q):
        want = adjusted(logits[i, j], prompts[i], outputs[i] + drafts[i][:j], params[i], stop_ids)
        np.testing.assert_allclose(got[i, j], want, rtol=1e-5, atol=1e-4)


def test_settings_that_are_off_change_nothing():
    logits = np.random.default_rng(0).standard_normal((1, Q, 64)).astype(np.float32)
    slots = jax.tree.map(lambda x: x[:1], slots_for([SamplingParams()], [[1, 2]], [[3, 3]], capacity=CAPACITY))
    got = _adjust(logits, slots.sampling, slots.history, slots.prompt, slots.length, jnp.array([[3, 4]]))
    np.testing.assert_array_equal(got, logits)
    np.testing.assert_allclose(_probabilities(logits, slots.sampling), jax.nn.softmax(logits), rtol=1e-5)


def seeds(n, high=0):
    return jnp.stack([jnp.full(n, high, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1)


def test_random_numbers_follow_seed_position_and_purpose():
    """Nothing else counts: not the row of the batch, not how many positions are asked for at once."""
    position = jnp.arange(6).reshape(3, 2) + 100
    all_at_once = jax.random.key_data(sampling.keys(seeds(3), position, sampling.DRAFT))
    for i, j in np.ndindex(3, 2):
        alone = sampling.keys(seeds(3)[i : i + 1], position[i, j : j + 1], sampling.DRAFT)
        np.testing.assert_array_equal(jax.random.key_data(alone)[0], all_at_once[i, j])


def test_random_numbers_differ_wherever_seed_position_or_purpose_do():
    position = jnp.broadcast_to(jnp.arange(50), (20, 50))
    data = [
        jax.random.key_data(sampling.keys(seeds(20, high), position, purpose)).reshape(-1, 2)
        for purpose in (sampling.ACCEPT, sampling.SAMPLE, sampling.DRAFT)
        for high in (0, 1, 2**31)
    ]
    assert len(np.unique(np.concatenate(data), axis=0)) == 3 * 3 * 20 * 50


def pairs(take, n=100_000):
    """`take(keys)` at two neighbouring positions of n requests, and at one position for two purposes."""
    at = jnp.broadcast_to(jnp.array([7, 8]), (n, 2))
    sample = np.asarray(take(sampling.keys(seeds(n), at, sampling.SAMPLE)))
    accept = np.asarray(take(sampling.keys(seeds(n), at, sampling.ACCEPT)))
    return {"positions": sample, "purposes": np.stack([sample[:, 0], accept[:, 0]], axis=1)}


@pytest.mark.parametrize("which", ["positions", "purposes"])
def test_draws_are_independent(which):
    p = np.array([0.5, 0.25, 0.0, 0.15, 0.06, 0.04])
    draws = pairs(jax.jit(lambda keys: sampling.draw(jnp.broadcast_to(3 * p, (*keys.shape, 6)), keys)))[which]
    assert fit_p_value(draws, np.outer(p, p)) > ALPHA


@pytest.mark.parametrize("which", ["positions", "purposes"])
def test_uniforms_are_uniform_and_independent(which):
    numbers = pairs(jax.jit(sampling.uniform))[which]
    assert numbers.min() >= 0 and numbers.max() < 1
    assert fit_p_value((numbers * 10).astype(int), np.full((10, 10), 0.01)) > ALPHA


@pytest.mark.parametrize("mapped", ["seed", "start", "step"])
def test_keys_are_the_same_under_vmap(mapped):
    """Map one argument alone: block drafters draw all drafts at once, each with its step."""
    given = {"seed": jnp.array([[1, 2], [3, 4]], jnp.uint32), "start": jnp.array([5, 6]), "step": jnp.array(7)}
    several = jnp.stack([given[mapped], given[mapped] + 1, given[mapped] + 2])
    key = lambda value: jax.random.key_data(sampling.round_keys(**given | {mapped: value}, purpose=sampling.DRAFT))  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(key)(several), np.stack([key(value) for value in several]))


def test_greedy_rounds_are_for_requests_whose_settings_change_no_logits():
    """Whatever changes what is drawn alone changes nothing at temperature 0."""
    drawing = {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "seed": 1, "stop_token_ids": [3], "ignore_eos": True}
    adjusting = {"repetition_penalty": 2, "presence_penalty": 1, "frequency_penalty": -1, "min_tokens": 1, "n": 1}
    assert not any(adjusts(SamplingParams(**{name: value})) for name, value in drawing.items())
    found = {name for name, value in adjusting.items() if adjusts(SamplingParams(**{name: value}))}
    assert found == adjusting.keys() - {"n"} and adjusts(SamplingParams(logit_bias={3: 1.0}))
