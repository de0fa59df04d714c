"""Rows times FP8 weights that become bfloat16 in registers: in interpret mode, and lowered for CUDA."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models import fp8
from jaxspec.pallas.dense import fp8_wide, tiles
from jaxspec.pallas.dense.tiles import Tiling
from tests.pallas.dense import test_fp8_tiles
from tests.support.kernels import kernels
from tests.support.sample import one_in, rare

INTERPRET = plgpu.InterpretGPUParams()


def run(x, values, scales, real, residual=None, **options):
    """The kernel's result in float32."""
    out = fp8_wide.matmul(x, values, scales, jnp.array([real], jnp.int32), residual, **options)
    assert out.dtype == jnp.bfloat16
    return np.asarray(out, np.float32)


def exact(x, values, scales, block):
    weight = fp8.dequantise(values, scales, block).T
    return x @ (weight.astype(jnp.bfloat16).astype(jnp.float32) if block else weight)


def check(rows, real, inputs, outputs, block, unit, kind="plain", **options) -> None:
    # Rounded as in plain layers: gate, up and silu(gate); and a product before it is added.
    within = {"gated": 1.2e-2, "added": 4.5e-3, "plain": 3e-3}[kind]
    test_fp8_tiles.check(rows, real, inputs, outputs, block, unit, kind, within, run, exact, **options)


@pytest.mark.parametrize("rows,real,kind,tiling,scales", [
    (300, 140, "gated", (128, 128), (128, 32)),  # the last tile begins among the rows of another; one is of padding
    (261, 261, "added", (256, 128), (128, 64)),
    rare(136, 136, "plain", (128, 128), (None, 1)),
    rare(256, 0, "plain", (256, 128), (128, 128)),
    (132, 132, "gated", (128, 64), (128, 32)),  # one warpgroup
    rare(256, 230, "added", (256, 64), (128, 128)),
    rare(200, 170, "gated", (160, 128), (128, 64)),
    rare(192, 192, "added", (192, 128), (None, 1)),
])  # fmt: skip
def test_matches_plain_jnp(monkeypatch, rows, real, kind, tiling, scales):
    """With fewer blocks than tiles, so that each takes several; interpreting a block takes a while, idle or not."""
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    check(rows, real, 256, 128, *scales, kind, tiling=Tiling(*tiling), interpret=INTERPRET)


def test_three_warpgroups(monkeypatch):
    """A tile's last group has outputs of two scales."""
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    check(130, 130, 128, 384, 128, 32, "gated", tiling=Tiling(128, 192), interpret=INTERPRET)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows,real", [(130, 130), (256, 256), (264, 150), (700, 650)])
@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize("unit", [32, 128, None])
def test_matches_plain_jnp_with_its_own_tiles(monkeypatch, rows, real, kind, unit):
    monkeypatch.setattr(tiles, "BLOCKS", 3)
    check(rows, real, 384, 384, 128 if unit else None, unit or 1, kind, interpret=INTERPRET)


def test_the_rings_come_round(monkeypatch):
    """More steps than slots, and tiles that begin at any of them."""
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    check(136, 136, 128 * 5, 256, 128, 64, tiling=Tiling(128, 128), interpret=INTERPRET)


@pytest.mark.parametrize(
    "rows,outputs,block,unit,kind",
    one_in(6, [132, 1024], [4096, 24576], [(128, 32), (None, 1)], ["plain", "gated", "added"]),
)
def test_lowers_for_cuda(rows, outputs, block, unit, kind):
    given = test_fp8_tiles.shapes(rows, outputs, block, unit, kind)
    assert kernels(partial(fp8_wide.matmul, block=block, gated=kind == "gated"), *given) == 1


def test_tiles_are_those_that_were_fastest():
    """Take Qwen3-8B's q, k and v, its gate and up, and its others."""
    tiles_of = lambda rows: [fp8_wide.tiling_of(rows, outputs) for outputs in (6144, 24576, 4096)]  # noqa: E731
    assert tiles_of(160) == [Tiling(160, 64), Tiling(160, 192), Tiling(128, 64)]
    assert tiles_of(256) == [Tiling(128, 128), Tiling(128, 192), Tiling(128, 64)]
    assert tiles_of(512) == [Tiling(128, 192), Tiling(256, 128), Tiling(128, 128)]
    assert tiles_of(2048) == [Tiling(256, 128)] * 3


def test_what_is_not_for_it_is_named():
    supported = fp8_wide.supported
    assert supported(512, jnp.bfloat16, 128, 4096, 4096, 128) is None
    assert supported(512, jnp.bfloat16, None, 4096, 4096, 1) is None
    assert "4096 rows" in supported(4096, jnp.bfloat16, 128, 4096, 4096, 128)
    assert "128 rows" in supported(128, jnp.bfloat16, 128, 4096, 4096, 128)
    assert "float32" in supported(512, jnp.float32, 128, 4096, 4096, 128)
    assert "128 inputs each" in supported(512, jnp.bfloat16, 64, 4096, 4096, 128)
    assert "4096 x 96" in supported(512, jnp.bfloat16, 128, 96, 4096, 32)
    assert "16 outputs" in supported(512, jnp.bfloat16, 128, 4096, 4096, 16)
