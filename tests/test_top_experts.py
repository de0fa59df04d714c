"""The router's kernel against its reference: in interpret mode, lowered for CUDA, and where the mixture takes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import target
from jaxspec.pallas.target import KERNELS
from jaxspec.pallas.top_experts import reference, select, supported, top_experts

CASES = [
    (3, 128, 8),
    (2, 256, 8),
    (1, 512, 10),
    (2, 60, 4),
    (2, 200, 1),
    (1, 300, 8),
    (1, 8, 8),
]  # tokens, experts, of a token


def check(t: int, e: int, k: int, renormalised: bool, **options):
    logits = 3 * jax.random.normal(jax.random.key(e), (t, e))
    logits = logits.at[0, : e // 2].set(logits[0, 0]).at[-1, 0].set(-jnp.inf)  # equals, and one nobody may want
    ids, weights = select(logits, k=k, renormalised=renormalised, **options)
    expected_ids, expected = reference(logits, k, renormalised)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("t,e,k", CASES)
def test_matches_the_reference(t, e, k, renormalised):
    check(t, e, k, renormalised, interpret=plgpu.InterpretGPUParams())


def test_what_is_not_a_number_chooses_different_experts_all_the_same():
    logits = jnp.full((1, 8), jnp.nan).at[0, 5].set(1.0)
    ids, _ = select(logits, k=3, renormalised=True, interpret=plgpu.InterpretGPUParams())
    assert ids.tolist() == [[5, 0, 1]]


def test_a_router_takes_the_kernel_where_there_is_one(monkeypatch):
    monkeypatch.setattr(target, "kernels_here", lambda: None)
    before = KERNELS["router"]
    traced = jax.jit(lambda x: top_experts(x, 8, True)).trace(jax.ShapeDtypeStruct((2048, 256), jnp.float32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1
    assert KERNELS["router"] == before + 1
    jax.eval_shape(lambda x: top_experts(x, 8, True), jax.ShapeDtypeStruct((2, 2000), jnp.float32))
    assert KERNELS["router"] == before + 1


@pytest.mark.parametrize("renormalised", [True, False])
def test_gradients_are_those_of_plain_jnp(renormalised):
    """A router is trained through it, whichever path served."""
    logits, scale = jax.random.normal(jax.random.key(0), (5, 12)), jnp.arange(1.0, 4)
    of = lambda f: jax.grad(lambda x: (f(x, 3, renormalised)[1] * scale).sum())(logits)  # noqa: E731
    np.testing.assert_allclose(of(top_experts), of(reference), rtol=1e-6)
    assert abs(of(top_experts)).max() > 0.01


def test_what_cannot_run_is_named():
    assert supported(512, 128) is None
    assert supported(513, 8) == "513 experts, more than 512"
    assert supported(256, 129) == "129 experts a token, more than 128"
