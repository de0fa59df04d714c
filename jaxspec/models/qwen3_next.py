"""Qwen3-Next: layers of linear attention, every fourth one of full attention, each with an MLP or experts behind it.

Linear layers run a gated delta rule over a state of fixed size (https://arxiv.org/abs/2412.06464), behind a short
convolution. Full attention is Qwen3's with a gate on its output, and part of each head rotates. Which layer is which,
the config says. Norms are zero-centred (the weight is an offset from one), but for the one inside a linear layer.

Names and conventions are those of `Qwen3NextForCausalLM`. Qwen3.5 is the same model with the linear layers' projections
laid out otherwise in its checkpoints (`qwen3_5`).

Up to eight rows on a Hopper GPU have each norm in one kernel with the products after it, and the output projection in
one with the residual stream (`pallas.few_rows`). These take eight together, so fewer are filled up: r rows a request,
from the embedding to the last layer. What mixes tokens is given the t real ones alone. XLA would put each cut and each
filling up into a kernel of its own, were it not part of one that is there anyway: so linear attention's result comes
with room for r rows, those from t on hold anything, and nothing that follows looks from one row at another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models import few_rows, llama, moe
from jaxspec.models.layers import (
    Hidden,
    Mixer,
    Param,
    centred_rms_norm,
    centred_scale,
    linear,
    rms_norm,
    rope,
    rope_frequencies,
    row_of,
    scale,
)
from jaxspec.models.llama import unembed
from jaxspec.pallas.few_rows import add_product, normed, normed_supported, product_supported
from jaxspec.pallas.hopper import chosen
from jaxspec.pallas.project import project, real_rows

QK_NORM = True
HYBRID = True
NORM_TOPK_PROB = True  # transformers' default

__all__ = ["HYBRID", "NORM_TOPK_PROB", "QK_NORM", "forward", "parameters", "unembed"]


def projections(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """What a linear layer makes of its input: `qkvz`, and `ba`, from which beta and the decay come.

    The checkpoint has both in groups, one a key head: its q and k, then v and z of its value heads; b and a of those.
    """
    d, mix = config.hidden_size, config.linear
    heads = mix.value_heads // mix.key_heads
    values = heads * mix.value_dim

    def grouped(name: str, *widths: int) -> Param:
        columns = mix.key_heads * sum(widths)
        return Param((d, columns), (prefix + name,), (columns,), transpose=True, grouped=widths)

    return {
        "qkvz": grouped("in_proj_qkvz.weight", mix.key_dim, mix.key_dim, values, values),
        "ba": grouped("in_proj_ba.weight", heads, heads),
    }


def parameters(
    config: ModelConfig, projections: Callable[[ModelConfig, str], dict[str, Param]] = projections
) -> dict[str, Any]:
    """The params pytree as declarations; `projections` declares those of a linear layer, given its tensors' prefix."""
    d, v = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Param((v, d), ("model.embed_tokens.weight",), (d,)),
        "layers": [],
        "norm": centred_scale(d, "model.norm.weight"),
    }
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        if i in config.linear.layers:
            mixing = linear_parameters(config, prefix + "linear_attn.", projections)
        else:
            mixing = attention_parameters(config, prefix + "self_attn.")
        tree["layers"].append({**mixing, **_common(config, i not in config.dense_layers, prefix)})
    if not config.tie_embeddings:
        tree["head"] = linear(d, {"lm_head.weight": v})
    return tree


def attention_layer_parameters(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """One layer of full attention by itself, as in an MTP module."""
    return {**attention_parameters(config, prefix + "self_attn."), **_common(config, True, prefix)}


def _common(config: ModelConfig, experts: bool, prefix: str) -> dict[str, Param]:
    d, mlp = config.hidden_size, prefix + "mlp."
    return {
        "attn_norm": centred_scale(d, prefix + "input_layernorm.weight"),
        "mlp_norm": centred_scale(d, prefix + "post_attention_layernorm.weight"),
        **(moe.parameters(config, mlp) if config.num_experts and experts else llama.mlp_parameters(config, mlp)),
    }


def attention_parameters(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Full attention. Each query head's columns are followed by its gate's."""
    d, h = config.hidden_size, config.head_dim
    n, m = config.num_heads * h, config.num_kv_heads * h
    return {
        "qkv": linear(d, {prefix + "q_proj.weight": 2 * n, prefix + "k_proj.weight": m, prefix + "v_proj.weight": m}),
        "out": linear(n, {prefix + "o_proj.weight": d}),
        "q_norm": centred_scale(h, prefix + "q_norm.weight"),
        "k_norm": centred_scale(h, prefix + "k_norm.weight"),
    }


def linear_parameters(config: ModelConfig, prefix: str, projections: Callable) -> dict[str, Param]:
    """Linear attention. What goes into an exponent stays in float32."""
    d, mix = config.hidden_size, config.linear
    values, channels = mix.value_heads * mix.value_dim, mix.channels

    def by_head(name: str) -> Param:
        return Param((mix.value_heads,), (prefix + name,), (mix.value_heads,), dtype="float32", init="zeros")

    return {
        **projections(config, prefix),
        "conv": Param((mix.taps, channels), (prefix + "conv1d.weight",), (channels,), transpose=True, depthwise=True),
        "decay_log": by_head("A_log"),
        "decay_bias": by_head("dt_bias"),
        "read_norm": scale(mix.value_dim, prefix + "norm.weight"),
        "out": linear(values, {prefix + "out_proj.weight": d}),
    }


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any = None,
    capture: tuple[int, ...] = (),
    wanted: Int[Array, " b"] | None = None,
) -> Hidden:
    """As `llama.forward`; `mixer` owns the linear layers' states too."""
    x, t, outputs, counts = params["embed"][tokens], tokens.shape[1], [], {True: 0, False: 0}
    few = chosen(few_supported(params["layers"], tokens.shape))
    x = few_rows.fill(x) if few else x

    # One trace and one lowering for all layers of a kind: the index is data.
    @jax.jit
    def attend(layer, i, x, cache, row):
        here = mixer if row is None else mixer.only(row >= 0)
        return attention_layer(layer, config, i, x, positions, here, cache, few, row)

    @jax.jit
    def recur(layer, i, x, cache, row):
        return linear_layer(layer, config, i, x, positions, mixer, cache, few, row)

    for layer in params["layers"]:
        is_linear = "qkvz" in layer
        row = wanted if layer is params["layers"][-1] and not few else None
        x, cache = (recur if is_linear else attend)(layer, jnp.int32(counts[is_linear]), x, cache, row)
        counts[is_linear] += 1
        outputs.append(x[:, :t])
    outputs[-1] = row_of(outputs[-1], wanted if few else None)
    last = centred_rms_norm(outputs[-1], params["norm"], config.rms_norm_eps)
    outputs.append(last)
    return Hidden(last, tuple(outputs[i] for i in capture), cache)


def attention_layer(layer, config, i, x, positions, mixer, cache, few, row=None) -> tuple[Float[Array, "b r d"], Any]:
    """Gated full attention and the MLP: the residual stream after them. `i` counts layers of full attention.

    `few`: the kernels of few rows serve, and `x` is filled up for them. `row`: of each sequence the one that goes on
    after the mixing, if not all do.
    """
    eps, (b, t) = config.rms_norm_eps, positions.shape
    n, m, h = config.num_heads, config.num_kv_heads, config.head_dim
    (qkv,) = _products(layer, x, ["qkv"], eps, positions, few)
    qkv = qkv[:, :t].reshape(b, t, 2 * n + 2 * m, h)
    q, k, v = jnp.split(qkv, [2 * n, 2 * n + m], axis=2)
    q, gate = jnp.moveaxis(q.reshape(b, t, n, 2, h), 3, 0)
    frequencies = rope_frequencies(config)
    rotated = lambda x, norm: rope(centred_rms_norm(x, layer[norm], eps), positions, frequencies)  # noqa: E731
    mixed, cache = mixer.attend(cache, i, rotated(q, "q_norm"), rotated(k, "k_norm"), v)
    mixed = (mixed * jax.nn.sigmoid(gate)).reshape(b, t, n * h)
    return _finish(layer, config, x, mixed, positions, few, row), cache


def linear_layer(layer, config, i, x, positions, mixer, cache, few, row=None) -> tuple[Float[Array, "b r d"], Any]:
    """Linear attention and the MLP: the residual stream after them. `i` counts linear layers; the rest as above."""
    mix, eps, t = config.linear, config.rms_norm_eps, positions.shape[1]
    qkvz, ba = _products(layer, x, ["qkvz", "ba"], eps, positions, few)
    beta, a = jnp.split(ba[:, :t], 2, axis=-1)
    decay = jnp.exp(-jnp.exp(layer["decay_log"]) * jax.nn.softplus(a + layer["decay_bias"]))

    (q, k, v), cache = mixer.convolve(cache, i, qkvz[:, :t], layer["conv"], mix)
    read, cache = mixer.recur(cache, i, q, k, v, decay, jax.nn.sigmoid(beta), x.shape[1])

    gate = jax.nn.silu(qkvz[..., mix.channels :].astype(jnp.float32).reshape(read.shape))
    read = rms_norm(read.astype(jnp.float32), layer["read_norm"].astype(jnp.float32), eps) * gate
    return _finish(layer, config, x, read.astype(x.dtype).reshape(*x.shape[:2], -1), positions, few, row), cache


def few_supported(layers: Sequence[dict[str, Array]], shape: tuple[int, int]) -> str | None:
    """Why the kernels of few rows can't serve these layers' rows of this shape, [b, t], or None if they can."""
    rows = shape[0] * few_rows.filled(*shape)
    for layer in layers:
        (inputs, d), dtype = layer["out"].shape, layer["out"].dtype
        columns = [layer[name].shape[1] for name in ("qkv", "qkvz", "ba") if name in layer]
        fits = normed_supported(rows, d, columns, dtype) or product_supported(rows, [inputs], (inputs, d), dtype)
        if fits is not None:
            return fits
    return None


def _products(layer, x, names, eps, positions, few) -> list[Float[Array, "b t _"]]:
    """The normed rows' products with these weights; those of `ba` in float32."""
    weights, real = [layer[name] for name in names], real_rows(positions)
    if few:
        dtypes = tuple("float32" if name == "ba" else str(x.dtype) for name in names)
        outs = normed(x.reshape(-1, x.shape[-1]), layer["attn_norm"], weights, eps=eps, dtypes=dtypes, centred=True)
        return [out.reshape(*x.shape[:2], -1) for out in outs]
    rows = centred_rms_norm(x, layer["attn_norm"], eps)
    in_float32 = lambda weight: jnp.matmul(rows, weight, preferred_element_type=jnp.float32)  # noqa: E731
    return [
        in_float32(weight) if name == "ba" else project(rows, weight, real)
        for name, weight in zip(names, weights, strict=True)
    ]


def _finish(layer, config, x, mixed, positions, few, row):
    """The rest of a layer after its mixing: output projection and MLP, each added to the residual stream."""
    x, mixed, positions = (row_of(a, row) for a in (x, mixed, positions))
    real = real_rows(positions)
    if few:
        rows, mixed = x.reshape(-1, x.shape[-1]), few_rows.flat(mixed)
        if "router" in layer:
            marked = few_rows.marked(positions)
            return few_rows.mixture(layer, config, rows, mixed, *marked, centred=True).reshape(x.shape)
        x = add_product(rows, mixed, layer["out"]).reshape(x.shape)
    else:
        x = project(mixed, layer["out"], real, x)
    normed = centred_rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    if "router" in layer:
        return moe.moe(layer, config, normed, positions, x)
    return llama.add_mlp(layer, x, normed, real)
