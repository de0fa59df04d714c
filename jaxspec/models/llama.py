"""The Llama family: pre-norm decoder layers, grouped-query attention with rotary positions, a SiLU-gated MLP.

The q, k, v projections are one matmul, gate and up another: fewer, larger reads of weights. Families that differ in
details that the config can express (biases, norms of q and k, rope scaling) reuse this forward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.layers import Attention, Hidden, Param, bias, linear, rms_norm, rope, rope_frequencies, scale

QK_NORM = False


def parameters(config: ModelConfig) -> dict[str, Any]:
    """The params pytree as declarations. Checkpoint names are those of `LlamaForCausalLM`."""
    d, v = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Param((v, d), ("model.embed_tokens.weight",), (d,)),
        "layers": [_layer(config, f"model.layers.{i}.") for i in range(config.num_layers)],
        "norm": scale(d, "model.norm.weight"),
    }
    if not config.tie_embeddings:
        tree["head"] = linear(d, {"lm_head.weight": v})
    return tree


def _layer(config: ModelConfig, prefix: str) -> dict[str, Param]:
    d, f, h = config.hidden_size, config.mlp_size, config.head_dim
    n, m = config.num_heads * h, config.num_kv_heads * h
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    layer = {
        "attn_norm": scale(d, prefix + "input_layernorm.weight"),
        "qkv": linear(d, {attn + "q_proj.weight": n, attn + "k_proj.weight": m, attn + "v_proj.weight": m}),
        "out": linear(n, {attn + "o_proj.weight": d}),
        "mlp_norm": scale(d, prefix + "post_attention_layernorm.weight"),
        "gate_up": linear(d, {mlp + "gate_proj.weight": f, mlp + "up_proj.weight": f}),
        "down": linear(f, {mlp + "down_proj.weight": d}),
    }
    if config.attention_bias:
        layer["qkv_bias"] = bias({attn + "q_proj.bias": n, attn + "k_proj.bias": m, attn + "v_proj.bias": m})
        layer["out_bias"] = bias({attn + "o_proj.bias": d})
    if config.mlp_bias:
        layer["gate_up_bias"] = bias({mlp + "gate_proj.bias": f, mlp + "up_proj.bias": f})
        layer["down_bias"] = bias({mlp + "down_proj.bias": d})
    if config.qk_norm:
        layer["q_norm"] = scale(h, attn + "q_norm.weight")
        layer["k_norm"] = scale(h, attn + "k_norm.weight")
    return layer


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    attention: Attention,
    cache: Any = None,
    capture: tuple[int, ...] = (),
) -> Hidden:
    """Run the decoder over `tokens` at absolute `positions`.

    `attention` owns the keys and values: it is given each layer's and decides what the queries see. `capture` names
    decoder layers (0-based) whose output, the un-normed residual stream, is returned in that order.
    """
    frequencies = rope_frequencies(config)

    @jax.jit  # one trace and one lowering for all layers: the index is data
    def decoder_layer(layer, i, x, cache):
        mixed, cache = _attend(layer, config, i, x, positions, frequencies, attention, cache)
        x = x + mixed
        return x + _mlp(layer, rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)), cache

    x = params["embed"][tokens]
    captured = {}
    for i, layer in enumerate(params["layers"]):
        x, cache = decoder_layer(layer, jnp.int32(i), x, cache)
        if i in capture:
            captured[i] = x
    last = rms_norm(x, params["norm"], config.rms_norm_eps)
    return Hidden(last, tuple(captured[i] for i in capture), cache)


def _attend(layer, config, i, x, positions, frequencies, attention, cache):
    b, t, _ = x.shape
    n, m, h = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = rms_norm(x, layer["attn_norm"], config.rms_norm_eps) @ layer["qkv"]
    if config.attention_bias:
        qkv = qkv + layer["qkv_bias"]
    q, k, v = jnp.split(qkv.reshape(b, t, n + 2 * m, h), [n, n + m], axis=2)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    out, cache = attention(cache, i, rope(q, positions, frequencies), rope(k, positions, frequencies), v)
    out = out.reshape(b, t, n * h) @ layer["out"]
    return (out + layer["out_bias"] if config.attention_bias else out), cache


def _mlp(layer: dict[str, Array], x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    gate_up = x @ layer["gate_up"]
    if "gate_up_bias" in layer:
        gate_up = gate_up + layer["gate_up_bias"]
    gate, up = jnp.split(gate_up, 2, axis=-1)
    x = (jax.nn.silu(gate) * up) @ layer["down"]
    return x + layer["down_bias"] if "down_bias" in layer else x


def unembed(params: dict[str, Any], hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Final hidden states to logits, float32."""
    if "head" in params:
        return jnp.matmul(hidden, params["head"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,vd->...v", hidden, params["embed"], preferred_element_type=jnp.float32)
