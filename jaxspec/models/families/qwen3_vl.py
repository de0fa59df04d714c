"""Qwen3-VL: Qwen3's text model beside a vision tower that also adds to the residual stream behind the first layers.

Rotary positions have three axes, as Qwen3.5's.
"""

from __future__ import annotations

from functools import partial

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder, Mixture, Mlp
from jaxspec.models.families import qwen3
from jaxspec.models.families.qwen3_5 import with_sections
from jaxspec.models.vision import qwen_tower

__all__ = ["read", "tensors", "tower"]

SECTIONS = (24, 20, 20)  # of the published sizes, where a config is silent
tower = partial(qwen_tower, deepstack=(8, 16, 24))


def read(hf: reading.Config, feeds: list[Mlp | Mixture] | None = None) -> Decoder:
    """`feeds`: what layers have for an MLP. **Raises:** `ConfigError` naming the key."""
    return with_sections(hf, qwen3.read(hf, feeds), SECTIONS)
