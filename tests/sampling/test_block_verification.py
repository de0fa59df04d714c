"""Block verification in numpy and on the device: its distribution by enumeration, and how much more it accepts.

Over three tokens and three drafts everything can be summed up: all drafts, and for each where a round may end. So
"exact" is a sum here and no sample, and rejecting token by token is at hand to be compared with.
"""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import acceptance, sampling
from tests.support.exact import ALPHA, fit_p_value

V, D = 3, 3
ROUNDS = 100_000


def tables(seed, sharpness=1.0):
    """Distributions over the next token after each text of up to D tokens: of a target, and of its drafter."""
    rng = np.random.default_rng(seed)
    texts = [text for n in range(D + 1) for text in itertools.product(range(V), repeat=n)]
    target = {text: rng.dirichlet(np.full(V, sharpness)) for text in texts}
    drafter = {text: 0.5 * p + 0.5 * rng.dirichlet(np.full(V, sharpness)) for text, p in target.items()}
    target[()] = np.array([0.0, 0.7, 0.3])  # a token that the target never chooses, and the drafter does
    drafter[0,] = target[0,].copy()  # and a row on which they agree
    drafter[1,] = np.eye(V)[0]  # and one on which the drafter is certain
    return target, drafter


def rounds_of(target, drafter, drafts):
    """A round's rows for each of `drafts`: p f64[n, q, v] and draft_p f64[n, d, v]."""
    rows = lambda table, n: np.array([[table[text[:j]] for j in range(n)] for text in drafts])  # noqa: E731
    return rows(target, D + 1), rows(drafter, D)


def reference(p, draft_p, drafts, count):
    """The paper's algorithm 2, for one round: how likely it ends after 0 to `count` drafts, and for each the
    distribution of the bonus."""
    weight = [1.0]
    for j in range(count):
        weight.append(min(1.0, weight[j] * p[j, drafts[j]] / draft_p[j, drafts[j]]))
    ends, bonus, going = np.zeros(count + 1), [], 1.0
    residual = [np.maximum(weight[j] * p[j] - draft_p[j], 0) for j in range(count)]
    for j in range(count, -1, -1):
        if j == count:
            passes = weight[j]
        else:
            total = residual[j].sum()
            passes = 1.0 if weight[j] == 1 else total / (total + 1 - weight[j])
        ends[j], going = going * passes, going * (1 - passes)
    for j in range(count + 1):
        left = p[j] if j == count or residual[j].sum() == 0 else residual[j]
        bonus.append(left / left.sum())
    return ends, bonus


def token_by_token(p, draft_p, drafts, count):
    """Counterpart of `reference` for rejection sampling draft by draft."""
    ends, bonus, alive = np.zeros(count + 1), [], 1.0
    for j in range(count):
        stays = min(1.0, p[j, drafts[j]] / draft_p[j, drafts[j]])
        ends[j], alive = alive * (1 - stays), alive * stays
        left = np.maximum(p[j] - draft_p[j], 0)
        bonus.append(left / left.sum() if left.sum() > 0 else p[j])
    ends[count] = alive
    return ends, [*bonus, p[count]]


def device(p, draft_p, drafts, count):
    """Counterpart of `reference` for `verify.block`, from the rates that it draws its coins against."""
    as32 = [jnp.asarray(x, jnp.float32)[None] for x in (p, draft_p)]
    weight, rate = _rates(as32[0], jnp.array([drafts]), jnp.array([count]), as32[1])
    weight, rate = np.float64(weight[0]), np.append(1.0, np.float64(rate[0]))
    ends = np.array([rate[j] * np.prod(1 - rate[j + 1 :]) for j in range(D + 1)])
    bonus = []
    for j in range(count + 1):
        left = p[j] if j == count else np.maximum(weight[j] * p[j] - draft_p[j], 0)
        bonus.append(left / left.sum() if left.sum() > 1e-7 else p[j])
    assert not ends[count + 1 :].any()
    return ends[: count + 1], bonus


_rates = jax.jit(acceptance.pass_rates)
_block = jax.jit(acceptance.block)


def summed(how, seed, count_of):
    """The distribution f64[v, ..., v] of the first D tokens after a round, the target writing what is missing; and how
    many drafts are accepted on average. `count_of(drafts)` is how many count."""
    target, drafter = tables(seed)
    out, accepted = np.zeros((V,) * D), 0.0
    for drafts in itertools.product(range(V), repeat=D):
        count = count_of(drafts)
        drawn = np.prod([drafter[drafts[:j]][drafts[j]] for j in range(count)])
        if any(drafts[count:]) or drawn == 0:  # drafts that don't count are token 0
            continue
        (p,), (draft_p,) = rounds_of(target, drafter, [drafts])
        ends, bonus = how(p, draft_p, drafts, count)
        for end, chance in enumerate(ends):
            accepted += drawn * chance * end
            for token, bonus_chance in enumerate(bonus[end]):
                text = (*drafts[:end], token)[:D]
                for rest in itertools.product(range(V), repeat=D - len(text)):
                    whole = text + rest
                    more = np.prod([target[whole[:j]][whole[j]] for j in range(len(text), D)])
                    out[whole] += drawn * chance * bonus_chance * more
    return out, accepted


def expected(seed):
    target, _ = tables(seed)
    out = np.ones((V,) * D)
    for text in itertools.product(range(V), repeat=D):
        out[text] = np.prod([target[text[:j]][text[j]] for j in range(D)])
    return out


COUNTS = {
    "three": lambda drafts: 3,
    "one": lambda drafts: 1,
    "cut by the drafts before": lambda drafts: 1 if drafts[0] == 1 else 2 if drafts[:2] == (2, 0) else 3,
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("how", [reference, device, token_by_token], ids=lambda f: f.__name__)
def test_output_is_the_targets_to_the_last_digit(how, count):
    for seed in range(3):
        out, _ = summed(how, seed, COUNTS[count])
        np.testing.assert_allclose(out, expected(seed), atol=1e-6)


def test_a_cut_by_the_draft_itself_would_bend_the_output():
    """The sum can fail: a draft that is dropped for being what it is."""
    out, _ = summed(reference, 0, lambda drafts: 0 if drafts[0] == 1 else 3)
    assert abs(out - expected(0)).max() > 0.01


def test_more_is_accepted_than_token_by_token():
    gains = []
    for seed in range(10):
        block, one = (summed(how, seed, COUNTS["three"])[1] for how in (reference, token_by_token))
        assert block >= one - 1e-12
        gains.append(block / one)
    assert np.mean(gains) > 1.01


def test_point_masses_gain_nothing():
    """Why drafts without probabilities keep `acceptance.match`: block verification accepts exactly as many of them."""
    target, _ = tables(0, sharpness=2.0)
    for drafts in itertools.product(range(V), repeat=D):
        p = rounds_of(target, target, [drafts])[0][0]
        certain = np.eye(V)[list(drafts)]
        ends, one = reference(p, certain, drafts, D)[0], token_by_token(p, certain, drafts, D)[0]
        np.testing.assert_allclose(ends, one, atol=1e-12)


@cache
def sampled(seed):
    """`ROUNDS` rounds on the device: the drafts, the yielded tokens, their number; and p and draft_p, as seen."""
    target, drafter = tables(seed)
    codes = list(itertools.product(range(V), repeat=D))
    rng = np.random.default_rng(seed)
    chances = np.array([np.prod([drafter[text[:j]][text[j]] for j in range(D)]) for text in codes])
    which = rng.choice(len(codes), ROUNDS, p=chances / chances.sum())
    p, draft_p = (x[which] for x in rounds_of(target, drafter, codes))
    drafts = np.array(codes)[which]
    seeds = jnp.stack([jnp.full(ROUNDS, seed, jnp.uint32), jnp.arange(ROUNDS, dtype=jnp.uint32)], axis=1)
    inputs = [jnp.asarray(x, jnp.float32) for x in (p, draft_p)]
    tokens, yields = _block(
        inputs[0], jnp.asarray(drafts), jnp.full(ROUNDS, D), inputs[1], seeds, jnp.zeros(ROUNDS, jnp.int32)
    )
    return drafts, np.asarray(tokens), np.asarray(yields), p, draft_p


def test_coins_fall_as_the_rates_say():
    _, tokens, yields, *_ = sampled(0)
    first = np.where(yields > 0, tokens[:, 0], -1)
    target, _ = tables(0)
    assert fit_p_value(first, target[()]) > ALPHA
    two = tokens[yields > 1]
    chances = sum_of_starts(0)
    assert fit_p_value(two[:, :2], chances / chances.sum()) > ALPHA


def sum_of_starts(seed):
    """How likely a round yields two tokens or more and begins with these, f64[v, v]."""
    target, drafter = tables(seed)
    out = np.zeros((V, V))
    for drafts in itertools.product(range(V), repeat=D):
        drawn = np.prod([drafter[drafts[:j]][drafts[j]] for j in range(D)])
        (p,), (draft_p,) = rounds_of(target, drafter, [drafts])
        if drawn == 0:
            continue
        ends, bonus = reference(p, draft_p, drafts, D)
        out[drafts[0]] += drawn * ends[1] * bonus[1]
        out[drafts[0], drafts[1]] += drawn * ends[2:].sum()
    return out


def test_never_fewer_over_many_rounds():
    """Drawn rounds accept as many as token by token would on the same drafts on average, up to 4 standard errors of the
    mean; and here clearly more."""
    drafts, _, yields, p, draft_p = sampled(1)
    at = lambda x: np.take_along_axis(x[:, :D], drafts[..., None], axis=2)[..., 0]  # noqa: E731
    one = np.cumprod(np.minimum(1, at(p) / at(draft_p)), axis=1).sum(axis=1)  # expected, given these drafts
    more = (yields - 1) - one
    margin = 4 * more.std() / np.sqrt(ROUNDS)
    assert more.mean() > -margin
    assert more.mean() > 2 * margin, (more.mean(), margin)


def test_a_round_never_meets_an_earlier_rounds_random_numbers():
    """Whatever position a draft is for. Bonus tokens alone go by position: each is drawn once."""
    seed = jnp.array([[3, 4]], jnp.uint32)
    data = [
        jax.random.key_data(sampling.round_keys(seed, jnp.array([start]), jnp.arange(8), purpose)).reshape(-1, 2)
        for start in range(10)
        for purpose in (sampling.ACCEPT, sampling.DRAFT)
    ]
    bonus = jax.random.key_data(sampling.keys(seed, jnp.arange(20)[None], sampling.SAMPLE)).reshape(-1, 2)
    assert len(np.unique(np.concatenate([*data, bonus]), axis=0)) == 10 * 2 * 8 + 20
    alone = sampling.round_keys(seed, jnp.array([5]), jnp.asarray(2), sampling.DRAFT)
    np.testing.assert_array_equal(jax.random.key_data(alone)[0], data[2 * 5 + 1][2])
