"""The few rows' kernels with FP8 weights, on the device: what interpret mode lacks, registers, clusters and rings."""

from __future__ import annotations

import functools
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import fp8
from jaxspec.pallas import few_rows
from tests import test_few_rows_fp8 as cpu

pytestmark = pytest.mark.gpu

SIZES = {"qwen3-8b": cpu.QWEN3, "qwen3-30b-a3b": cpu.MIXTURE}
CHECKS = {
    "gated": cpu.check_gated,
    "add": cpu.check_add,
    "biased add": partial(cpu.check_add, biased=True, scaled=False),
    "product": cpu.check_product,
    "heads": cpu.check_heads,
}


@functools.cache
def operands(sizes):
    return cpu.operands(**SIZES[sizes])


def test_every_number_is_exact():
    """Each e4m3 number comes out as it is, times its scale, whatever its place among the inputs."""
    numbers = jnp.arange(256, dtype=jnp.uint8).at[jnp.array([127, 255])].set(0)  # but for what is no number
    values = jnp.stack([jnp.roll(numbers, i) for i in range(64)]).view(fp8.E4M3)
    weight = few_rows.Fp8Weight(values, jnp.array([[4.0, -0.5]]))
    whole = np.asarray(values, np.float32) * np.repeat([4.0, -0.5], 128)
    for first in range(0, 256, 8):
        x = jnp.roll(jnp.eye(8, 256, dtype=jnp.bfloat16), first, axis=1)
        np.testing.assert_array_equal(few_rows.product([x], weight), whole[:, first : first + 8].T)


@pytest.mark.parametrize("kernel", CHECKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_wide_layers(sizes, kernel):
    """Several times, since blocks of a cluster may finish in any order, and rings go round."""
    given = operands(sizes)
    for _ in range(5):
        CHECKS[kernel](given)


@pytest.mark.parametrize("kernel", ["gated", "heads"])
def test_rows_that_blocks_norm(kernel):
    CHECKS[kernel](cpu.operands(d=512), scaled=False)
