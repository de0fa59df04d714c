"""Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention that doesn't rotate, and so on.

Experts, behind some dense layers, are scored by a sigmoid. Names are those of Moonshot's checkpoints, whose config
counts layers from one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, convolution, decoder_tensors, exact_numbers, mixtral_tensors
from jaxspec.models.description import Decoder, KimiDelta, Layer
from jaxspec.models.families import glm4_moe
from jaxspec.models.families.deepseek_v3 import LATENTS, dense_layers, latent_attention
from jaxspec.models.families.qwen3_next import linear_layers
from jaxspec.models.weights import WHOLE, by_inputs, by_outputs, linear, norm_scale

__all__ = ["read", "tensors"]

# What transformers' KimiLinearConfig has where a config.json is silent.
DEFAULTS = {
    **LATENTS,
    "q_lora_rank": None,
    **glm4_moe.DEFAULTS,
    "routed_scaling_factor": 2.446,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
# Moonshot's names of some keys, and transformers'.
NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
ONLY = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,  # transformers has a head whatever the key says
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    reading.only(hf, ONLY)
    linear_config = hf.get("linear_attn_config") or {}
    if not isinstance(linear_config, Mapping):
        raise ConfigError(f"config.json: linear_attn_config must be a mapping, got {shown(linear_config)}")
    linear = linear_layers({**hf, "layer_types": layer_kinds(hf, linear_config)})
    hf = {**hf, **{ours: hf[theirs] for theirs, ours in NAMES.items() if theirs in hf}}
    hf |= {ours: linear_config[theirs] for theirs, ours in LINEAR.items() if theirs in linear_config}
    rule = KimiDelta(*(positive(hf, key) for key in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")))
    latents = latent_attention({**hf, "rope_parameters": None, "rope_scaling": None})
    latents = dataclasses.replace(latents, rope=reading.unrotated(latents.rope))
    norm, experts, dense = reading.norm(hf), glm4_moe.mixture(hf), dense_layers(hf)
    layers = [
        Layer(rule if linear[i] else latents, mlp if dense(i) else experts, norm)
        for i, mlp in enumerate(reading.mlps({**hf, "mlp_bias": False}))
    ]
    return reading.decoder(hf, layers, norm)


def layer_kinds(hf: reading.Config, linear: Mapping) -> list[str]:
    """The kind of each layer: `layer_types`, or by the two lists of `linear_attn_config`."""
    if hf.get("layer_types") is not None:
        return hf["layer_types"]
    count, lists = positive(hf, "num_hidden_layers"), [linear.get(key) for key in ("full_attn_layers", "kda_layers")]
    if not all(isinstance(each, list | tuple) for each in lists) or {*range(1, count + 1)} != {*lists[0], *lists[1]}:
        raise ConfigError(
            f"config.json: linear_attn_config must have each layer, 1 to {count}, in full_attn_layers or in "
            f"kda_layers; got {shown(lists)}"
        )
    return ["linear_attention" if i + 1 in lists[1] else "full_attention" for i in range(count)]


def kimi_delta_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """Kimi Delta Attention. What goes into an exponent stays in float32, and gates are never quantised on load."""
    m, prefix = layer.mixing, prefix + "self_attn."
    n, w, heads = m.inner, m.width, ((m.heads, m.width),)
    named = lambda *names: [f"{prefix}{name}.weight" for name in names]  # noqa: E731
    qkv, conv = named("q_proj", "k_proj", "v_proj"), named("q_conv1d", "k_conv1d", "v_conv1d")
    low = dict(zip(named("f_a_proj", "g_a_proj", "b_proj"), (w, w, m.heads), strict=True))
    narrow = by_outputs(((1, w),), ((1, w),), ((m.heads, 1),))
    return {
        "qkv": linear(d, dict.fromkeys(qkv, n), split=by_outputs(*[heads] * 3)),
        "gates": linear(d, low, exact=True, split=narrow),
        "steps": linear(w, dict.fromkeys(named("f_b_proj"), n), exact=True, split=by_outputs(heads)),
        "output_gates": linear(w, dict.fromkeys(named("g_b_proj"), n), exact=True, split=by_outputs(heads)),
        "conv": convolution(m.taps, dict.fromkeys(conv, n), by_outputs(*[heads] * 3)),
        "decay_log": exact_numbers(m.heads, prefix + "A_log", by_outputs(((m.heads, 1),)), unit_axes=(2, 1)),
        "decay_bias": exact_numbers(n, prefix + "dt_bias", by_outputs(heads)),
        "read_norm": norm_scale(w, prefix + "o_norm.weight", split=WHOLE),
        "out": linear(n, {prefix + "o_proj.weight": d}, split=by_inputs(m.heads, w)),
    }


tensors = partial(decoder_tensors, mixings={KimiDelta: kimi_delta_tensors}, mixtures=mixtral_tensors)
