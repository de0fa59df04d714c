"""Qwen3.5 with experts: Qwen3.5's layers, each with a mixture of experts for an MLP."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.description import Decoder
from jaxspec.models.families import qwen3_next
from jaxspec.models.families.qwen3_5 import tensors, tower, with_sections

__all__ = ["read", "tensors", "tower"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    feeds = reading.mixtures(hf, renormalised=True)  # there is no key for it
    return with_sections(hf, qwen3_next.read(hf, feeds))
