"""Layers with FP8 weights on the device: the path of few rows against the plain one, kernels and all."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import dummy
from jaxspec.decoder import forward as forward_module
from jaxspec.decoder.fp8_rows import FP8_ROWS
from jaxspec.decoder.fp8_tiles import FP8_TILES
from jaxspec.decoder.functions import normed
from jaxspec.decoder.plain import PLAIN
from jaxspec.models.description import Norm
from jaxspec.pallas import hopper
from jaxspec.pallas.dense.add_norm import add_norm
from tests.decoder.test_fp8_layers import declared
from tests.support import kernels

pytestmark = pytest.mark.gpu

QWEN3_8B = kernels.QWEN3_8B | {"num_hidden_layers": 2}
ROWS = (1, 8, 9, 16, 32, 33, 64, 128)


def compare(
    monkeypatch, config, tensors, requests: int, rows: int, path=FP8_ROWS, made=("add_norm", "fp8_rows"), ties=0
):
    """Check that a path matches PLAIN on random weights and tokens, repeats its bits, and uses its kernels.

    `ties`: the share of tokens for which a router may choose another expert, or a number of e4m3 its neighbour.
    """
    params = dummy(tensors, "bfloat16", 0)
    tokens = jax.random.randint(jax.random.key(1), (requests, rows), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(rows), tokens.shape)

    def compiled(path):
        monkeypatch.setattr(forward_module, "PATHS", (path,))
        forward = lambda params: forward_module.forward(  # noqa: E731
            config.decoder, params, tokens, positions, WholeTexts(), None, (0, 1)
        )
        with hopper.counting() as chosen:
            return jax.jit(forward).lower(params).compile(), chosen

    (ours, chosen), (theirs, _) = compiled(path), compiled(PLAIN)
    assert all(chosen[name] for name in made)
    found, again, expected = (
        jax.tree.leaves((run.features, run.last)) for run in (ours(params), ours(params), theirs(params))
    )
    for mine, twice, plain in zip(found, again, expected, strict=True):
        mine, twice, plain = (np.asarray(x, np.float32) for x in (mine, twice, plain))
        np.testing.assert_array_equal(mine, twice)  # a missing wait would differ now and then
        assert np.isfinite(mine).all() and np.abs(plain).max() > 0
        off = (np.abs(mine - plain) > 3e-2 * np.abs(plain).max()).any(axis=-1)
        assert off.mean() <= ties


@pytest.mark.parametrize("requests", ROWS)
def test_layers_of_qwen3_8b_are_those_of_the_plain_path(monkeypatch, requests):
    compare(monkeypatch, *declared("qwen3", **QWEN3_8B), requests, 1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("requests,rows", [(1, 1), (3, 4), (16, 1), (32, 4)])
def test_every_family_gives_what_the_plain_path_gives(monkeypatch, family, requests, rows):
    compare(monkeypatch, *declared(family, num_attention_heads=8, num_key_value_heads=2), requests, rows)


@pytest.mark.parametrize("requests,rows", [(33, 1), (8, 5), (16, 4), (100, 1), (32, 4)])
@pytest.mark.parametrize("family,ties", [("qwen3", 0), ("qwen3_moe", 0.05), ("qwen3_5_moe", 0.05)])
def test_quantised_rows_give_what_the_plain_path_gives(monkeypatch, family, ties, requests, rows):
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    made = "fp8_norm_quantise", "fp8_quantise", "fp8_tiles"
    compare(monkeypatch, *declared(family, True, **sizes), requests, rows, FP8_TILES, made, ties)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width,splits", [(2048, 16), (4096, 8), (4096, None), (8192, 4)])
def test_sums_and_norms_are_those_of_plain_jnp(rows, width, splits):
    keys = jax.random.split(jax.random.key(rows), 3)
    x, scale = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in ((keys[0], (rows, width)), (keys[1], width))
    )
    parts = None if splits is None else jax.random.normal(keys[2], (splits, -(-rows // 8) * 8, width))
    added, out = jax.jit(partial(add_norm, eps=1e-6))(x, parts, scale)
    expected = x
    if parts is not None:
        total = parts[0]
        for part in parts[1:]:  # in the kernel's order: the same bits
            total = total + part
        expected = x + total[:rows].astype(x.dtype)
    np.testing.assert_array_equal(added, expected)
    reference = np.asarray(normed(expected, scale, Norm(1e-6)), np.float32)
    np.testing.assert_allclose(np.asarray(out[:rows], np.float32), reference, rtol=2**-7, atol=1e-6)
