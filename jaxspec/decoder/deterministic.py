"""Layers in which a row has the same bits whatever rows are beside it: the path of `--deterministic`.

A sum in floating point depends on its order. Here every sum has one order, for any number of rows:

- Up to 128 rows of a round go through `weight_stream` with fixed shares; more through `tile_matmul`, which sums the
  same parts of the inputs. In a narrow model they go through `few_rows`, up to 64 at a time. Their attention has fixed
  parts (`paged.Rows.fixed`).
- Rows of prompts go through `tile_matmul`, which adds up one step of inputs after the other in tiles of any shape, and
  a kernel for their norms.
- Over several devices all rows go through `tile_matmul`, and sums go in the order of ranks (`summed_in_order`).
- On a CPU all rows go through XLA's products in slices of `SLICE`, so that there is one shape.
- Linear attention takes its state from one token to the next, in a round and in replay alike (`fixed_order`), and
  prompts in blocks at fixed positions. It and gated attention are in their kinds (`Mixing.fixed`).

Rounds and prompts don't agree with one another. So what a round computed is never computed again as a prompt: the
prefix tree holds prompts alone, and a preempted request starts again (`scheduler`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder import few_rows as narrow
from jaxspec.decoder.fixed_order import change_of, exact_product, row_norm
from jaxspec.decoder.functions import Table, cos_sin_apart
from jaxspec.decoder.matmul import gate, reference, valid_count
from jaxspec.decoder.mixer import Mixer
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.padding import flat
from jaxspec.decoder.path import PLAINEST, Call, Path, implementing, layers_differ
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Decoder, Layer, Norm, beyond
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import HALF, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.attention.decode_attention.plan import MAX_ROWS
from jaxspec.pallas.attention.prompt_attention import UNIT as PROMPT_ROWS
from jaxspec.pallas.dense import few_rows, tile_matmul, weight_stream
from jaxspec.pallas.dense.add_norm import WIDEST, add_norm
from jaxspec.pallas.sliced_rows import SLICE, sliced
from jaxspec.parallel.peers import summed_in_order
from jaxspec.parallel.sharding import devices

NARROW_SLICE = 64  # that `few_rows` does

IMPLEMENTS = implementing({Decoder: {"deterministic"}, Norm: {"centred"}, Rope: {"columns"}})


def fits(decoder: Decoder, layers: Sequence[Weights], call: Call) -> str | None:
    """Refuse a call, as `Path.fits`. A CPU takes all."""
    if not call.processors and hopper.platform() == "cpu":
        return None
    if call.processors < weight_stream.BLOCKS:
        return f"{call.processors} Hopper multiprocessors; {weight_stream.BLOCKS} are needed"
    if call.pages != "bfloat16":
        return f"pages in {call.pages}; bfloat16 is supported"
    if reason := layers_differ(decoder):
        return reason
    if len(decoder.ropes) > 1:
        return "layers whose ropes differ"
    if any(each["gate_up"].layout.interleave != HALF for each in layers):
        return f"an MLP {decoder.layers[0].feed.width} wide"
    if decoder.width > WIDEST:
        return f"rows of {decoder.width}; supported: up to {WIDEST}"
    if MAX_ROWS < call.rows < PROMPT_ROWS:
        return f"{call.rows} rows of a request; supported: up to {MAX_ROWS}"
    for layer in dict.fromkeys(decoder.layers):
        if reason := mixing_of(layer).fixed_refuses(layer, call.rows):
            return reason
    each = [each[name] for each in layers for name in ("qkv", "qkvz", "out", "gate_up", "down") if name in each]
    weights = {(weight.dtype, weight.inputs, weight.outputs): weight for weight in each}
    for weight in weights.values():
        if reason := weight_stream.fixed_supported(weight.dtype, weight.inputs, weight.outputs):
            return reason
    for weight in _adapted(layers):
        (k, places, rank), (*_, n), dtype = weight.adapters.a.shape, weight.adapters.b.shape, weight.adapters.a.dtype
        for of in ((k, places * rank), (places * rank, n)):
            if reason := weight_stream.fixed_supported(dtype, *of):
                return f"adapters, of which {reason}"
    if call.devices > 1:
        return None
    if _narrow(decoder):
        return narrow.sizes_fit(decoder, layers, Call(1, NARROW_SLICE, call.pages, call.processors))
    widths = [width for weight in weights.values() for width in (weight.inputs, weight.outputs)]
    return weight_stream.supported(weight_stream.MAX_ROWS, each[0].dtype, *widths)


def _adapted(layers: Sequence[Weights]) -> list[Weight]:
    """The weights whose products add what rows' adapters do."""
    weights = (each for layer in layers for each in layer.values() if isinstance(each, Weight))
    return [weight for weight in weights if weight.adapters is not None]


def _by_xla() -> bool:
    return not hopper.multiprocessors()


def _narrow(decoder: Decoder) -> bool:
    whole = {Decoder: IMPLEMENTS[Decoder], Rope: PLAINEST[Rope]}  # all columns of a head rotate
    return decoder.width <= few_rows.NARROW and not beyond(decoder, narrow.FEW_ROWS.implements | whole)


def ops_of(decoder: Decoder, layers: Sequence[Weights], positions: Int[Array, "b t"], mixer: Mixer) -> Ops:
    """Steps of prompts and a CPU's rows, of a narrow model's round, or of a wide one's. Kernels from one layer to the
    next have no sums over devices, and no adapters."""
    if _by_xla() or devices() > 1 or _adapted(layers) or positions.shape[1] >= PROMPT_ROWS:
        return LayerByLayer(positions, mixer, cos_sin_apart(positions, decoder.attention))
    if _narrow(decoder):
        return NarrowRound(positions, mixer, cos_sin_apart(flat(positions[..., None])[:, 0], decoder.attention))
    return WideRound(positions, mixer, cos_sin_apart(positions, decoder.attention))


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


@dataclass(frozen=True, eq=False)
class Fixed(Ops):
    """Steps whose sums have one order."""

    table: Table  # of the rope

    def _mix(self, layer, weights, i, made, cache, dtype, in_parts=False):
        by_axis = self.table_by_axis(layer)
        table = self.table if by_axis is None else jax.lax.optimization_barrier(by_axis)
        of = layer, weights, i, made, self.positions, self.mixer, cache, dtype, table, in_parts
        return mixing_of(layer).fixed(*of)


class WideRound(Fixed):
    """A wide model's round: `weight_stream.Streamed` with a last layer of the same kernels; more rows in tiles, with
    sums of the same parts. Rows are flat; given to a layer is its first product in parts, after the rows."""

    def first(self, layer, weights, x, inputs):
        x, weight = x.reshape(-1, x.shape[2]), weights[mixing_of(layer).projections[0]]
        rows = row_norm(x, weights["attn_norm"], layer.norm)
        if len(x) <= weight_stream.MAX_ROWS:
            return x, jnp.moveaxis(weight_stream.product_fixed(rows, weight.unquantised), 0, 1)
        return x, _in_parts(rows, weight, valid_count(self.positions))[:, None]

    def after(self, decoder, layers):
        nexts = zip(decoder.layers[1:], layers[1:], strict=True)
        firsts = [(each[mixing_of(layer).projections[0]], each["attn_norm"]) for layer, each in nexts]
        return [*firsts, None]

    def mix(self, layer, weights, i, x, given, cache):
        (b, t), made = self.positions.shape, [jnp.moveaxis(given, 1, 0)]
        for name in mixing_of(layer).projections[1:]:
            rows = weight_stream.norm_fixed(x, weights["attn_norm"], **_named(layer))
            made.append(in_turn(lambda rows, name=name: exact_product(rows, weights[name]), rows).reshape(b, t, -1))
        return self._mix(layer, weights, i, made, cache, x.dtype, in_parts=True)

    def finish(self, layer, weights, after, x, mixed):
        run = self._stream if len(x) <= weight_stream.MAX_ROWS else self._tiled
        return run(layer, weights, after, x, mixed.reshape(len(x), -1))

    def _stream(self, layer, weights, after, x, mixed):
        chain, scales = [weights[name].unquantised for name in ("out", "gate_up", "down")], [weights["mlp_norm"]]
        if after is not None:
            chain, scales = [*chain, after[0].unquantised], [*scales, after[1]]
        out, partials = weight_stream.stream_fixed(x, mixed, chain, scales, **_named(layer))
        if after is None:  # any scale: the norm isn't read
            return add_norm(out, partials, weights["mlp_norm"], eps=layer.norm.eps)[0], None
        return out, jnp.moveaxis(partials, 0, 1)

    def _tiled(self, layer, weights, after, x, mixed):
        product = partial(_in_parts, valid=valid_count(self.positions))
        x = product(mixed, weights["out"], residual=x)
        rows = weight_stream.norm_fixed(x, weights["mlp_norm"], **_named(layer))
        x = product(product(rows, weights["gate_up"], gated=True), weights["down"], residual=x)
        if after is None:
            return x, None
        rows = weight_stream.norm_fixed(x, after[1], **_named(layer))
        return x, product(rows, after[0])[:, None]


def _named(layer: Layer) -> dict[str, Any]:
    return {"eps": layer.norm.eps, "centred": layer.norm.centred}


def _in_parts(x: Array, weight: Weight, valid: Array, residual: Array | None = None, gated: bool = False) -> Array:
    """A product of more rows than `weight_stream` takes, with the bits that they would have there."""
    splits = weight_stream.splits_fixed(weight.inputs, weight.outputs, gated)
    of = x, weight.unquantised, valid, residual
    return tile_matmul.matmul(*of, gated=gated, splits=splits, rounded=gated)


class NarrowRound(Fixed):
    """A narrow model's round: `few_rows.FewRows`, each kernel in slices of as many rows as it takes."""

    def first(self, layer, weights, x, inputs):
        return flat(x), None

    def mix(self, layer, weights, i, x, given, cache):
        a, b, eps = layer.mixing, len(self.positions), layer.norm.eps
        norms = [weights["q_norm"], weights["k_norm"]] if a.qk_norm else []

        def write(pages, kv_slots, inverse_scales):
            made, kv_slots = [], kv_slots.reshape(-1)
            for at in range(0, len(x), NARROW_SLICE):
                rows, cos, sin, here = (y[at : at + NARROW_SLICE] for y in (x, *self.table, kv_slots))
                of = [rows], [weights["attn_norm"]], weights["qkv"].unquantised, cos, sin, pages, i, here
                q, pages = few_rows.heads(*of, norms, (), weights.get("qkv_bias"), inverse_scales, eps=eps)
                made.append(q)
            return jnp.concatenate(made).reshape(b, -1, a.heads, a.head_dim), pages

        mixed, cache = self.mixer.attend_written(cache, i, len(x) // b, write, None)
        return mixed.reshape(len(x), -1), cache

    def finish(self, layer, weights, after, x, mixed):
        eps = layer.norm.eps

        def rest(x, mixed):
            x = few_rows.add_product(x, mixed, weights["out"].unquantised)
            hidden = few_rows.gated(x, weights["mlp_norm"], weights["gate_up"].unquantised, (), eps=eps)
            return few_rows.add_product(x, hidden, weights["down"].unquantised)

        return in_turn(rest, x, mixed, most=NARROW_SLICE), None


class LayerByLayer(Fixed):
    """Prompts, and all rows on a CPU: `plain.Plain` with products and norms of their own order."""

    compacts = True

    def first(self, layer, weights, x, inputs):
        return x, None

    def mix(self, layer, weights, i, x, given, cache):
        rows, (first, *exact) = row_norm(x, weights["attn_norm"], layer.norm), mixing_of(layer).projections
        made = [_product(rows, weights[first], valid_count(self.positions))]
        made += [exact_product(rows, weights[name]) for name in exact]
        return self._mix(layer, weights, i, made, cache, x.dtype)

    def add(self, layer, weights, x, mixed):
        return _added(x, mixed, weights["out"], valid_count(self.positions)), None

    def feed(self, layer, weights, after, x, given):
        rows, valid = row_norm(x, weights["mlp_norm"], layer.norm), valid_count(self.positions)
        return _added(x, _product(rows, weights["gate_up"], valid, gated=True), weights["down"], valid), None


def _added(
    x: Float[Array, "b t d"], rows: Float[Array, "b t k"], weight: Weight, valid: Array
) -> Float[Array, "b t d"]:
    """x + a product, of which each of several devices has a part."""
    if devices() == 1:
        return _product(rows, weight, valid, x)
    part = _product(rows, weight, valid)
    return summed_in_order(part.reshape(-1, part.shape[-1]), x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _product(x: Array, weight: Weight, valid: Array, residual: Array | None = None, gated: bool = False) -> Array:
    """Multiply as `matmul.project`."""
    if weight.adapters is not None:
        out = _product(x, weight.replace(adapters=None), valid, change_of(x, weight.adapters, residual))
        return _gate(out, weight.layout.interleave) if gated else out
    rows = [a.reshape(-1, a.shape[-1]) for a in (x, residual) if a is not None]
    if _by_xla():
        out = sliced(lambda x, *before: reference(x, weight, *before or [None], gated), SLICE, *rows)
    else:
        out = tile_matmul.matmul(rows[0], weight.unquantised, valid, *rows[1:] or [None], gated=gated)
    return out.reshape(*x.shape[:-1], math.prod(out.shape) // math.prod(x.shape[:-1]))


def _gate(gate_up: Float[Array, "*b n"], run: int) -> Float[Array, "*b o"]:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    alone = jax.lax.optimization_barrier  # from what is beside it, which XLA might compute it with
    out = sliced(partial(gate, run=run), SLICE, rows) if _by_xla() else alone(gate(alone(rows), run))
    return out.reshape(*gate_up.shape[:-1], -1)


DETERMINISTIC = Path("deterministic", IMPLEMENTS, 0, fits, ops_of, sums=True, adapters=True)
