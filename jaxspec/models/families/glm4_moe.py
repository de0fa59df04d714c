"""GLM-4.5, 4.6 and 4.7: mixtures whose experts are scored by a sigmoid, behind some dense layers; half of heads rotate.

Every token has the shared expert, which has no gate.
"""

from __future__ import annotations

from jaxspec.config.json_values import positive, positive_float
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Layer, Mixture, SigmoidScores

__all__ = ["read", "tensors"]

# What transformers' Glm4MoeConfig has where a config.json is silent.
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm = reading.norm(hf)
    named = dict(qk_norm=norm if hf.get("use_qk_norm") else None, bias=bool(hf.get("attention_bias", False)))
    attention = reading.attention(hf, rotated=0.5, **named)
    dense = reading.layer_number(hf, "first_k_dense_replace")
    mlps, experts = reading.mlps({**hf, "mlp_bias": False}), mixture(hf)
    layers = [Layer(attention, mlp if i < dense else experts, norm) for i, mlp in enumerate(mlps)]
    return reading.decoder(hf, layers, norm)


def mixture(hf: reading.Config) -> Mixture:
    """Keys as DeepSeek-V3 named them, but for the experts' number."""
    reading.silu_experts(hf)
    key = "n_routed_experts" if "n_routed_experts" in hf else "num_local_experts"
    experts, chosen, groups = positive(hf, key), positive(hf, "num_experts_per_tok"), positive(hf, "n_group", 1)
    best, width = positive(hf, "topk_group", 1), positive(hf, "moe_intermediate_size")
    if experts % groups or best > groups:
        raise ConfigError(
            f"config.json: n_group ({groups}) must divide {key} ({experts}), and topk_group ({best}) be at most n_group"
        )
    if chosen > experts // groups * best:
        raise ConfigError(f"config.json: num_experts_per_tok ({chosen}) exceeds the experts of {best} groups")
    return Mixture(
        experts=experts,
        per_token=chosen,
        width=width,
        renormalised=bool(hf["norm_topk_prob"]),
        shared=width * reading.layer_number(hf, "n_shared_experts"),
        shared_gated=False,
        scores=SigmoidScores(groups, best, positive_float(hf, "routed_scaling_factor", 1.0)),
    )
