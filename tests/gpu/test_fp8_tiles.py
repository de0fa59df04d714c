"""FP8 products of many rows on the device: shapes that are served, and how fast they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench import profile
from jaxspec.decoder.matmul import project
from jaxspec.models import fp8
from jaxspec.models.description import Norm
from jaxspec.models.weights import HALF, Fp8, Layout, Weight
from jaxspec.pallas.dense import fp8_quantise, fp8_tiles
from jaxspec.pallas.dense.tiles import Tiling
from tests.pallas.dense.test_fp8_tiles import check, check_normed, operands, run
from tests.support.kernels import PRODUCTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("rows,real", [(132, 132), (165, 130), (512, 512), (1024, 700), (2048, 1)])
def test_matches_plain_jnp(rows, real, shape):
    inputs, outputs, unit, kind = PRODUCTS[shape]
    for _ in range(2):  # what one launch leaves behind isn't the next one's
        check(rows, real, inputs, outputs, 128, unit, kind)


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
def test_scales_of_outputs(kind):
    check(600, 600, 4096, 6144, None, 1, kind)


@pytest.mark.parametrize("rows", [1, 8, 64, 100, 128])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_few_quantised_rows(rows, shape):
    """Sum some in parts."""
    inputs, outputs, unit, kind = PRODUCTS[shape]
    check(rows, rows, inputs, outputs, 128, unit, kind)


@pytest.mark.parametrize("block,unit", [(128, 64), (None, 1)])
def test_every_division(block, unit):
    for tiling in fp8_tiles.SIZES:
        for splits in (2, 3, 8):
            check(100, 90, 128 * 24, 1152, block, unit, "added", tiling=Tiling(*tiling), splits=splits)


@pytest.mark.parametrize("tiling", fp8_tiles.GATED)
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_every_tile(kind, tiling):
    check(640, 600, 1152, 2304, 128, 64, kind, tiling=Tiling(*tiling))


def test_a_row_gets_the_same_in_any_company():
    """Sums run over the inputs in one order, whatever the tiles; and twice on the same data."""
    x, values, scales = operands(2048, 4096, 6144, 128, 128)
    of = lambda rows, real: run(x[:rows], values, scales, real, block=128)[:100]  # noqa: E731
    expected = of(256, 256)
    for rows, real in ((136, 136), (512, 300), (2048, 2048), (256, 256)):
        np.testing.assert_array_equal(of(rows, real), expected)


@pytest.mark.parametrize("rows,inputs", [(33, 4096), (64, 4096), (100, 12288), (2048, 4096)])
def test_rows_are_quantised_as_in_plain_jnp(rows, inputs):
    x = operands(rows, inputs, 128, 128, 128)[0]
    got, expected = jax.jit(fp8_quantise.quantise_rows)(x), jax.jit(fp8.quantise_rows)(x)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours[:rows], np.float32), np.asarray(theirs, np.float32), rtol=1e-6)


@pytest.mark.parametrize("rows,inputs", [(33, 2048), (64, 4096), (100, 8192), (2048, 4096)])
@pytest.mark.parametrize("splits,quantise", [(None, True), (1, True), (8, True), (4, False)])
def test_rows_are_normed_and_quantised_as_in_plain_jnp(rows, inputs, splits, quantise):
    for norm in (Norm(1e-6), Norm(1e-6, centred=True)):
        check_normed(rows, inputs, norm, splits, quantise)


RATES = {  # TFLOP/s at least, quantising and dequantising included, of gate and up at 2,048 rows
    "off": (Fp8(128), 500),
    "blocks": (Fp8(128, True), 800),
    "tensor": (Fp8(None, True), 800),
}


@pytest.mark.parametrize("mode", RATES)
@pytest.mark.speed
def test_arithmetic_rate(figures, mode):
    """By kernel time, with four different weights; the limit leaves room for a busy device."""
    rows, (inputs, outputs, unit, _) = 2048, PRODUCTS["gate, up"]
    fmt, least = RATES[mode]
    x, values, scales = operands(rows, inputs, outputs, fmt.block, unit if fmt.block else outputs)
    weights = [Weight(jnp.copy(values), fmt, Layout((outputs,), HALF), scales) for _ in range(4)]
    valid = jnp.array([rows], jnp.int32)
    call = jax.jit(lambda x, weights: [project(x, weight, valid, gated=True) for weight in weights])
    jax.block_until_ready(call(x, weights))
    times = 5

    def work():
        for _ in range(times):
            jax.block_until_ready(call(x, weights))

    kernels = profile.kernels(work, times * len(weights))
    us = sum(kernel["us"] for kernel in kernels)
    rate = 2 * rows * inputs * outputs / us / 1e6
    figures[f"FP8 gate, up of {rows} rows, {mode}"] = {"us": us, "TFLOP/s": rate, "all": kernels}
    assert rate >= least
