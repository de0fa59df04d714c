"""dots.llm1: Qwen3's attention, and DeepSeek-V3's mixtures behind some dense layers."""

from __future__ import annotations

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families.glm4_moe import mixture

__all__ = ["read", "tensors"]

# What transformers' Dots1Config has where a config.json is silent.
DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    hf = {**hf, "n_shared_experts": hf.get("n_shared_experts") or 0}
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    attention = reading.attention(hf, qk_norm=norm, bias=bias, out_bias=bias)
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    first, dense = (reading.layer_number(hf, key) for key in ("max_window_layers", "first_k_dense_replace"))
    mlps, experts = reading.mlps({**hf, "mlp_bias": False}), mixture(hf)
    feeds = [mlp if i < dense else experts for i, mlp in enumerate(mlps)]
    windows = reading.windows(hf, window, lambda i: i >= first)
    return reading.decoder(hf, reading.layers(attention, feeds, norm, windows), norm)
