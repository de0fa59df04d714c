"""Acceptance is exact: the tokens that come out follow the target, whatever the drafts were drawn from.

A target over a small vocabulary is given as tables (the next token depends on the last one alone), so both what should
come out and how often drafts should be accepted are known in closed form.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import acceptance, sampling
from tests.support.exact import ALPHA, fit_p_value
from tests.support.sample import rare

# Of so many samples, running takes longer than compiling, which is what other tests save (conftest.py).
optimised = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
N, V = 200_000, 7
PROMPT_TOKEN = 2


def rows_of(rng, *zeros):
    """Seven distributions over seven tokens, those in `zeros` impossible."""
    p = rng.dirichlet(np.ones(V), V)
    p[:, list(zeros)] = 0
    return p / p.sum(1, keepdims=True)


_rng = np.random.default_rng(1)
TARGET = rows_of(_rng, 5)
DRAFTS = {
    "unrelated": rows_of(_rng),
    "close": 0.8 * TARGET + 0.2 * rows_of(_rng, 5),
    "equal": TARGET,
    "disjoint": np.eye(V)[np.full(V, 5)],
    "overlapping in one token": rows_of(_rng, 0, 1, 2, 3),
    "point mass": np.eye(V)[np.arange(V) // 2],
}


def seeds(n, high=0):
    return jnp.stack([jnp.full(n, high, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1)


def draft_chain(draft, last, seed, position):
    """Two tokens drawn from `draft` after `last`, as drafters draw them, and the distributions used."""
    tokens, probs = [], []
    for step in range(2):
        probs.append(draft[last])
        last = sampling.draw(probs[-1], sampling.round_keys(seed, position, jnp.asarray(step), sampling.DRAFT))
        tokens.append(last)
    return jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1)


@optimised
def block_round(target, draft, last, count, seed, position):
    target, draft = jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)
    drafts, draft_p = draft_chain(draft, last, seed, position)
    p = target[jnp.concatenate([last[:, None], drafts], axis=1)]
    return acceptance.block(p, drafts, count, draft_p, seed, position)


@optimised
def matching_round(target, drafts, last, count, seed, position):
    """A round of sampling from the target at every row and accepting what agrees."""
    target = jnp.asarray(target, jnp.float32)
    p = target[jnp.concatenate([last[:, None], drafts], axis=1)]
    at = position[:, None] + jnp.arange(p.shape[1])
    return acceptance.match(sampling.draw(p, sampling.keys(seed, at, sampling.SAMPLE)), drafts, count)


def two_tokens(step, high):
    """First two tokens of N requests, a second round completing those whose first gave one; and the first's yields.

    The second round drafts again for positions that the first one drafted for. Drafts there with the first one's random
    numbers would give other pairs: those drafts had a say in where the first round ended.
    """
    last, position = jnp.full(N, PROMPT_TOKEN), jnp.arange(N) % 50
    count = jnp.arange(N) % 3
    tokens, yields = step(last, count, seeds(N, high), position)
    later, _ = step(tokens[:, 0], count, seeds(N, high), position + 1)
    second = jnp.where(yields > 1, tokens[:, 1], later[:, 0])
    return np.column_stack([tokens[:, 0], second]), np.asarray(yields), np.asarray(count)


def check(pairs, yields, count, overlap):
    """The pairs follow the target; drafts were accepted as often as `overlap` (f64[v], by the token before) says."""
    first = TARGET[PROMPT_TOKEN]
    assert fit_p_value(pairs[:, 0], first) > ALPHA
    assert fit_p_value(pairs, first[:, None] * TARGET) > ALPHA
    for n in (0, 1, 2):  # requests with n drafts, each a fair sample of their own
        rows = count == n
        assert yields[rows].min() >= 1 and yields[rows].max() <= n + 1
        assert fit_p_value(pairs[rows], first[:, None] * TARGET) > ALPHA
    accepted = (yields > 1)[count > 0]
    from scipy import stats  # takes a second, of each process that collects tests

    assert stats.binomtest(int(accepted.sum()), len(accepted), min(overlap[PROMPT_TOKEN], 1)).pvalue > ALPHA
    return accepted.mean()


@pytest.mark.parametrize(
    "name", [rare(name) if name in ("close", "overlapping in one token") else name for name in DRAFTS]
)
def test_block_verification_follows_the_target(name):
    draft = DRAFTS[name]

    def step(last, count, seed, position):
        return block_round(TARGET, draft, last, count, seed, position)

    overlap = np.minimum(TARGET, draft).sum(1)
    rate = check(*two_tokens(step, list(DRAFTS).index(name)), overlap)
    if name == "equal":
        assert rate == 1
    if name == "disjoint":
        assert rate == 0


ROUND = dict(count=jnp.array([3]), drafts=jnp.array([[5, 6, 7]]), p=(jnp.ones((1, 4, 7)), 3, 1))


@pytest.mark.parametrize(("given", "says"), [
    (dict(chosen=(jnp.array([[5, 6]]), 2, 1)), r"3 drafts take chosen of \[1, 4\], got \[1, 2\]"),
    (dict(chosen=(jnp.ones((2, 4)), 2, 1)), r"got \[2, 4\]"),  # it was broadcast
    (dict(count=3), "count must be an array, got int"),
    (dict(count=jnp.array([3, 3])), r"count int\[b\], got \[1, 3\] and \[2\]"),
    (dict(draft_p=(jnp.ones((1, 4, 7)), 3, 0)), r"take draft_p of \[1, 3, v\], got \[1, 4, 7\]"),
    (dict(draft_p=(jnp.ones((1, 3, 6)), 3, 0)), r"p \[1, 4, 7\] and draft_p \[1, 3, 6\] must be over one vocabulary"),
])  # fmt: skip
def test_an_error_names_the_array_of_another_shape(given, says):
    """They are a user's arrays: in the tests, annotations say so first."""
    acceptance._shaped(**ROUND)
    with pytest.raises(ValueError, match=says):
        acceptance._shaped(**ROUND | given)


@pytest.mark.parametrize(("given", "says"), [
    (dict(seed=7), r"1 requests take a seed of uint32\[1, 2\], such as .*, got int"),
    (dict(seed=jnp.zeros((1, 2), jnp.int32)), r"got int32\[1, 2\]"),
    (dict(seed=jnp.zeros(2, jnp.uint32)), r"got uint32\[2\]"),
    (dict(position=5), r"take a position of int\[1\], got int"),
    (dict(position=jnp.ones(1)), r"got float32\[1\]"),
])  # fmt: skip
def test_an_error_says_what_random_numbers_are_made_of(given, says):
    right = dict(seed=seeds(1), position=jnp.array([3]))
    acceptance._numbered(1, **right)
    with pytest.raises(ValueError, match=says):
        acceptance._numbered(1, **right | given)


def test_matching_takes_one_choice_more_than_drafts():
    with pytest.raises(ValueError, match=r"3 drafts take chosen of \[1, 4\], got \[1, 2\]"):
        acceptance.match(jnp.array([[5, 6]]), jnp.array([[5, 6, 7]]), jnp.array([3]))
    tree = acceptance.Tree.of(jnp.array([[0, 1]]), 2)
    with pytest.raises(ValueError, match=r"3 drafts take parents of \[1, 3\], got \[1, 2\]"):
        acceptance.walk(jnp.array([[5, 6, 7, 8]]), jnp.array([[5, 6, 7]]), jnp.array([3]), tree)


def test_rates_are_of_one_draft_or_more():
    with pytest.raises(ValueError, match="d at least 1"):
        acceptance.pass_rates(jnp.ones((1, 1, 7)), jnp.zeros((1, 0), jnp.int32), jnp.array([0]), jnp.ones((1, 0, 7)))


def test_the_expected_length_has_a_slope_where_nothing_was_drawn():
    """A draft that its drafter gives no probability, as one of a rule's or of a softmax that underflowed."""
    p, drafts = jnp.full((1, 3, 4), 0.25).at[0, 1, 2].set(0.0), jnp.array([[1, 2]])
    q = jnp.array([[[0.5, 0.0, 0.3, 0.2], [0.6, 0.4, 0.0, 0.0]]])
    length = jax.jit(jax.value_and_grad(lambda q: acceptance.expected_length(p, drafts, jnp.array([2]), q)[0]))
    value, slope = length(q)
    assert value == 2.0 and np.isfinite(slope).all()  # the first stands, whatever was drawn; the second can't
    assert np.isnan(length(q.at[0, 0, 1].set(np.nan))[0])


def test_matching_follows_the_target():
    """Drafts from a point mass that varies with the request's position."""

    def step(last, count, seed, position):
        drafts = (position[:, None] + jnp.arange(2)) % 3
        return matching_round(TARGET, drafts, last, count, seed, position)

    overlap = np.full(V, np.bincount(np.arange(N) % 50 % 3, minlength=3) @ TARGET[PROMPT_TOKEN, :3] / N)
    check(*two_tokens(step, 99), overlap)


def test_matching_gives_the_tokens_of_plain_decoding():
    """Seeds decide the text, whatever is drafted."""

    def decode(*drafts):
        drafts = jnp.broadcast_to(jnp.array(drafts), (N, 2))
        return two_tokens(lambda last, *rest: matching_round(TARGET, drafts, last, *rest), 5)[:2]

    tokens, yields = decode(0, 3)
    plain, one = decode(5, 5)  # which the target never chooses: nothing is accepted
    np.testing.assert_array_equal(tokens, plain)
    assert yields.max() == 3 and one.max() == 1


@pytest.mark.parametrize("drafts,count,yields", [
    ([5, 6, 7], 3, 4),  # all right: three drafts and the bonus
    ([5, 6, 1], 3, 3),
    ([5, 1, 7], 3, 2),  # right again after a mistake counts for nothing
    ([1, 6, 7], 3, 1),
    ([5, 6, 7], 2, 3),  # what lies beyond the count isn't a draft
    ([5, 6, 7], 0, 1),
])  # fmt: skip
def test_greedy_verification(drafts, count, yields):
    chosen = jnp.array([[5, 6, 7, 8]])
    tokens, n = acceptance.match(chosen, jnp.array([drafts]), jnp.array([count]))
    assert n.tolist() == [yields]
    assert tokens[0, :yields].tolist() == [5, 6, 7, 8][:yields]
    # Block verification between point masses, as for a greedy request in a batch of others, does the same.
    mass = jax.nn.one_hot(chosen, 9), jax.nn.one_hot(jnp.array([drafts]), 9)
    tokens, n = acceptance.block(mass[0], jnp.array([drafts]), jnp.array([count]), mass[1], seeds(1), jnp.array([3]))
    assert n.tolist() == [yields]
    assert tokens[0, :yields].tolist() == [5, 6, 7, 8][:yields]
