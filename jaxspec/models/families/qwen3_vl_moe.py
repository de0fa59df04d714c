"""Qwen3-VL with experts, which are stacked in its checkpoints, each matrix transposed; quantised ones have them one by
one."""

from __future__ import annotations

from functools import partial

from jaxspec.models import reading
from jaxspec.models.declaring import Tensors, decoder_tensors, mixture_tensors, stacked_transposed
from jaxspec.models.description import Decoder, Mixture
from jaxspec.models.families import qwen3_vl
from jaxspec.models.families.qwen3_vl import tower

__all__ = ["read", "tensors", "tower"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    return qwen3_vl.read(hf, reading.mixtures(hf, renormalised=True))


def _transposed(mixture: Mixture, d: int, prefix: str) -> Tensors:
    return stacked_transposed(mixture_tensors(mixture, d, prefix))


tensors = partial(decoder_tensors, mixtures=_transposed)
