"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek-V3's mixtures behind some dense layers.

Most layers see a window; the others don't rotate. Queries and keys are normed by head, before they are rotated.
"""

from __future__ import annotations

import dataclasses

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families import exaone4
from jaxspec.models.families.deepseek_v3 import ROUTING, dense_layers
from jaxspec.models.families.glm4_moe import mixture

__all__ = ["read", "tensors"]

# What transformers' ExaoneMoeConfig has where a config.json is silent.
DEFAULTS = {
    **exaone4.DEFAULTS,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
MTP = False


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, ROUTING)
    experts = mixture({**hf, "n_routed_experts": hf.get("num_experts"), "n_shared_experts": hf["num_shared_experts"]})
    decoder, dense = exaone4.read(hf), dense_layers(hf)
    layers = [
        dataclasses.replace(layer, feed=layer.feed if dense(i) else experts, pre_norm=True, post_norm=False)
        for i, layer in enumerate(decoder.layers)
    ]
    return dataclasses.replace(decoder, layers=tuple(layers))
