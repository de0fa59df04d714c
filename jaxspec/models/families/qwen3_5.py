"""Qwen3.5: Qwen3-Next's layers with dense MLPs, and each projection of a linear layer a tensor of its own.

Names are those of `Qwen3_5ForCausalLM`. Public checkpoints have the text model beside a vision tower, which is left
out: without images, the three axes that its rotary positions have are one.
"""

from __future__ import annotations

from functools import partial

from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, channel_parts, decoder_tensors, delta_rule_tensors
from jaxspec.models.description import Decoder, DeltaRule
from jaxspec.models.families import qwen3_next
from jaxspec.models.weights import LEAST, by_outputs, linear

__all__ = ["read", "tensors"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    return qwen3_next.read(hf, reading.mlps(hf))


def separate_projections(rule: DeltaRule, d: int, prefix: str) -> Tensors:
    """Projections of a linear layer's input as in `qwen3_next.grouped_projections`, from tensors without groups."""
    values, heads = rule.value_heads * rule.value_dim, rule.value_heads
    qkvz = {prefix + "in_proj_qkv.weight": rule.channels, prefix + "in_proj_z.weight": values}
    ba = {prefix + "in_proj_b.weight": heads, prefix + "in_proj_a.weight": heads}
    return {
        "qkvz": linear(d, qkvz, split=by_outputs(channel_parts(rule), ((heads, rule.value_dim),))),
        "ba": linear(d, ba, exact=True, split=by_outputs(*[((heads, 1),)] * 2), least=LEAST),
    }


tensors = partial(decoder_tensors, mixings={DeltaRule: partial(delta_rule_tensors, projections=separate_projections)})
