"""The kernel of prompts' convolution, on the device: right, and how fast."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxspec.pallas.recurrence import causal_conv
from tests.pallas.recurrence import test_conv_chunk
from tests.pallas.recurrence.test_conv_chunk import BLOCK, MIX

pytestmark = pytest.mark.gpu

SERVED = dataclasses.replace(MIX, key_heads=16, value_heads=32)  # Qwen3-Next's and Qwen3.5-35B-A3B's


@pytest.mark.parametrize("b", [9, 40, 128])
def test_matches_the_plain_form(b, monkeypatch):
    test_conv_chunk.check(monkeypatch, b, SERVED)


def test_an_odd_number_of_heads(monkeypatch):
    test_conv_chunk.check(monkeypatch, 16, dataclasses.replace(MIX, key_heads=3, value_heads=3))


@pytest.mark.parametrize("b,least", [(16, 1.0), (128, 2.8)])
@pytest.mark.speed
def test_memory_bandwidth(b, least, figures):
    """TB/s of inputs read and heads written in eight layers; `least` leaves room for a busy device."""
    layers, key = 8, jax.random.key(0)
    x, weight = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for shape in ((b, BLOCK, SERVED.channels + 4096), (SERVED.taps, SERVED.channels))
    )
    windows = causal_conv.empty_windows(layers, 8, 1, SERVED.channels, SERVED.taps, x.dtype)
    slots, full = jnp.zeros(b, jnp.int32), jnp.full(b, BLOCK, jnp.int32)
    which = slots, slots.at[0].set(-1), jnp.full(b, -1, jnp.int32), full

    @partial(jax.jit, donate_argnums=0)
    def run(windows, x):
        outs = []
        for layer in range(layers):
            out, windows = causal_conv.chunk(windows, jnp.int32(layer), *which, x, weight, SERVED)
            outs.append(out)
        return windows, outs

    for _ in range(2):
        windows, outs = jax.block_until_ready(run(windows, x))
    begin, rounds = time.perf_counter(), 30
    for _ in range(rounds):
        windows, outs = run(windows, x)
    jax.block_until_ready((windows, outs))
    seconds = (time.perf_counter() - begin) / rounds / layers
    rate = 2 * b * BLOCK * SERVED.channels * x.dtype.itemsize / seconds / 1e12
    figures[f"convolution of {b} blocks"] = {"us": seconds * 1e6, "TB/s": rate}
    assert rate >= least
