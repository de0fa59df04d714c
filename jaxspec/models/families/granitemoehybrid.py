"""Granite 4: Granite's multipliers around state-space layers and attention, behind each an MLP or experts.

Attention rotates in models without state-space layers alone. The MLP, or shared expert, has gate and up as one tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder, Mamba2, Mlp
from jaxspec.models.families import granite, granitemoe, nemotron_h
from jaxspec.models.weights import by_inputs, by_outputs, linear, run_length

__all__ = ["read", "tensors"]

# What transformers' GraniteMoeHybridConfig has where a config.json is silent.
DEFAULTS = {
    **granitemoe.DEFAULTS,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "time_step_limit": (0.0, float("inf")),
}
# Of state-space layers, the keys that Nemotron-H has for the same sizes.
NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # older names


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    named = hf.get("layer_types") or hf.get("layers_block_type")
    known = (*KINDS, *KINDS.values())
    kinds = reading.kinds({**hf, "layer_types": named}, "layer_types", known, lambda i: "linear_attention")
    kinds = [KINDS.get(kind, kind) for kind in kinds]
    if "full_attention" not in kinds:
        raise ConfigError("config.json: layer_types has no attention layer, and needs one")
    shared = positive(hf, "shared_intermediate_size")
    if reading.layer_number(hf, "num_local_experts"):
        feed = granitemoe.mixture(hf, shared)
    else:
        feed = Mlp(shared, activation=reading.activation(hf))
    decoder = granite.read({**hf, "layer_types": None}, [feed] * len(kinds))
    mixings = {"full_attention": decoder.attention}
    position = hf.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise ConfigError(f"config.json: position_embedding_type must be rope or nope, got {shown(position)}")
    if position != "rope":
        still = reading.unrotated(decoder.attention.rope)
        mixings["full_attention"] = dataclasses.replace(decoder.attention, rope=still)
    if "linear_attention" in kinds:
        mixings["linear_attention"] = mamba2(hf)
    layers = [
        dataclasses.replace(layer, mixing=mixings[kind]) for layer, kind in zip(decoder.layers, kinds, strict=True)
    ]
    return dataclasses.replace(decoder, layers=tuple(layers))


def mamba2(hf: reading.Config) -> Mamba2:
    """The state-space layer, all of whose heads are one group: its norm is over them all."""
    reading.only(hf, {"mamba_n_groups": 1})
    inner, heads = positive(hf, "mamba_expand") * positive(hf, "hidden_size"), positive(hf, "mamba_n_heads")
    width = inner // heads if hf["mamba_d_head"] == "auto" else positive(hf, "mamba_d_head")
    if width * heads != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads ({heads}) times mamba_d_head ({width}) must be mamba_expand times hidden_size "
            f"({inner})"
        )
    hf = {**hf, "mamba_d_head": width}
    return nemotron_h.mamba2({**hf, **{theirs: hf[ours] for ours, theirs in NAMES.items() if ours in hf}})


def tensors(decoder: Decoder) -> dict[str, Any]:
    states = {Mamba2: lambda layer, d, prefix: nemotron_h.mamba2_tensors(layer.mixing, d, prefix + "mamba.")}
    tree = decoder_tensors(decoder, states, mixtures=granitemoe.mixture_tensors)
    for i, (layer, arrays) in enumerate(zip(decoder.layers, tree["layers"], strict=True)):
        if isinstance(layer.feed, Mlp):
            d, width = decoder.width, layer.feed.width
            inputs, outputs = (f"model.layers.{i}.shared_mlp.{name}_linear.weight" for name in ("input", "output"))
            both = by_outputs(((width, 1), (width, 1)))
            arrays["gate_up"] = linear(d, {inputs: 2 * width}, run_length(width), split=both)
            arrays["down"] = linear(width, {outputs: d}, split=by_inputs(width))
    return tree
