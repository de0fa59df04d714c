"""Layers at few rows, each in four kernels and attention's (`pallas.dense.few_rows`); a mixture has two and its own.

They run a target's layers, DFlash's, and EAGLE-3's one, whose q, k and v are made of two inputs side by side. Rows are
flat here, each request's padded so that the kernels take eight together (`padding`): once before the first layer, and
attention takes and gives them as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
from jaxtyping import Array, Float, Int

from jaxspec.decoder import plain
from jaxspec.decoder.functions import cos_sin
from jaxspec.decoder.low_rank import own_columns
from jaxspec.decoder.matmul import quantises_rows
from jaxspec.decoder.mixings.attention import sinks
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.mixture_rows import add, given_first, given_to, mixture, operand, quantised_refused, stored_as
from jaxspec.decoder.padding import flat, padded, untimed, valid_rows
from jaxspec.decoder.path import MIXTURE, SIGMOID_SCORES, Call, Path, implementing, layers_differ
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Attention, ClampedSwiglu, Decoder, Mixture, Mlp, SigmoidScores
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas.attention.prompt_attention import UNIT
from jaxspec.pallas.dense import few_rows

TIMED_WIDTH = 8192  # over several devices, of dense models in FP8 at 9 to 32 rows
ALONE_DEVICES = 1  # that a layer by itself is divided among: no GPU has timed it on several

Table = tuple[Float[Array, "r half"], Float[Array, "r half"]]

IMPLEMENTS = implementing({
    Mixture: {*MIXTURE, "bias", "router_bias", "activation", "shared_gated", "scores"},
    ClampedSwiglu: {"alpha", "limit"}, SigmoidScores: SIGMOID_SCORES,
    Rope: {"columns"},
})  # fmt: skip


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Refuse a call, as `Path.fits`."""
    if call.rows >= UNIT:
        return f"{call.rows} rows of a request, which are a prompt's"  # not measured
    if call.devices > 1 and decoder.width <= few_rows.NARROW:
        return f"rows of {decoder.width} divided among {call.devices} devices"
    if call.inputs is not None and call.devices > ALONE_DEVICES:
        return f"a layer by itself divided among {call.devices} devices"
    # `sizes_fit` has the limit of weights that aren't FP8.
    if call.adapters and (reason := adapters_refused(decoder, layers, call)):
        return reason
    timed = decoder.width <= TIMED_WIDTH and all(isinstance(layer.feed, Mlp) for layer in decoder.layers)
    if reason := untimed(call.requests * padded(call.requests, call.rows), call.devices, timed):
        return reason
    return sizes_fit(decoder, layers, call)


def adapters_refused(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Why the kernels can't add what rows' adapters do, or None if they can."""
    if call.devices > 1:
        return f"rows with adapters divided among {call.devices} devices"
    if decoder.width <= few_rows.NARROW or any(isinstance(layer.feed, Mixture) for layer in decoder.layers):
        return f"rows of {decoder.width} with adapters; supported: wider than {few_rows.NARROW}, and MLPs"
    rows = call.requests * padded(call.requests, call.rows)
    for weight in (each for each in _multiplied(layers) if each.adapters is not None):
        k, places, rank = weight.adapters.a.shape
        if weight.quantised or places * rank % few_rows.TILE:
            return f"adapters of rank {rank} in {places} places of a weight in {weight.format}"
        if reason := few_rows.product_supported(rows, [k], (k, places * rank), weight.adapters.a.dtype):
            return reason
    return None


def sizes_fit(decoder: Decoder, layers: Sequence[Weights], call: Call, quantised: bool = True) -> str | None:
    """Why the kernels can't take these layers' sizes and dtypes, or None if they can. `quantised`: weights may be."""
    if call.pages is None:
        return "no pages to write to"
    if call.inputs == ():
        return "rows that are normed already"
    beside = sum(call.inputs[1:]) if call.inputs else 0
    if beside and any(map(quantises_rows, _multiplied(layers))):
        return "two inputs whose rows are quantised"
    if reason := layers_differ(decoder):
        return reason
    a, norm = decoder.attention, decoder.layers[0].norm
    if odd := [each.mixing.qk_norm for each in decoder.layers if each.mixing.qk_norm not in (None, norm)]:
        return f"norms of q and k that aren't the layer's, {odd[0]}"
    widths = decoder.width, a.heads * a.head_dim
    refused = [_mlp_refused(each) for each in layers]
    if decoder.mixture is None and any(refused):
        return next(filter(None, refused))
    if len(mlps := {each["down"].inputs for each in layers if "down" in each and not _mlp_refused(each)}) > 1:
        return f"MLPs of different widths, {sorted(mlps)}"
    widths += tuple(mlps)
    rows, multiplied = call.requests * padded(call.requests, call.rows), _multiplied(layers)
    packed = [weight for weight in multiplied if weight.quantised]
    if packed and not quantised:
        return f"weights in {packed[0].format}"
    if reason := next(filter(None, map(quantised_refused, packed)), None):
        return reason
    dtype, ways = layers[0]["attn_norm"].dtype if packed else multiplied[0].dtype, map(stored_as, multiplied)
    wide = few_rows.FP8_ROWS if call.adapters else few_rows.WIDE_ROWS  # no faster kernel adds what adapters do
    fit = partial(few_rows.supported, rows, a.head_dim, widths, dtype, call.pages, beside=beside, wide_rows=wide)
    each = itertools.product(ways, {rope.columns for rope in decoder.ropes})
    return next(filter(None, (fit(**way, rotated=columns) for way, columns in each)), None)


def _mlp_refused(weights: Weights) -> str | None:
    """Why the kernels can't take a layer's MLP, or None if they can, or if it has none. Beside mixtures such an MLP is
    a plain layer's: only the first layers have one."""
    mlp = [weights[name] for name in ("gate_up", "down") if name in weights]
    if mlp and mlp[0].layout.interleave != HALF:
        return f"an MLP {mlp[1].inputs} wide"
    return next(filter(None, (quantised_refused(weight) for weight in mlp if weight.quantised)), None)


def _multiplied(layers: Sequence[Weights]) -> list[Weight]:
    """The weights of dense products by the kernels."""
    names = [("qkv", "out") if _mlp_refused(layer) else ("qkv", "out", "gate_up", "down") for layer in layers]
    return [layer[name] for layer, own in zip(layers, names, strict=True) for name in own if name in layer]


@dataclass(frozen=True, eq=False)
class FewRows(Ops):
    """Flat rows, each request's padded. Given to a layer are its inputs side by side, all but the first layer by itself
    have one."""

    tables: Mapping[Rope, Table]
    valid: tuple[Int[Array, "1 r"], int]  # which rows a mixture of experts is for, see `valid_rows`
    own: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)  # `own_columns` by a weight's ranks

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        changes, own = [weight.adapters for weight in _multiplied(layers) if weight.adapters is not None], {}
        for _, places, rank in {change.a.shape for change in changes}:
            own[rank] = own_columns(changes[0].place, padded(*positions.shape), places, rank, few_rows.TILE)
        kinds = {layer.mixing.rope: layer.mixing for layer in decoder.layers}
        tables = {rope: rope_table(attention, positions) for rope, attention in kinds.items()}
        return cls(positions, mixer, tables, valid_rows(positions), own)

    def adapters(self, rows: Array, weight: Weight) -> list[few_rows.Adapters]:
        """Shrink rows by their adapters, as the kernel of their product with a weight takes it; nothing without any."""
        if weight.adapters is None:
            return []
        a, b = weight.adapters.a, weight.adapters.b
        own, present = self.own[a.shape[2]]
        with jax.named_scope("adapters"):
            inner = few_rows.shrink(rows, a.reshape(len(a), -1), own)
        return [few_rows.Adapters(inner, b.reshape(-1, b.shape[2]), present)]

    def first(self, layer, weights, x, inputs):
        rows = flat(x)
        if inputs is not None:
            return rows, [(flat(each), scale) for each, scale in inputs]
        return rows, [given_first(layer, weights, rows, weights["attn_norm"])]

    def after(self, decoder, layers):
        """After the last layer, the next round's first."""
        return [{name: each[name] for name in ("qkv", "attn_norm")} for each in (*layers[1:], layers[0])]

    def mix(self, layer, weights, i, x, given, cache):
        a, norms = layer.mixing, [weights[name] for name in ("q_norm", "k_norm") if layer.mixing.qk_norm]
        later = [weights[name] for name in ("out", "gate_up", "down") if name in weights]
        prefetch = _prefetched(x, weights["qkv"], later)
        given = [given_to(weights["qkv"], each, layer.norm.centred) for each in given]
        adapters, table = self.adapters(given[0][0], weights["qkv"]), self.tables[a.rope]

        def write(pages, kv_slots, inverse_scales):
            of = *zip(*given, strict=True), operand(weights["qkv"]), *table, pages, i, kv_slots.reshape(-1)
            q, pages = few_rows.heads(
                *of, norms, prefetch, weights.get("qkv_bias"), inverse_scales, *adapters, eps=layer.norm.eps
            )
            return q.reshape(len(self.positions), -1, a.heads, a.head_dim), pages

        t = len(x) // len(self.positions)
        mixed, cache = self.mixer.attend_written(cache, i, t, write, a.window, **sinks(a, weights))
        return mixed.reshape(len(x), -1), cache

    def add(self, layer, weights, x, mixed):
        if _mlp_refused(weights):
            return add(x, mixed, weights["out"], None, bias=weights.get("out_bias"))
        norm, follows = layer.norm, weights["router" if isinstance(layer.feed, Mixture) else "gate_up"]
        named = dict(centred=norm.centred, bias=weights.get("out_bias"), prefetch=follows)
        adapters = self.adapters(mixed, weights["out"])
        return add(x, mixed, weights["out"], weights["mlp_norm"], adapters=adapters, **named)

    def feed(self, layer, weights, after, x, given):
        scale, qkv = (after["attn_norm"], after["qkv"]) if after else (None, None)
        if isinstance(layer.feed, Mixture):
            x, given = mixture(layer, weights, x, given, *self.valid, scale, qkv)
            return x, [given]
        if _mlp_refused(weights):
            x = plain.feed(layer, weights, self.batched(x), self.positions).reshape(x.shape)
            return x, [(x, scale)]
        prefetch = _prefetched(x, weights["gate_up"], [qkv] if after else [])
        given = given_to(weights["gate_up"], given, layer.norm.centred)
        adapters = self.adapters(given[0], weights["gate_up"])
        hidden = few_rows.gated(*given, operand(weights["gate_up"]), prefetch, *adapters, eps=layer.norm.eps)
        adapters = self.adapters(hidden, weights["down"])
        x, given = add(x, hidden, weights["down"], scale, prefetch=qkv, adapters=adapters)
        return x, [given]


def _prefetched(x: Float[Array, "r d"], weight: Weight, later: Sequence[Weight]) -> list[Array]:
    """Later weights that this one's kernel prefetches: unquantised ones, of a layer so small that memory is idle for
    most of it."""
    small = x.shape[1] <= few_rows.NARROW and not weight.quantised
    return [each.unquantised for each in later if small and not each.quantised]


def rope_table(attention: Attention, positions: Int[Array, "b t"]) -> Table:
    """Cosine and sine of each flat row's angles."""
    return cos_sin(flat(positions[..., None])[:, 0], attention)


FEW_ROWS = Path("few_rows", IMPLEMENTS, 1, fits, FewRows.of, one=True, sums=True, axes=False, adapters=True)
