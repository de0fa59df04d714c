"""The kernel of few rows and integers of four bits: in interpret mode against numpy, by lowering it, and its choice."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.matmul import project, reference
from jaxspec.models import int4
from jaxspec.models.weights import Int4, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import int4_rows
from jaxspec.pallas.dense.int4_rows import MAX_ROWS, product, supported
from jaxspec.pallas.hopper import counting
from tests.support.kernels import kernels
from tests.support.sample import rare

INTERPRET = plgpu.InterpretGPUParams()


def operands(rows: int, outputs: int, inputs: int, group: int, zeros: bool, dtype=np.float16):
    """Rows, values, scales, and the weight they stand for."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32), jnp.bfloat16)
    numbers = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (inputs // group, outputs)).astype(dtype)
    points = rng.integers(0, 17, scales.shape) if zeros else np.full(scales.shape, 8)
    spread = lambda each: np.repeat(each.astype(np.float64), group, axis=0).T  # noqa: E731
    whole = (numbers - spread(points)) * spread(scales)
    rows_of = np.stack([scales, points.astype(dtype)], 1).reshape(-1, outputs) if zeros else scales
    return x, int4.arrange(jnp.asarray(numbers[:, ::2] | numbers[:, 1::2] << 4)), jnp.asarray(rows_of), whole


@pytest.mark.parametrize("rows,outputs,inputs,group,zeros,enough", [
    (13, 64, 256, 32, True, 2),  # rows that are padded, inputs in two parts
    rare(1, 64, 128, 128, False, 1),
    rare(8, 128, 768, 128, True, 1),  # more steps than the ring has slots
    rare(40, 64, 256, 64, False, 1),
    rare(72, 64, 384, 384, True, 3),  # a scale for all inputs
])  # fmt: skip
def test_matches_numpy(monkeypatch, rows, outputs, inputs, group, zeros, enough):
    monkeypatch.setattr(int4_rows, "ENOUGH", enough)
    x, values, scales, whole = operands(rows, outputs, inputs, group, zeros)
    np.testing.assert_array_equal(int4.dequantise(values, scales, zeros), whole.astype(np.float32))
    got = np.asarray(product(x, values, scales, zeros=zeros, interpret=INTERPRET))
    expected = np.asarray(x, np.float64) @ whole.T
    assert got.shape == (rows, outputs) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("rows,outputs,inputs,group,zeros,dtype", [
    (1, 4096, 4096, 128, False, jnp.bfloat16), (16, 24576, 4096, 32, True, jnp.float16),
    (128, 4096, 12288, 12288, True, jnp.float32),
])  # fmt: skip
def test_lowers_for_cuda(rows, outputs, inputs, group, zeros, dtype):
    shapes = (rows, inputs), (outputs, inputs // 2), (inputs // group * (1 + zeros), outputs)
    given = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.bfloat16, jnp.uint8, dtype), strict=True)]
    assert kernels(partial(product, zeros=zeros), *given) == 1


@pytest.mark.parametrize("ordered", [rare(False), True])
def test_projections_choose_it(monkeypatch, ordered):
    """The result is the plain form's but for rounding; with `order`, rows are taken in the weight's."""
    x, values, scales, _ = operands(8, 64, 128, 64, True)
    order = jnp.asarray(np.random.default_rng(0).permutation(128), jnp.int32) if ordered else None
    weight = Weight(values, Int4(64, True, ordered), scales=scales, order=order)
    residual = jnp.ones((8, 64), jnp.bfloat16)
    expected = reference(x, weight, residual).astype("float32")
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(int4_rows, "product", partial(product, interpret=INTERPRET))
    with counting() as chosen:
        got = project(x, weight, jnp.array([8]), residual).astype("float32")
    assert chosen["int4_rows"] == 1
    np.testing.assert_allclose(got, expected, atol=2**-6 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("change,says", [
    ({"dtype": jnp.float16}, "rows in float16; supported: bfloat16"),
    ({"rows": MAX_ROWS + 1}, "129 rows; supported: up to 128"),
    ({"outputs": 96}, "a weight of 256 x 96; supported: multiples of 128 x 64"),
    ({"group": 96}, "scales for 96 inputs; supported: 32, 64, and multiples of 128"),
    ({"group": None}, None),
])  # fmt: skip
def test_supported_says_why_not(change, says):
    assert supported(**dict(rows=8, dtype=jnp.bfloat16, outputs=64, inputs=256, group=128) | change) == says
