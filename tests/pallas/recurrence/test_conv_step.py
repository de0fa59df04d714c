"""The kernel of a round's convolution against the plain form: in interpret mode, lowered for CUDA, and chosen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.description import DeltaRule
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import KERNELS
from jaxspec.pallas.recurrence import causal_conv
from jaxspec.pallas.recurrence.conv_step import channels_supported, conv_channels, conv_step, supported
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import rare

MIX = DeltaRule(key_heads=1, value_heads=2, key_dim=128, value_dim=128, taps=4)
LAYERS, SLOTS = 2, 5


def operands(rows: int, replay: tuple[int, ...], mix: DeltaRule = MIX):
    """Operands of `causal_conv.step`, with windows for rounds of `rows` rows and foreign columns in x."""
    keys = jax.random.split(jax.random.key(rows), 3)
    b, normal = len(replay), lambda key, *shape: drawn.normal(key, shape, jnp.bfloat16)
    windows = normal(keys[0], LAYERS, max(SLOTS, b), mix.taps - 1 + rows, mix.channels)
    slots = jnp.arange(b, dtype=jnp.int32)[::-1]
    x, weight = normal(keys[1], b, rows, mix.channels + 256), normal(keys[2], mix.taps, mix.channels)
    return windows, jnp.int32(1), slots, jnp.array(replay, jnp.int32), x, weight


def check(rows: int, replay: tuple[int, ...], mix: DeltaRule = MIX, **options):
    given = operands(rows, replay, mix)
    got, window = conv_step(*given, key_heads=mix.key_heads, eps=causal_conv.L2_EPS, **options)
    heads, expected_window = causal_conv.reference_step(*given, mix)
    np.testing.assert_array_equal(window, expected_window)
    for part, expected in zip(got, heads, strict=True):
        np.testing.assert_allclose(
            np.asarray(part, np.float64), np.asarray(expected, np.float64), rtol=2**-7, atol=1e-4
        )


@pytest.mark.parametrize("rows,replay", [(1, (0, 1)), (4, (4,)), rare(3, (2,))])
def test_matches_the_plain_form(rows, replay):
    check(rows, replay, interpret=plgpu.InterpretGPUParams())


def check_channels(rows: int, replay: tuple[int, ...], biased: bool = True, widths=(256, 128, 128), **options):
    """Channels of a state space, which stand behind its gates and before its steps."""
    mix = dataclasses.replace(MIX, key_heads=1, value_heads=sum(widths) // 128 - 2)
    *given, weight = operands(rows, replay, mix)
    bias = drawn.normal(jax.random.key(7), (mix.channels,), jnp.bfloat16) if biased else None
    channels = causal_conv.Channels(128, widths, rows)
    given[-1] = jnp.pad(given[-1], ((0, 0), (0, 3), (0, 0)), constant_values=jnp.nan)  # padding rows
    got, window = conv_channels(*given, weight, bias, **channels._asdict(), **options)
    parts, expected_window = causal_conv.reference_step(*given, weight, channels, bias=bias)
    np.testing.assert_array_equal(window, expected_window)
    for part, expected in zip(got, parts, strict=True):
        assert part.shape == expected.shape
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (part, expected)), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("rows,replay,biased", [(1, (0, 1), True), (4, (3,), False), rare(8, (8, 2), True)])
def test_channels_of_a_state_space_match_the_plain_form(rows, replay, biased):
    check_channels(rows, replay, biased, interpret=plgpu.InterpretGPUParams())


def test_a_round_takes_the_kernel_where_there_is_one(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    before = KERNELS["conv_step"]
    assert kernels(lambda *given: causal_conv.step(*given, MIX), *operands(4, (0, 3))) == 1
    narrow = dataclasses.replace(MIX, value_dim=64)
    jax.eval_shape(lambda *given: causal_conv.step(*given, narrow), *operands(4, (0, 3), narrow))
    assert KERNELS["conv_step"] == before + 1
    channels = causal_conv.Channels(128, (256, 128, 128), 4)
    bias = jnp.zeros(512, jnp.bfloat16)
    assert kernels(lambda *given: causal_conv.step(*given, channels, False, bias), *operands(4, (0, 3))) == 1
    assert KERNELS["conv_step"] == before + 2


def test_what_cannot_run_is_named():
    assert supported(16, 128, 128, jnp.bfloat16) is None
    assert "float32" in supported(1, 128, 128, jnp.bfloat16, jnp.float32)
    assert "keys of width 64" in supported(1, 64, 128, jnp.bfloat16)
    assert "17 rows" in supported(17, 128, 128, jnp.bfloat16)
    assert channels_supported(16, 4096, (4096, 1024, 1024), jnp.bfloat16) is None  # Nemotron 3 Nano's
    assert "64 columns" in channels_supported(1, 128, (256, 64, 64), jnp.bfloat16)
    assert "64 columns" in channels_supported(1, 64, (256, 128), jnp.bfloat16)
    assert "float32" in channels_supported(1, 128, (256, 128), jnp.float32)
