"""Layers in which a row has the same bits whatever rows are beside it: the path of `--deterministic`.

A sum in floating point depends on its order. Here every sum has one order, for any number of rows:

- Up to 128 rows of a round go through `weight_stream` with fixed shares; more through `tile_matmul`, which sums the
  same parts of the inputs. In a narrow model they go through `few_rows`, up to 64 at a time. Their attention has fixed
  parts (`cache.Rows.fixed`).
- Rows of prompts go through `tile_matmul`, which adds up one step of inputs after the other in tiles of any shape, and
  a kernel for their norms.
- On a CPU all rows go through XLA's products in slices of `SLICE`, so that there is one shape.
- Linear attention takes its state from one token to the next, in a round and in replay alike (`delta_fixed`), and
  prompts in blocks at fixed positions. It and gated attention are in `deterministic_mixing`.

Rounds and prompts don't agree with one another. So what a round computed is never computed again as a prompt: the
prefix tree holds prompts alone, and a preempted request starts again (`scheduler`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import deterministic_mixing as mixing
from jaxspec.decoder import few_rows as narrow
from jaxspec.decoder.deterministic_mixing import exact_product, in_order, row_norm
from jaxspec.decoder.functions import cos_sin_apart, row_of
from jaxspec.decoder.layer import HEADS_WRITTEN, attention, projections
from jaxspec.decoder.matmul import reference, valid_count
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.padding import flat, unflat
from jaxspec.decoder.path import Call, Path, Stack, Weights, numbered
from jaxspec.decoder.spec import ROPE_SCALINGS, Attention, Decoder, DeltaRule, Layer, Mlp, Norm, Rope, beyond
from jaxspec.pallas import few_rows, hopper, tile_matmul, weight_stream, write_heads
from jaxspec.pallas.add_norm import WIDEST, add_norm
from jaxspec.pallas.decode_attention.plan import HEAD_WIDTHS, MAX_GROUP, MAX_ROWS
from jaxspec.pallas.prompt_attention import UNIT as PROMPT_ROWS
from jaxspec.slices import SLICE, sliced
from jaxspec.weights import HALF, Unquantised, Weight

NARROW_SLICE = 64  # that `few_rows` does

IMPLEMENTS = {
    Decoder: frozenset({"vocab_size", "width", "layers", "norm", "tied", "embed_scale", "deterministic"}),
    Layer: frozenset({"mixing", "feed", "norm"}),
    Attention: frozenset({"heads", "kv_heads", "head_dim", "rope", "qk_norm", "gated", "bias"}),
    DeltaRule: frozenset({"key_heads", "value_heads", "key_dim", "value_dim", "taps"}),
    Mlp: frozenset({"width"}),
    Norm: frozenset({"eps", "centred"}),
    Rope: frozenset({"theta", "scaling", "columns"}),
    **ROPE_SCALINGS,
    Unquantised: frozenset(),
}


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """As `Path.fits`. On a CPU all do."""
    if not call.processors and hopper.platform() == "cpu":
        return None
    if call.processors < weight_stream.BLOCKS:
        return f"{call.processors} Hopper multiprocessors; {weight_stream.BLOCKS} are needed"
    if call.pages != "bfloat16":
        return f"pages in {call.pages}; bfloat16 is supported"
    a, rule = decoder.attention, decoder.delta_rule
    ropes = {layer.mixing.rope for layer in decoder.layers if isinstance(layer.mixing, Attention)}
    if len({layer.norm for layer in decoder.layers}) > 1 or len(ropes) > 1:
        return "layers whose norms or ropes differ"
    if a.head_dim not in HEAD_WIDTHS or a.heads // a.kv_heads > MAX_GROUP:
        return f"{a.heads} query heads of {a.head_dim} over {a.kv_heads} KV heads"
    if beyond(a, HEADS_WRITTEN):
        if a.bias:
            return "biases of gated attention"
    elif a.qk_norm and (reason := write_heads.supported(a.heads, a.kv_heads, a.head_dim, a.head_dim, "bfloat16")):
        return f"norms of q and k in prompts, with {reason}"
    if any(each["gate_up"].layout.interleave != HALF for each in layers):
        return f"an MLP {decoder.layers[0].feed.width} wide"
    if decoder.width > WIDEST:
        return f"rows of {decoder.width}; supported: up to {WIDEST}"
    if MAX_ROWS < call.rows < PROMPT_ROWS:
        return f"{call.rows} rows of a request; supported: up to {MAX_ROWS}"
    if rule is not None and (reason := mixing.supported(rule, call.rows)):
        return reason
    each = [each[name] for each in layers for name in ("qkv", "qkvz", "out", "gate_up", "down") if name in each]
    weights = {(weight.dtype, weight.inputs, weight.outputs): weight for weight in each}
    for weight in weights.values():
        if reason := tile_matmul.fixed_supported(weight.dtype, weight.inputs, weight.outputs):
            return reason
    if _narrow(decoder):
        return narrow.sizes_fit(decoder, layers, Call(1, NARROW_SLICE, call.pages, call.processors))
    widths = [width for weight in weights.values() for width in (weight.inputs, weight.outputs)]
    return weight_stream.supported(weight_stream.MAX_ROWS, each[0].dtype, *widths)


def _by_xla() -> bool:
    return not hopper.multiprocessors()


def _narrow(decoder: Decoder) -> bool:
    return decoder.width <= few_rows.NARROW and not beyond(decoder, narrow.IMPLEMENTS | {Decoder: IMPLEMENTS[Decoder]})


def run(
    decoder: Decoder,
    layers: Sequence[Weights],
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    mixer: Mixer,
    cache: Any,
    requested: Int[Array, " b"] | None,
) -> Stack:
    """As `Path.run`: a round of a narrow model, prompts and a CPU's rows, or a wide model's round."""
    narrow_round = not _by_xla() and positions.shape[1] < PROMPT_ROWS and _narrow(decoder)
    placed = flat(positions[..., None])[:, 0] if narrow_round else positions
    of = decoder, layers, x, positions, mixer, cache, cos_sin_apart(placed, decoder.attention)
    if narrow_round:
        return _narrow_round(*of)
    if _by_xla() or positions.shape[1] >= PROMPT_ROWS:
        return _layer_by_layer(*of, requested)
    return _wide_round(*of)


def unembed(head: Weight, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Final hidden states to logits, float32."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if _by_xla():
        return exact_product(hidden, head)
    return in_turn(lambda rows: exact_product(rows, head), rows).reshape(*hidden.shape[:-1], -1)


def in_turn(f: Callable[..., Any], *rows: Array, most: int = weight_stream.MAX_ROWS) -> Any:
    """`f` of up to `most` rows after the other, which is a kernel of its own for each."""
    count = len(rows[0])
    outs = [f(*(x[at : at + most] for x in rows)) for at in range(0, count, most)]
    return outs[0] if len(outs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=0), *outs)


def _wide_round(decoder, layers, x, positions, mixer, cache, table) -> Stack:
    """As `streamed.run`, with a last layer of the same kernels; more rows in tiles, with sums of the same parts."""
    (b, t), outputs = positions.shape, []
    shape, named = x.shape, {"eps": decoder.layers[0].norm.eps, "centred": decoder.layers[0].norm.centred}

    @partial(jax.jit, static_argnums=0)
    def attend(layer, weights, i, x, made, cache):
        """`made`: this layer's first projection in parts, after the rows."""
        if isinstance(layer.mixing, DeltaRule) or beyond(layer.mixing, HEADS_WRITTEN):
            made = in_order(jnp.moveaxis(made, 1, 0)).astype(x.dtype).reshape(b, t, -1)
            if isinstance(layer.mixing, Attention):
                return mixing.attention(layer, weights, i, made, positions, mixer, cache, table)
            rows = weight_stream.norm_fixed(x, weights["attn_norm"], **named)
            ba = in_turn(lambda rows: exact_product(rows, weights["ba"]), rows).reshape(b, t, -1)
            return mixing.delta_rule(layer, weights, i, made, ba, mixer, cache)
        a = layer.mixing
        if write_heads.supported(a.heads, a.kv_heads, a.head_dim, a.head_dim, "bfloat16"):
            made = in_order(jnp.moveaxis(made, 1, 0))[:, None].astype(x.dtype)  # that kernel adds the parts up itself
        made = jnp.moveaxis(made, 1, 0).reshape(made.shape[1], b, t, -1)
        return attention(layer, weights, i, made, positions, mixer, cache, x.dtype, table)

    @jax.jit
    def stream(weights, following, scale, x, mixed):
        chain = [weights[name].unquantised for name in ("out", "gate_up", "down")]
        scales = [weights["mlp_norm"]]
        if following is not None:
            chain, scales = [*chain, following.unquantised], [*scales, scale]

        def one(x, mixed):
            out, partials = weight_stream.stream_fixed(x, mixed, chain, scales, **named)
            if following is None:  # any scale: the norm isn't read
                return add_norm(out, partials, weights["mlp_norm"], eps=named["eps"])[0], out
            return out, jnp.moveaxis(partials, 0, 1)

        return one(x, mixed.reshape(len(x), -1))

    @jax.jit
    def tiled(weights, following, scale, x, mixed):
        product = partial(_in_parts, valid=valid_count(positions))
        x = product(mixed.reshape(len(x), -1), weights["out"], residual=x)
        rows = weight_stream.norm_fixed(x, weights["mlp_norm"], **named)
        x = product(product(rows, weights["gate_up"], gated=True), weights["down"], residual=x)
        if following is None:
            return x, x
        rows = weight_stream.norm_fixed(x, scale, **named)
        return x, product(rows, following)[:, None]

    x = x.reshape(b * t, -1)
    few = len(x) <= weight_stream.MAX_ROWS
    firsts = [weights[projections(layer)[0]] for layer, weights in zip(decoder.layers, layers, strict=True)]
    rows = row_norm(x, layers[0]["attn_norm"], decoder.layers[0].norm)
    if few:
        made = jnp.moveaxis(weight_stream.product_fixed(rows, firsts[0].unquantised), 0, 1)
    else:
        made = _in_parts(rows, firsts[0], valid_count(positions))[:, None]
    each = zip(numbered(decoder, layers), [*firsts[1:], None], [*layers[1:], None], strict=True)
    for (layer, weights, i), following, after in each:
        mixed, cache = attend(layer, weights, i, x, made, cache)
        scale = None if after is None else after["attn_norm"]
        x, made = (stream if few else tiled)(weights, following, scale, x, mixed)
        outputs.append(x.reshape(shape))
    return Stack(outputs, cache)


def _in_parts(x: Array, weight: Weight, valid: Array, residual: Array | None = None, gated: bool = False) -> Array:
    """A product of more rows than `weight_stream` takes, with the bits that they would have there."""
    splits = weight_stream.splits_fixed(weight.inputs, weight.outputs, gated)
    of = x, weight.unquantised, valid, residual
    return tile_matmul.matmul(*of, gated=gated, splits=splits, rounded=gated)


def _narrow_round(decoder, layers, x, positions, mixer, cache, table) -> Stack:
    """As `few_rows.run`, each kernel in slices of as many rows as it takes."""
    (b, t), eps, outputs = positions.shape, decoder.layers[0].norm.eps, []
    turn = partial(in_turn, most=NARROW_SLICE)

    @partial(jax.jit, static_argnums=0)
    def one(layer, weights, i, x, cache):
        a = layer.mixing
        norms = [weights["q_norm"], weights["k_norm"]] if a.qk_norm else []

        def write(pages, kv_slots, inverse_scales):
            made = []
            kv_slots = kv_slots.reshape(-1)
            for at in range(0, len(x), NARROW_SLICE):
                rows, cos, sin, here = (y[at : at + NARROW_SLICE] for y in (x, *table, kv_slots))
                of = [rows], [weights["attn_norm"]], weights["qkv"].unquantised, cos, sin, pages, i, here
                q, pages = few_rows.heads(*of, norms, (), weights.get("qkv_bias"), inverse_scales, eps=eps)
                made.append(q)
            return jnp.concatenate(made).reshape(b, -1, a.heads, a.head_dim), pages

        mixed, cache = mixer.attend_written(cache, i, len(x) // b, write, None)

        def rest(x, mixed):
            x = few_rows.add_product(x, mixed, weights["out"].unquantised)
            hidden = few_rows.gated(x, weights["mlp_norm"], weights["gate_up"].unquantised, (), eps=eps)
            return few_rows.add_product(x, hidden, weights["down"].unquantised)

        return turn(rest, x, mixed.reshape(len(x), -1)), cache

    x = flat(x)
    for i, (layer, weights) in enumerate(zip(decoder.layers, layers, strict=True)):
        x, cache = one(layer, weights, jnp.int32(i), x, cache)
        outputs.append(unflat(x, b, t))
    return Stack(outputs, cache)


def _layer_by_layer(decoder, layers, x, positions, mixer, cache, table, requested) -> Stack:
    """As the plain path, with products and norms of their own order: prompts, and all rows on a CPU."""
    outputs = []

    def mix(layer, weights, i, rows, mixer, cache):
        made = _product(rows, weights[projections(layer)[0]], valid_count(positions))
        if isinstance(layer.mixing, DeltaRule):
            return mixing.delta_rule(layer, weights, i, made, exact_product(rows, weights["ba"]), mixer, cache)
        mixed = mixing.attention if beyond(layer.mixing, HEADS_WRITTEN) else attention
        return mixed(layer, weights, i, made, positions, mixer, cache, table=table)

    @partial(jax.jit, static_argnums=0)
    def one(layer, weights, i, x, cache, row):
        rows = row_norm(x, weights["attn_norm"], layer.norm)
        mixed, cache = mix(layer, weights, i, rows, mixer if row is None else mixer.only(row >= 0), cache)
        x, mixed, valid = row_of(x, row), row_of(mixed, row), valid_count(row_of(positions, row))
        x = _product(mixed, weights["out"], valid, x)
        rows = row_norm(x, weights["mlp_norm"], layer.norm)
        hidden = _product(rows, weights["gate_up"], valid, gated=True)
        return _product(hidden, weights["down"], valid, x), cache

    for layer, weights, i in numbered(decoder, layers):
        x, cache = one(layer, weights, i, x, cache, requested if weights is layers[-1] else None)
        outputs.append(x)
    return Stack(outputs, cache)


def _product(x: Array, weight: Weight, valid: Array, residual: Array | None = None, gated: bool = False) -> Array:
    """As `matmul.project`."""
    rows = [a.reshape(-1, a.shape[-1]) for a in (x, residual) if a is not None]
    if _by_xla():
        out = sliced(lambda x, *before: reference(x, weight, *before or [None], gated), SLICE, *rows)
    else:
        out = tile_matmul.matmul(rows[0], weight.unquantised, valid, *rows[1:] or [None], gated=gated)
    return out.reshape(*x.shape[:-1], math.prod(out.shape) // math.prod(x.shape[:-1]))


DETERMINISTIC = Path("deterministic", IMPLEMENTS, 0, fits, run)
