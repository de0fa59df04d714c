"""The router's kernel against its reference: in interpret mode, lowered for CUDA, and where the mixture takes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import hopper
from jaxspec.pallas.experts.experts_mlp import NOBODY
from jaxspec.pallas.experts.top_experts import reference, select, supported, top_experts
from jaxspec.pallas.hopper import KERNELS
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import one_in, rare

CASES = [
    (3, 128, 8),
    (2, 256, 8),
    (1, 512, 10),
    (2, 60, 4),
    (2, 200, 1),
    (1, 300, 8),
    (1, 8, 8),
]  # tokens, experts, of a token


def inputs(t: int, e: int, width: int = 0):
    """Logits, positions of which some are padding's, and, where it has a `width`, an expert that is shared."""
    logits = 3 * drawn.normal(jax.random.key(e), (t, e))
    logits = logits.at[0, : e // 2].set(logits[0, 0]).at[-1, 0].set(-jnp.inf)  # equals, and one nobody may want
    positions = jnp.arange(t) if t < 3 else jnp.arange(t) - 1
    rows, gate = (drawn.normal(jax.random.key(i), shape) for i, shape in enumerate(((t, width), (width, 1))))
    shared = (rows.astype(jnp.bfloat16), (gate * 0.1).astype(jnp.bfloat16)) if width else None
    return logits, positions, shared


def check(t: int, e: int, k: int, renormalised: bool, width: int, **options):
    given = inputs(t, e, width)
    ids, weights = select(*given, k=k, renormalised=renormalised, **options)
    expected_ids, expected = reference(*given, k, renormalised)
    each = k + bool(width)
    np.testing.assert_array_equal(ids[:, :each], expected_ids)
    assert (ids[:, each:] == NOBODY).all()
    np.testing.assert_allclose(weights[:, :each], expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("t,e,k,renormalised,width", one_in(6, CASES, [(True, 0), (False, 0), (True, 384)]))
def test_matches_the_reference(t, e, k, renormalised, width):
    check(t, e, k, renormalised, width, interpret=plgpu.InterpretGPUParams())


def test_what_is_not_a_number_chooses_different_experts_all_the_same():
    logits = jnp.full((1, 8), jnp.nan).at[0, 5].set(1.0)
    ids, _ = select(logits, jnp.zeros(1, int), k=3, renormalised=True, interpret=plgpu.InterpretGPUParams())
    assert ids[:, :3].tolist() == [[5, 0, 1]]


def test_a_router_takes_the_kernel_where_there_is_one(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    before = KERNELS["top_experts"]
    of = lambda t, e, width: jax.eval_shape(lambda: inputs(t, e, width))  # noqa: E731
    run = jax.jit(lambda *given: top_experts(*given, 8, True))
    assert kernels(run, *of(2048, 256, 2048)) == 1
    assert KERNELS["top_experts"] == before + 1
    jax.eval_shape(run, *of(2, 2000, 0))
    jax.eval_shape(run, *of(2, 256, 100))
    assert KERNELS["top_experts"] == before + 1


@pytest.mark.parametrize("renormalised", [True, rare(False)])
def test_gradients_are_those_of_plain_jnp(renormalised):
    """A router is trained through it, whichever path served."""
    (logits, positions, (rows, gate)), scale = inputs(5, 12, 16), jnp.arange(1.0, 5)
    given = jnp.where(jnp.isfinite(logits), logits, -9.0), rows.astype(jnp.float32), gate.astype(jnp.float32)

    def gradients(f):
        total = lambda logits, *shared: (f(logits, positions, shared, 3, renormalised)[1] * scale).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2))(*given)

    for got, expected in zip(gradients(top_experts), gradients(reference), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert abs(got).max() > 0.01


def test_what_cannot_run_is_named():
    assert supported(512, 128) is None
    assert supported(513, 8) == "513 experts, more than 512"
    assert supported(256, 129) == "129 experts a token, more than 128"
    shared = jax.eval_shape(lambda: inputs(2, 8, 100))[2]
    assert supported(256, 8, shared) == "rows 100 wide, not a multiple of 128"
