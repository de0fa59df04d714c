"""Many rows times FP8 weights that become bfloat16 in registers, on the device: shapes that are served."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import fp8
from jaxspec.pallas.dense import fp8_wide
from jaxspec.pallas.dense.tiles import Tiling
from tests.pallas.dense.test_fp8_tiles import operands
from tests.pallas.dense.test_fp8_wide import check, run
from tests.support.kernels import PRODUCTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("rows,real", [(132, 132), (165, 130), (512, 512), (1024, 700), (2048, 1)])
def test_matches_plain_jnp(rows, real, shape):
    inputs, outputs, unit, kind = PRODUCTS[shape]
    for _ in range(2):  # what one launch leaves behind isn't the next one's
        check(rows, real, inputs, outputs, 128, unit, kind)


@pytest.mark.parametrize("tiling", fp8_wide.SIZES)
@pytest.mark.parametrize("kind,unit", [("plain", 128), ("gated", 32), ("added", 64)])
def test_every_tile(kind, unit, tiling):
    check(600, 570, 1152, 2304, 128, unit, kind, tiling=Tiling(*tiling))


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
def test_scales_of_outputs(kind):
    check(600, 600, 4096, 6144, None, 1, kind)


@pytest.mark.parametrize("low,high", [(-14, -6), (-40, -30), (10, 20)])
def test_every_number_is_converted(low, high):
    """Rows of one 1 each show the weight: e4m3's numbers but for NaN, times scales, rounded to bfloat16."""
    numbers = np.arange(256, dtype=np.uint8)
    numbers = np.random.default_rng(0).permuted(np.tile(numbers[(numbers & 127) != 127], 130)[: 128 * 256])
    values = jnp.asarray(numbers.reshape(128, 256)).view(jnp.float8_e4m3fn)
    scales = jnp.exp2(jax.random.uniform(jax.random.key(0), (4, 2), minval=low, maxval=high))
    out = fp8_wide.matmul(jnp.eye(256, dtype=jnp.bfloat16), values, scales, jnp.array([256], jnp.int32), block=128)
    got, expected = (np.asarray(each, np.float32) for each in (out.T, fp8.dequantise(values, scales, 128)))
    expected = expected.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=2**-7, atol=0)  # a unit in the last place
    assert (got == expected).mean() > 0.995  # a scale's two parts have some 16 bits


def test_a_row_gets_the_same_in_any_company():
    """Sums run over the inputs in one order, whatever the tiles; and twice on the same data."""
    x, values, scales = operands(1024, 4096, 6144, 128, 128)
    of = lambda rows, real: run(x[:rows], values, scales, real, block=128)[:100]  # noqa: E731
    expected = of(256, 256)
    for rows, real in ((136, 136), (512, 300), (1024, 1024), (256, 256)):
        np.testing.assert_array_equal(of(rows, real), expected)
