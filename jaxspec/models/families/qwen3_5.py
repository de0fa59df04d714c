"""Qwen3.5: Qwen3-Next's layers with dense MLPs, and each projection of a linear layer a tensor of its own.

Names are those of `Qwen3_5ForCausalLM`. Public checkpoints have the text model beside a vision tower (`vision`). Rotary
positions have three axes, which are one where there are no pictures.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, channel_parts, decoder_tensors, delta_rule_tensors
from jaxspec.models.description import Decoder, DeltaRule, Layer
from jaxspec.models.families import qwen3_next
from jaxspec.models.rope import rope_settings
from jaxspec.models.vision import qwen_tower as tower
from jaxspec.models.weights import LEAST, by_outputs, linear

__all__ = ["read", "tensors", "tower"]

SECTIONS = (11, 11, 10)  # of the published sizes, where a config is silent


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    return with_sections(hf, qwen3_next.read(hf, reading.mlps(hf)))


def with_sections(hf: reading.Config, decoder: Decoder, default: tuple[int, int, int] = SECTIONS) -> Decoder:
    """The decoder, whose ropes turn some pairs by a picture's row and column. `default`: where a config is silent."""
    sections = rope_settings(hf)[0].get("mrope_section") or default
    numbers = isinstance(sections, list | tuple) and all(type(each) is int and each >= 0 for each in sections)
    if not numbers or len(sections) != 3:
        raise ConfigError(f"config.json: mrope_section must be three numbers of pairs, got {shown(sections)}")

    def sectioned(layer: Layer) -> Layer:
        if (rope := getattr(layer.mixing, "rope", None)) is None:
            return layer
        rope = dataclasses.replace(rope, sections=tuple(sections))
        return dataclasses.replace(layer, mixing=dataclasses.replace(layer.mixing, rope=rope))

    return dataclasses.replace(decoder, layers=tuple(map(sectioned, decoder.layers)))


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
