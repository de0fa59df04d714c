"""The kernel that adds up rows from all over an array: interpreted against its reference, and where it serves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import experts, target
from jaxspec.pallas.target import KERNELS
from jaxspec.pallas.weighted_rows import FEWEST, MOST, supported, weighted_rows


def check(t: int, k: int, d: int, **options):
    """Rows that nobody may read aren't numbers."""
    keys = jax.random.split(jax.random.key(t), 3)
    rows = jax.random.normal(keys[0], (t + 20, d)).astype(jnp.bfloat16).at[0].set(jnp.nan)
    place = jax.random.randint(keys[1], (t, k), 1, t + 20).at[-1, -1].set(-1)
    weights = jax.random.uniform(keys[2], (t, k))
    got = np.asarray(weighted_rows(rows, place, weights, **options), np.float64)
    values = np.where(place[..., None] >= 0, np.asarray(rows, np.float64)[place], 0)
    expected = (values * np.asarray(weights, np.float64)[..., None]).sum(1)
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("t,k,d", [(2, 8, 128), (1, 9, 2048), (2, 1, 384)])
def test_matches_the_definition(t, k, d):
    check(t, k, d, interpret=plgpu.InterpretGPUParams())


def test_many_tokens_take_it_where_there_is_one(monkeypatch):
    monkeypatch.setattr(target, "kernels_here", lambda: None)
    shape = jax.ShapeDtypeStruct
    before = KERNELS["weighted rows"]
    for tokens, kernels in ((FEWEST - 1, 0), (FEWEST, 1)):
        place, weights = shape((tokens, 9), jnp.int32), shape((tokens, 9), jnp.float32)
        traced = jax.jit(experts.combine).trace(shape((9 * tokens, 2048), jnp.bfloat16), place, weights)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == kernels
        assert KERNELS["weighted rows"] == before + kernels


def test_what_it_leaves_to_others_is_named():
    assert supported(FEWEST, MOST, 2048, jnp.bfloat16) is None
    assert supported(8, 9, 2048, jnp.bfloat16) == "8 tokens"
    assert "float32" in supported(FEWEST, 9, 2048, jnp.float32)
    assert "17 rows a token" in supported(FEWEST, 17, 2048, jnp.bfloat16)
    assert "width of 100" in supported(FEWEST, 9, 100, jnp.bfloat16)
