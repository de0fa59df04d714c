"""Hunyuan dense: Llama's decoder with an RMS norm over each query and key head, after the rotary embedding.

Its `dynamic` rope has a fixed `alpha`, which stretches the base alone.
"""

from __future__ import annotations

from typing import Any

from jaxspec.config.json_values import positive, positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import Mixtures, decoder_tensors
from jaxspec.models.description import Decoder, Layer, Mixture, Mlp
from jaxspec.models.rope import rope_settings
from jaxspec.models.weights import norm_scale

__all__ = ["read", "tensors"]

# What transformers' HunYuanDenseV1Config has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5}


def read(hf: reading.Config, feeds: list[Mlp | Mixture] | None = None) -> Decoder:
    """`feeds`: what layers have for an MLP. **Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    named = dict(qk_norm=norm, qk_norm_rotated=True, bias=bias, out_bias=bias)
    attention = reading.attention(_stretched(hf), **named)
    feeds = feeds or reading.mlps({**hf, "mlp_bias": False})
    return reading.decoder(hf, [Layer(attention, feed, norm) for feed in feeds], norm)


def _stretched(hf: reading.Config) -> reading.Config:
    """The config with `alpha` in its rope's base: theta alpha^(d / (d - 2)) for heads d wide."""
    settings, kind = rope_settings(hf)
    if not settings.get("alpha") or kind != "dynamic":
        return hf
    width = positive(hf, "head_dim", positive(hf, "hidden_size") // positive(hf, "num_attention_heads"))
    theta = positive_float(settings if "rope_theta" in settings else hf, "rope_theta", 10_000.0)
    theta *= positive_float(settings, "alpha") ** (width / (width - 2))
    return {**hf, "rope_parameters": {"rope_theta": theta}, "rope_scaling": None}


def tensors(decoder: Decoder, mixtures: Mixtures | None = None) -> dict[str, Any]:
    tree = decoder_tensors(decoder, mixtures=mixtures)
    for i, arrays in enumerate(tree["layers"]):
        for name, source in (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")):
            width = decoder.attention.head_dim
            arrays[name] = norm_scale(width, f"model.layers.{i}.self_attn.{source}.weight")
    return tree
