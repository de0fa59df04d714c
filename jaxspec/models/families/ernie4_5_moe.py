"""ERNIE 4.5 with experts: ERNIE 4.5's attention, and experts chosen by a corrected softmax behind some dense layers.

Every token has the shared experts, which are one MLP without a gate.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import positive
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, mixture_tensors, renamed
from jaxspec.models.description import Decoder, Layer, Mixture, SigmoidScores

__all__ = ["read", "tensors"]

# What transformers' Ernie4_5_MoeConfig has where a config.json is silent.
DEFAULTS = {
    "rope_theta": 500000.0,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
MTP_NORMED = False


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.full_attention_only(hf)
    reading.silu_experts(hf)
    reading.only(hf, {"use_bias": False, "moe_use_aux_free": True, "moe_gate": "topk"})
    norm, attention = reading.norm(hf), reading.attention(hf, interleaved=True)
    width, count = positive(hf, "moe_intermediate_size"), positive(hf, "num_hidden_layers")
    mixture = Mixture(
        *reading.experts(hf, "moe_num_experts", "moe_k"),
        width,
        shared=width * reading.layer_number(hf, "moe_num_shared_experts"),
        shared_gated=False,
        scores=SigmoidScores(function="softmax"),
    )
    first, every = reading.layer_number(hf, "moe_layer_start_index"), positive(hf, "moe_layer_interval")
    last = count - 1 if hf["moe_layer_end_index"] == -1 else reading.layer_number(hf, "moe_layer_end_index")
    sparse = lambda i: (i + 1) % every == 0 and first <= i <= last  # noqa: E731
    mlps = reading.mlps({**hf, "mlp_bias": False})
    layers = [Layer(attention, mixture if sparse(i) else mlp, norm) for i, mlp in enumerate(mlps)]
    return reading.decoder(hf, layers, norm)


def mtp_layer(decoder: Decoder) -> Layer:
    """The layer of an MTP module, which has a dense MLP."""
    return dataclasses.replace(decoder.layers[0], feed=reading.dense_mlp(decoder))


def named_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """The mixture, whose correction has another name, and an axis of length one before its own."""
    tree = mixture_tensors(m, d, prefix)
    correction = renamed(tree["router_correction"], {"mlp.gate.": "mlp.moe_statics."})
    return tree | {"router_correction": dataclasses.replace(correction, unit_axes=(1, 0))}


tensors = partial(decoder_tensors, mixtures=named_tensors)
