"""MiniCPM 1 and 4: Llama's decoder with muP's multipliers, which are Granite's under other names."""

from __future__ import annotations

import math

from jaxspec.config.json_values import positive, positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families import granite

__all__ = ["read", "tensors"]

# What OpenBMB's MiniCPMConfig has where a config.json is silent.
DEFAULTS = {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "tie_word_embeddings": True}


def read(hf: reading.Config) -> Decoder:
    """Attention is dense at any length, as vLLM's; `sparse_config` is of OpenBMB's own kernels. **Raises:**
    `ConfigError` naming the key."""
    layers, width = positive(hf, "num_hidden_layers"), positive(hf, "hidden_size")
    reading.only(hf, {"num_experts": 0, "mup_denominator": layers})
    head = positive(hf, "head_dim", width // positive(hf, "num_attention_heads"))
    multipliers = {
        "embedding_multiplier": positive_float(hf, "scale_emb"),
        "residual_multiplier": positive_float(hf, "scale_depth") / math.sqrt(layers),
        "logits_scaling": width / positive_float(hf, "dim_model_base"),
        "attention_multiplier": head**-0.5,
    }
    return granite.read({**hf, **multipliers, "mlp_bias": False})
