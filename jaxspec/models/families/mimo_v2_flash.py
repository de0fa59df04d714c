"""MiMo-V2-Flash: most layers see a window, with sinks; values are narrower than keys; experts are scored by a sigmoid.

Layers that see a window have twice the KV heads of those that see all of the text, and another rope.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from jaxspec.config.json_values import positive, positive_float
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, attention_tensors, decoder_tensors, renamed
from jaxspec.models.description import Attention, Decoder, Layer
from jaxspec.models.families.deepseek_v3 import ROUTING, dense_layers
from jaxspec.models.families.glm4_moe import mixture
from jaxspec.models.rope import rope_settings

__all__ = ["read", "tensors"]

# What transformers' MiMoV2FlashConfig has where a config.json is silent.
DEFAULTS = {
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 3,  # which no config says, and all checkpoints have
}
MTP_CHAINED = False  # each module takes the target's hidden state
THETAS = {"full_attention": ("rope_theta", 5e6), "sliding_attention": ("swa_rope_theta", 1e4)}
ROTATED = 0.334  # of a head, where the config is silent
ONLY = {
    **ROUTING,
    "attention_bias": False,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": 0,
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, ONLY)
    hf = {**hf, "rms_norm_eps": hf.get("layernorm_epsilon", hf.get("rms_norm_eps", 1e-5))}
    hf |= {"n_shared_experts": 0, "routed_scaling_factor": hf.get("routed_scaling_factor") or 1.0}
    norm = reading.norm(hf)
    # Checkpoints count the tokens before a token; transformers, with its own.
    before = hf.get("sliding_window_size") is not None
    window = positive(hf, "sliding_window_size") + 1 if before else positive(hf, "sliding_window")
    pattern = reading.each_layer(hf, "hybrid_layer_pattern", lambda i: i > 0 and (i + 1) % 6 > 0)
    windows = reading.windows(hf, window, lambda i: pattern[i])
    full, sliding = (
        _attention(hf, "full_attention"),
        _attention(_of_windows(hf), "sliding_attention", sinks=True, pool=1),
    )
    sparse = reading.each_layer(hf, "moe_layer_freq", lambda i: i > 0)
    dense = dense_layers(hf) if hf.get("mlp_layer_types") is not None else lambda i: not sparse[i]
    experts, mlps = mixture(hf), reading.mlps({**hf, "mlp_bias": False})
    layers = [
        Layer(
            dataclasses.replace(full if window is None else sliding, window=window), mlp if dense(i) else experts, norm
        )
        for i, (mlp, window) in enumerate(zip(mlps, windows, strict=True))
    ]
    return reading.decoder(hf, layers, norm)


def _of_windows(hf: reading.Config) -> reading.Config:
    """The config with the heads of layers that see a window, by default twice the KV heads."""
    own = {"num_key_value_heads": 2 * positive(hf, "num_key_value_heads")}
    names = "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"
    return {**hf, **own, **{name: hf[f"swa_{name}"] for name in names if hf.get(f"swa_{name}") is not None}}


def _attention(hf: reading.Config, kind: str, **more: Any) -> Attention:
    scale = hf["attention_value_scale"]
    more |= {
        "value_dim": positive(hf, "v_head_dim"),
        "value_scale": 1.0 if scale is None else positive_float(hf, "attention_value_scale"),
    }
    hf = reading.with_rope(hf, kind, THETAS)
    settings, scaling = rope_settings(hf)
    if scaling != "default" and not any(each.get("partial_rotary_factor") for each in (hf, settings)):
        raise ConfigError(  # in transformers, 1 where a rope is scaled, and ROTATED where it isn't
            f"config.json: the rope of {kind}, of type {scaling}, lacks partial_rotary_factor; give it "
            f"({ROTATED} in published models)"
        )
    return reading.attention(hf, ROTATED, **more)


def mtp_layer(decoder: Decoder) -> Layer:
    """The layer of an MTP module: a window, and a dense MLP."""
    sees = next((layer for layer in decoder.layers if layer.mixing.window is not None), decoder.layers[0])
    return dataclasses.replace(sees, feed=reading.dense_mlp(decoder))


def named_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """Attention, whose sinks have another name."""
    tree = attention_tensors(layer, d, prefix)
    return {name: renamed(param, {"self_attn.sinks": "self_attn.attention_sink_bias"}) for name, param in tree.items()}


tensors = partial(decoder_tensors, mixings={Attention: named_tensors})
