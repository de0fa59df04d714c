"""Kimi Linear's layers on the device at the published model's widths, with eight experts: by kernels and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache.mixers import RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import forward as paths
from jaxspec.models.families import kimi_linear
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.hopper import counting
from tests.support.kernels import assert_close, seconds, switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

LAYERS = ["linear_attention"] * 3 + ["full_attention"]
KIMI = dict(
    hidden_size=2304, intermediate_size=9216, num_attention_heads=32, num_key_value_heads=32, vocab_size=512,
    linear_num_heads=32, linear_head_dim=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, num_experts=8, num_experts_per_token=8, moe_intermediate_size=1024, num_shared_experts=1,
    num_hidden_layers=len(LAYERS), layer_types=LAYERS, first_k_dense_replace=1,
)  # fmt: skip


@pytest.mark.parametrize("requests,t", [(1, 1), (8, 1), (1, 4), (2, 4)])
def test_layers_are_those_of_the_model(monkeypatch, figures, requests, t):
    """Each token takes all experts: a near-tie would have one choose others. The second round replays the first's."""
    config = ModelConfig.from_hf(tiny_config("kimi_linear", **KIMI))
    params, pages = dummy(kimi_linear.tensors(config.decoder), "bfloat16", seed=0), 2
    table, slots = jnp.arange(1, 1 + pages * requests).reshape(requests, pages), jnp.arange(requests)
    empty = empty_cache(config, PageLayout(1 + pages * requests, 64, "bfloat16"), requests + 1, t, "bfloat16")

    @jax.jit
    def forward(params, tokens, cache, start, replay):
        rows = Rows(start + jnp.arange(requests), jnp.full(requests, t), table)
        mixer = RoundRows(rows, slots, jnp.full(requests, replay))
        hidden = paths.forward(config.decoder, params, tokens, rows.marked_positions(t), mixer, cache, (0,))
        return (hidden.last, hidden.features[0]), hidden.cache

    def two_rounds():
        tokens = jnp.arange(requests * t).reshape(requests, t)
        _, cache = forward(params, tokens, empty, 60, 0)
        return forward(params, tokens + 100, cache, 61, 1)

    with counting() as took:
        got = two_rounds()
    assert took["few_rows_normed"] and took["few_rows_add"] and took["expert_add"]
    assert took["delta_step"] and took["latent_decode"] and not took["portable_delta_step"]
    given = params, jnp.zeros((requests, t), int), got[1], 62, 1
    figures[f"Kimi Linear, {requests} x {t} rows"] = (
        f"{1e6 * seconds(forward, *given, rounds=50) / len(LAYERS):.1f} us a layer"
    )
    switch_off(monkeypatch)
    expected = two_rounds()
    for one, other in zip(jax.tree.leaves(got[0]), jax.tree.leaves(expected[0]), strict=True):
        assert_close(one, other, 4e-2)
    used = lambda cache: (cache.kv[0][:, 1:], *(leaf[:, :requests] for leaf in jax.tree.leaves(cache.states)))  # noqa: E731
    for one, other in zip(used(got[1]), used(expected[1]), strict=True):
        assert_close(one, other, 4e-2)
