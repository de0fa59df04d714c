"""The matmul of many rows on the device: shapes that are served, and how fast it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder.forward import forward
from jaxspec.models.families import qwen3
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.dense.tile_matmul import matmul
from jaxspec.pallas.dense.tiles import Tiling
from jaxspec.pallas.hopper import counting
from tests.pallas.dense.test_tile_matmul import check, inputs
from tests.support.kernels import PRODUCTS, assert_close, seconds, switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

SHAPES = {name: (*PRODUCTS[name][:2], name == "gate, up") for name in ("qkv", "out", "gate, up")}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows,real", [(160, 160), (165, 165), (192, 130), (512, 512), (1024, 700), (2048, 1)])
def test_matches_plain_jnp(rows, real, shape):
    for _ in range(2):  # what one launch leaves behind isn't the next one's
        check(rows, real, *SHAPES[shape])


@pytest.mark.parametrize("rows,real", [(160, 160), (165, 165), (192, 130), (2048, 2048)])
def test_adds_to_a_residual_stream(rows, real):
    check(rows, real, *SHAPES["out"], added=True)


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_every_width_of_tile(columns, gated):
    check(640, 600, 576, 2304 if columns == 192 else 2048, gated, tiling=Tiling(128, columns))


@pytest.mark.parametrize("rows,real", [(512, 512), (512, 300), (600, 600), (700, 650), (2048, 2048)])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_tall_tiles(rows, real, gated):
    for _ in range(2):
        check(rows, real, 576, 2304, gated, tiling=Tiling(256, 192))


def test_a_row_gets_the_same_in_any_company():
    """Sums run over the inputs in one order, whatever the tiles."""
    x, weight = inputs(2048, 4096, 6144)
    of = lambda rows, real: matmul(x[:rows], weight, jnp.array([real], jnp.int32))[:100]  # noqa: E731
    for rows, real in ((136, 136), (512, 300), (2048, 2048)):
        assert (of(rows, real) == of(256, 256)).all()


def test_a_model_prefills_through_it(monkeypatch):
    """Prompt blocks, some of them part or all padding, against the plain layers: the real rows, and the cache."""
    config = ModelConfig.from_hf(tiny_config("qwen3", hidden_size=512, intermediate_size=1024, num_hidden_layers=3))
    params = dummy(qwen3.tensors(config.decoder), "bfloat16", seed=0)
    tokens = jax.random.randint(jax.random.key(0), (8, 64), 0, config.vocab_size)
    table = jnp.array([[1, 2, 3]] * 3 + [[4, 0, 0], [5, 6, 0], [5, 6, 0], [0, 0, 0], [0, 0, 0]])
    rows = Rows(jnp.array([0, 64, 128, 0, 0, 64, 0, 0]), jnp.array([64, 64, 30, 64, 64, 1, 0, 0]), table)
    kv = jnp.zeros(PageLayout(7, 64, "bfloat16").kv(config).shape, jnp.bfloat16)
    run = jax.jit(lambda kv: forward(config.decoder, params, tokens, rows.marked_positions(64), rows, kv))
    with counting() as chosen:
        ours = run(kv)
    assert chosen["tile_matmul"] == 4  # of a layer: layers share a trace
    switch_off(monkeypatch)
    plain = run(kv)
    real = np.arange(64) < np.asarray(rows.count)[:, None]
    for got, expected in ((ours.last[real], plain.last[real]), (ours.cache[:, 1:], plain.cache[:, 1:])):
        assert_close(got, expected, 2e-2)


@pytest.mark.speed
def test_arithmetic_rate(figures):
    """TFLOP/s of a layer's gate and up at 1024 rows; the limit leaves room for a busy device."""
    rows, (width, outputs, gated) = 1024, SHAPES["gate, up"]
    x, weight = inputs(rows, width, outputs)
    weights, real = [weight * (1 + i) for i in range(4)], jnp.array([rows], jnp.int32)
    run = jax.jit(lambda x, weights: [matmul(x, weight, real, gated=gated) for weight in weights])
    taken = seconds(run, x, weights, rounds=20) / len(weights)
    rate = 2 * rows * width * outputs / taken / 1e12
    figures["gate, up of 1024 rows"] = {"us": taken * 1e6, "TFLOP/s": rate}
    assert rate >= 600
