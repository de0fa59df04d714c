"""Qwen3 dense: Llama's decoder with an RMS norm over each query and key head, before the rotary embedding."""

from jaxspec.models.llama import forward, parameters, unembed

QK_NORM = True

__all__ = ["QK_NORM", "forward", "parameters", "unembed"]
