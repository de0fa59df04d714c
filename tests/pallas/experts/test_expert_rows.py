"""Rows to experts and back: the kernels interpreted against their definitions, and where they serve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import hopper
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_rows import FEWEST, MOST, supported, take_rows, weighted_rows
from jaxspec.pallas.hopper import KERNELS
from tests.support import drawn
from tests.support.kernels import kernels


def check(t: int, k: int, d: int, **options):
    """Rows that nobody may read aren't numbers."""
    keys = jax.random.split(jax.random.key(t), 3)
    rows = drawn.normal(keys[0], (t + 20, d), jnp.bfloat16).at[0].set(jnp.nan)
    place = jax.random.randint(keys[1], (t, k), 1, t + 20).at[-1, -1].set(-1)
    weights = jax.random.uniform(keys[2], (t, k))
    got = np.asarray(weighted_rows(rows, place, weights, **options), np.float64)
    values = np.where(place[..., None] >= 0, np.asarray(rows, np.float64)[place], 0)
    expected = (values * np.asarray(weights, np.float64)[..., None]).sum(1)
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-6)


def check_taking(t: int, rows: int, d: int, **options):
    x = drawn.normal(jax.random.key(d), (t, d), jnp.bfloat16)
    token = jax.random.randint(jax.random.key(rows), (rows,), 0, t)
    np.testing.assert_array_equal(take_rows(x, token, **options), x[token])


@pytest.mark.parametrize("t,rows,d", [(3, 16, 128), (20, 8, 2048), (3, 8, 2880)])
def test_rows_are_taken(t, rows, d):
    check_taking(t, rows, d, interpret=plgpu.InterpretGPUParams())


def test_rows_are_taken_in_groups():
    with pytest.raises(ValueError, match="12 rows to take; supported: a multiple of 8"):
        take_rows(jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros(12, jnp.int32))


@pytest.mark.parametrize("t,k,d", [(2, 8, 128), (1, 9, 2048), (2, 1, 384), (2, 4, 2880)])
def test_rows_are_added_up(t, k, d):
    check(t, k, d, interpret=plgpu.InterpretGPUParams())


def test_many_tokens_take_it_where_there_is_one(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    shape = jax.ShapeDtypeStruct
    before = KERNELS["weighted_rows"]
    for tokens, own in ((FEWEST - 1, 0), (FEWEST, 1)):
        place, weights = shape((tokens, 9), jnp.int32), shape((tokens, 9), jnp.float32)
        assert kernels(experts_mlp.combine, shape((9 * tokens, 2048), jnp.bfloat16), place, weights) == own
        assert KERNELS["weighted_rows"] == before + own


def test_what_it_leaves_to_others_is_named():
    assert supported(FEWEST, MOST, 2048, jnp.bfloat16) is None
    assert supported(8, 9, 2048, jnp.bfloat16) == "8 tokens"
    assert "float32" in supported(FEWEST, 9, 2048, jnp.float32)
    assert "17 rows a token" in supported(FEWEST, 17, 2048, jnp.bfloat16)
    assert supported(FEWEST, 4, 2880, jnp.bfloat16) is None
    for width in (100, 192, 2892):
        assert f"width of {width}" in supported(FEWEST, 9, width, jnp.bfloat16)
