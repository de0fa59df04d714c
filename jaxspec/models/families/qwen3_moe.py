"""Qwen3 with experts: Qwen3's decoder, most of whose layers have a mixture of experts for an MLP."""

from __future__ import annotations

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors as tensors
from jaxspec.models.description import Decoder
from jaxspec.models.families import qwen3

__all__ = ["read", "tensors"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    # False is transformers' default; the published configs say true.
    return qwen3.read(hf, reading.mixtures(hf, renormalised=False))
