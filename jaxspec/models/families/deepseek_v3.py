"""DeepSeek-V3, R1 and V3.1: latent attention, and experts scored by a sigmoid behind some dense layers.

Every token has the shared experts, which are one MLP without a gate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, LatentAttention, Layer, Mixture, Norm
from jaxspec.models.families.glm4_moe import mixture
from jaxspec.models.rope import position_scale, rope, score_scale

__all__ = ["read", "tensors"]

# What transformers' DeepseekV3Config has where a config.json is silent.
LATENTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEFAULTS = {
    **LATENTS,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
LATENT_NORM = Norm(1e-6)  # whatever rms_norm_eps says


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    return described(hf, mixture(hf), ROUTING)


def described(hf: reading.Config, experts: Mixture, only: dict[str, Any]) -> Decoder:
    """The decoder with these experts, none of them in its first layers. `only`: keys, and the one value that each may
    have."""
    reading.only(hf, {"attention_bias": False, "moe_layer_freq": 1, **only})
    reading.full_attention_only(hf)
    norm, attention = reading.norm(hf), latent_attention(hf)
    dense = dense_layers(hf)
    mlps = reading.mlps({**hf, "mlp_bias": False})
    layers = [Layer(attention, mlp if dense(i) else experts, norm) for i, mlp in enumerate(mlps)]
    return reading.decoder(hf, layers, norm)


def dense_layers(hf: reading.Config) -> Callable[[int], bool]:
    """Whether a layer has a dense MLP: by `mlp_layer_types`, or as one of the first."""
    known = ("dense", "sparse")
    default = lambda i: known[i >= reading.layer_number(hf, "first_k_dense_replace")]  # noqa: E731
    kinds = reading.kinds(hf, "mlp_layer_types", known, default)
    return lambda i: kinds[i] == "dense"


def latent_attention(hf: reading.Config) -> LatentAttention:
    """**Raises:** `ConfigError` naming the key."""
    rotating, plain = positive(hf, "qk_rope_head_dim"), positive(hf, "qk_nope_head_dim")
    interleaved = hf.get("rope_interleave", True) is not False
    return LatentAttention(
        heads=positive(hf, "num_attention_heads"),
        latent=positive(hf, "kv_lora_rank"),
        key_dim=plain,
        value_dim=positive(hf, "v_head_dim"),
        rope=dataclasses.replace(rope(hf, rotating), columns=rotating, interleaved=interleaved),
        scale=score_scale(hf) / math.sqrt(plain + rotating),
        norm=LATENT_NORM,
        query_latent=None if hf.get("q_lora_rank") is None else positive(hf, "q_lora_rank"),
        position_scale=position_scale(hf),
    )
