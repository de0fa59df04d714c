"""Layers with norms behind their sub-layers on the device: their kernels at real sizes, and whole layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache.mixers import AttentionRows, Cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import forward as paths
from jaxspec.models.families import gemma4
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.hopper import counting
from tests.decoder import test_post_norms as layers
from tests.pallas.attention import test_write_heads as heads
from tests.pallas.dense import test_post_norm as cpu
from tests.support.kernels import assert_close, seconds, switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

GEMMA4_31B = dict(
    hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16, head_dim=256,
    num_global_key_value_heads=4, global_head_dim=512, attention_k_eq_v=True, sliding_window=1024, vocab_size=512,
    hidden_size_per_layer_input=0, num_hidden_layers=6,
)  # fmt: skip
GEMMA4_26B = GEMMA4_31B | dict(
    hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
    num_global_key_value_heads=2, enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _sums_as_the_kernels_have_them():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("rows,valid", [(8, 8), (8, 1), (64, 64)])
@pytest.mark.parametrize("layer", cpu.LAYERS)
def test_norms_are_those_of_plain_jnp(rows, valid, layer):
    cpu.check(rows, layer, valid)


@pytest.mark.parametrize("width,columns", cpu.SIZES)
def test_products_of_normed_rows(width, columns):
    """Several times, since blocks of a cluster may finish in any order, and rings go round."""
    for dtype in ("bfloat16", "float32", "bfloat16"):
        cpu.check_products(8, width, columns, dtype)
        cpu.check_gated(8, width, columns)


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("sizes", [
    (4, 1, 256, True, False), (16, 8, 256, True, False), (32, 16, 256, False, False), (16, 2, 512, False, True),
    (32, 4, 512, False, True), (8, 1, 512, False, False), (32, 8, 128, False, False),
])  # fmt: skip
def test_heads(rows, sizes):
    heads.check_few(rows, *sizes)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("family,own", [
    ("gemma3", dict(head_dim=256, num_key_value_heads=1)),
    ("gemma4", dict(head_dim=256, global_head_dim=512, num_global_key_value_heads=1)),
    ("gemma4", layers.GEMMA4 | layers.EXPERTS),
    ("gemma4", layers.INPUTS | {"global_head_dim": 128}),
    ("olmo2", {}),
    ("exaone4", {}),
])  # fmt: skip
def test_layers_are_those_of_the_model(monkeypatch, family, own, tree):
    config, params = layers.small(family, **own)
    with counting() as took:
        got = layers.forward(config, params, layers.rounds(tree))
    assert took["post_norm"] and took["few_rows_gated"]
    switch_off(monkeypatch)
    expected = layers.forward(config, params, layers.rounds(tree))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, 4e-2)


@pytest.mark.parametrize("requests,t", [(1, 1), (8, 1), (1, 4)])
@pytest.mark.parametrize("name,sizes", [("26B-A4B", GEMMA4_26B), ("31B", GEMMA4_31B)])
@pytest.mark.speed
def test_layers_of_gemma4(monkeypatch, figures, name, sizes, requests, t):
    """Six layers against the plain ones, and how long either take: one of them sees all of the text."""
    config = ModelConfig.from_hf(tiny_config("gemma4", **sizes))
    params, each = dummy(gemma4.tensors(config.decoder), "bfloat16", seed=0), 8
    table = jnp.arange(1, 1 + each * requests).reshape(requests, each)
    rows = Rows(jnp.arange(requests) * 7 + 300, jnp.full(requests, t), table)
    empty = PageLayout(1 + each * requests, 64, "bfloat16").groups(config)
    cache = Cache(tuple(0.5 * jax.random.normal(jax.random.key(1), kv.shape, kv.dtype) for kv in empty))
    tokens, results, times = jnp.arange(requests * t).reshape(requests, t), [], {}

    def forward(params, tokens, cache):
        of = config.decoder, params, tokens, rows.marked_positions(t), AttentionRows(rows), cache, (0,)
        hidden = paths.forward(*of)
        return hidden.last, hidden.features[0], hidden.cache  # pages, so that all layers' are written

    for path in ("post_norms", "plain"):
        if path == "plain":
            monkeypatch.setattr(paths, "PATHS", (paths.PLAIN,))
            jax.clear_caches()
        run = jax.jit(lambda *given: forward(*given))
        results.append(run(params, tokens, cache))
        times[path] = f"{1e6 * seconds(run, params, tokens, cache, rounds=50) / 6:.1f} us a layer"
    figures[f"Gemma 4's {name}, {requests} x {t} rows"] = times
    assert_close(results[0][1], results[1][1], 2e-2)  # of one layer, before a near-tie has a row choose other experts
