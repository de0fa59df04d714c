"""Granite 4's layers on the device at the widths of H-Small, with twelve experts: by kernels and without.

Their shared expert is twice as wide as the others, whose number is no multiple of 32: up to eight tokens it is a launch
of its own. One row of such a model in bfloat16 met an illegal instruction, and logits in FP8 were NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoint.params import dummy
from jaxspec.models.families import granitemoehybrid
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.hopper import counting
from tests.gpu.test_kimi_layers import away, rounds
from tests.support.kernels import switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

GRANITE = dict(
    hidden_size=4096, intermediate_size=768, shared_intermediate_size=1536, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=512, num_local_experts=12, num_experts_per_tok=12, num_hidden_layers=3,
    layer_types=["linear_attention"] * 2 + ["full_attention"], mamba_n_heads=128,
    mamba_d_head=64, mamba_d_state=128,
)  # fmt: skip


@pytest.mark.parametrize("requests,t", [(1, 1), (8, 1), (1, 4), (3, 4)])
def test_layers_are_those_of_the_model(monkeypatch, requests, t):
    """Each token takes all experts. The kernels are no farther from float32 than plain layers are, by half of that."""
    config = ModelConfig.from_hf(tiny_config("granitemoehybrid", **GRANITE))
    params = dummy(granitemoehybrid.tensors(config.decoder), "bfloat16", seed=0)
    with counting() as took:
        got, _ = rounds(config, params, "bfloat16", requests, t)
    assert took["delta_step"] and took["expert_plan"] and took["grouped_norm"]
    switch_off(monkeypatch)
    plain, _ = rounds(config, params, "bfloat16", requests, t)
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, params)
    exact, _ = rounds(config, wide, "float32", requests, t)
    for one, other, reference in zip(got, plain, exact, strict=True):
        assert away(one, reference) <= max(1.5 * away(other, reference), 1e-3)
