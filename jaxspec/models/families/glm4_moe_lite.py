"""GLM-4.7-Flash: latent attention with the experts of GLM-4.5."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families import glm4_moe
from jaxspec.models.families.deepseek_v3 import LATENTS, ROUTING, described

__all__ = ["read", "tensors"]

# What transformers' Glm4MoeLiteConfig has where a config.json is silent.
DEFAULTS = {
    **LATENTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    **glm4_moe.DEFAULTS,
    "routed_scaling_factor": 1.8,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    return described(hf, glm4_moe.mixture(hf), ROUTING)
