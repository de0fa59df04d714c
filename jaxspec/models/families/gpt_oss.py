"""gpt-oss: every other layer sees a window, heads have attention sinks, and all layers have experts with biases.

An expert is a SwiGLU with clamped inputs. Experts' weights are MXFP4 in published checkpoints, and bfloat16
`[experts, in, out]` in dequantised ones; gate's columns alternate with up's one by one in both. Names and equations are
those of `GptOssForCausalLM`.
"""

from __future__ import annotations

from functools import partial

from jaxspec.config.json_values import positive, positive_float
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors
from jaxspec.models.description import ClampedSwiglu, Decoder, Mixture
from jaxspec.models.weights import WHOLE, Layout, Param, Split, bias, by_inputs, by_outputs, linear

__all__ = ["read", "tensors"]

# What transformers' GptOssConfig has where a config.json is silent.
DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}

ENDS = ("<|return|>", "<|call|>")  # of a reply, and of a call of a tool, which somebody else answers


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    norm, biased = reading.norm(hf), bool(hf["attention_bias"])
    attention = reading.attention(hf, bias=biased, out_bias=biased, sinks=True)
    window = None if hf["sliding_window"] is None else positive(hf, "sliding_window")
    windows = reading.windows(hf, window, lambda i: i % 2 == 0)
    feeds = [mixture(hf)] * positive(hf, "num_hidden_layers")
    return reading.decoder(hf, reading.layers(attention, feeds, norm, windows), norm)


def mixture(hf: reading.Config) -> Mixture:
    """A softmax over the logits of the experts chosen is one over all logits, renormalised among the chosen."""
    reading.silu_experts(hf)
    experts, chosen = reading.experts(hf, "num_local_experts")
    return Mixture(
        experts=experts,
        per_token=chosen,
        width=positive(hf, "intermediate_size"),
        bias=True,
        router_bias=True,
        activation=ClampedSwiglu(positive_float(hf, "swiglu_alpha"), positive_float(hf, "swiglu_limit")),
    )


def mixture_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """Router and experts with their biases. Here gate's rows come first, as in other mixtures."""
    e, f, experts = m.experts, m.width, prefix + "experts."
    gate_up, down, pairs = Layout((2 * f,), grouped=(1, 1)), Layout((d,)), by_outputs(((f, 2),), groups=m.groups)

    def stack(name: str, outputs: int, inputs: int, layout: Layout, split: Split) -> Param:
        name = experts + name
        return Param((e, outputs, inputs), (name,), layout, transpose=True, whole=name, split=split)

    def biases(name: str, outputs: int, layout: Layout, split: Split) -> Param:
        return Param((e, outputs), (experts + name,), layout, init="zeros", split=split)

    return {
        "router": linear(d, {prefix + "router.weight": e}, exact=True, split=WHOLE),
        "router_bias": bias({prefix + "router.bias": e}, split=WHOLE),
        "experts_gate_up": stack("gate_up_proj", 2 * f, d, gate_up, pairs),
        "experts_gate_up_bias": biases("gate_up_proj_bias", 2 * f, gate_up, pairs),
        "experts_down": stack("down_proj", d, f, down, by_inputs(f, groups=m.groups)),
        "experts_down_bias": biases("down_proj_bias", d, down, Split("once", groups=m.groups)),
    }


tensors = partial(decoder_tensors, mixtures=mixture_tensors)
