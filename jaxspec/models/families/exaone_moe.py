"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek-V3's mixtures behind some dense layers.

Most layers see a window; the others don't rotate. Queries and keys are normed by head, before they are rotated.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, mixture_tensors, renamed
from jaxspec.models.description import Decoder, Layer, Mixture
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


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, ROUTING)
    experts = mixture({**hf, "n_routed_experts": hf.get("num_experts"), "n_shared_experts": hf["num_shared_experts"]})
    decoder, dense = exaone4.read(hf), dense_layers(hf)
    layers = [
        dataclasses.replace(layer, feed=layer.feed if dense(i) else experts, pre_norm=True, post_norm=False)
        for i, layer in enumerate(decoder.layers)
    ]
    _check_layers(hf, decoder)
    return dataclasses.replace(decoder, layers=tuple(layers))


def _check_layers(hf: reading.Config, decoder: Decoder) -> None:
    """**Raises:** `ConfigError` for windows of several sizes or clamped MLPs, which K-EXAONE 2.0 has."""
    windows = [layer.mixing.window or 0 for layer in decoder.layers]
    for key, supported in (("sliding_windows", windows), ("swiglu_limits", [0] * len(windows))):
        named = hf.get(key)
        if named is not None and not (isinstance(named, list | tuple) and [each or 0 for each in named] == supported):
            raise ConfigError(
                f"{key} {shown(named)} is not supported for model_type {hf['model_type']!r}; supported: "
                f"{shown(supported)}, by its other keys"
            )


def mtp_layer(decoder: Decoder) -> Layer:
    """The layer of an MTP module: attention to all of the text, as in this model's other layers, and a dense MLP."""
    layer, mixing = decoder.layers[0], decoder.layers[0].mixing
    if mixing.window is not None:
        mixing = dataclasses.replace(mixing, window=None, rope=reading.unrotated(mixing.rope))
    return dataclasses.replace(layer, mixing=mixing, feed=reading.dense_mlp(decoder))


def named_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """The mixture, whose correction stands beside the router."""
    tree = mixture_tensors(m, d, prefix)
    return tree | {"router_correction": renamed(tree["router_correction"], {"mlp.gate.": "mlp."})}


tensors = partial(decoder_tensors, mixtures=named_tensors)
