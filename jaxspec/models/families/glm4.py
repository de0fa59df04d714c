"""GLM-4 dense (GLM-4-0414, GLM-Z1): norms before and after each sub-layer, neighbouring columns rotate in pairs.

Half of each head rotates. q, k and v have biases. Gate and up are one tensor in the checkpoint, gate's rows first.
"""

from __future__ import annotations

from typing import Any

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import NORMS, decoder_tensors
from jaxspec.models.description import Decoder, Layer, Mlp
from jaxspec.models.weights import by_outputs, linear, run_length

__all__ = ["read", "tensors"]

# What transformers' Glm4Config has where a config.json is silent.
DEFAULTS = {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-07}
POST_NORMS = {"attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    norm = reading.norm(hf)
    attention = reading.attention(hf, rotated=0.5, interleaved=True, bias=bool(hf["attention_bias"]))
    mlp = Mlp(positive(hf, "intermediate_size"), activation=reading.activation(hf))
    layer = Layer(attention, mlp, norm, post_norm=True)
    return reading.decoder(hf, [layer] * positive(hf, "num_hidden_layers"), norm)


def tensors(decoder: Decoder) -> dict[str, Any]:
    tree = decoder_tensors(decoder, norms=NORMS | POST_NORMS)
    for i, (layer, arrays) in enumerate(zip(decoder.layers, tree["layers"], strict=True)):
        width = layer.feed.width
        gate_up = {f"model.layers.{i}.mlp.gate_up_proj.weight": 2 * width}
        arrays["gate_up"] = linear(
            decoder.width, gate_up, run_length(width), split=by_outputs(((width, 1), (width, 1)))
        )
    return tree
