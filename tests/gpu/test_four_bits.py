"""Products of dense weights in four bits, of few rows and of many, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import logits, project
from jaxspec.models.weights import Int4, Nvfp4
from jaxspec.pallas.hopper import KERNELS
from tests.decoder import test_few_rows_layers as layers
from tests.pallas.dense.test_few_rows_four_bits import drawn
from tests.support.kernels import switch_off

pytestmark = pytest.mark.gpu
KINDS = Int4(128), Int4(32), Int4(32, zeros=True), Nvfp4()


@pytest.mark.parametrize("rows,inputs,outputs", [(1, 4096, 512), (8, 1024, 6144), (32, 4096, 512), (40, 4096, 512),
                                                 (128, 1024, 6144), (512, 512, 24576)])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_are_those_of_the_dequantised_weight(kind, rows, inputs, outputs):
    weight, whole = drawn(kind, inputs, outputs)
    x = jax.random.normal(jax.random.key(rows), (rows, inputs), jnp.bfloat16)
    got = np.asarray(project(x, weight, jnp.array([rows])), np.float64)
    expected = np.asarray(x, np.float64) @ whole
    assert np.linalg.norm(got - expected) <= 4e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 512])
@pytest.mark.parametrize("kind", [Int4(32, zeros=True), Int4(128, zeros=True)], ids=str)
def test_zero_points_need_not_be_whole(kind, rows):
    """GGUF has such. The rows' mean isn't zero, so rounded zero points would add up."""
    weight, _ = drawn(kind, 1024, 512, np.float32)
    points = np.random.default_rng(0).uniform(-3, 19, (len(weight.scales) // 2, 512))
    points[0] = -3e4  # a group whose numbers are next to alike
    weight = weight.replace(scales=weight.scales.at[1::2].set(points).at[0].multiply(1e-4))
    x = 1 + jax.random.normal(jax.random.key(rows), (rows, 1024), jnp.bfloat16)
    got = np.asarray(project(x, weight, jnp.array([rows])), np.float64)
    expected = np.asarray(x, np.float64) @ np.asarray(weight.dequantised(jnp.float32), np.float64)
    assert np.linalg.norm(got - expected) <= 4e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("rows", [1, 32, 70])
@pytest.mark.parametrize("kind", [Int4(128), Nvfp4()], ids=str)
def test_a_heads_logits_are_not_rounded(kind, rows):
    weight, whole = drawn(kind, 2048, 64 * 600)
    x = jax.random.normal(jax.random.key(rows), (rows, 2048), jnp.bfloat16)
    got = np.asarray(jax.jit(logits)(x, weight), np.float64)
    expected = np.asarray(x, np.float64) @ whole
    assert np.linalg.norm(got - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("width", [512, 1280])
def test_layers_in_several_formats_are_those_of_the_model(monkeypatch, width):
    config, params = layers.in_several_formats(width)
    before = KERNELS["few_rows_heads"]
    got = layers.forward(config, params, layers.two_requests())
    assert KERNELS["few_rows_heads"] > before
    switch_off(monkeypatch)
    expected = layers.forward(config, params, layers.two_requests())
    layers.assert_same_forward(got, expected, layers.two_requests(), 1e-1)  # as of quantised rows in FP8
