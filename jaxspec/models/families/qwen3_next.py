"""Qwen3-Next: layers of linear attention, every fourth one of full attention, each with experts behind it.

Linear layers run a gated delta rule over a state of fixed size, behind a short convolution. Full attention is Qwen3's
with a gate on its output, and part of each head rotates. Which layer is which, the config says. Norms are
zero-centred, but for the one inside a linear layer. Names and conventions are those of `Qwen3NextForCausalLM`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, delta_rule_tensors
from jaxspec.models.description import Decoder, DeltaRule, Layer, Mixture, Mlp
from jaxspec.models.weights import LEAST, Layout, Param, by_outputs

__all__ = ["read", "tensors"]


def read(hf: reading.Config, feeds: list[Mlp | Mixture] | None = None) -> Decoder:
    """`feeds`: what layers have for an MLP; by default experts. **Raises:** `ConfigError` naming the key."""
    reading.no_windows(hf)
    reading.only(hf, {"attention_bias": False, "hidden_act": "silu"})
    if hf.get("attn_output_gate", True) is not True:
        raise ConfigError("config.json: attn_output_gate false is not supported; attention is gated in these models")
    if (gate := hf.get("output_gate_type", "silu")) not in ("silu", "swish"):
        raise ConfigError(
            f"output_gate_type {shown(gate)} is not supported for model_type {hf['model_type']!r}; supported: silu "
            "(also called swish)"
        )
    norm, linear = reading.norm(hf, centred=True), linear_layers(hf)
    attention = reading.attention(hf, qk_norm=norm, gated=True, rotated=0.25)
    rule = delta_rule(hf)
    feeds = feeds or reading.mixtures(hf, renormalised=True)
    layers = [Layer(rule if each else attention, feed, norm) for each, feed in zip(linear, feeds, strict=True)]
    return reading.decoder(hf, layers, norm)


def linear_layers(hf: reading.Config) -> list[bool]:
    """Which layers are of linear attention: by `layer_types`, or all but each n-th."""
    known = ("full_attention", "linear_attention")
    default = lambda i: known[(i + 1) % positive(hf, "full_attention_interval", 4) > 0]  # noqa: E731
    kinds = reading.kinds(hf, "layer_types", known, default)
    if set(kinds) != set(known):
        raise ConfigError(f"config.json: layer_types has no {set(known).difference(kinds).pop()} layer, and needs both")
    return [kind == "linear_attention" for kind in kinds]


def delta_rule(hf: reading.Config) -> DeltaRule:
    """The linear attention that a config describes. **Raises:** `ConfigError` for sizes that don't fit together."""
    keys, values = positive(hf, "linear_num_key_heads"), positive(hf, "linear_num_value_heads")
    if values % keys:
        raise ConfigError(f"linear_num_value_heads ({values}) must be a multiple of linear_num_key_heads ({keys})")
    return DeltaRule(
        key_heads=keys,
        value_heads=values,
        key_dim=positive(hf, "linear_key_head_dim"),
        value_dim=positive(hf, "linear_value_head_dim"),
        taps=positive(hf, "linear_conv_kernel_dim"),
    )


def grouped_projections(rule: DeltaRule, d: int, prefix: str) -> Tensors:
    """The projections of a linear layer's input: `qkvz`, and `ba`, from which beta and the decay come.

    The checkpoint has both in groups, one a key head: its q and k, then v and z of its value heads; b and a of those.
    """
    heads = rule.value_heads // rule.key_heads
    values = heads * rule.value_dim

    def grouped(name: str, *widths: int, **options: Any) -> Param:
        columns = rule.key_heads * sum(widths)
        layout = Layout((columns,), grouped=widths)
        split = by_outputs(((rule.key_heads, sum(widths)),))
        return Param((d, columns), (prefix + name,), layout, transpose=True, split=split, **options)

    return {
        "qkvz": grouped("in_proj_qkvz.weight", rule.key_dim, rule.key_dim, values, values),
        "ba": grouped("in_proj_ba.weight", heads, heads, exact=True, least=LEAST),
    }


tensors = partial(decoder_tensors, mixings={DeltaRule: partial(delta_rule_tensors, projections=grouped_projections)})
