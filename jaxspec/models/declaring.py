"""Declarations of a decoder's parameters, under the names of Hugging Face checkpoints: `model.layers.0.*`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.models.description import (
    Attention,
    Decoder,
    DeltaRule,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    SigmoidScores,
)
from jaxspec.models.weights import (
    ONCE,
    WHOLE,
    Layout,
    Param,
    Parts,
    Split,
    bias,
    by_inputs,
    by_outputs,
    embedding,
    expert_stack,
    head,
    linear,
    norm_scale,
    run_length,
)

Tensors = dict[str, Param]
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # of a layer, by their names here
Declare = Callable[[Layer, int, str], Tensors]  # of a layer's mixing, given the model's width and the layer's prefix
Projections = Callable[[DeltaRule, int, str], Tensors]  # of a linear layer, given the width and the names' prefix
Mixtures = Callable[[Mixture, int, str], Tensors]  # of a mixture, the same


def decoder_tensors(
    decoder: Decoder,
    mixings: Mapping[type, Declare] | None = None,
    norms: Mapping[str, str] = NORMS,
    mixtures: Mixtures | None = None,
) -> dict[str, Any]:
    """The params pytree as declarations.

    `mixings`: those of kinds of mixing beside attention, by type of description. `norms`: the checkpoint's name of
    each. `mixtures`: of mixtures of experts, by default `mixture_tensors`.
    """
    d, v = decoder.width, decoder.vocab_size
    tree: dict[str, Any] = {
        "embed": embedding(v, d, "model.embed_tokens.weight"),
        "layers": [
            layer_tensors(layer, d, f"model.layers.{i}.", mixings, norms, mixtures)
            for i, layer in enumerate(decoder.layers)
        ],
        "norm": norm_scale(d, "model.norm.weight", decoder.norm.centred),
    }
    if not decoder.tied:
        tree["head"] = head(d, v, "lm_head.weight")
    if of := decoder.layer_inputs:
        columns = len(decoder.layers) * of.width
        projection = {"model.per_layer_model_projection.weight": columns}
        tree["layer_embed"] = embedding(of.vocab_size, columns, "model.embed_tokens_per_layer.weight")
        tree["layer_projection"] = linear(d, projection, split=WHOLE)
        tree["layer_projection_norm"] = norm_scale(of.width, "model.per_layer_projection_norm.weight")
    return tree


def layer_tensors(
    layer: Layer,
    d: int,
    prefix: str,
    mixings: Mapping[type, Declare] | None = None,
    norms: Mapping[str, str] = NORMS,
    mixtures: Mixtures | None = None,
) -> Tensors:
    """One decoder layer, whose tensors are called `prefix...` in the checkpoint."""
    declare = {Attention: attention_tensors, LatentAttention: latent_tensors, **(mixings or {})}[type(layer.mixing)]
    feed = (mixtures or mixture_tensors) if isinstance(layer.feed, Mixture) else mlp_tensors
    return {
        **{name: norm_scale(d, f"{prefix}{source}.weight", layer.norm.centred) for name, source in norms.items()},
        **declare(layer, d, prefix),
        **feed(layer.feed, d, prefix + "mlp."),
        **(input_tensors(layer, d, prefix) if layer.input_width else {}),
        **({"layer_scale": number(prefix + "layer_scalar")} if layer.output_scaled else {}),
    }


def input_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """A layer's own input. It is narrow, so each device has all of it."""
    w = layer.input_width
    return {
        "input_gate": linear(d, {prefix + "per_layer_input_gate.weight": w}, split=WHOLE),
        "input_out": linear(w, {prefix + "per_layer_projection.weight": d}, split=WHOLE),
        "input_norm": norm_scale(d, prefix + "post_per_layer_input_norm.weight", layer.norm.centred),
    }


def number(source: str) -> Param:
    """Declare a learnt number that something is multiplied by."""
    return Param((1,), (source,), Layout((1,)), init="ones", split=WHOLE)


def attention_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """Where attention is gated, each query head's columns are followed by its gate's."""
    a, prefix = layer.mixing, prefix + "self_attn."
    n, kinds = a.heads * a.values, 0 if a.shared else 1 if a.k_is_v else 2
    own = {"k_proj": (a.kv_heads, a.head_dim), "v_proj": (a.kv_heads, a.values)}
    heads = {"q_proj": (a.heads, 2 * a.head_dim if a.gated else a.head_dim), **dict(list(own.items())[:kinds])}
    widths, by_head = (
        {name: math.prod(each) for name, each in heads.items()},
        by_outputs(*[(x,) for x in heads.values()]),
    )
    tree = {
        "qkv": linear(d, {f"{prefix}{name}.weight": width for name, width in widths.items()}, split=by_head),
        "out": linear(n, {prefix + "o_proj.weight": d}, split=by_inputs(a.heads, a.values)),
    }
    if a.bias:
        tree["qkv_bias"] = bias({f"{prefix}{name}.bias": width for name, width in widths.items()}, split=by_head)
    if a.out_bias:
        tree["out_bias"] = bias({prefix + "o_proj.bias": d}, split=ONCE)
    if a.sinks:
        split = by_outputs(((a.heads, 1),))
        tree["sinks"] = Param((a.heads,), (prefix + "sinks",), Layout((a.heads,)), split=split)
    if a.qk_norm and not a.qk_norm_unit:
        for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads))[: 1 if a.shared else 2]:
            width, split = a.head_dim, WHOLE
            if a.qk_norm_all:
                width, split = heads * a.head_dim, by_outputs(((heads, a.head_dim),))
            tree[name] = norm_scale(width, f"{prefix}{name}.weight", a.qk_norm.centred, split)
    return tree


def latent_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """Latent attention. `latents` makes queries or their latent, then the latent of keys and values, then the columns
    that rotate. `keys_values` has all heads' keys first, which queries are multiplied by, then all their values."""
    a, prefix = layer.mixing, prefix + "self_attn."
    queries, both = a.heads * a.query_dim, a.key_dim + a.value_dim
    by_head, whole = ((a.heads, a.query_dim),), lambda width: ((1, width),)
    first, split = ("q_proj", queries), by_outputs(by_head, whole(a.memory.width))
    tree = {}
    if a.query_latent:
        first, split = ("q_a_proj", a.query_latent), WHOLE
        tree["query_norm"] = norm_scale(a.query_latent, prefix + "q_a_layernorm.weight")
        tree["queries"] = linear(a.query_latent, {prefix + "q_b_proj.weight": queries}, split=by_outputs(by_head))
    name, width = first
    sources = {f"{prefix}{name}.weight": width, prefix + "kv_a_proj_with_mqa.weight": a.memory.width}
    tree = {
        "latents": linear(d, sources, split=split),
        **tree,
        "latent_norm": norm_scale(a.latent, prefix + "kv_a_layernorm.weight"),
        "keys_values": Param(
            (a.latent, a.heads * both),
            (prefix + "kv_b_proj.weight",),
            Layout((a.heads * both,), grouped=(a.key_dim, a.value_dim)),
            transpose=True,
            split=by_outputs(((a.heads, both),)),
        ),
        "out": linear(a.heads * a.value_dim, {prefix + "o_proj.weight": d}, split=by_inputs(a.heads, a.value_dim)),
    }
    if a.by_request > 1:
        return {name: dataclasses.replace(param, split=WHOLE) for name, param in tree.items()}
    return tree


def delta_rule_tensors(layer: Layer, d: int, prefix: str, projections: Projections) -> Tensors:
    """Linear attention. What goes into an exponent stays in float32."""
    rule, prefix = layer.mixing, prefix + "linear_attn."
    heads, split = rule.value_heads, by_outputs(((rule.value_heads, 1),))
    return {
        **projections(rule, d, prefix),
        "conv": convolution(rule.taps, {prefix + "conv1d.weight": rule.channels}, by_outputs(channel_parts(rule))),
        "decay_log": exact_numbers(heads, prefix + "A_log", split),
        "decay_bias": exact_numbers(heads, prefix + "dt_bias", split),
        "read_norm": norm_scale(rule.value_dim, prefix + "norm.weight"),
        "out": linear(heads * rule.value_dim, {prefix + "out_proj.weight": d}, split=by_inputs(heads, rule.value_dim)),
    }


def convolution(taps: int, sources: dict[str, int], split: Split) -> Param:
    """Declare a short convolution's weight, of so many channels in each of its tensors."""
    widths = tuple(sources.values())
    named = dict(transpose=True, depthwise=True, split=split)
    return Param((taps, sum(widths)), tuple(sources), Layout(widths), **named)


def exact_numbers(count: int, source: str, split: Split, init: str = "zeros", **named: Any) -> Param:
    """Declare numbers that go into an exponent, or are multiplied by a state: they stay in float32."""
    return Param((count,), (source,), Layout((count,)), dtype="float32", init=init, split=split, **named)


def channel_parts(rule: DeltaRule) -> Parts:
    """The heads whose queries, keys and values are the channels of the convolution."""
    keys = rule.key_heads, rule.key_dim
    return keys, keys, (rule.value_heads, rule.value_dim)


def mlp_tensors(mlp: Mlp, d: int, prefix: str) -> Tensors:
    """A dense MLP. Columns of gate and up alternate in runs, so that a tile of them holds both."""
    f, run = mlp.width, run_length(mlp.width) if mlp.gated else 0
    first, names = first_of(mlp)
    split = by_outputs(*[((f, 1),)] * len(names))
    tree = {
        first: linear(d, {f"{prefix}{name}.weight": f for name in names}, run, split=split),
        "down": linear(f, {prefix + "down_proj.weight": d}, split=by_inputs(f)),
    }
    if mlp.bias:
        tree[f"{first}_bias"] = bias({f"{prefix}{name}.bias": f for name in names}, run, split=split)
        tree["down_bias"] = bias({prefix + "down_proj.bias": d}, split=ONCE)
    return tree


def first_of(feed: Mlp | Mixture) -> tuple[str, tuple[str, ...]]:
    """The name of an MLP's first weight, and the checkpoint's names of its parts."""
    return ("gate_up", ("gate_proj", "up_proj")) if feed.gated else ("up", ("up_proj",))


def mixture_tensors(mixture: Mixture, d: int, prefix: str) -> Tensors:
    """A mixture of experts.

    Experts are stacked, `experts_gate_up` [e, 2f, d] (gate's rows first) and `experts_down` [e, d, f], in checkpoints'
    own orientation: their many small matrices are never transposed. Checkpoints have them one by one, or stacked like
    this already. Experts without a gate have `experts_up` [e, f, d]. Several devices have projections to a latent and
    back whole, each.
    """
    e, f, s, wide = mixture.experts, mixture.width, mixture.shared, mixture.latent or d
    each, shared = prefix + "experts.{}.", prefix + ("shared_expert." if mixture.shared_gated else "shared_experts.")
    first, names = first_of(mixture)
    split = lambda width, groups=1: by_outputs(*[((width, 1),)] * len(names), groups=groups)  # noqa: E731
    up = {f"{each}{name}.weight": f for name in names}
    down = {each + "down_proj.weight": wide}
    tree = {
        "router": linear(d, {prefix + "gate.weight": e}, exact=True, split=WHOLE),
        f"experts_{first}": expert_stack(e, wide, f"{prefix}experts.{first}_proj", up, split(f, mixture.groups)),
        "experts_down": expert_stack(e, f, prefix + "experts.down_proj", down, by_inputs(f, groups=mixture.groups)),
    }
    if s:
        up = {f"{shared}{name}.weight": s for name in names}
        tree[f"shared_{first}"] = expert_stack(1, d, "", up, split(s))
        tree["shared_down"] = expert_stack(1, s, "", {shared + "down_proj.weight": d}, by_inputs(s))
        if mixture.shared_gated:
            tree["shared_gate"] = linear(d, {prefix + "shared_expert_gate.weight": 1}, exact=True, split=WHOLE)
    if isinstance(mixture.scores, SigmoidScores) and mixture.scores.corrected:
        tree["router_correction"] = correction(e, prefix + "gate.e_score_correction_bias")
    if mixture.latent:
        tree["latent_in"] = linear(d, {prefix + "fc1_latent_proj.weight": wide}, split=WHOLE)
        tree["latent_out"] = linear(wide, {prefix + "fc2_latent_proj.weight": d}, split=WHOLE)
    return tree


def stacked_transposed(tree: Tensors) -> Tensors:
    """The mixture of a checkpoint that stacks experts, each matrix transposed. Quantised ones have them one by one."""
    stacks = {name: tree[name] for name in ("experts_gate_up", "experts_down")}
    return tree | {
        name: dataclasses.replace(param, sources=(param.whole,), apart=param.sources, transpose=True)
        for name, param in stacks.items()
    }


def mixtral_tensors(m: Mixture, d: int, prefix: str, correction_bias: str = "gate.e_score_correction_bias") -> Tensors:
    """A mixture under Mixtral's names: an expert's gate, down and up are w1, w2 and w3. `correction_bias`: the name of
    the scores' correction."""
    tree = mixture_tensors(m, d, prefix.removesuffix("mlp.") + "block_sparse_moe.")
    for name, parts in (
        ("experts_gate_up", {"gate_proj": "w1", "up_proj": "w3"}),
        ("experts_down", {"down_proj": "w2"}),
        ("router_correction", {"gate.e_score_correction_bias": correction_bias}),
    ):
        if name in tree:
            tree[name] = renamed(tree[name], parts)
    return tree


def renamed(param: Param, names: Mapping[str, str]) -> Param:
    """The declaration with other parts of its sources' names."""
    sources = param.sources
    for old, new in names.items():
        sources = tuple(source.replace(old, new) for source in sources)
    return dataclasses.replace(param, sources=sources)


def correction(experts: int, source: str) -> Param:
    """Declare the numbers that are added to experts' scores before the choice, float32 [e]."""
    return Param((experts,), (source,), Layout((experts,)), dtype="float32", init="zeros", split=WHOLE)
