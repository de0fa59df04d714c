"""Layers of each family on the device at the widths of published models: what their rounds give, beside float32.

Mixtures have twelve experts, all of which each token takes, and Llama 4 one: a near-tie would have another be chosen.
Twelve is no multiple of what kernels take at once: with 72 experts an illegal instruction ended Granite 4's rounds of
one row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.params import dummy
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from tests.gpu.test_kimi_layers import away, rounds
from tests.support.kernels import switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

LARGE = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
SMALL = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
LOCAL = dict(num_local_experts=12, num_experts_per_tok=12)
ROUTED = dict(n_routed_experts=12, num_experts=12, num_experts_per_tok=12)
LATENT = dict(
    q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_key_value_heads=16
)
LINEAR = dict(
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, head_dim=256
)
MAMBA = dict(mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, shared_intermediate_size=1024)
FAMILIES = {
    "arcee": SMALL | dict(hidden_size=2560, intermediate_size=18432, num_attention_heads=20),
    "bailing_moe": LARGE | ROUTED | dict(moe_intermediate_size=1024, n_group=1, topk_group=1, num_shared_experts=1),
    "cohere2": LARGE | dict(intermediate_size=14336),
    "deepseek_v2": SMALL | ROUTED | LATENT | dict(q_lora_rank=None, moe_intermediate_size=1408, n_shared_experts=2),
    "deepseek_v3": LARGE
    | ROUTED
    | LATENT
    | dict(moe_intermediate_size=2048, n_shared_experts=1, n_group=1, topk_group=1),
    "dots1": LARGE | ROUTED | dict(num_key_value_heads=32, moe_intermediate_size=1408, n_shared_experts=2),
    "ernie4_5_moe": SMALL
    | dict(moe_num_experts=12, moe_k=12, moe_intermediate_size=1536, hidden_size=2560, num_attention_heads=20),
    "exaone4": LARGE | dict(hidden_size=5120, num_attention_heads=40),
    "exaone_moe": LARGE | ROUTED | dict(moe_intermediate_size=2048, num_shared_experts=1),
    "gemma2": LARGE | dict(hidden_size=3584, num_attention_heads=16, head_dim=256, query_pre_attn_scalar=256),
    "gemma3": LARGE | dict(hidden_size=2560, num_attention_heads=8, num_key_value_heads=4, head_dim=256),
    "glm4_moe": LARGE | ROUTED | dict(moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1),
    "glm4_moe_lite": SMALL | ROUTED | LATENT | dict(moe_intermediate_size=1536, n_shared_experts=1),
    "granitemoe": SMALL | LOCAL | dict(hidden_size=1536, intermediate_size=512, num_attention_heads=24, head_dim=64),
    "granitemoehybrid": SMALL | LOCAL | MAMBA | dict(hidden_size=1536, intermediate_size=512, num_attention_heads=12),
    "granitemoeshared": SMALL | LOCAL | dict(intermediate_size=512, shared_intermediate_size=1024),
    "hunyuan_v1_moe": LARGE | dict(num_experts=12, moe_topk=12, intermediate_size=3072),
    "hy_v3": LARGE | ROUTED | dict(moe_intermediate_size=1536, num_shared_experts=1),
    "llama4": LARGE
    | dict(num_local_experts=1, num_experts_per_tok=1, hidden_size=5120, num_attention_heads=40),
    "mimo_v2_flash": LARGE
    | ROUTED
    | dict(num_key_value_heads=4, head_dim=192, v_head_dim=128, moe_intermediate_size=2048, intermediate_size=16384),
    "minicpm": SMALL | dict(hidden_size=2304, intermediate_size=5760, num_attention_heads=36, head_dim=64),
    "minimax_m2": LARGE | LOCAL | dict(hidden_size=3072, intermediate_size=1536, num_attention_heads=48, rotary_dim=64),
    "ministral3": LARGE | dict(intermediate_size=14336),
    "mistral4": LARGE | ROUTED | LATENT | dict(moe_intermediate_size=2048, n_shared_experts=1),
    "mixtral": LARGE | LOCAL | dict(intermediate_size=14336),
    "nemotron_h": SMALL
    | ROUTED
    | dict(
        hidden_size=2688, mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, moe_latent_size=None, hybrid_override_pattern="ME*E",
        num_hidden_layers=4,
    ),
    "olmo3": LARGE | dict(num_key_value_heads=32),
    "olmoe": SMALL | dict(num_experts=12, num_experts_per_tok=12, intermediate_size=1024, num_key_value_heads=16),
    "phi3": LARGE | dict(hidden_size=5120, num_attention_heads=40, num_key_value_heads=10),
    "qwen2_moe": SMALL | ROUTED | dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "qwen3_5_moe": SMALL | ROUTED | LINEAR | dict(moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "qwen3_moe": SMALL | ROUTED | dict(moe_intermediate_size=768),
    "qwen3_vl_moe": SMALL | ROUTED | dict(moe_intermediate_size=768),
    "smollm3": SMALL | dict(intermediate_size=11008),
    "solar_open": LARGE | ROUTED | dict(moe_intermediate_size=1280, n_shared_experts=1),
}  # fmt: skip


def config_of(family: str) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(family, vocab=512, **FAMILIES[family]))


@pytest.mark.parametrize("requests,t", [(1, 1), (8, 1), (2, 4), (40, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_are_near_those_of_float32(monkeypatch, family, requests, t):
    config = config_of(family)
    params = dummy(MODELS[config.model_type].tensors(config.decoder), "bfloat16", seed=0)
    got, _ = rounds(config, params, "bfloat16", requests, t)
    switch_off(monkeypatch)
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, params)
    exact, _ = rounds(config, wide, "float32", requests, t)
    for one, reference in zip(got[:2], exact[:2], strict=True):
        assert np.isfinite(np.asarray(one, np.float32)).all()
        assert away(one, reference) <= 4e-2
