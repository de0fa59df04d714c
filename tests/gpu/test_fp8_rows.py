"""The FP8 kernel of few rows on the device: shapes that are served, and how much of the memory's speed it reaches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import fp8
from jaxspec.pallas.dense.fp8_rows import product
from tests.support.kernels import PRODUCTS, seconds

pytestmark = pytest.mark.gpu

SHAPES = {name: (outputs, inputs) for name, (inputs, outputs, *_) in PRODUCTS.items()}


def draw(rows: int, outputs: int, inputs: int, seed: int = 0):
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    values, scales = fp8.quantise_blocks(jax.random.normal(keys[1], (outputs, inputs), jnp.bfloat16))
    return x, values, jnp.repeat(scales, 4, axis=0)  # one for 32 outputs, as gate and up have


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 33, 64, 128])
def test_matches_plain_jnp(rows, shape):
    """Twice on the same data: a missing wait would differ now and then."""
    run = jax.jit(product)
    for seed in range(3):
        x, values, scales = draw(rows, *SHAPES[shape], seed)
        got = run(x, values, scales)
        np.testing.assert_array_equal(got, run(x, values, scales))
        with jax.default_matmul_precision("highest"):
            expected = x.astype(jnp.float32) @ fp8.dequantise(values, scales, 128).T
        np.testing.assert_allclose(got, expected, atol=1e-4 * float(jnp.abs(expected).max()))


def test_a_row_gets_the_same_in_any_company():
    x, values, scales = draw(8, 4096, 4096)
    alone = product(x[:1], values, scales)
    np.testing.assert_array_equal(product(x, values, scales)[:1], alone)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.speed
def test_reads_weights_fast(rows, shape):
    """Read so many different weights that none is found in a cache."""
    outputs, inputs = SHAPES[shape]
    x, values, scales = draw(rows, outputs, inputs)
    count = max(8, 2**30 // values.size)
    weights = [(jnp.copy(values), jnp.copy(scales)) for _ in range(count)]
    run = jax.jit(lambda x, weights: [product(x, *weight) for weight in weights])
    taken = seconds(run, x, weights, rounds=10) / count
    speed = values.size / taken / 1e12
    print(f"{shape}, {rows} rows: {taken * 1e6:.1f} us, {speed:.2f} TB/s")
    assert speed > 0.6  # an H100 gave 0.71 (out, 32 rows) to 1.91 (gate, up, 8 rows), of about 3
