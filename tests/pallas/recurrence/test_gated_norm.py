"""Norms of hybrids' deterministic path: behind linear attention, of heads, and centred ones, in interpret mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.functions import normed, rms_norm
from jaxspec.models.description import Norm
from jaxspec.pallas.dense.add_norm import add_norm
from jaxspec.pallas.dense.weight_stream import norm_fixed
from jaxspec.pallas.recurrence.gated_norm import ROWS, gated_norm
from tests.support import drawn

EPS = 1e-6


def draw(i: int, *shape: int):
    return drawn.normal(jax.random.key(i), shape, "bfloat16")


def near(got, expected, tolerance=0.008):
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    assert np.isfinite(got).all() and np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def test_the_norm_and_gate_behind_linear_attention_are_the_plain_ones():
    read, rows, scale = draw(0, 1, 2 * ROWS, 2, 128), draw(1, 1, 2 * ROWS, 5 * 128), draw(2, 128)
    got = gated_norm(read, rows, scale, eps=EPS, interpret=plgpu.InterpretGPUParams())
    z = jax.nn.silu(rows[..., 3 * 128 :].astype(jnp.float32)).reshape(read.shape)
    near(got, rms_norm(read.astype(jnp.float32), scale.astype(jnp.float32), EPS) * z)


@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("norm", [Norm(EPS), Norm(EPS, centred=True)])
def test_rows_are_normed_as_plain_layers_do(width, norm):
    x, scale, interpret = draw(0, 3, width), draw(1, width), plgpu.InterpretGPUParams()
    named = {"eps": norm.eps, "centred": norm.centred, "interpret": interpret}
    near(add_norm(x, None, scale, **named)[1][:3], normed(x, scale, norm))
    near(norm_fixed(x, scale, **named), normed(x, scale, norm))


def test_lowers_for_cuda():
    run = jax.jit(lambda *of: gated_norm(*of, eps=EPS))
    of = (
        jnp.zeros((3, 64, 48, 128), jnp.bfloat16),
        jnp.zeros((3, 64, 16384), jnp.bfloat16),
        jnp.zeros(128, jnp.bfloat16),
    )
    assert "mosaic_gpu" in run.trace(*of).lower(lowering_platforms=("cuda",)).as_text()
