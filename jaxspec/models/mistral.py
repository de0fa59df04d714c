"""Mistral: Llama's decoder. Where layers see a window alone, it must hold the whole context."""

from __future__ import annotations

from jaxspec.config import ConfigError, positive
from jaxspec.decoder.spec import Decoder
from jaxspec.models import llama, reading
from jaxspec.models.declaring import decoder_tensors as tensors

__all__ = ["read", "tensors"]


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    if hf.get("sliding_window") is not None:
        window, longest = positive(hf, "sliding_window"), positive(hf, "max_position_embeddings")
        if window < longest:
            raise ConfigError(
                f"sliding_window {window} with max_position_embeddings {longest}: attention within a window is not "
                f"supported; lower max_position_embeddings to {window} to serve contexts that the window holds"
            )
    return llama.read(hf)
