"""The kernel of many rows and weights of four bits: interpreted against numpy, and lowered."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import gate
from jaxspec.models.weights import HALF, Int4, Nvfp4
from jaxspec.pallas.dense import four_wide
from jaxspec.pallas.dense.few_rows.share import FourBits
from jaxspec.pallas.dense.tiles import Tiling
from tests.pallas.dense.test_few_rows import INTERPRET
from tests.pallas.dense.test_few_rows_four_bits import drawn, drawn_shape, rows_of
from tests.support.kernels import kernels
from tests.support.sample import rare

MATMUL = partial(four_wide.matmul, **INTERPRET)


@pytest.mark.parametrize("kind,rows,gated", [(Int4(32, zeros=True), 40, False), rare(Nvfp4(), 70, True),
                                             rare(Int4(128), 70, False)])  # fmt: skip
def test_products_are_those_of_the_dequantised_weight(kind, rows, gated):
    """Rows past the valid ones hold anything."""
    (weight, whole), x = drawn(kind, 512, 128), rows_of(rows, 512)
    residual = None if gated else rows_of(rows, 128)
    got = MATMUL(x, weight, jnp.array([rows - 3]), residual, gated=gated, tiling=Tiling(32, 64 if gated else 128))
    expected = np.asarray(x, np.float64) @ whole
    expected = np.asarray(gate(jnp.asarray(expected), HALF)) if gated else expected + np.asarray(residual, np.float64)
    got, expected = np.asarray(got, np.float64)[:-3], expected[:-3]
    np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "kind,rows,gated", [(Int4(128), 33, True), rare(Int4(128), 128, True), rare(Nvfp4(), 512, False)]
)
def test_lowers_for_cuda(kind, rows, gated):
    given = jax.eval_shape(lambda: (jnp.ones((rows, 4096), jnp.bfloat16), drawn_shape(kind, 4096, 24576)))
    valid = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert kernels(lambda *given: four_wide.matmul(*given, gated=gated), *given, valid) == 1


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("four", [FourBits(), FourBits(32, True, "float32"), FourBits(128, False, "bfloat16")])
def test_every_tile_has_a_ring_that_the_compiler_takes(four, gated):
    """Few rows would have more slots than a group has barriers, and many none."""
    for size in four_wide.SIZES:
        assert 2 <= four_wide.slots_of(Tiling(*size), four, gated) <= four_wide.MAX_BARRIERS, size


def test_weights_that_do_not_fit_are_named():
    weight, _ = drawn(Int4(128), 512, 64)
    assert four_wide.supported(40, jnp.bfloat16, weight) is None
    assert "rows in float32" in four_wide.supported(40, jnp.float32, weight)
    assert "2049 rows; supported: up to 2048" in four_wide.supported(2049, jnp.bfloat16, weight)
    assert "multiples of 256" in four_wide.supported(40, jnp.bfloat16, drawn(Int4(64), 128, 64)[0])
