"""Hunyuan with experts (Hunyuan-A13B): Hunyuan's attention, and a mixture with a shared expert in each layer."""

from __future__ import annotations

from typing import Any

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, mixture_tensors, renamed
from jaxspec.models.description import Decoder, Mixture
from jaxspec.models.families import hunyuan_v1_dense

__all__ = ["read", "tensors"]

# What transformers' HunYuanMoEV1Config has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1, "num_shared_expert": 1}
ONLY = {"use_qk_norm": True, "use_mixed_mlp_moe": True, "use_cla": False}
BY_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")  # a number, or one for each layer


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    hf = {**hf, **{key: _of_all_layers(hf[key], key) for key in BY_LAYER if hf.get(key) is not None}}
    reading.only(hf, ONLY)
    reading.silu_experts(hf)
    shared = positive(hf, "intermediate_size") * positive(hf, "num_shared_expert")
    width = positive(hf, "moe_intermediate_size", hf["intermediate_size"])
    mixture = Mixture(*reading.experts(hf, "num_experts", "moe_topk"), width, shared=shared, shared_gated=False)
    return hunyuan_v1_dense.read(hf, [mixture] * positive(hf, "num_hidden_layers"))


def _of_all_layers(given: Any, key: str) -> Any:
    """The one number that all layers have."""
    if not isinstance(given, list | tuple):
        return given
    if not given or any(each != given[0] for each in given):
        raise ConfigError(f"config.json: {key} must be the same in all layers, got {shown(given)}")
    return given[0]


def named_tensors(m: Mixture, d: int, prefix: str) -> Tensors:
    """The mixture, whose router and shared expert have other names."""
    names = {"mlp.gate.": "mlp.gate.wg.", "shared_experts.": "shared_mlp."}
    return {name: renamed(param, names) for name, param in mixture_tensors(m, d, prefix).items()}


def tensors(decoder: Decoder) -> dict[str, Any]:
    return hunyuan_v1_dense.tensors(decoder, mixtures=named_tensors)
