"""Few tokens' experts added up for the norm after it: interpreted, lowered for CUDA, and what it leaves to others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_add import MOST, add_scaled, supported
from jaxspec.pallas.experts.experts_mlp import NOBODY
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare


def operands(t: int, k: int, d: int):
    """The first row of the experts' isn't a number, and is no token's."""
    keys = jax.random.split(jax.random.key(t), 5)
    rows = drawn.normal(keys[0], (t * k + 9, d), jnp.bfloat16).at[0].set(jnp.nan)
    place = jax.random.randint(keys[1], (t, k), 1, t * k + 9).at[-1, -1].set(-1)
    residual = drawn.normal(keys[3], (-(-t // 8) * 8, d), jnp.bfloat16)
    scale = (1 + 0.1 * drawn.normal(keys[4], (d,))).astype(jnp.bfloat16)
    return rows, place, jax.random.uniform(keys[2], (t, k)), residual, scale


def check(t: int, k: int, d: int, **options):
    rows, place, weights, residual, scale = given = operands(t, k, d)
    got, scaled = add_scaled(*given, **options)
    assert_close(got[:t], residual[:t] + experts_mlp.combine(rows, place, weights))
    np.testing.assert_array_equal(got[t:], residual[t:])
    expected = few_rows.scale_rows(got, scale)
    np.testing.assert_array_equal(scaled.rows, expected.rows)
    np.testing.assert_allclose(scaled.squares, expected.squares, rtol=1e-5)


@pytest.mark.parametrize("t,k,d", [rare(1, 4, 192), (8, 2, 1088), (21, 3, 192)])
def test_rows_are_added_up(t, k, d):
    check(t, k, d, interpret=plgpu.InterpretGPUParams())


def check_alone(k: int, d: int, **options):
    """One token, whose experts are given by number, the last of them none; each has eight rows, of which one counts."""
    rows, _, weights, residual, scale = operands(1, k, d)
    rows = jnp.tile(rows.at[0].set(1), (8, 1))[: 8 * k]
    ids = jnp.full((1, 128), NOBODY).at[0, : k - 1].set(jnp.arange(k - 1))
    wide = jnp.pad(weights, ((0, 0), (0, 128 - k)))
    place = jnp.where(jnp.arange(k) < k - 1, 8 * jnp.arange(k), -1)[None]
    got, scaled = add_scaled(rows, ids, wide, residual, scale, each=k, alone=k, **options)
    expected, more = add_scaled(rows, place, weights, residual, scale, **options)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(scaled.rows, more.rows)


def test_one_tokens_rows_need_no_places():
    check_alone(4, 192, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("t", [1, 8, 32])
def test_lowers_for_cuda(t):
    given = jax.eval_shape(lambda: operands(t, 4, 2880))
    assert kernels(add_scaled, *given) == 1


def test_what_it_leaves_to_others_is_named():
    assert supported(8, 4, 2880, jnp.bfloat16) is None
    assert "float32" in supported(8, 4, 2880, jnp.float32)
    assert supported(32, 4, 2880, jnp.bfloat16) is None
    assert "40 rows" in supported(40, 4, 2880, jnp.bfloat16)
    assert f"up to {MOST}" in supported(8, 17, 2880, jnp.bfloat16)
    assert "rows 100 wide" in supported(8, 4, 100, jnp.bfloat16)
