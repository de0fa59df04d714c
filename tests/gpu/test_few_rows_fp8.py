"""The few rows' kernels with FP8 weights, on the device: what interpret mode lacks, registers, clusters and rings."""

from __future__ import annotations

import functools
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import paged
from jaxspec.models import fp8
from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.hopper import KERNELS, counting
from tests.decoder import test_few_rows_layers as layers
from tests.pallas.dense import test_few_rows_fp8 as cpu
from tests.support.kernels import switch_off

pytestmark = pytest.mark.gpu

HALF_70B = dict(d=8192, heads=32, kv_heads=4, f=14336, width=128)  # Llama-70B's on one of two devices
SIZES = {
    "qwen3-8b": cpu.QWEN3, "qwen3-30b-a3b": cpu.MIXTURE, "qwen3.8-27b": cpu.HYBRID, "half of 70b": HALF_70B,
    "glm-4.5-air": cpu.GLM,
}  # fmt: skip
CHECKS = {
    "gated": cpu.check_gated,
    "add": cpu.check_add,
    "biased add": partial(cpu.check_add, biased=True, scaled=False),
    "product": cpu.check_product,
    "normed": cpu.check_normed,
    "centred normed": partial(cpu.check_normed, centred=True),
    "heads": cpu.check_heads,
    "biased heads": partial(cpu.check_heads, normed=False, biased=True),
    "rounded gated": partial(cpu.check_gated, rounds=True),
    "rounded add": partial(cpu.check_add, rounds=True),
    "rounded normed": partial(cpu.check_normed, rounds=True),
    "rounded heads": partial(cpu.check_heads, rounds=True),
}


@functools.cache
def operands(sizes, by_output, rows):
    return cpu.operands(rows, by_output, **SIZES[sizes])


def test_every_number_is_exact():
    """Each e4m3 number comes out as it is, times its scale, whatever its place among the inputs."""
    numbers = jnp.arange(256, dtype=jnp.uint8).at[jnp.array([127, 255])].set(0)  # but for what is no number
    values = jnp.stack([jnp.roll(numbers, i) for i in range(64)]).view(fp8.E4M3)
    weight = few_rows.Fp8Weight(values, jnp.array([[4.0, -0.5]]))
    whole = np.asarray(values, np.float32) * np.repeat([4.0, -0.5], 128)
    for first in range(0, 256, 8):
        x = jnp.roll(jnp.eye(8, 256, dtype=jnp.bfloat16), first, axis=1)
        np.testing.assert_array_equal(few_rows.product([x], weight), whole[:, first : first + 8].T)


def test_quantised_rows_are_those_of_plain_jnp():
    cpu.check_numbers()


@pytest.mark.parametrize("kernel", CHECKS)
@pytest.mark.parametrize("sizes,by_output,rows", [
    ("qwen3-8b", False, 8), ("qwen3-8b", True, 8), ("qwen3-30b-a3b", False, 8),
    ("qwen3-8b", False, 16), ("qwen3-8b", False, 24), ("qwen3-8b", False, 32), ("qwen3.8-27b", False, 32),
    ("half of 70b", False, 32), ("glm-4.5-air", True, 8), ("glm-4.5-air", True, 32),
])  # fmt: skip
def test_wide_layers(sizes, by_output, rows, kernel):
    """Several times, since blocks of a cluster may finish in any order, some rows each, and rings go round."""
    given = operands(sizes, by_output, rows)
    for _ in range(5):
        CHECKS[kernel](given)


@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize("kernel", ["gated", "heads"])
def test_rows_that_blocks_norm(kernel, by_output):
    CHECKS[kernel](cpu.operands(d=512, by_output=by_output), scaled=False)


@pytest.mark.parametrize("by_output,activations", [(False, False), (True, False), (False, True), (True, True)])
def test_layers_are_those_of_the_model(monkeypatch, by_output, activations):
    config, params = layers.small_model("qwen3", hidden_size=1408, intermediate_size=512, num_hidden_layers=3)
    params["layers"] = layers.in_fp8(params["layers"], by_output, activations)
    rows = paged.Rows(jnp.array([0, 15]), jnp.array([4, 3]), jnp.array([[1, 2], [3, 4]]))
    before = KERNELS["few_rows_heads"]
    got = layers.forward(config, params, rows)
    assert KERNELS["few_rows_heads"] == before + 1
    switch_off(monkeypatch)
    tolerance = 1e-1 if activations else 2e-2  # a last bit of a row may round it to another e4m3 number
    layers.assert_same_forward(got, layers.forward(config, params, rows), rows, tolerance)


GLM_AIR = dict(
    hidden_size=4096, intermediate_size=10944, num_attention_heads=96, num_key_value_heads=8, num_hidden_layers=3,
    moe_intermediate_size=1408,
)  # fmt: skip


@pytest.mark.parametrize("qk_norm,activations,rows", [
    (False, True, layers.one_request), (False, True, layers.two_requests), (False, False, layers.one_request),
    (True, True, layers.two_requests),
])  # fmt: skip
def test_layers_of_glm_are_those_of_the_model(monkeypatch, qk_norm, activations, rows):
    """GLM-4.5-Air's but for fewer experts, all of which each token has: a near-tie would have one choose others."""
    config, params = layers.small_model("glm4_moe", **layers.GLM | GLM_AIR, use_qk_norm=qk_norm)
    params["layers"], rows = layers.in_fp8(params["layers"], True, activations), rows()
    with counting() as took:
        got = layers.forward(config, params, rows)
    assert {"few_rows_heads", "few_rows_add", "few_rows_normed", "expert_fp8", "expert_add"} <= {*took}
    switch_off(monkeypatch)
    tolerance = 1e-1 if activations else 2e-2  # a last bit of a row may round it to another e4m3 number
    layers.assert_same_forward(got, layers.forward(config, params, rows), rows, tolerance)
