"""Gemma 3's text model: most layers see a window, the others all of the text, each kind with a rope of its own.

Zero-centred norms stand before and after each sub-layer, and over each query and key head. MLPs are gated by GELU.
Embeddings are multiplied by the square root of the width. The larger ones read pictures.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder, Layer, Mlp
from jaxspec.models.vision import siglip_tower as tower

__all__ = ["read", "tensors", "tower"]

# What transformers' Gemma3TextConfig has where a config.json is silent, as those with a vision tower are about most.
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
THETAS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    for key in UNSUPPORTED:
        if hf.get(key):
            raise ConfigError(f"config.json: {key} {shown(hf[key])} is not supported; in Gemma 3 it is null or false")
    pattern, window = positive(hf, "sliding_window_pattern"), positive(hf, "sliding_window")
    windows = reading.windows(hf, window, lambda i: bool((i + 1) % pattern))
    norm, bias = reading.norm(hf, centred=True), bool(hf.get("attention_bias", False))
    scalar = positive_float(hf, "query_pre_attn_scalar")
    more = {"qk_norm": norm, "bias": bias, "out_bias": bias}
    more["scale"] = None if scalar == positive(hf, "head_dim") else scalar**-0.5
    kinds = {
        None: reading.attention(reading.with_rope(hf, "full_attention", THETAS), **more),
        window: reading.attention(reading.with_rope(hf, "sliding_attention", THETAS), window=window, **more),
    }
    mlp = Mlp(positive(hf, "intermediate_size"), activation=reading.activation(hf, "hidden_activation"))
    decoder = reading.decoder(hf, [Layer(kinds[each], mlp, norm, post_norm=True) for each in windows], norm)
    return dataclasses.replace(decoder, embed_scale=decoder.width**0.5)


tensors = partial(decoder_tensors, norms=NORMS)
