"""Mistral Small 4: DeepSeek-V3's latent attention, whose queries are scaled by their position in long texts, and
experts scored by a softmax."""

from __future__ import annotations

import dataclasses

from jaxspec.config.json_values import positive
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families.deepseek_v3 import described
from jaxspec.models.families.glm4_moe import mixture
from jaxspec.models.families.ministral3 import ROPE
from jaxspec.models.rope import rope_settings

__all__ = ["read", "tensors"]

# What transformers' Mistral4Config has where a config.json is silent.
DEFAULTS = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        **ROPE,
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
    },
}
ROUTING = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    settings, _ = rope_settings(hf)
    rotating, plain = positive(hf, "qk_rope_head_dim"), positive(hf, "qk_nope_head_dim")
    # Of a whole head's columns, those behind the ones that never rotate.
    share = settings.pop("partial_rotary_factor", None)
    if share is not None and int((rotating + plain) * share) != rotating:
        raise ConfigError(
            f"config.json: partial_rotary_factor ({share}) must be the share of qk_rope_head_dim ({rotating}) in a "
            f"head of {rotating + plain} columns"
        )
    hf = {**hf, "rope_parameters": settings, "rope_scaling": None}
    return described(hf, dataclasses.replace(mixture(hf), scores="softmax"), ROUTING)
