"""DeepSeek-V2-Lite: latent attention whose queries may have no latent, and experts scored by a softmax."""

from __future__ import annotations

import dataclasses

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families.deepseek_v3 import LATENTS, described
from jaxspec.models.families.glm4_moe import mixture

__all__ = ["read", "tensors"]

# What transformers' DeepseekV2Config has where a config.json is silent.
DEFAULTS = {**LATENTS, "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False}
# Groups of experts, and weights that are scaled, are those of the larger V2.
ROUTING = {
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "mlp_bias": False,
    "rope_interleave": True,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    experts = mixture({**hf, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0})
    return described(hf, dataclasses.replace(experts, scores="softmax"), ROUTING)
