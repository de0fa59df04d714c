"""The Llama family: pre-norm decoder layers, grouped-query attention with rotary positions, a SiLU-gated MLP.

The q, k, v projections are one matmul, gate and up another: fewer, larger reads of weights. Families that differ in
details that the config can express (biases, norms of q and k, rope scaling) reuse this forward.

Layers of a mixture-of-experts model differ in the MLP alone (`models.moe`), and not all need have one.

Few rows on a Hopper GPU take the same layers cut elsewhere: each matmul is one kernel with all that stands around it
(`models.few_rows`), or with some more rows of a dense model all of them from one attention to the next are one
(`pallas.weight_stream`). Columns of gate and up alternate in runs, so that a tile of them holds both.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models import few_rows, moe
from jaxspec.models.layers import (
    Hidden,
    Mixer,
    Param,
    bias,
    cos_sin,
    linear,
    rms_norm,
    rope,
    rope_frequencies,
    row_of,
    scale,
)
from jaxspec.pallas import weight_stream, write_heads
from jaxspec.pallas.hopper import chosen
from jaxspec.pallas.project import gate, project, real_rows, run
from jaxspec.pallas.prompt_attention import UNIT

QK_NORM = False


def parameters(config: ModelConfig) -> dict[str, Any]:
    """The params pytree as declarations. Checkpoint names are those of `LlamaForCausalLM`."""
    d, v = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Param((v, d), ("model.embed_tokens.weight",), (d,)),
        "layers": [
            layer_parameters(config, f"model.layers.{i}.", bool(config.num_experts) and i not in config.dense_layers)
            for i in range(config.num_layers)
        ],
        "norm": scale(d, "model.norm.weight"),
    }
    if not config.tie_embeddings:
        tree["head"] = linear(d, {"lm_head.weight": v})
    return tree


def layer_parameters(config: ModelConfig, prefix: str, experts: bool = False) -> dict[str, Param]:
    """One decoder layer, whose tensors are called `prefix...` in the checkpoint. `experts`: of the config, for MLP."""
    d, h = config.hidden_size, config.head_dim
    n, m = config.num_heads * h, config.num_kv_heads * h
    attn = prefix + "self_attn."
    layer = {
        "attn_norm": scale(d, prefix + "input_layernorm.weight"),
        "qkv": linear(d, {attn + "q_proj.weight": n, attn + "k_proj.weight": m, attn + "v_proj.weight": m}),
        "out": linear(n, {attn + "o_proj.weight": d}),
        "mlp_norm": scale(d, prefix + "post_attention_layernorm.weight"),
        **(moe.parameters(config, prefix + "mlp.") if experts else mlp_parameters(config, prefix + "mlp.")),
    }
    if config.attention_bias:
        layer["qkv_bias"] = bias({attn + "q_proj.bias": n, attn + "k_proj.bias": m, attn + "v_proj.bias": m})
        layer["out_bias"] = bias({attn + "o_proj.bias": d})
    if config.qk_norm:
        layer["q_norm"] = scale(h, attn + "q_norm.weight")
        layer["k_norm"] = scale(h, attn + "k_norm.weight")
    return layer


def mlp_parameters(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """A dense MLP, whose tensors are called `prefix...` in the checkpoint."""
    d, f = config.hidden_size, config.mlp_size
    tree = {
        "gate_up": linear(d, {prefix + "gate_proj.weight": f, prefix + "up_proj.weight": f}, run(f)),
        "down": linear(f, {prefix + "down_proj.weight": d}),
    }
    if config.mlp_bias:
        tree["gate_up_bias"] = bias({prefix + "gate_proj.bias": f, prefix + "up_proj.bias": f}, run(f))
        tree["down_bias"] = bias({prefix + "down_proj.bias": d})
    return tree


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
    """Run the decoder over `tokens` at absolute `positions`; negative ones are padding, whose results nobody reads.

    `mixer` owns the keys and values: it is given each layer's and decides what the queries see. `capture` names decoder
    layers (0-based) whose output, the un-normed residual stream, is returned in that order; the number after the last
    layer's is the final norm's output.

    `wanted`: the row of each sequence whose final state is all that is asked for, -1 where none is. Then the last layer
    computes keys and values of all rows, which later ones will see, attention of the sequences asked for, and what
    comes after it of these rows alone.
    """
    x = params["embed"][tokens]
    prompt = tokens.shape[1] >= UNIT  # its blocks haven't been measured with few rows' kernels
    if not prompt and chosen(few_rows.supported(params["layers"][0], config, tokens.shape, mixer, cache)):
        layers = few_rows.layers
    elif chosen(_streamable(params, config, tokens.size), weight_stream.BLOCKS):
        layers = _streamed_layers
    else:
        layers = partial(_plain_layers, wanted=wanted)
    last, outputs, cache = layers(params, config, x, positions, mixer, cache)
    if wanted is not None and last.shape[1] > 1:  # of kernels that compute whole layers
        last, outputs[-1] = row_of(last, wanted), row_of(outputs[-1], wanted)
    return Hidden(last, tuple([*outputs, last][i] for i in capture), cache, outputs[-1])


def _plain_layers(params, config, x, positions, mixer, cache, wanted):
    """All decoder layers; the final norm's output, each layer's output, the cache."""
    eps, outputs, real = config.rms_norm_eps, [], real_rows(positions)

    @jax.jit  # one trace and one lowering for all layers: the index is data
    def decoder_layer(layer, i, x, cache, row=None):
        here = mixer if row is None else mixer.only(row >= 0)
        qkv = project(rms_norm(x, layer["attn_norm"], eps), layer["qkv"], real)
        mixed, cache = mix(layer, config, i, qkv[None], positions, here, cache)
        x, mixed, at = (row_of(a, row) for a in (x, mixed, positions))
        return finish(layer, config, x, mixed, at, real if row is None else real_rows(at)), cache

    for i, layer in enumerate(params["layers"]):
        x, cache = decoder_layer(layer, jnp.int32(i), x, cache, wanted if layer is params["layers"][-1] else None)
        outputs.append(x)
    return rms_norm(x, params["norm"], eps), outputs, cache


def _streamed_layers(params, config, x, positions, mixer, cache):
    """The same, with one kernel a layer from attention's output to the next layer's q, k, v; the last has no next."""
    eps, layers, outputs = config.rms_norm_eps, params["layers"], []

    @jax.jit
    def attend(layer, i, qkv, cache):
        return mix(layer, config, i, qkv, positions, mixer, cache)

    @jax.jit
    def stream(layer, following, x, mixed):
        weights = [layer["out"], layer["gate_up"], layer["down"], following["qkv"]]
        scales = [layer["mlp_norm"], following["attn_norm"]]
        flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        out, partials = weight_stream.stream(flat(x), flat(mixed), weights, scales, eps=eps)
        return out.reshape(x.shape), partials.reshape(len(partials), *x.shape[:-1], -1)

    qkv = (rms_norm(x, layers[0]["attn_norm"], eps) @ layers[0]["qkv"])[None]  # few rows
    for i, (layer, following) in enumerate(itertools.pairwise(layers)):
        mixed, cache = attend(layer, jnp.int32(i), qkv, cache)
        x, qkv = stream(layer, following, x, mixed)
        outputs.append(x)
    mixed, cache = attend(layers[-1], jnp.int32(len(layers) - 1), qkv, cache)
    x = finish(layers[-1], config, x, mixed, positions, real_rows(positions))
    return rms_norm(x, params["norm"], eps), [*outputs, x], cache


def _streamable(params: dict[str, Any], config: ModelConfig, rows: int) -> str | None:
    if config.attention_bias or config.mlp_bias:
        return "biases"
    if config.num_experts:
        return "experts"
    layer = params["layers"][0]
    return weight_stream.supported(rows, layer["qkv"].dtype, *layer["qkv"].shape, *layer["down"].shape)


def mix(layer, config, i, qkv, positions, mixer, cache):
    """From the fused projections to the heads' mix of values, `[b, t, n * h]`.

    `qkv`, `[s, b, t, d]`, is summed over its first axis in float32: what parts of the projection made.
    """
    _, b, t, _ = qkv.shape
    n, m, h = config.num_heads, config.num_kv_heads, config.head_dim
    eps, frequencies = config.rms_norm_eps, rope_frequencies(config)
    norms = [layer["q_norm"], layer["k_norm"]] if config.qk_norm else []
    if config.attention_bias:
        qkv = qkv + layer["qkv_bias"]  # of layers that no parts are made of
    if chosen(_writable(config, layer["qkv"].dtype, norms, mixer, cache)):
        cos, sin = (x.reshape(b * t, -1) for x in cos_sin(positions, frequencies))

        def write(kv, place):
            rows = qkv.reshape(len(qkv), b * t, -1)
            q, kv = write_heads.write_heads(rows, cos, sin, kv, i, place.reshape(-1), norms, eps=eps)
            return q.reshape(b, t, n, h), kv

        out, cache = mixer.attend_written(cache, i, t, write)
        return out.reshape(b, t, n * h), cache
    qkv = qkv.sum(0).astype(layer["qkv"].dtype).reshape(b, t, n + 2 * m, h)
    q, k, v = jnp.split(qkv, [n, n + m], axis=2)
    if norms:
        q, k = (rms_norm(x, norm, eps) for x, norm in zip((q, k), norms, strict=True))
    out, cache = mixer.attend(cache, i, rope(q, positions, frequencies), rope(k, positions, frequencies), v)
    return out.reshape(b, t, n * h), cache


def _writable(config: ModelConfig, dtype: Any, norms: list[Array], mixer: Mixer, cache: Any) -> str | None:
    """Why `write_heads` can't take a projection's rows, in `dtype`, to what `mixer` keeps, or None if it can."""
    if not hasattr(mixer, "attend_written"):
        return "no pages to write to"
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    dtypes = dtype, mixer.pages(cache).dtype, *(norm.dtype for norm in norms)
    return write_heads.supported(*heads, config.rotary_dim, *dtypes)


def finish(layer, config, x, mixed, positions, real):
    """The rest of a layer after its attention: output projection and MLP, each added to the residual stream."""
    if config.attention_bias:
        x = x + (project(mixed, layer["out"], real) + layer["out_bias"])
    else:
        x = project(mixed, layer["out"], real, x)
    normed = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    if "router" in layer:
        return moe.moe(layer, config, normed, positions, x)
    return add_mlp(layer, x, normed, real)


def add_mlp(
    layer: dict[str, Array], x: Float[Array, "b t d"], normed: Float[Array, "b t d"], real: Int[Array, "1"]
) -> Float[Array, "b t d"]:
    """The residual stream `x` after the gated MLP of its first `real` rows, which are given normed."""
    if "gate_up_bias" in layer:
        hidden = gate(project(normed, layer["gate_up"], real) + layer["gate_up_bias"])
        return x + (project(hidden, layer["down"], real) + layer["down_bias"])
    return project(project(normed, layer["gate_up"], real, gated=True), layer["down"], real, x)


def unembed(params: dict[str, Any], hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Final hidden states to logits, float32."""
    if "head" in params:
        return jnp.matmul(hidden, params["head"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,vd->...v", hidden, params["embed"], preferred_element_type=jnp.float32)
