"""The kernel of prompts' convolution against the plain form: in interpret mode, lowered for CUDA, and chosen."""

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
from jaxspec.pallas.recurrence import causal_conv, conv_chunk
from jaxspec.pallas.recurrence.conv_chunk import BLOCK, supported
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.operations import only

MIX = DeltaRule(key_heads=1, value_heads=2, key_dim=128, value_dim=128, taps=4)
LAYERS, SLOTS = 2, 6


def operands(b: int, mix: DeltaRule = MIX, seed: int = 0):
    """Operands of `causal_conv.chunk`: blocks that go on from slots of any kind, and foreign columns in x."""
    rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), 3)
    normal = lambda key, *shape: drawn.normal(key, shape, jnp.bfloat16)  # noqa: E731
    windows = normal(keys[0], LAYERS, SLOTS, mix.taps, mix.channels)
    x, weight = normal(keys[1], b, BLOCK, mix.channels + 256), normal(keys[2], mix.taps, mix.channels)
    slots, source, keep = rng.integers(SLOTS, size=b), rng.integers(-1, SLOTS, b), rng.integers(-2, SLOTS + 2, b)
    count = np.where(rng.random(b) < 0.5, BLOCK, rng.integers(1, BLOCK, b))
    count[::3] = rng.integers(1, 4)  # short ones, behind which more than one block is looked back on
    return windows, jnp.int32(1), *(jnp.asarray(each, jnp.int32) for each in (slots, source, keep, count)), x, weight


def check(monkeypatch, b: int, mix: DeltaRule = MIX, **options):
    """With the kernel in place of what `causal_conv.chunk` would do here; only real rows mean anything."""
    given = operands(b, mix)
    expected, expected_windows = jax.jit(lambda *given: causal_conv.chunk(*given, mix))(*given)
    kernel = conv_chunk.conv_chunk
    with monkeypatch.context() as patch:
        patch.setattr(causal_conv, "CONVOLUTION_CHUNK", only(causal_conv.CONVOLUTION_CHUNK, "conv_chunk"))
        patch.setattr(conv_chunk, "conv_chunk", lambda *args, **named: kernel(*args, **named, **options))
        got, windows = jax.jit(lambda *given: causal_conv.chunk(*given, mix))(*given)
    np.testing.assert_array_equal(windows, expected_windows)
    for part, want in zip(got, expected, strict=True):
        part, want = np.asarray(part, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(part, want, rtol=2**-7, atol=1e-4)


def test_matches_the_plain_form(monkeypatch):
    check(monkeypatch, 6, interpret=plgpu.InterpretGPUParams())


def test_a_prompt_takes_the_kernel_where_there_is_one(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    before = KERNELS["conv_chunk"]
    assert kernels(lambda *given: causal_conv.chunk(*given, MIX), *operands(9)) == 1
    narrow = dataclasses.replace(MIX, value_dim=64)
    jax.eval_shape(lambda *given: causal_conv.chunk(*given, narrow), *operands(9, narrow))
    jax.eval_shape(lambda *given: causal_conv.chunk(*given, MIX), *operands(8))
    assert KERNELS["conv_chunk"] == before + 1


@pytest.mark.parametrize("wrong,reason", [
    ((8, 64, 4, 128, 128), "512 rows"),
    ((32, 32, 4, 128, 128), "blocks of 32 tokens"),
    ((16, 64, 4, 64, 128), "keys of width 64"),
    ((16, 64, 9, 128, 128), "9 taps"),
    ((16, 64, 4, 128, 128, jnp.bfloat16, jnp.float32), "float32"),
])  # fmt: skip
def test_what_cannot_run_is_named(wrong, reason):
    assert supported(16, 64, 4, 128, 128, jnp.bfloat16) is None
    assert reason in supported(*wrong)
