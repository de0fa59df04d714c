"""The portable kernel of FP8 weights against numpy, in Pallas's interpreter; and that it lowers for several generations
of GPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import project, reference
from jaxspec.models.fp8 import E4M3
from jaxspec.models.weights import Fp8, Weight
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import fp8 as op
from tests.pallas.dense.test_fp8_rows import operands
from tests.support.portable import KINDS, lowered


@pytest.mark.parametrize("capability", [8.0, 8.9])
@pytest.mark.parametrize("rows,outputs,inputs,unit", [(1, 64, 128, 32), (13, 128, 512, 64), (72, 64, 384, 128)])
def test_matches_numpy(rows, outputs, inputs, unit, capability, monkeypatch):
    monkeypatch.setattr(portable, "capability", lambda: capability)
    x, values, scales, whole = operands(rows, outputs, inputs, min(unit, outputs))
    got = np.asarray(op.product(x, values, scales, interpret=True))
    expected = np.asarray(x, np.float64) @ whole.T.astype(np.float64)
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def test_every_number_is_exact():
    """Both ways to convert."""
    values = jnp.arange(256, dtype=jnp.uint8).at[jnp.array([127, 255])].set(0).view(E4M3)
    for given in (values, values.view(jnp.int8)):
        np.testing.assert_array_equal(op.numbers(given, jnp.bfloat16), values.astype(jnp.bfloat16))


@pytest.mark.parametrize("block", [128, None])
def test_projections_take_it_where_it_is_asked_for(block, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    monkeypatch.setattr(op, "product", partial(op.product, interpret=True))
    x, values, scales, _ = operands(8, 128, 256, 128)
    scales = scales if block else jnp.linspace(0.5, 2, 128)[:, None]
    weight = Weight(values, Fp8(block), scales=scales)
    with counting() as kernels, hopper.use_kernels("portable"):
        got = project(x, weight, jnp.array([8]))
    assert kernels == {"portable_fp8": 1}
    with counting() as kernels:
        project(x, weight, jnp.array([8]))
    assert not kernels  # no GPU has run it yet, so it must be asked for
    expected = np.float32(reference(x, weight))
    np.testing.assert_allclose(np.float32(got), expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize("capability", KINDS)
def test_lowers_for_each_generation(capability, monkeypatch):
    monkeypatch.setattr(portable, "capability", lambda: float(capability))
    shapes = ((32, 4096), jnp.bfloat16), ((6144, 4096), E4M3), ((48, 32), jnp.float32)
    text = lowered(op.product, *(jax.ShapeDtypeStruct(*each) for each in shapes), capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("given,reason", [
    ((8, "bfloat16", 128, 4096, 4096, 128), None),
    ((8, "float32", 128, 4096, 4096, 128), "rows in float32"),
    ((129, "bfloat16", 128, 4096, 4096, 128), "129 rows; up to 128"),
    ((8, "bfloat16", 64, 4096, 4096, 128), "scales that aren't for 128 inputs"),
    ((8, "bfloat16", 128, 4096, 4100, 128), "a weight of 4100 x 4096; multiples of 128 x 64"),
])  # fmt: skip
def test_supported_says_why_not(given, reason):
    answer = op.supported(*given)
    assert answer is None if reason is None else reason in answer
