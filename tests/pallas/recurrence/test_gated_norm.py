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
from jaxspec.pallas.recurrence.gated_norm import ROWS, gated_norm, grouped_norm, grouped_supported
from tests.support import drawn
from tests.support.kernels import kernels

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


def check_grouped(b: int, t: int, columns: int, groups: int, interpret=False):
    """With two rows of padding that nobody reads."""
    read, rows, scale = draw(0, b, t, columns), draw(1, b, t + 2, columns + 192), draw(2, columns)
    got = grouped_norm(read, rows, scale, groups=groups, eps=EPS, interpret=interpret)
    assert got.shape == (b, t + 2, columns)
    read, z, scale = (x.astype(jnp.float32) for x in (read, rows[:, :t, :columns], scale))
    gated = (read * jax.nn.silu(z)).reshape(b, t, groups, -1)
    near(got[:, :t], rms_norm(gated, scale.reshape(groups, -1), EPS).reshape(read.shape))


@pytest.mark.parametrize("columns,groups", [(1024, 2), (3072, 1)])
def test_the_norm_behind_a_state_space_is_the_plain_one(columns, groups):
    check_grouped(3, 2, columns, groups, plgpu.InterpretGPUParams())


@pytest.mark.parametrize("columns,groups", [(4096, 8), (3072, 1), (8192, 1), (1024, 8)])
def test_the_norm_behind_a_state_space_lowers_for_cuda(columns, groups):
    """Nemotron 3 Nano's, those of Granite 4's hybrids, and others."""
    of = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4, columns), (8, 4, 2 * columns), (columns,)))
    assert kernels(lambda *of: grouped_norm(*of, groups=groups, eps=EPS), *of) == 1
    assert grouped_supported(8, 4, columns, groups, "bfloat16") is None


def test_what_has_no_norm_behind_a_state_space_is_named():
    assert "513 rows" in grouped_supported(513, 1, 4096, 8, "bfloat16")
    assert "groups of 64 columns" in grouped_supported(1, 1, 512, 8, "bfloat16")
    assert "groups of 8320 columns; supported: multiples of 128 up to 8192" in grouped_supported(
        1, 1, 8320, 1, "bfloat16"
    )
    assert "float32" in grouped_supported(1, 1, 4096, 8, "bfloat16", "float32")
