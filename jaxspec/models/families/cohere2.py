"""Cohere 2 (Command R7B, Command A): attention and MLP side by side, behind one layer norm.

Layers that see a window rotate neighbouring columns; those that see all of the text don't rotate.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import positive, positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder, Layer, Norm

__all__ = ["read", "tensors"]

# What transformers' Cohere2Config has where a config.json is silent.
DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}
# Of Cohere's own keys, those that would change the forward; transformers passes over them.
ONLY = {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False, "rotary_pct": 1.0}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, ONLY)
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    every = positive(hf, "sliding_window_pattern")
    windows = reading.windows(hf, window, lambda i: bool((i + 1) % every))
    norm, bias = Norm(positive_float(hf, "layer_norm_eps"), mean=True), bool(hf.get("attention_bias", False))
    turned = reading.attention(hf, interleaved=True, bias=bias, out_bias=bias, window=window)
    still = dataclasses.replace(turned, rope=reading.unrotated(turned.rope), window=None)
    layers = [
        Layer(turned if each else still, mlp, norm, parallel=True)
        for each, mlp in zip(windows, reading.mlps({**hf, "mlp_bias": False}), strict=True)
    ]
    return dataclasses.replace(reading.decoder(hf, layers, norm), logit_scale=positive_float(hf, "logit_scale"))


tensors = partial(decoder_tensors, norms={"attn_norm": "input_layernorm"})
