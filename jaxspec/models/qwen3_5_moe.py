"""Qwen3.5 with experts: Qwen3.5's layers, each with a mixture of experts for an MLP (`models.moe`)."""

from jaxspec.models.qwen3_5 import HYBRID, QK_NORM, forward, parameters, unembed

NORM_TOPK_PROB = True  # there is no key for it

__all__ = ["HYBRID", "NORM_TOPK_PROB", "QK_NORM", "forward", "parameters", "unembed"]
