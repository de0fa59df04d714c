"""The FP8 kernel of few rows: in interpret mode against numpy, by lowering it for CUDA, and where it is chosen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.matmul import project, reference
from jaxspec.models.fp8 import E4M3
from jaxspec.models.weights import Fp8, Layout, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import fp8_rows
from jaxspec.pallas.dense.fp8_rows import ENOUGH, MAX_ROWS, Share, product, supported
from jaxspec.pallas.hopper import counting
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.quantised import quantised


def operands(rows: int, outputs: int, inputs: int, unit: int = 128):
    """Rows, values, scales for each `unit` outputs, and the weight they stand for."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32), jnp.bfloat16)
    weight = rng.standard_normal((outputs, inputs), np.float32) * np.exp(rng.standard_normal((outputs, 1)))
    values, scales, whole = quantised(weight.astype(np.float32), "block")
    scales = np.repeat(scales, 128 // unit, axis=0)[: outputs // unit]
    return x, jnp.asarray(values), jnp.asarray(scales), whole


@pytest.mark.parametrize("rows,outputs,inputs,unit,enough", [
    (1, 64, 128, 64, 1),
    (8, 192, 384, 32, 1),  # scales for fewer outputs than a block has, a part of a block of 128
    (8, 128, 1024, 128, 1),  # more steps than the ring has slots
    (13, 64, 512, 64, 2),  # rows that are padded, inputs in two parts
    (40, 256, 640, 32, 1),  # two groups of outputs a block
    (72, 64, 384, 64, 1),
])  # fmt: skip
def test_matches_numpy(monkeypatch, rows, outputs, inputs, unit, enough):
    monkeypatch.setattr(fp8_rows, "ENOUGH", enough)
    x, values, scales, whole = operands(rows, outputs, inputs, unit)
    got = np.asarray(product(x, values, scales, interpret=plgpu.InterpretGPUParams()))
    expected = np.asarray(x, np.float64) @ whole.T.astype(np.float64)
    assert got.shape == (rows, outputs) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def test_every_number_is_exact():
    """Each e4m3 number comes out as it is, times its scale."""
    numbers = jnp.arange(256, dtype=jnp.uint8).at[jnp.array([127, 255])].set(0)  # but for what is no number
    values = jnp.broadcast_to(numbers, (64, 256)).view(E4M3)
    for first in (0, 120, 248):
        x = jnp.roll(jnp.eye(8, 256, dtype=jnp.bfloat16), first, axis=1)
        got = product(x, values, jnp.array([[3.0, -5.0]]), interpret=plgpu.InterpretGPUParams())
        expected = np.asarray(values[0, first : first + 8], np.float32) * (3.0 if first < 128 else -5.0)
        np.testing.assert_array_equal(got[:, 5], expected)


@pytest.mark.parametrize(
    "rows,outputs,inputs", [(1, 4096, 4096), (16, 24576, 4096), (64, 4096, 12288), (128, 6144, 4096)]
)
def test_lowers_for_cuda(rows, outputs, inputs):
    shapes = (rows, inputs), (outputs, inputs), (outputs // 32, inputs // 128)
    given = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.bfloat16, E4M3, jnp.float32), strict=True)]
    assert kernels(product, *given) == 1


@pytest.mark.parametrize("outputs,inputs", [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (128, 128)])
def test_every_multiprocessor_has_work(outputs, inputs):
    share = Share.of(8, outputs, inputs, 64)
    assert share.splits * share.chunks * share.blocks * 128 == inputs and share.tiles * 64 == outputs
    assert share.tiles * share.splits >= ENOUGH or share.chunks * share.blocks == 1


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
def test_projections_choose_it_and_have_gradients(monkeypatch, kind):
    """The result is the plain form's but for rounding; gradients are the plain form's."""
    x, values, scales, _ = operands(8, 128, 256, 32)
    layout = Layout((64, 64), interleave=32) if kind == "gated" else Layout((128,))
    weight, gated = Weight(values, Fp8(128), layout, scales), kind == "gated"
    residual = drawn.normal(jax.random.key(0), (8, 128), jnp.bfloat16) if kind == "added" else None
    of = lambda f: jax.value_and_grad(lambda x: f(x).astype(jnp.float32).sum())(x)  # noqa: E731
    expected = of(lambda x: reference(x, weight, residual, gated))
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(fp8_rows, "product", partial(product, interpret=plgpu.InterpretGPUParams()))
    with counting() as chosen:
        got = of(lambda x: project(x, weight, jnp.array([8], jnp.int32), residual, gated))
    assert chosen == {"fp8_rows": 1}
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-2)
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), np.asarray(expected[1], np.float32))


def test_what_is_not_for_it_is_named():
    sizes = 128, 4096, 4096, 128
    assert supported(MAX_ROWS, jnp.bfloat16, *sizes) is None
    assert "129 rows" in supported(MAX_ROWS + 1, jnp.bfloat16, *sizes)
    assert "float32" in supported(8, jnp.float32, *sizes)
    assert "128 inputs each" in supported(8, jnp.bfloat16, None, *sizes[1:])
    assert "4096 x 100" in supported(8, jnp.bfloat16, 128, 100, 4096, 128)
    assert "16 outputs" in supported(8, jnp.bfloat16, 128, 4096, 4096, 16)
