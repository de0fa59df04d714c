"""OLMoE: mixtures for MLPs; queries are normed across all heads, and so are keys."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer, Mixture

__all__ = ["read", "tensors"]

# What transformers' OlmoeConfig has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    reading.silu_experts(hf)
    reading.only(hf, {"clip_qkv": None})
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, qk_norm=norm, qk_norm_all=True, bias=bias, out_bias=bias)
    experts, width = reading.experts(hf, "num_experts"), positive(hf, "intermediate_size")
    mixture = Mixture(*experts, width, renormalised=bool(hf.get("norm_topk_prob", False)))
    return reading.decoder(hf, [Layer(attention, mixture, norm)] * positive(hf, "num_hidden_layers"), norm)
