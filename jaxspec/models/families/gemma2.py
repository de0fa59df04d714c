"""Gemma 2: every other layer sees a window; scores and logits are squashed below a cap.

Zero-centred norms stand before and after each sub-layer. MLPs are gated by GELU. Embeddings are multiplied by the
square root of the width.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import positive, positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder, Mlp
from jaxspec.models.families.gemma3 import NORMS

__all__ = ["read", "tensors"]

# What transformers' Gemma2Config has where a config.json is silent.
DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, {"use_bidirectional_attention": False})
    norm, bias = reading.norm(hf, centred=True), bool(hf.get("attention_bias", False))
    scalar, cap = positive_float(hf, "query_pre_attn_scalar"), _cap(hf, "attn_logit_softcapping")
    scale = None if scalar == positive(hf, "head_dim") else scalar**-0.5
    attention = reading.attention(hf, bias=bias, out_bias=bias, scale=scale, score_cap=cap)
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    windows = reading.windows(hf, window, lambda i: i % 2 == 0)
    mlp = Mlp(positive(hf, "intermediate_size"), activation=reading.activation(hf, "hidden_activation"))
    layers = reading.layers(attention, [mlp] * len(windows), norm, windows)
    layers = [dataclasses.replace(layer, post_norm=True) for layer in layers]
    decoder = reading.decoder(hf, layers, norm)
    return dataclasses.replace(decoder, embed_scale=decoder.width**0.5, logit_cap=_cap(hf, "final_logit_softcapping"))


def _cap(hf: reading.Config, key: str) -> float | None:
    return None if hf[key] is None else positive_float(hf, key)


tensors = partial(decoder_tensors, norms=NORMS)
