"""Kimi Linear's layers on the device at the published model's widths, with eight experts: by kernels and without."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.mixers import RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import forward as paths
from jaxspec.models.families import kimi_linear
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.hopper import counting
from tests.support.kernels import seconds, switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

LAYERS = ["linear_attention"] * 3 + ["full_attention"]
KIMI = dict(
    hidden_size=2304, intermediate_size=9216, num_attention_heads=32, num_key_value_heads=32, vocab_size=512,
    linear_num_heads=32, linear_head_dim=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, num_experts=8, num_experts_per_token=8, moe_intermediate_size=1024, num_shared_experts=1,
    num_hidden_layers=len(LAYERS), layer_types=LAYERS, first_k_dense_replace=1,
)  # fmt: skip
CONFIG = ModelConfig.from_hf(tiny_config("kimi_linear", **KIMI))


def rounds(config, params, dtype, requests, t):
    """Two rounds, of which the second replays the first's rows, and a call that is timed: what the second gives, and
    the caches' parts that requests have."""
    pages = 2
    table, slots = jnp.arange(1, 1 + pages * requests).reshape(requests, pages), jnp.arange(requests)
    empty = empty_cache(config, PageLayout(1 + pages * requests, 64, dtype), requests + 1, t, dtype)

    @jax.jit
    def forward(params, tokens, cache, start, replay):
        rows = Rows(start + jnp.arange(requests), jnp.full(requests, t), table)
        mixer = RoundRows(rows, slots, jnp.full(requests, replay))
        hidden = paths.forward(config.decoder, params, tokens, rows.marked_positions(t), mixer, cache, (0,))
        return (hidden.last, hidden.features[0]), hidden.cache

    tokens = jnp.arange(requests * t).reshape(requests, t)
    _, cache = forward(params, tokens, empty, 60, 0)
    out, cache = forward(params, tokens + 100, cache, 61, 1)
    kept = cache.kv[0][:, 1:], *(leaf[:, :requests] for leaf in jax.tree.leaves(cache.states))
    return [*out, *kept], partial(forward, params, tokens, cache, 62, 1)


@pytest.mark.parametrize("requests,t", [(1, 1), (8, 1), (1, 4), (2, 4)])
def test_layers_are_those_of_the_model(monkeypatch, figures, requests, t):
    """Each token takes all experts: a near-tie would have one choose others. The kernels are no farther from float32
    than plain layers are, by half of that at most: those are 2.1e-2 to 2.6e-2 away from it on a CPU."""
    params = dummy(kimi_linear.tensors(CONFIG.decoder), "bfloat16", seed=0)
    with counting() as took:
        got, again = rounds(CONFIG, params, "bfloat16", requests, t)
    assert took["few_rows_normed"] and took["few_rows_add"] and took["expert_add"]
    assert took["delta_step"] and took["latent_decode"] and not took["portable_delta_step"]
    each = 1e6 * seconds(again, rounds=50) / len(LAYERS)
    figures[f"Kimi Linear, {requests} x {t} rows"] = f"{each:.1f} us a layer"
    switch_off(monkeypatch)
    plain, _ = rounds(CONFIG, params, "bfloat16", requests, t)
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, params)
    exact, _ = rounds(CONFIG, wide, "float32", requests, t)
    for one, other, reference in zip(got, plain, exact, strict=True):
        assert away(one, reference) <= max(1.5 * away(other, reference), 1e-3)


def away(got, expected):
    """The distance, by norm, as a share."""
    got, expected = (np.asarray(each, np.float64) for each in (got, expected))
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)
