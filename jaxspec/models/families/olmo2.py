"""OLMo 2: a sub-layer's output is normed and its input isn't; queries are normed across all heads, and so are keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Decoder, Layer

__all__ = ["read", "tensors"]

# What transformers' Olmo2Config has where a config.json is silent.
DEFAULTS = {"rms_norm_eps": 1e-5}
NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


def read(
    hf: reading.Config, windows: list[int | None] | None = None, thetas: Mapping[str, tuple[str, float]] | None = None
) -> Decoder:
    """`windows`: how many positions each layer sees; None: all. `thetas`: of `with_rope`, where layers differ in it.

    **Raises:** `ConfigError` naming the key.
    """
    if windows is None:
        reading.full_attention_only(hf)
    norm, bias = reading.norm(hf), bool(hf.get("attention_bias", False))
    named = dict(qk_norm=norm, qk_norm_all=True, bias=bias, out_bias=bias)
    mlps = reading.mlps({**hf, "mlp_bias": False})
    windows, layers = windows or [None] * len(mlps), []
    for window, mlp in zip(windows, mlps, strict=True):
        kind = "sliding_attention" if window else "full_attention"
        attention = reading.attention(reading.with_rope(hf, kind, thetas) if thetas else hf, window=window, **named)
        layers.append(Layer(attention, mlp, norm, pre_norm=False, post_norm=True))
    return reading.decoder(hf, layers, norm)


tensors = partial(decoder_tensors, norms=NORMS)
