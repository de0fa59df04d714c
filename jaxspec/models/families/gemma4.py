"""Gemma 4's text model: most layers see a window, the others all of the text, with wider heads and a rope of their own.

Norms stand before and after each sub-layer, and over each query, key and value head. Scores aren't scaled. In layers
that see all of the text, values may be the keys' projection, and a quarter of a head's pairs rotates. A learnt number
multiplies each layer's output. MLPs are gated by GELU. Embeddings are multiplied by the square root of the width, and
logits may be capped.

The smallest have inputs of each layer's own, and their last layers share keys and values of earlier ones. The 26B has
experts beside each MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, mlp_tensors
from jaxspec.models.description import Attention, Decoder, Layer, LayerInputs, Mixture, Mlp, Norm
from jaxspec.models.families.gemma3 import NORMS, THETAS
from jaxspec.models.vision import gemma4_tower as tower
from jaxspec.models.weights import WHOLE, by_inputs, by_outputs, expert_stack, linear, norm_scale

__all__ = ["read", "tensors", "tower"]

# What transformers' Gemma4TextConfig has where a config.json is silent.
DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    if hf.get("use_bidirectional_attention") == "all":
        raise ConfigError(
            "config.json: use_bidirectional_attention 'all' is not supported; rows see earlier ones alone"
        )
    norm, window = reading.norm(hf), positive(hf, "sliding_window")
    windows = reading.windows(hf, window, lambda i: bool((i + 1) % 6))
    windows[-1] = None  # whatever the config says, as in transformers
    mlp = Mlp(positive(hf, "intermediate_size"), activation=reading.activation(hf, "hidden_activation"))
    kinds, inputs = {window: sliding(hf, norm, window), None: full(hf, norm, windows)}, layer_inputs(hf)
    width, own = inputs.width if inputs else 0, len(windows) - _shared_layers(hf, windows)
    wide = dataclasses.replace(mlp, width=mlp.width * (2 if hf.get("use_double_wide_mlp") else 1))
    layers = [
        Layer(
            dataclasses.replace(kinds[each], shared=i >= own),
            with_experts(hf, wide if i >= own else mlp),
            norm,
            post_norm=True,
            input_width=width,
            output_scaled=True,
        )
        for i, each in enumerate(windows)
    ]
    cap = hf.get("final_logit_softcapping")
    cap = None if cap is None else positive_float(hf, "final_logit_softcapping")
    decoder, scale = reading.decoder(hf, layers, norm), positive(hf, "hidden_size") ** 0.5
    return dataclasses.replace(decoder, embed_scale=scale, logit_cap=cap, layer_inputs=inputs)


def layer_inputs(hf: reading.Config) -> LayerInputs | None:
    """The per-layer embeddings, of models that have some."""
    if not hf.get("hidden_size_per_layer_input"):
        return None
    padding = hf.get("pad_token_id") or 0
    vocab = positive(hf, "vocab_size_per_layer_input")
    if type(padding) is not int or not 0 <= padding < vocab:
        raise ConfigError(f"config.json: pad_token_id must be a token id, got {shown(padding)}")
    inputs = LayerInputs(positive(hf, "hidden_size_per_layer_input"), vocab, padding)
    if inputs.vocab_size < positive(hf, "vocab_size"):
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input ({inputs.vocab_size}) must be at least vocab_size "
            f"({hf['vocab_size']})"
        )
    return inputs


def with_experts(hf: reading.Config, mlp: Mlp) -> Mlp | Mixture:
    """The MLP, or experts with it beside them."""
    if not hf.get("enable_moe_block"):
        return mlp
    experts = reading.experts(hf, "num_experts", "top_k_experts")
    return Mixture(*experts, positive(hf, "moe_intermediate_size"), activation=mlp.activation, beside=mlp)


def mixture_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """The experts and their router, and the MLP beside them. Experts are stacked, or in some quantised checkpoints one
    by one."""
    e, f, layer = m.experts, m.width, prefix.removesuffix("mlp.")
    each, up = layer + "experts.{}.", by_outputs(((f, 1),), ((f, 1),), groups=m.groups)
    gate_up = {f"{each}{name}.weight": f for name in ("gate_proj", "up_proj")}
    down, split = {each + "down_proj.weight": d}, by_inputs(f, groups=m.groups)
    return {
        **mlp_tensors(m.beside, d, prefix),
        "router": linear(d, {layer + "router.proj.weight": e}, exact=True, split=WHOLE),
        "router_norm": norm_scale(d, layer + "router.scale"),
        "expert_scale": norm_scale(e, layer + "router.per_expert_scale"),
        "experts_gate_up": expert_stack(e, d, layer + "experts.gate_up_proj", gate_up, up),
        "experts_down": expert_stack(e, f, layer + "experts.down_proj", down, split),
        "mlp_own_norm": norm_scale(d, layer + "post_feedforward_layernorm_1.weight"),
        "experts_norm": norm_scale(d, layer + "pre_feedforward_layernorm_2.weight"),
        "experts_own_norm": norm_scale(d, layer + "post_feedforward_layernorm_2.weight"),
    }


def _shared_layers(hf: reading.Config, windows: list[int | None]) -> int:
    """How many of the last layers have the keys and values of earlier ones, of which there is one of each kind."""
    count = reading.layer_number(hf, "num_kv_shared_layers")
    if count and not set(windows) <= set(windows[: max(len(windows) - count, 0)]):
        raise ConfigError(
            f"config.json: num_kv_shared_layers {count} of {len(windows)} leaves some kind of layer_types without keys "
            "and values of its own"
        )
    return count


def sliding(hf: reading.Config, norm: Norm, window: int) -> Attention:
    """The attention of layers that see a window."""
    return _attention(hf, "sliding_attention", norm, window=window)


def full(hf: reading.Config, norm: Norm, windows: list[int | None]) -> Attention:
    """The attention of layers that see all of the text."""
    own, k_is_v = {"head_dim": hf["global_head_dim"]}, bool(hf.get("attention_k_eq_v"))
    if k_is_v and hf.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = hf["num_global_key_value_heads"]
    if (by_layer := hf.get("per_layer_config")) is not None:  # empty where all layers have the same heads
        own = {} if by_layer == {} else _of_full_layers(by_layer, windows)
    return _attention({**hf, **own}, "full_attention", norm, k_is_v=k_is_v)


def _of_full_layers(by_layer: Any, windows: list[int | None]) -> Mapping[str, Any]:
    """The keys that full layers have of their own, as transformers 5.23 saves them: by number of the layer, with zeros
    before it so that all are as long."""
    numbers = [str(i) for i, window in enumerate(windows) if window is None]
    if isinstance(by_layer, Mapping):
        by_layer = {str(number).lstrip("0") or "0": own for number, own in by_layer.items()}
    own = by_layer.get(numbers[-1]) if isinstance(by_layer, Mapping) else None
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(own, Mapping) or not own.keys() <= known or by_layer != dict.fromkeys(numbers, own):
        raise ConfigError(
            "config.json: per_layer_config must have head_dim and num_key_value_heads of the layers with "
            f"full_attention, {', '.join(numbers)}, and the same ones for each; got {shown(by_layer)}"
        )
    return own


def _attention(hf: reading.Config, kind: str, norm: Norm, **more) -> Attention:
    bias = bool(hf.get("attention_bias", False))
    ropes = hf.get("rope_parameters") or ROPES
    more |= {"qk_norm": norm, "v_norm": norm, "scale": 1.0, "bias": bias, "out_bias": bias}
    return reading.attention(reading.with_rope({**hf, "rope_parameters": ropes}, kind, THETAS), **more)


tensors = partial(decoder_tensors, norms=NORMS, mixtures=mixture_tensors)
