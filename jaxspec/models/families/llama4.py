"""Llama 4 (Scout, Maverick), its text model: layers rotate and see a chunk of the text, or do neither.

The layers that rotate, neighbouring columns as a pair, norm queries and keys then, without a weight. Those that don't
scale queries by their position. A token has one expert, whose input is multiplied by the sigmoid of its logit, and a
shared one; Maverick has an MLP in every other layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, mixture_tensors, renamed, stacked_transposed
from jaxspec.models.description import Decoder, Layer, Mixture, Mlp, SigmoidScores
from jaxspec.models.positions import Chunks, ScaleByPosition

__all__ = ["read", "tensors"]

# What transformers' Llama4TextConfig has where a config.json is silent.
DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
KINDS = ("full_attention", "chunked_attention")


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, {"num_experts_per_tok": 1})
    reading.silu_experts(hf)
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    turned = reading.attention(hf, interleaved=True, bias=bias, out_bias=bias)
    still = dataclasses.replace(turned, rope=reading.unrotated(turned.rope), position_scale=_position_scale(hf))
    if hf["use_qk_norm"]:
        turned = dataclasses.replace(turned, qk_norm=norm, qk_norm_rotated=True, qk_norm_unit=True)
    # The list has a 1 for layers that do rotate, and says nothing if it is empty.
    interval, listed = positive(hf, "no_rope_layer_interval"), hf.get("no_rope_layers") or None
    rotates = reading.each_layer({**hf, "no_rope_layers": listed}, "no_rope_layers", lambda i: (i + 1) % interval > 0)
    kinds = reading.kinds(hf, "layer_types", KINDS, lambda i: KINDS[rotates[i]])
    chunks = _chunks(hf) if KINDS[1] in kinds else None
    layers = [
        Layer(dataclasses.replace(turned if turns else still, window=chunks if kind == KINDS[1] else None), feed, norm)
        for turns, kind, feed in zip(rotates, kinds, _feeds(hf), strict=True)
    ]
    return reading.decoder(hf, layers, norm)


def _position_scale(hf: reading.Config) -> ScaleByPosition | None:
    if not hf["attn_temperature_tuning"]:
        return None
    return ScaleByPosition(positive_float(hf, "attn_scale"), positive(hf, "floor_scale"), offset=1)


def _chunks(hf: reading.Config) -> Chunks:
    size = positive(hf, "attention_chunk_size")
    if size & (size - 1):
        raise ConfigError(f"config.json: attention_chunk_size must be a power of two, got {size}")
    return Chunks(size)


def _feeds(hf: reading.Config) -> list[Mlp | Mixture]:
    """Each layer's experts, with a shared one as wide as each of them, or its MLP."""
    layers, width = positive(hf, "num_hidden_layers"), positive(hf, "intermediate_size")
    step, listed = positive(hf, "interleave_moe_layer_step"), hf.get("moe_layers")
    if listed is None:
        listed = range(step - 1, layers, step)
    elif not isinstance(listed, list | tuple) or any(i not in range(layers) for i in listed):
        raise ConfigError(f"config.json: moe_layers must be a list of layers, 0 to {layers - 1}, got {shown(listed)}")
    experts = Mixture(
        *reading.experts(hf, "num_local_experts"),
        width,
        renormalised=False,
        shared=width,
        shared_gated=False,
        scores=SigmoidScores(corrected=False),
        weighs_inputs=True,
    )
    mlp = Mlp(positive(hf, "intermediate_size_mlp"))
    return [experts if i in listed else mlp for i in range(layers)]


def named_experts(m: Mixture, d: int, prefix: str) -> Tensors:
    """The mixture, whose experts are stacked, each matrix transposed."""
    names = {"gate.weight": "router.weight", "shared_experts.": "shared_expert."}
    tree = stacked_transposed(mixture_tensors(m, d, prefix.replace(".mlp.", ".feed_forward.")))
    return {name: renamed(param, names) for name, param in tree.items()}


def tensors(decoder: Decoder) -> dict[str, Any]:
    tree = decoder_tensors(decoder, mixtures=named_experts)
    named = lambda layer: {name: renamed(each, {".mlp.": ".feed_forward."}) for name, each in layer.items()}  # noqa: E731
    return tree | {"layers": [named(layer) for layer in tree["layers"]]}
