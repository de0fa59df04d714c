"""Ling 2 (mini, flash and 1T, BailingMoeV2): Qwen3's attention, and DeepSeek-V3's mixtures behind some dense layers.

Part of each head rotates. Checkpoints have q, k and v as one tensor.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from jaxspec.config.json_values import positive
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import (
    Tensors,
    attention_tensors,
    decoder_tensors,
    layer_tensors,
    mixture_tensors,
    renamed,
)
from jaxspec.models.description import Attention, Decoder, Layer, Mixture
from jaxspec.models.families.glm4_moe import mixture
from jaxspec.models.weights import Layout, by_outputs

__all__ = ["read", "tensors"]

# What inclusionAI's BailingMoeV2Config has where a config.json is silent.
DEFAULTS = {
    "first_k_dense_replace": 0,
    "num_shared_experts": 0,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
ONLY = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
}
NAMES = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    reading.only(hf, ONLY)
    if hf.get("score_function") is None:
        raise ConfigError(
            "config.json: score_function is missing, as in the first Ling models (BailingMoeForCausalLM), which aren't "
            "supported; Ling 2 has sigmoid"
        )
    width, shared = positive(hf, "moe_intermediate_size"), reading.layer_number(hf, "num_shared_experts")
    reading.only(hf, {"moe_shared_expert_intermediate_size": width})
    experts = mixture({**hf, "n_routed_experts": positive(hf, "num_experts"), "n_shared_experts": shared})
    norm = reading.norm(hf)
    attention, dense = reading.attention(hf, 1.0, qk_norm=norm), reading.layer_number(hf, "first_k_dense_replace")
    mlps = reading.mlps({**hf, "mlp_bias": False})
    layers = [Layer(attention, mlp if i < dense else experts, norm) for i, mlp in enumerate(mlps)]
    return reading.decoder(hf, layers, norm)


def named_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """Attention, with queries, keys and values in one tensor."""
    tree, a = attention_tensors(layer, d, prefix), layer.mixing
    heads = (a.heads, a.head_dim), (a.kv_heads, a.head_dim), (a.kv_heads, a.head_dim)
    fused = dict(sources=(prefix + "attention.query_key_value.weight",), split=by_outputs(heads))
    tree["qkv"] = dataclasses.replace(tree["qkv"], layout=Layout((sum(tree["qkv"].layout.splits),)), **fused)
    return {name: renamed(param, NAMES) for name, param in tree.items()}


def named_experts(m: Mixture, d: int, prefix: str) -> Tensors:
    """The mixture, whose correction has another name."""
    tree, names = mixture_tensors(m, d, prefix), {"gate.e_score_correction_bias": "gate.expert_bias"}
    return tree | {"router_correction": renamed(tree["router_correction"], names)}


OWN = {"mixings": {Attention: named_tensors}, "mixtures": named_experts}
mtp_tensors = partial(layer_tensors, **OWN)


def tensors(decoder: Decoder) -> dict[str, Any]:
    tree = decoder_tensors(decoder, **OWN)
    return tree | {"embed": renamed(tree["embed"], {"embed_tokens": "word_embeddings"})}
