"""The kernel of few rows and integers of four bits on the device: its numbers at served sizes, and its speed."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import int4
from jaxspec.pallas.dense.int4_rows import product
from tests.pallas.dense.test_int4_rows import operands

pytestmark = pytest.mark.gpu

SIZES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))  # Qwen3-8B's layer
TIMES = 16


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("outputs,inputs,group,zeros", [(512, 1024, 128, False), (512, 1024, 32, True)])
def test_matches_numpy(rows, outputs, inputs, group, zeros):
    x, values, scales, whole = operands(rows, outputs, inputs, group, zeros)
    got, expected = np.asarray(product(x, values, scales, zeros=zeros)), np.asarray(x, np.float64) @ whole.T
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
def test_speed(rows):
    """Prints; weights are distinct, so that no cache holds them."""
    for outputs, inputs in SIZES:
        keys = jax.random.split(jax.random.key(0), TIMES)
        weights = [int4.quantise(jax.random.normal(key, (outputs, inputs), jnp.bfloat16), 128) for key in keys]
        x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
        run = jax.jit(lambda x, weights: [product(x, *weight) for weight in weights])
        jax.block_until_ready(run(x, weights))
        start = time.perf_counter()
        jax.block_until_ready([run(x, weights) for _ in range(8)])
        us = (time.perf_counter() - start) / 8 / TIMES * 1e6
        read = outputs * inputs * (0.5 + 2 / 128)
        print(f"int4_rows {rows} x {inputs} x {outputs}: {us:.1f} us, {read / us / 1e6:.2f} TB/s")
