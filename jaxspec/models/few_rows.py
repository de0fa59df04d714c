"""Decoder layers of a small dense model at few rows, each in four kernels and attention's: see `pallas.few_rows`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.config import ModelConfig
from jaxspec.models.layers import Mixer, rms_norm, rope_frequencies
from jaxspec.pallas import few_rows
from jaxspec.pallas.project import run
from jaxspec.pallas.weight_stream import HALF


def supported(params: dict[str, Any], config: ModelConfig, rows: int, mixer: Mixer, cache: Any) -> str | None:
    """Why `layers` can't run so many rows of this model over what `mixer` keeps, or None if it can."""
    if config.attention_bias or config.mlp_bias:
        return "biases"
    if config.num_experts:
        return "experts"
    if config.qk_norm:
        return "norms of queries and keys"
    if not hasattr(mixer, "attend_written"):
        return "no pages to write to"
    if config.rotary_dim != config.head_dim or run(config.mlp_size) != HALF:
        return f"{config.rotary_dim} of {config.head_dim} columns rotated, an MLP {config.mlp_size} wide"
    inputs = config.hidden_size, config.num_heads * config.head_dim, config.mlp_size
    dtypes = params["layers"][0]["qkv"].dtype, mixer.pages(cache).dtype
    return few_rows.supported(rows, config.head_dim, inputs, *dtypes)


def layers(params, config, x, positions, mixer, cache):
    """All decoder layers; the final norm's output, each layer's output, the cache. As `llama._plain_layers`."""
    (b, t, _), eps, outputs = x.shape, config.rms_norm_eps, []
    rows = b * t

    def flat(a: Array, fill: int = 0) -> Array:
        """Rows one under the other, filled up to what the kernels take."""
        a = a.reshape(rows, -1)
        return jnp.pad(a, ((0, -rows % few_rows.GROUP), (0, 0)), constant_values=fill)

    angle = flat(positions).astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    @jax.jit  # one trace and one lowering for all layers: the index is data
    def decoder_layer(layer, following, i, x, cache):
        def write(kv, place):
            operands = x, layer["attn_norm"], layer["qkv"], cos, sin, kv, i, flat(place, -1)[:, 0]
            q, kv = few_rows.heads(*operands, [layer["out"], layer["gate_up"], layer["down"]], eps=eps)
            return q[:rows].reshape(b, t, config.num_heads, config.head_dim), kv

        mixed, cache = mixer.attend_written(cache, i, t, write)
        x = few_rows.add_product(x, flat(mixed), layer["out"])
        hidden = few_rows.gated(x, layer["mlp_norm"], layer["gate_up"], [following], eps=eps)
        return few_rows.add_product(x, hidden, layer["down"]), cache

    x = flat(x)
    for i, layer in enumerate(params["layers"]):
        following = params["layers"][(i + 1) % len(params["layers"])]  # after the last, the next round's first
        x, cache = decoder_layer(layer, following["qkv"], jnp.int32(i), x, cache)
        outputs.append(x[:rows].reshape(b, t, -1))
    return rms_norm(outputs[-1], params["norm"], eps), outputs, cache
