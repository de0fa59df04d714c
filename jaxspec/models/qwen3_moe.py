"""Qwen3 with experts: Qwen3's decoder, most of whose layers have a mixture of experts for an MLP (`models.moe`)."""

from jaxspec.models.llama import forward, parameters, unembed

QK_NORM = True
NORM_TOPK_PROB = False  # transformers' default; the published configs say true

__all__ = ["NORM_TOPK_PROB", "QK_NORM", "forward", "parameters", "unembed"]
