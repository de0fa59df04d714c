"""The kernel that scores experts one by one, against its reference: interpreted, lowered for CUDA, and chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.description import SigmoidScores
from jaxspec.pallas import hopper
from jaxspec.pallas.experts.experts_mlp import NOBODY
from jaxspec.pallas.experts.scored_experts import Routing, reference, scored_experts, select, supported
from jaxspec.pallas.hopper import KERNELS
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import one_in

CASES = [(3, 128, 8), (1, 256, 8), (9, 160, 8), (2, 60, 6), (1, 8, 8)]  # tokens, experts, of a token
ROUTINGS = {
    "GLM-4.5's": (True, SigmoidScores(), True),
    "MiniMax-M2's": (True, SigmoidScores(), False),
    "scaled": (True, SigmoidScores(scale=2.5), True),
    "not renormalised": (False, SigmoidScores(), False),
    "ERNIE 4.5's": (True, SigmoidScores(function="softmax"), True),
}


def routing(name: str, k: int) -> Routing:
    renormalised, scores, shared = ROUTINGS[name]
    return Routing(k, renormalised, scores, shared)


def inputs(t: int, e: int):
    """Logits, of which half are equal in one row, corrections that change the choice, and positions."""
    logits = 2 * drawn.normal(jax.random.key(e), (t, e))
    logits = logits.at[0, : e // 2].set(logits[0, 0])
    correction = 0.3 * drawn.normal(jax.random.key(e + 1), (e,)).at[: e // 2].set(0.1)
    return logits, correction, jnp.arange(t) if t < 3 else jnp.arange(t) - 1


def check(t: int, e: int, k: int, name: str, **options):
    of, each = routing(name, k), k + ROUTINGS[name][2]
    ids, weights = select(*inputs(t, e), routing=of, **options)
    expected_ids, expected = reference(*inputs(t, e), of)
    np.testing.assert_array_equal(ids[:, :each], expected_ids)
    assert (ids[:, each:] == NOBODY).all()
    valid = expected_ids != NOBODY
    np.testing.assert_allclose(weights[:, :each][valid], expected[valid], rtol=1e-5)


@pytest.mark.parametrize("t,e,k,name", one_in(5, CASES, list(ROUTINGS)))
def test_matches_the_reference(t, e, k, name):
    check(t, e, k, name, interpret=plgpu.InterpretGPUParams())


def test_what_is_not_a_number_chooses_different_experts_all_the_same():
    logits, of = jnp.full((1, 8), jnp.nan).at[0, 5].set(1.0), routing("GLM-4.5's", 3)
    ids, _ = select(logits, jnp.zeros(8), jnp.zeros(1, int), routing=of, interpret=plgpu.InterpretGPUParams())
    assert ids[:, :4].tolist() == [[5, 0, 1, 8]]


@pytest.mark.parametrize("name,logit", [("GLM-4.5's", -200.0), ("ERNIE 4.5's", 200.0)])
def test_scores_that_are_all_zero_or_whose_powers_overflow_are_the_references(name, logit):
    """Two of three experts alone may be chosen: the third is the first of those that a correction rules out."""
    of, ruled_out = routing(name, 3), jnp.zeros(8).at[:6].set(-jnp.inf)
    given = jnp.full((1, 8), logit), ruled_out, jnp.zeros(1, int)
    ids, weights = select(*given, routing=of, interpret=plgpu.InterpretGPUParams())
    expected_ids, expected = reference(*given, of)
    assert ids[:, :4].tolist() == expected_ids.tolist() == [[6, 7, 0, 8]]
    np.testing.assert_allclose(weights[:, :4], expected, rtol=1e-5)


def test_a_group_is_as_good_as_its_two_best_experts():
    """DeepSeek-V3's choice: the first group has the best expert, the second the best pair."""
    of = Routing(2, True, SigmoidScores(groups=2, top_groups=1), False)
    logits = jnp.array([[3.0, -3.0, -3.0, 1.0, 1.5, -3.0]])
    ids, _ = reference(logits, jnp.zeros(6), jnp.zeros(1, int), of)
    assert ids.tolist() == [[4, 3]]


def test_a_router_takes_the_kernel_where_there_is_one(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    before, of = KERNELS["scored_experts"], jax.eval_shape(lambda: inputs(2048, 128))
    assert kernels(lambda *given: scored_experts(*given, routing("GLM-4.5's", 8)), *of) == 1
    grouped = Routing(8, True, SigmoidScores(8, 4), True)
    kernels(lambda *given: scored_experts(*given, grouped), *of)
    assert KERNELS["scored_experts"] == before + 1


@pytest.mark.parametrize("name", ["scaled", "ERNIE 4.5's"])
def test_gradients_are_those_of_plain_jnp(name):
    """A router is trained through it, whichever path served."""
    (logits, *further), scale = inputs(5, 12), jnp.arange(1.0, 5)

    def gradient(f):
        return jax.grad(lambda logits: (f(logits, *further, routing(name, 3))[1] * scale).sum())(logits)

    np.testing.assert_allclose(gradient(scored_experts), gradient(reference), rtol=1e-6)
    assert abs(gradient(reference)).max() > 0.01


def test_what_cannot_run_is_named():
    assert supported(512, routing("GLM-4.5's", 127)) is None
    assert supported(513, routing("GLM-4.5's", 8)) == "513 experts, more than 512"
    assert supported(256, routing("GLM-4.5's", 128)) == "128 experts a token, more than 127"
    assert supported(256, Routing(8, True, SigmoidScores(8, 4))) == "experts in 8 groups"
