"""Qwen3.5: Qwen3-Next's layers, with each projection of a linear layer a tensor of its own.

Names are those of `Qwen3_5ForCausalLM`. Public checkpoints have the text model beside a vision tower, which is left
out: without images, the three axes that its rotary positions have are one.
"""

from __future__ import annotations

from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.models import qwen3_next
from jaxspec.models.layers import Param, linear
from jaxspec.models.qwen3_next import HYBRID, QK_NORM, forward, unembed

__all__ = ["HYBRID", "QK_NORM", "forward", "parameters", "unembed"]


def projections(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """As `qwen3_next.projections`, of tensors in no groups."""
    d, mix = config.hidden_size, config.linear
    values, heads = mix.value_heads * mix.value_dim, mix.value_heads
    return {
        "qkvz": linear(d, {prefix + "in_proj_qkv.weight": mix.channels, prefix + "in_proj_z.weight": values}),
        "ba": linear(d, {prefix + "in_proj_b.weight": heads, prefix + "in_proj_a.weight": heads}),
    }


def parameters(config: ModelConfig) -> dict[str, Any]:
    """The params pytree as declarations."""
    return qwen3_next.parameters(config, projections)
