"""A decoder's forward, by the fastest path that implements it: `PATHS`, `choose`, `forward`, and what follows it.

The choice is made when a program is traced. `choose` is pure, so the same question can be asked beforehand: that is how
the engine says what runs (`path_table`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import deterministic, plain, stack, streams
from jaxspec.decoder.deterministic import DETERMINISTIC
from jaxspec.decoder.few_rows import FEW_ROWS, rope_table, sizes_fit
from jaxspec.decoder.fp8_rows import FP8_ROWS
from jaxspec.decoder.fp8_tiles import FP8_TILES
from jaxspec.decoder.functions import capped, normed, rope, row_of, whole_float32
from jaxspec.decoder.fused_norms import FUSED_NORMS
from jaxspec.decoder.low_rank import attached
from jaxspec.decoder.matmul import logits
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.padding import flat, padded
from jaxspec.decoder.path import NO_HOPPER, Call, Path
from jaxspec.decoder.plain import PLAIN
from jaxspec.decoder.post_norms import POST_NORMS
from jaxspec.decoder.streams import STREAMS
from jaxspec.decoder.weight_stream import FP8_STREAM, WEIGHT_STREAM
from jaxspec.models.description import Decoder, Norm, beyond
from jaxspec.models.weights import Weight, matmul
from jaxspec.pallas import hopper, operation, portable
from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, nothing
from jaxspec.parallel.sharding import devices, embed

Overrides = tuple[Float[Array, "n c"], Int[Array, "b t"]]  # as of `forward`

PATHS = FEW_ROWS, FUSED_NORMS, POST_NORMS, WEIGHT_STREAM, FP8_STREAM, FP8_ROWS, FP8_TILES, PLAIN  # the fastest first


@flax.struct.dataclass
class Hidden:
    """A forward's result: `last` is the final-norm output; `features` the residual stream after each captured layer.

    Where one row a sequence was requested, t is 1 in `last`, and in all that is of the last layer.

    `unnormed` is what the final norm was taken of. `experts`: the numbers of those that each mixture chose, if the
    decoder reports them.
    """

    last: Float[Array, "b t d"]
    features: tuple[Float[Array, "b _ d"], ...]
    cache: Any
    unnormed: Float[Array, "b t d"] | None = None
    experts: Int[Array, "b t l k"] | None = None


def choose(decoder: Decoder, layers: Sequence[Weights], call: Call) -> tuple[Path, dict[str, str]]:
    """The first path that runs such a call, and why each one before it doesn't. `layers` are the weights, or shapes.

    **Raises:** `NotImplementedError` if none does, which names what the plain path lacks.
    """
    if decoder.deterministic:
        if (reason := DETERMINISTIC.refuses(decoder, layers, call)) is not None:
            raise NotImplementedError(f"--deterministic has no kernels for {reason}. Drop the flag")
        return DETERMINISTIC, {}
    refused: dict[str, str] = {}
    for path in (STREAMS,) if decoder.streams else PATHS:
        if (reason := path.refuses(decoder, layers, call)) is None:
            return path, refused
        refused[path.name] = reason
    raise NotImplementedError(f"no path runs this decoder; the plain one lacks {refused[PLAIN.name]}")


def path_table(
    decoder: Decoder,
    layers: Sequence[Weights],
    requests: Sequence[int],
    rows: int,
    pages: str,
    tp_size: int = 1,
    adapters: bool = False,
) -> list[dict[str, Any]]:
    """For rounds of so many `requests`, `rows` each: which path runs the layers, and why no faster one does.

    "portable" is the plain path with the portable kernels. `adapters`: requests have some.
    """
    table, of = [], {"devices": tp_size, "adapters": adapters}
    for count in requests:
        path, refused = choose(decoder, layers, Call(count, rows, pages, hopper.multiprocessors(), **of))
        name = "portable" if path is PLAIN and portable.kernels_here() is None else path.name
        table.append({"requests": count, "rows": count * rows, "path": name, "refused": refused})
    return table


def describe(table: list[dict[str, Any]]) -> str:
    """A `path_table` in words: batches that take the same path, for the same reasons, in one line.

    That the device has no kernels is left out: the start's line about kernels says so.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for line in table:
        refused = line["refused"].items()
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in refused if reason != NO_HOPPER)
        lines.setdefault((line["path"], reasons), []).append(str(line["rows"]))
    told = (
        f"{', '.join(rows)} rows: {path}{f' ({reasons})' * bool(reasons)}" for (path, reasons), rows in lines.items()
    )
    return "the decoder's layers in a round of " + "\n  ".join(told)


def forward(
    decoder: Decoder,
    params: dict[str, Any],
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"] | Int[Array, "3 b t"],
    mixer: Mixer,
    cache: Any = None,
    capture: tuple[int, ...] = (),
    requested: Int[Array, " b"] | None = None,
    overrides: Overrides | None = None,
    adapters: Int[Array, " b"] | None = None,
) -> Hidden:
    """Run the decoder over `tokens` at absolute `positions`; negative ones are padding, whose results nobody reads.
    Those of three axes, which tokens of pictures have, are for the rope table alone.

    `mixer` owns the keys and values: it is given each layer's and decides what the queries see. `capture` names decoder
    layers (0-based) whose output, the un-normed residual stream, is returned in that order; the number after the last
    layer's is the final norm's output, and -1 the embedding's.

    Of several residual streams, what is captured, and the final norm's output, is one row that they make; all of them
    behind the last layer, side by side, are number `Decoder.last_streams`.

    `requested`: i32[b], the one row of each sequence whose final state is needed, -1 for none; None: all rows. The last
    layer then computes keys and values of all rows, which later ones will see, but attention of the named sequences
    alone, and what follows of the named rows alone.

    `overrides`: rows that stand in for embeddings, an image's for example, and for each token the number of its row,
    negative where it has its own embedding. Further columns of a row are added behind the first layers.

    `adapters`: for each sequence the place of its adapter among `params["adapters"]`, -1 for none; None: none has one.
    """
    x, layers = embed(params["embed"], tokens), params["layers"]
    if decoder.embed_scale != 1:
        x = x * jnp.asarray(decoder.embed_scale, x.dtype)
    x = overridden(x, overrides)
    if adapters is not None:
        layers = attached(layers, params["adapters"], adapters)
    path, _ = choose(decoder, layers, Call.of(positions, mixer, cache, adapters=adapters is not None))
    ops = _ops(path, decoder, layers, positions, mixer)
    if cache is None and decoder.sharing:
        cache = {}  # where layers keep what others share
    with whole_float32(x.dtype):
        if decoder.layer_inputs:
            own = tokens if overrides is None else jnp.where(overrides[1] < 0, tokens, decoder.layer_inputs.padding)
            ops = dataclasses.replace(ops, inputs=plain.layer_inputs(decoder, params, own, x, ops.positions))
        if decoder.ngrams:
            ops = dataclasses.replace(ops, tokens=tokens)
        stream = jnp.tile(x, decoder.streams.count) if decoder.streams else x
        outputs, cache, experts = stack.run(ops, decoder, layers, stream, cache, requested, _added(x, overrides))
        if decoder.streams:
            side_by_side = outputs[-1]
            last, outputs = streams.as_one(decoder, params, outputs, ops.positions, capture)
    if decoder.deterministic:
        last = deterministic.row_norm(outputs[-1], params["norm"], decoder.norm)
    elif not decoder.streams:
        last = normed(outputs[-1], params["norm"], decoder.norm)
    if requested is not None and last.shape[1] > 1:  # of paths that compute whole layers
        last, outputs[-1] = row_of(last, requested), row_of(outputs[-1], requested)
    unnormed = None if decoder.streams else outputs[-1]
    captured = [*outputs, last, *([side_by_side] if decoder.streams else []), x]
    return Hidden(last, tuple(captured[i] for i in capture), cache, unnormed, experts)


def overridden(x: Float[Array, "b t d"], overrides: Overrides | None) -> Float[Array, "b t d"]:
    """Embeddings, with rows that stand in for some of them."""
    if overrides is None:
        return x
    rows, at = overrides
    return jnp.where(at[..., None] < 0, x, rows[jnp.maximum(at, 0), : x.shape[-1]].astype(x.dtype))


def _added(x: Float[Array, "b t d"], overrides: Overrides | None) -> list[Float[Array, "b t d"]]:
    """List what overriding rows add to the residual stream behind each of the first layers."""
    columns = 0 if overrides is None else overrides[0].shape[1]
    nothing, d = jnp.zeros_like(x), x.shape[-1]
    return [overridden(nothing, (overrides[0][:, i : i + d], overrides[1])) for i in range(d, columns, d)]


def _ops(path: Path, decoder: Decoder, layers: Sequence[Weights], positions: Array, mixer: Mixer) -> stack.Ops:
    if positions.ndim == 2:
        return path.ops(decoder, layers, positions, mixer)
    return dataclasses.replace(path.ops(decoder, layers, positions[0], mixer), axes=positions)


def run_layer(
    decoder: Decoder,
    weights: Weights,
    x: Float[Array, "b r d"],
    positions: Int[Array, "b t"] | Int[Array, "3 b t"],
    mixer: Mixer,
    cache: Any,
    inputs: Sequence[tuple[Float[Array, "b _ _"], Float[Array, " _"] | None]] | None = None,
    requested: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b _ d"], Any]:
    """The residual stream `x` after the layer of a decoder of one, before any norm, and the cache.

    `inputs`: rows side by side that queries, keys and values are made of, each with the scale of its norm, None if it
    has none; by default `x` with the layer's first norm, or what several streams are mixed to. Given rows may be
    followed by padding, r - t a request, and so may be what is returned. It stays there from call to call: cutting it
    off and adding it would be kernels of its own.

    `requested`: as in `forward`. Then that row of each sequence may be all that is returned.
    """
    if inputs is None and not decoder.streams:
        inputs = [(x, weights["attn_norm"])]
    plain = inputs is None or any(scale is None for _, scale in inputs)
    widths = () if plain else tuple(rows.shape[2] for rows, _ in inputs)
    path, _ = choose(decoder, [weights], Call.of(positions, mixer, cache, widths))
    ops = _ops(path, decoder, [weights], positions, mixer)
    with whole_float32(x.dtype):
        return stack.run_one(ops, decoder, weights, inputs, x, cache, requested)


def write_keys_values(
    decoder: Decoder,
    params: dict[str, Any],
    context: Float[Array, "b t d"],
    rows: Any,
    cache: Any,
) -> Any:
    """The cache after keys and values that all layers make of the same rows, normed by `hidden_norm`, are written.

    `params["context"]` has the columns of the first layer's keys, then of its values, then of the next layer's;
    `context_norm` [l, h] the scales of their norms. `rows`: where they stand, as `paged.Rows`.
    """
    call = decoder, params, context, rows, cache
    return operation.choose("keys and values of a context", CONTEXT, *call).run(*call)


def _few_refused(decoder, params, context, rows, cache) -> str | None:
    call = Call(*context.shape[:2], _dtype(rows.pages(cache)), hopper.multiprocessors())
    return FEW_ROWS.lacks(decoder, params["context"]) or sizes_fit(decoder, params["layers"], call, quantised=False)


def _few_keys_values(decoder, params, context, rows, cache):
    (b, t, _), eps = context.shape, decoder.layers[0].norm.eps
    table = rope_table(decoder.attention, rows.marked_positions(t))
    kv_slots = rows.written(cache, padded(b, t)).reshape(-1)
    of = flat(context), params["hidden_norm"], params["context"].unquantised, *table
    return few_rows.keys_values(*of, cache, kv_slots, params["context_norm"], params.get("context_bias"), eps=eps)


def _keys_values(decoder, params, context, rows, cache):
    (b, t, _), a, norm = context.shape, decoder.attention, decoder.layers[0].norm
    kv = matmul(normed(context, params["hidden_norm"], norm), params["context"])
    if a.bias:
        kv = kv + params["context_bias"]
    kv = kv.reshape(b, t, len(decoder.layers), 2, a.kv_heads, a.head_dim)
    k, v = jnp.moveaxis(kv, (3, 2), (0, 1))  # each [l, b, t, m, h]
    k = normed(k, params["context_norm"][:, None, None, None], norm)
    k = rope(k, rows.positions(t), a)
    return rows.write(cache, jnp.arange(len(decoder.layers))[:, None, None], k, v)


CONTEXT = (
    Implementation("few_rows", HOPPER, _few_refused, _few_keys_values),
    Implementation("plain", ANY, nothing, _keys_values),
)


def _dtype(pages: Array | None) -> str | None:
    return None if pages is None else jnp.dtype(pages.dtype).name


def unembed(params: dict[str, Any], hidden: Float[Array, "*b d"], decoder: Decoder) -> Float[Array, "*b v"]:
    """Final hidden states of this decoder to logits, float32; of this device's part of the vocabulary."""
    product = deterministic.unembed(params["head"], hidden) if decoder.deterministic else head_logits(params, hidden)
    product = product if decoder.logit_scale == 1 else product * decoder.logit_scale
    return product if decoder.logit_cap is None else capped(product, decoder.logit_cap)


def head_logits(params: dict[str, Any], hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """The product with the head, or with tied embeddings, float32: logits but for a decoder's scale and cap.

    Over several devices XLA times nothing, and multiplies one row in float32 by a float32 copy of the head: three times
    the bytes, and 1.2 GB of Qwen3-8B's half. Two rows it multiplies as they are.
    """
    if devices() > 1 and math.prod(hidden.shape[:-1]) == 1:
        return head_logits(params, jnp.concatenate([hidden, hidden], axis=-2))[..., :1, :]
    with whole_float32(hidden.dtype):
        if (head := _head(params, hidden)) is not None:
            return logits(hidden, head)
        return jnp.einsum("...d,vd->...v", hidden, params["embed"], preferred_element_type=jnp.float32)


COPY_ROWS = 32  # for more `fp8_rows` reads at half of an unquantised head's speed: half of the bytes gain nothing


def _head(params: dict[str, Any], hidden: Float[Array, "*b d"]) -> Weight | None:
    """The head of these rows: a drafter's copy of it for few rows, if it has one, or the head itself; None if
    that is the embedding."""
    few = math.prod(hidden.shape[:-1]) <= COPY_ROWS
    return params["head_copy"] if few and "head_copy" in params else params.get("head")


TOP_TOKENS = {Norm: frozenset({"eps"})}  # what the kernel implements that norms, unembeds and takes the argmax


def top_tokens(
    params: dict[str, Any], norm: Norm, scale: Float[Array, " d"], x: Float[Array, "b t d"] | None
) -> tuple[Int[Array, "b t"], Float[Array, "b t"]] | None:
    """The tokens with the highest logits of rows before their final norm, and these; None where no kernel serves."""
    return BEST.run(params, norm, scale, x) if BEST.takes(params, norm, scale, x) else None


def _best_refused(params, norm, scale, x) -> str | None:
    if devices() > 1 or x is None or _head(params, x) is not None:
        return "a head that isn't the embedding of one device"  # tied weights have a token's side by side
    b, t, _ = x.shape
    embed = params["embed"]
    return beyond(norm, TOP_TOKENS) or few_rows.top_supported(b * padded(b, t), embed.shape, embed.dtype)


def _best(params, norm, scale, x):
    b, t, _ = x.shape
    found = few_rows.top_tokens(flat(x), scale, params["embed"], eps=norm.eps)
    return tuple(each.reshape(b, -1)[:, :t] for each in found)


BEST = Implementation("top_tokens", HOPPER, _best_refused, _best)
