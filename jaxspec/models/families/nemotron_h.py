"""Nemotron-H and Nemotron 3: each layer is a state-space layer, attention, an MLP or a mixture, behind one norm.

Attention doesn't rotate. MLPs have no gate, and square ReLU. Experts are scored by a sigmoid; those of some models take
a projection of the rows. Names are those of NVIDIA's checkpoints.
"""

from __future__ import annotations

import dataclasses
import math

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import (
    Tensors,
    attention_tensors,
    convolution,
    exact_numbers,
    mixture_tensors,
    mlp_tensors,
    renamed,
)
from jaxspec.models.description import Absent, Attention, Decoder, Layer, Mamba2, Mixture, Mlp, Norm
from jaxspec.models.families import glm4_moe
from jaxspec.models.rope_scaling import NoRotation, Rope
from jaxspec.models.weights import (
    ONCE,
    bias,
    by_inputs,
    by_outputs,
    embedding,
    head,
    linear,
    norm_scale,
)

__all__ = ["read", "tensors"]

# What transformers' NemotronHConfig has where a config.json is silent.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_limit": (0.0, float("inf")),
    "layer_norm_epsilon": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
# Other names of some keys, and of layers.
OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    hf = {**hf, **{ours: hf[theirs] for theirs, ours in OLDER.items() if theirs in hf}}
    only = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "sliding_window": None}
    reading.only(hf, {**only, "tie_word_embeddings": False})  # transformers has a head whatever the key says
    norm = Norm(positive_float(hf, "layer_norm_epsilon"))
    make = {
        "mamba": lambda: (mamba2(hf), Absent()),
        "attention": lambda: (attention(hf), Absent()),
        "mlp": lambda: (Absent(), Mlp(positive(hf, "intermediate_size"), bool(hf.get("mlp_bias")), "relu2", False)),
        "moe": lambda: (Absent(), mixture(hf)),
    }
    kinds = layer_kinds(hf)
    made = {kind: Layer(*make[kind](), norm) for kind in set(kinds)}
    if "attention" not in made:
        raise ConfigError(
            "config.json: the layers have no attention, and need a layer of it; see hybrid_override_pattern"
        )
    return reading.decoder(hf, [made[kind] for kind in kinds], norm)


def layer_kinds(hf: reading.Config) -> list[str]:
    """Kind of each layer, by `layers_block_type`, or `hybrid_override_pattern`, a letter a layer."""
    named = hf.get("layers_block_type") or hf.get("layer_types")
    if named is None:
        pattern = hf.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(LETTERS):
            raise ConfigError(
                "config.json: hybrid_override_pattern must have a letter for each layer, "
                f"{', '.join(f'{letter} ({kind})' for letter, kind in LETTERS.items())}; got {shown(pattern)}"
            )
        return [LETTERS[letter] for letter in pattern]
    known = [*NAMES, *LETTERS.values()]
    if not isinstance(named, list | tuple) or not named or any(kind not in known for kind in named):
        raise ConfigError(
            f"config.json: layers_block_type must name layers, each {', '.join(known)}; got {shown(named)}"
        )
    return [NAMES.get(kind, kind) for kind in named]


def attention(hf: reading.Config) -> Attention:
    """Grouped attention without a rotation, though configs have the keys of one."""
    heads, kv_heads = positive(hf, "num_attention_heads"), positive(hf, "num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    biased = bool(hf.get("attention_bias"))
    rope = Rope(1e4, NoRotation())
    return Attention(heads, kv_heads, positive(hf, "head_dim"), rope, bias=biased, out_bias=biased)


def mamba2(hf: reading.Config) -> Mamba2:
    """The state-space layer that a config describes."""
    limit = hf["time_step_limit"]
    if isinstance(limit, list):  # JSON has no infinity; transformers 5 saves an object
        limit = [math.inf if each == {"__float__": "Infinity"} else each for each in limit]
    numbers = isinstance(limit, list | tuple) and all(type(each) in (int, float) for each in limit)
    if not numbers or len(limit) != 2 or not 0 <= limit[0] < limit[1]:
        raise ConfigError(f"config.json: time_step_limit must be two numbers, least and most; got {shown(limit)}")
    heads, groups = positive(hf, "mamba_num_heads"), positive(hf, "n_groups")
    if heads % groups:
        raise ConfigError(f"config.json: mamba_num_heads ({heads}) must be a multiple of n_groups ({groups})")
    return Mamba2(
        heads=heads,
        width=positive(hf, "mamba_head_dim"),
        groups=groups,
        state=positive(hf, "ssm_state_size"),
        taps=positive(hf, "conv_kernel"),
        conv_bias=bool(hf["use_conv_bias"]),
        bias=bool(hf.get("use_bias")),
        least_step=float(limit[0]),
        most_step=float(limit[1]),
    )


def mixture(hf: reading.Config) -> Mixture:
    """Keys as DeepSeek-V3 named them, but for the shared expert's width."""
    if hf.get("mlp_bias"):
        raise ConfigError("config.json: mlp_bias true is not supported for experts")
    return dataclasses.replace(
        glm4_moe.mixture({**hf, "n_shared_experts": 0, "hidden_act": "silu"}),
        shared=positive(hf, "moe_shared_expert_intermediate_size"),
        activation="relu2",
        gated=False,
        latent=positive(hf, "moe_latent_size") if hf.get("moe_latent_size") else 0,
    )


def tensors(decoder: Decoder) -> dict:
    """The params pytree as declarations."""
    d, v = decoder.width, decoder.vocab_size
    tree = {
        "embed": embedding(v, d, "backbone.embeddings.weight"),
        "layers": [layer_tensors(layer, d, f"backbone.layers.{i}.") for i, layer in enumerate(decoder.layers)],
        "norm": norm_scale(d, "backbone.norm_f.weight"),
    }
    return tree if decoder.tied else {**tree, "head": head(d, v, "lm_head.weight")}


def layer_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """One layer: its norm, and its mixer, which may be an MLP."""
    mixes = isinstance(layer.feed, Absent)
    norm = {"attn_norm" if mixes else "mlp_norm": norm_scale(d, prefix + "norm.weight")}
    return norm | TENSORS[type(layer.mixing if mixes else layer.feed)](layer, d, prefix)


def _attention(layer: Layer, d: int, prefix: str) -> Tensors:
    """Attention's tensors, which have the names of the mixer's here."""
    tensors = attention_tensors(layer, d, prefix)
    return {name: renamed(param, {"self_attn.": "mixer."}) for name, param in tensors.items()}


TENSORS = {
    Attention: _attention,
    Mamba2: lambda layer, d, prefix: mamba2_tensors(layer.mixing, d, prefix + "mixer."),
    Mixture: lambda layer, d, prefix: mixture_tensors(layer.feed, d, prefix + "mixer."),
    Mlp: lambda layer, d, prefix: mlp_tensors(layer.feed, d, prefix + "mixer."),
}


def mamba2_tensors(m: Mamba2, d: int, prefix: str) -> Tensors:
    """A state-space layer. What goes into an exponent stays in float32. dt is a column a head, of which a device has
    fewer than a block.
    """
    heads, states = (m.heads, m.width), (m.groups, m.state)
    channels = heads, states, states
    made = by_outputs((heads, *channels, (m.heads, 1)))
    each = lambda name, init: exact_numbers(m.heads, prefix + name, by_outputs(((m.heads, 1),)), init)  # noqa: E731
    first = linear(d, {prefix + "in_proj.weight": m.inner + m.channels + m.heads}, split=made)
    tree = {
        "in": dataclasses.replace(first, by_output=True),
        "conv": convolution(m.taps, {prefix + "conv1d.weight": m.channels}, by_outputs(channels)),
        "decay_log": each("A_log", "zeros"),
        "step_bias": each("dt_bias", "zeros"),
        "skip": each("D", "ones"),
        "read_norm": norm_scale(m.inner, prefix + "norm.weight", split=by_outputs((heads,))),
        "out": linear(m.inner, {prefix + "out_proj.weight": d}, split=by_inputs(*heads)),
    }
    if m.conv_bias:
        tree["conv_bias"] = bias({prefix + "conv1d.bias": m.channels}, split=by_outputs(channels))
    if m.bias:
        tree["in_bias"] = bias({prefix + "in_proj.bias": m.inner + m.channels + m.heads}, split=made)
        tree["out_bias"] = bias({prefix + "out_proj.bias": d}, split=ONCE)
    return tree
