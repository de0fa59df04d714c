"""The fused chain on the device: its stages hand over through counters, which interpret mode can't run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder.forward import forward
from jaxspec.models.families import qwen3
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.dense.weight_stream import stream
from jaxspec.pallas.hopper import KERNELS
from tests.pallas.dense.test_weight_stream import EPS, inputs, parts_of, parts_reference, reference
from tests.support.kernels import assert_close, switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 5, 20, 64, 65, 128])
@pytest.mark.parametrize("widths", [(512, 1024, 768), (4096, 12288, 6144)], ids=["narrow", "qwen3-8b"])
def test_chain_matches_plain_layers(rows, widths):
    """Narrow shapes leave blocks without work and hand over quickly: where a missing wait would show."""
    run = jax.jit(lambda *a: stream(*a, eps=EPS))
    for seed in range(3):
        x, mixed, weights, scales = inputs(rows, *widths, seed=seed)
        got, partials = run(x, mixed, weights, scales)
        # The plain layers in float32: a matrix-vector product in bfloat16 may round more often than the kernel does.
        with jax.default_matmul_precision("highest"):
            wide = jax.tree.map(lambda a: a.astype("float32"), (x, mixed, weights, scales))
            expected, logits = reference(*wide)
        assert_close(got, expected)
        assert_close(partials.sum(0), logits)


@pytest.mark.parametrize("rows", [16, 32, 128])
@pytest.mark.parametrize("widths", [(512, 1024, 768), (4096, 6144, 3072), (8192, 14336, 5120)],
                         ids=["narrow", "qwen3-8b over 2", "llama-70b over 2"])  # fmt: skip
def test_stages_between_two_sums_match_plain_layers(rows, widths):
    run = jax.jit(parts_of)
    for seed in range(2):
        x, mixed, weights, scales = inputs(rows, *widths, seed=seed)
        mixed, weights[0] = mixed[:, : widths[0] // 2], weights[0][: widths[0] // 2]  # half of the heads
        made = run(x, mixed, weights, scales)
        with jax.default_matmul_precision("highest"):
            wide = jax.tree.map(lambda a: a.astype("float32"), (x, mixed, weights, scales))
            for partials, expected in zip(made, parts_reference(*wide), strict=True):
                assert_close(partials.sum(0), expected)


def test_a_model_decodes_through_it(monkeypatch):
    """The streamed layers against the plain ones of the same model over a paged cache, features included."""
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    sizes = dict(hidden_size=1280, intermediate_size=1536, num_hidden_layers=3)  # wide: narrow models take few_rows
    config = ModelConfig.from_hf(tiny_config("qwen3", **heads, **sizes))
    params = dummy(qwen3.tensors(config.decoder), "bfloat16", seed=0)
    tokens, start = jnp.arange(24).reshape(8, 3), jnp.array([0, 5, 70, 126] * 2)
    table = jnp.arange(1, 25).reshape(8, 3)
    rows = Rows(start, jnp.full(8, 3), table)
    kv = 0.5 * jax.random.normal(jax.random.key(1), PageLayout(25, 64, "bfloat16").kv(config).shape)
    kv = kv.astype("bfloat16")
    run = jax.jit(lambda kv: forward(config.decoder, params, tokens, rows.positions(3), rows, kv, (0, 2)))
    before = KERNELS["weight_stream"]
    streamed = run(kv)
    assert KERNELS["weight_stream"] == before + 1
    switch_off(monkeypatch)
    plain = run(kv)
    assert KERNELS["weight_stream"] == before + 1
    for got, expected in zip(jax.tree.leaves(streamed), jax.tree.leaves(plain), strict=True):
        assert_close(got, expected, 2e-2)
