"""Mixtral: Mistral's decoder with a mixture of experts for each MLP, most often without a window."""

from __future__ import annotations

from functools import partial

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors, mixtral_tensors
from jaxspec.models.description import Decoder, Mixture

__all__ = ["read", "tensors"]

# What transformers' MixtralConfig has where a config.json is silent.
DEFAULTS = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.silu_experts(hf)
    reading.only(hf, {"attention_bias": False})
    norm, (experts, chosen) = reading.norm(hf), reading.experts(hf, "num_local_experts")
    window = None if hf.get("sliding_window") is None else positive(hf, "sliding_window")
    feeds = [Mixture(experts, chosen, positive(hf, "intermediate_size"))] * positive(hf, "num_hidden_layers")
    windows = reading.windows(hf, window, lambda i: True)
    return reading.decoder(hf, reading.layers(reading.attention(hf), feeds, norm, windows), norm)


tensors = partial(decoder_tensors, mixtures=mixtral_tensors)
