"""MiniMax-M2: mixtures whose experts are scored by a sigmoid; queries are normed across all heads, and so are keys."""

from __future__ import annotations

from functools import partial

from jaxspec.config.json_values import positive
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors, mixtral_tensors
from jaxspec.models.description import Decoder, Layer, Mixture, SigmoidScores

__all__ = ["read", "tensors"]

# What transformers' MiniMaxM2Config has where a config.json is silent.
DEFAULTS = {"head_dim": 128, "rope_theta": 5e6}
# Of MiniMax's own config, which transformers doesn't read.
ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, ONLY)
    reading.silu_experts(hf)
    reading.full_attention_only(hf)
    if not all(reading.each_layer(hf, "attn_type_list", lambda i: True)):
        raise ConfigError("config.json: attn_type_list 0 is not supported: linear attention; supported: 1, all of them")
    norm, (experts, chosen) = reading.norm(hf), reading.experts(hf, "num_local_experts")
    rotated = positive(hf, "rotary_dim", positive(hf, "head_dim")) / positive(hf, "head_dim")
    attention = reading.attention(hf, rotated, qk_norm=norm, qk_norm_all=True)
    mixture = Mixture(experts, chosen, positive(hf, "intermediate_size"), scores=SigmoidScores())
    return reading.decoder(hf, [Layer(attention, mixture, norm)] * positive(hf, "num_hidden_layers"), norm)


tensors = partial(decoder_tensors, mixtures=partial(mixtral_tensors, correction_bias="e_score_correction_bias"))
