"""Kimi-K2: DeepSeek-V3 with more experts, in one group."""

from jaxspec.models.families.deepseek_v3 import DEFAULTS, read, tensors

__all__ = ["DEFAULTS", "read", "tensors"]
