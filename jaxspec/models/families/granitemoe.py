"""Granite 3 with experts: Granite's decoder and multipliers, and a mixture in each layer.

Checkpoints have the experts of a layer as two tensors, gate's rows first.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import positive
from jaxspec.models import declaring, reading
from jaxspec.models.declaring import Tensors, decoder_tensors, renamed
from jaxspec.models.description import Decoder, Mixture
from jaxspec.models.families import granite
from jaxspec.models.weights import Layout, by_outputs

__all__ = ["read", "tensors"]

# What transformers' GraniteMoeConfig has where a config.json is silent.
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    return granite.read(hf, [mixture(hf)] * positive(hf, "num_hidden_layers"))


def mixture(hf: reading.Config, shared: int = 0) -> Mixture:
    """`shared`: the width of the shared expert."""
    reading.silu_experts(hf)
    experts = reading.experts(hf, "num_local_experts")
    return Mixture(*experts, positive(hf, "intermediate_size"), shared=shared, shared_gated=not shared)


def mixture_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """The experts and their router, and the shared expert beside them."""
    layer, both = prefix.removesuffix("mlp."), ((m.shared, 1), (m.shared, 1))
    experts = layer + "block_sparse_moe."
    tree = declaring.mixture_tensors(m, d, experts)
    tree["router"] = renamed(tree["router"], {"gate.weight": "router.layer.weight"})
    for name, source in (("experts_gate_up", "input_linear.weight"), ("experts_down", "output_linear.weight")):
        tree[name] = dataclasses.replace(tree[name], sources=(experts + source,), whole=experts + source)
    if m.shared:
        inputs, outputs = (f"{layer}shared_mlp.{name}_linear.weight" for name in ("input", "output"))
        named = dict(sources=(inputs,), layout=Layout((2 * m.shared,)), split=by_outputs(both))
        tree["shared_gate_up"] = dataclasses.replace(tree["shared_gate_up"], **named)
        tree["shared_down"] = dataclasses.replace(tree["shared_down"], sources=(outputs,))
    return tree


tensors = partial(decoder_tensors, mixtures=mixture_tensors)
