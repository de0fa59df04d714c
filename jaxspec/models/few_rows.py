"""Decoder layers at few rows, each in four kernels and attention's: see `pallas.few_rows`.

They run a target's layers, DFlash's, and EAGLE-3's one, whose q, k and v are made of two inputs side by side. In a
mixture of experts two of the kernels stand before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models import moe
from jaxspec.models.layers import Mixer, centred_rms_norm, cos_sin, rms_norm, rope_frequencies
from jaxspec.pallas import few_rows
from jaxspec.pallas.hopper import chosen
from jaxspec.pallas.project import run
from jaxspec.pallas.weight_stream import HALF

Turns = tuple[Float[Array, "r half"], Float[Array, "r half"]]
Given = tuple[Float[Array, "r d"], Float[Array, " d"]] | few_rows.Scaled  # rows and their norm's scale
Real = tuple[Int[Array, "1 r"], int]


def supported(
    layer: dict[str, Array], config: ModelConfig, shape: tuple[int, int], mixer: Mixer, cache: Any, beside: int = 0
) -> str | None:
    """Why layers like this one can't run rows of this shape, [b, t], over what `mixer` keeps, or None if they can.

    `beside`: the width of a second input of queries, keys and values.
    """
    if config.attention_bias or config.mlp_bias:
        return "biases"
    if not hasattr(mixer, "attend_written"):
        return "no pages to write to"
    if config.rotary_dim != config.head_dim:
        return f"{config.rotary_dim} of {config.head_dim} columns rotated"
    widths = config.hidden_size, config.num_heads * config.head_dim
    if "down" in layer or config.dense_layers:
        widths += (config.mlp_size,)
        if run(config.mlp_size) != HALF:
            return f"an MLP {config.mlp_size} wide"
    dtypes = layer["qkv"].dtype, mixer.pages(cache).dtype
    return few_rows.supported(shape[0] * filled(*shape), config.head_dim, widths, *dtypes, beside=beside)


def layers(params, config, x, positions, mixer, cache):
    """All decoder layers; the final norm's output, each layer's output, the cache. As `llama._plain_layers`."""
    b, t, outputs, turns = *positions.shape, [], rotations(config, positions)
    real = marked(positions)

    @jax.jit  # one trace and one lowering for all layers: the index is data
    def decoder_layer(weights, following, i, given, x, cache):
        return layer(weights, config, i, [given], x, b, turns, mixer, cache, following, real)

    x, first = flat(x), params["layers"][0]
    given = x, first["attn_norm"]
    if config.hidden_size > few_rows.NARROW and "down" in first:  # what a mixture makes isn't scaled
        given = few_rows.scale_rows(*given)
    for i, weights in enumerate(params["layers"]):
        following = params["layers"][(i + 1) % len(params["layers"])]  # after the last, the next round's first
        following = {name: following[name] for name in ("qkv", "attn_norm")}
        x, given, cache = decoder_layer(weights, following, jnp.int32(i), given, x, cache)
        outputs.append(unflat(x, b, t))
    return rms_norm(outputs[-1], params["norm"], config.rms_norm_eps), outputs, cache


def layer(
    weights: dict[str, Array],
    config: ModelConfig,
    i: Int[Array, ""],
    inputs: Sequence[Given],
    x: Float[Array, "r d"],
    b: int,
    turns: Turns,
    mixer: Mixer,
    cache: Any,
    following: dict[str, Array] | None = None,
    real: Real | None = None,
) -> tuple[Float[Array, "r d"], Given | None, Any]:
    """A decoder layer over the flat rows of `b` requests: what attention and MLP make of the residual stream `x`.

    Queries, keys and values are made of `inputs` side by side. `following`: weights of the layer after this one, whose
    input comes second. `real`: which rows a mixture of experts is for, see `marked`.
    """
    eps, small = config.rms_norm_eps, config.hidden_size <= few_rows.NARROW  # memory is idle for most of a small layer
    after = following["attn_norm"] if following else None
    norms = [weights["q_norm"], weights["k_norm"]] if config.qk_norm else []
    ahead = [weights[name] for name in ("out", "gate_up", "down") if small and name in weights]

    def write(kv, place):
        operands = *zip(*inputs, strict=True), weights["qkv"], *turns, kv, i, place.reshape(-1)
        q, kv = few_rows.heads(*operands, norms, ahead, eps=eps)
        return q.reshape(b, -1, config.num_heads, config.head_dim), kv

    mixed, cache = mixer.attend_written(cache, i, len(x) // b, write)
    mixed = mixed.reshape(len(x), -1)
    if "router" in weights:
        x = mixture(weights, config, x, mixed, *real)
        return x, (x, after), cache
    x, given = _add(x, mixed, weights["out"], weights["mlp_norm"])
    ahead = [following["qkv"]] if small and following else []
    hidden = few_rows.gated(*given, weights["gate_up"], ahead, eps=eps)
    x, given = _add(x, hidden, weights["down"], after)
    return x, given, cache


def _add(x, rows, weight, scale, centred=False):
    """The residual stream after a product is added, and what is given to the norm that follows, of this `scale`.

    Narrow rows aren't scaled for it: they are normed before weights arrive. No scale: nothing follows.
    """
    if x.shape[1] > few_rows.NARROW and scale is not None:
        return few_rows.add_product(x, rows, weight, scale, centred=centred)
    x = few_rows.add_product(x, rows, weight)
    return x, (x, scale)


def mixture(
    weights: dict[str, Array],
    config: ModelConfig,
    x: Float[Array, "r d"],
    mixed: Float[Array, "r k"],
    positions: Int[Array, "1 r"],
    real: int,
    centred: bool = False,
) -> Float[Array, "r d"]:
    """The output projection of what was mixed, and the mixture of experts, each added to the residual stream.

    Norm and router are one kernel where that serves. Only the first `real` rows go through the mixture, of those the
    ones that aren't padding, as `positions` are marked: one token alone has an experts' kernel that looks for no other.
    """
    eps, router = config.rms_norm_eps, weights["router"]
    x, given = _add(x, mixed, weights["out"], weights["mlp_norm"], centred)
    if few_rows.normed_supported(*x.shape, [router.shape[1]], router.dtype) is not None:
        norm = centred_rms_norm if centred else rms_norm
        return moe.moe(weights, config, norm(x[None], weights["mlp_norm"], eps), positions, x[None])[0]
    logits, rows = few_rows.normed(*given, [router], eps=eps, dtypes=("float32",), centred=centred, keep=True)
    return moe.mix(weights, config, rows, logits, positions, x, real)


def product(rows: Sequence[Float[Array, "b t _"]], weight: Float[Array, "k n"]) -> Float[Array, "b t n"]:
    """The product of rows side by side, by the kernel where it serves."""
    b, t, _ = rows[0].shape
    fits = few_rows.product_supported(b * filled(b, t), [x.shape[2] for x in rows], weight.shape, weight.dtype)
    if chosen(fits):
        return unflat(few_rows.product([flat(x) for x in rows], weight), b, t)
    return jnp.concatenate(rows, axis=-1) @ weight


def top_tokens(
    head: dict[str, Array], norm: Float[Array, " d"], x: Float[Array, "b t d"] | None, eps: float
) -> Int[Array, "b t"] | None:
    """The tokens with the highest logits of rows before their final norm; None where no kernel serves."""
    if x is None or "head" in head:  # what is tied to the embeddings has a token's weights side by side
        return None
    b, t, _ = x.shape
    if not chosen(few_rows.top_supported(b * filled(b, t), head["embed"].shape, head["embed"].dtype)):
        return None
    return few_rows.top_tokens(flat(x), norm, head["embed"], eps=eps).reshape(b, -1)[:, :t]


def rotations(config: ModelConfig, positions: Int[Array, "b t"]) -> Turns:
    """Cosine and sine of each flat row's angles."""
    return cos_sin(flat(positions[..., None])[:, 0], rope_frequencies(config))


def marked(positions: Int[Array, "b t"]) -> Real:
    """Positions of flat rows, -1 of those that fill up, and how many rows there are up to the last real one.

    Of several requests, what fills up stands between them.
    """
    b, t = positions.shape
    out = flat(positions[..., None], -1).T
    return out, t if b == 1 else out.size


def filled(b: int, t: int) -> int:
    """How many rows to give each of `b` requests that have `t`: so many that the kernels take them together.

    Attention then takes what the kernels before it give and gives what those after it take, with nothing between them.
    """
    return next(rows for rows in range(t, t + few_rows.GROUP) if b * rows % few_rows.GROUP == 0)


def fill(x: Array, value: int = 0) -> Array:
    """Rows [b, t, d], each request's filled up: [b, filled(b, t), d]."""
    b, t, _ = x.shape
    return jnp.pad(x, ((0, 0), (0, filled(b, t) - t), (0, 0)), constant_values=value)


def flat(x: Array, value: int = 0) -> Array:
    """Rows [b, t, d] one under the other, each request's filled up."""
    return fill(x, value).reshape(-1, x.shape[2])


def unflat(x: Float[Array, "r d"], b: int, t: int) -> Float[Array, "b t d"]:
    """The same rows as they were before `flat`."""
    return x.reshape(b, -1, x.shape[1])[:, :t]
