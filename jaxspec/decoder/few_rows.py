"""Layers at few rows, each in four kernels and attention's (`pallas.few_rows`); a mixture has two and its own.

They run a target's layers, DFlash's, and EAGLE-3's one, whose q, k and v are made of two inputs side by side. Rows are
flat here, each request's padded so that the kernels take eight together (`padding`): once before the first layer, and
attention takes and gives them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import cos_sin
from jaxspec.decoder.low_rank import own_places
from jaxspec.decoder.matmul import quantises_rows
from jaxspec.decoder.mixings.attention import sinks
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.mixture_rows import add, given_first, given_to, mixture, operand, quantised_refused, stored_as
from jaxspec.decoder.padding import flat, padded, untimed, valid_rows
from jaxspec.decoder.path import MIXTURE, Call, Path, implementing, layers_differ
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Attention, ClampedSwiglu, Decoder, Mixture, Mlp
from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas.attention.prompt_attention import UNIT
from jaxspec.pallas.dense import few_rows

TIMED_WIDTH = 8192  # over several devices, of dense models in FP8 at 9 to 32 rows
ALONE_DEVICES = 1  # that a layer by itself is divided among: no GPU has timed it on several

PRODUCTS = ("qkv", "out", "gate_up", "down")  # the weights of dense ones

Table = tuple[Float[Array, "r half"], Float[Array, "r half"]]
Counters = tuple[Int[Array, " m"], Int[Array, "1"]]  # as of `few_rows.Adapters`, and the turn of the next kernel

IMPLEMENTS = implementing({
    Mixture: {*MIXTURE, "bias", "router_bias", "activation"}, ClampedSwiglu: {"alpha", "limit"},
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
    if decoder.width <= few_rows.NARROW or any(isinstance(layer.feed, Mixture) for layer in decoder.layers):
        return f"rows of {decoder.width} with adapters; supported: wider than {few_rows.NARROW}, and MLPs"
    if 0 < call.processors < few_rows.BLOCKS:  # they wait for one another
        return f"rows with adapters on {call.processors} multiprocessors; {few_rows.BLOCKS} are needed"
    rows = call.requests * padded(call.requests, call.rows)
    groups = {"qkv": decoder.attention.head_dim // few_rows.TILE, "gate_up": None}
    for name, weight in ((name, each) for layer in layers for name, each in layer.items() if name in PRODUCTS):
        if weight.adapters is None:
            continue
        if weight.quantised:
            return f"adapters of a weight in {weight.format}"
        (k, projections, *of), outputs = weight.adapters.a.shape, weight.adapters.b.shape[2]
        of = groups.get(name, 1), *of, projections, weight.adapters.a.dtype
        if reason := few_rows.adapters_supported(rows, (k, outputs), *of):
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
    if len({layer.mixing.rope for layer in decoder.layers}) > 1:
        return "layers whose ropes differ"  # there is one table for all
    if odd := [each.mixing.qk_norm for each in decoder.layers if each.mixing.qk_norm not in (None, norm)]:
        return f"norms of q and k that aren't the layer's, {odd[0]}"
    widths = decoder.width, a.heads * a.head_dim
    if mlps := {layer.feed.width for layer in decoder.layers if isinstance(layer.feed, Mlp)}:
        if len(mlps) > 1:
            return f"MLPs of different widths, {sorted(mlps)}"
        widths += tuple(mlps)
        if any(each["gate_up"].layout.interleave != HALF for each in layers if "gate_up" in each):
            return f"an MLP {max(mlps)} wide"
    rows, multiplied = call.requests * padded(call.requests, call.rows), _multiplied(layers)
    formats = {type(weight.format) for weight in multiplied}
    if len(formats) > 1 or (multiplied[0].quantised and not quantised):
        return f"weights in {' and '.join(sorted(each.__name__ for each in formats))}"
    dtype, ways = multiplied[0].dtype, [{}]
    if multiplied[0].quantised:
        if reason := next(filter(None, map(quantised_refused, multiplied)), None):
            return reason
        dtype, ways = layers[0]["attn_norm"].dtype, list(map(stored_as, multiplied))
    wide = few_rows.FP8_ROWS if call.adapters else few_rows.WIDE_ROWS  # no faster kernel adds what adapters do
    fit = partial(few_rows.supported, rows, a.head_dim, widths, dtype, call.pages, beside=beside, wide_rows=wide)
    return next(filter(None, (fit(**way) for way in ways)), None)


def _multiplied(layers: Sequence[Weights]) -> list[Weight]:
    """The weights of dense products."""
    return [layer[name] for layer in layers for name in PRODUCTS if name in layer]


@dataclass(frozen=True, eq=False)
class FewRows(Ops):
    """Flat rows, each request's padded. Given to a layer are its inputs side by side, all but the first layer by itself
    have one; and the counters of the kernels that add what adapters do, which go from one to the next."""

    table: Table
    valid: tuple[Int[Array, "1 r"], int]  # which rows a mixture of experts is for, see `valid_rows`
    own: tuple[Array, ...] = ()  # `own_places`, if rows have adapters
    counters: Counters | None = None  # of the first kernel

    @classmethod
    def of(cls, decoder, layers, positions, mixer):
        changes, own = [weight.adapters for weight in _multiplied(layers) if weight.adapters is not None], ()
        if changes:
            places, rank, _ = changes[0].b.shape  # the same of all weights
            own = own_places(changes[0].place, padded(*positions.shape), places, rank, few_rows.TILE)
        counters = (jnp.zeros(len(changes), jnp.int32), jnp.zeros(1, jnp.int32)) if changes else None
        return cls(positions, mixer, rope_table(decoder.attention, positions), valid_rows(positions), own, counters)

    def within(self, kernel: Callable[..., Any], weight: Weight, counters: Counters | None, *operands, **options):
        """Call a kernel of a weight's product, with the rows' adapters if that has some. Returns its result, and the
        counters for the next."""
        if weight.adapters is None:
            return kernel(*operands, **options), counters
        (a, b), (counts, turn) = (weight.adapters.a, weight.adapters.b), counters
        given = few_rows.Adapters(a, b, *self.own, counts, turn)
        *made, counts = kernel(*operands, adapters=given, **options)
        return made[0] if len(made) == 1 else tuple(made), (counts, turn + 1)

    def first(self, layer, weights, x, inputs):
        rows = flat(x)
        if inputs is not None:
            return rows, ([(flat(each), scale) for each, scale in inputs], self.counters)
        return rows, ([given_first(layer, weights, rows, weights["attn_norm"])], self.counters)

    def after(self, decoder, layers):
        """After the last layer, the next round's first."""
        return [{name: each[name] for name in ("qkv", "attn_norm")} for each in (*layers[1:], layers[0])]

    def batched(self, x):
        return x.reshape(len(self.positions), -1, x.shape[1])

    def mix(self, layer, weights, i, x, given, cache):
        a, norms = layer.mixing, [weights[name] for name in ("q_norm", "k_norm") if layer.mixing.qk_norm]
        later = [name for name in ("out", "gate_up", "down") if name in weights and _idle(weights, x)]
        prefetch = [weights[name].unquantised for name in later]
        given, counters = given
        given = [given_to(weights["qkv"], each, layer.norm.centred) for each in given]

        def write(pages, kv_slots, inverse_scales):
            nonlocal counters
            operands = *zip(*given, strict=True), operand(weights["qkv"]), *self.table, pages, i, kv_slots.reshape(-1)
            of = *operands, norms, prefetch, weights.get("qkv_bias"), inverse_scales
            (q, pages), counters = self.within(few_rows.heads, weights["qkv"], counters, *of, eps=layer.norm.eps)
            return q.reshape(len(self.positions), -1, a.heads, a.head_dim), pages

        t = len(x) // len(self.positions)
        mixed, cache = self.mixer.attend_written(cache, i, t, write, a.window, **sinks(a, weights))
        return (mixed.reshape(len(x), -1), counters), cache

    def add(self, layer, weights, x, mixed):
        norm, follows = layer.norm, weights["router" if isinstance(layer.feed, Mixture) else "gate_up"]
        named = dict(centred=norm.centred, bias=weights.get("out_bias"), prefetch=follows)
        return self._add(x, *mixed, weights["out"], weights["mlp_norm"], **named)

    def feed(self, layer, weights, after, x, given):
        scale, qkv = (after["attn_norm"], after["qkv"]) if after else (None, None)
        given, counters = given
        if isinstance(layer.feed, Mixture):
            x, given = mixture(layer, weights, x, given, *self.valid, scale, qkv)
            return x, ([given], counters)
        prefetch = [qkv.unquantised] if after and _idle(weights, x) else []
        given = given_to(weights["gate_up"], given, layer.norm.centred)
        of = *given, operand(weights["gate_up"]), prefetch
        hidden, counters = self.within(few_rows.gated, weights["gate_up"], counters, *of, eps=layer.norm.eps)
        x, (given, counters) = self._add(x, hidden, counters, weights["down"], scale, prefetch=qkv)
        return x, ([given], counters)

    def _add(self, x, rows, counters, weight, scale, **named):
        """Add a product to the residual stream, as `mixture_rows.add`."""

        def within(kernel, *of, **options):
            nonlocal counters
            made, counters = self.within(kernel, weight, counters, *of, **options)
            return made

        x, given = add(x, rows, weight, scale, within=within, **named)
        return x, (given, counters)


def _idle(weights: Weights, x: Float[Array, "r d"]) -> bool:
    """Whether a layer is so small that memory is idle for most of it, and later weights are prefetched."""
    return x.shape[1] <= few_rows.NARROW and not weights["qkv"].quantised


def rope_table(attention: Attention, positions: Int[Array, "b t"]) -> Table:
    """Cosine and sine of each flat row's angles."""
    return cos_sin(flat(positions[..., None])[:, 0], attention)


FEW_ROWS = Path("few_rows", IMPLEMENTS, 1, fits, FewRows.of, one=True, sums=True, axes=False, adapters=True)
