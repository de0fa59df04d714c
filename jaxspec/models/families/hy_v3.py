"""Hy3: Qwen3's attention, and mixtures whose experts are scored by a sigmoid behind a dense layer.

Every token has the shared experts, which are one MLP without a gate.
"""

from __future__ import annotations

from functools import partial

from jaxspec.config.json_values import positive, positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, layer_tensors, mixture_tensors, renamed
from jaxspec.models.description import Decoder, Mixture, SigmoidScores
from jaxspec.models.families import qwen3
from jaxspec.models.families.deepseek_v3 import dense_layers

__all__ = ["read", "tensors"]

# What transformers' HYV3Config has where a config.json is silent.
DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.silu_experts(hf)
    reading.only(hf, {"mlp_bias": False})
    width, dense = positive(hf, "moe_intermediate_size"), dense_layers(hf)
    mixture = Mixture(
        *reading.experts(hf, "num_experts"),
        width,
        shared=width * positive(hf, "num_shared_experts"),
        shared_gated=False,
        scores=SigmoidScores(scale=positive_float(hf, "router_scaling_factor")),
    )
    return qwen3.read(hf, [mlp if dense(i) else mixture for i, mlp in enumerate(reading.mlps(hf))])


def named_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """The mixture, whose router and shared expert have other names."""
    names = {"mlp.gate.e_score_correction_bias": "mlp.expert_bias", "mlp.gate.": "mlp.router.gate."}
    names["shared_experts."] = "shared_mlp."
    return {name: renamed(param, names) for name, param in mixture_tensors(m, d, prefix).items()}


tensors = partial(decoder_tensors, mixtures=named_tensors)
mtp_tensors = partial(layer_tensors, mixtures=named_tensors)
