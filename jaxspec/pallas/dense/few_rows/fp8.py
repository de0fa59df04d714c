"""Products of few rows with FP8 weights: a block's sums, with its scales.

The numbers become bfloat16 in registers (`registers`). Each `BLOCK` of inputs has scales, which multiply its sums; or
each output has one, for all inputs.

Rows may be quantised, too (`quantise`). Then nothing is converted: FP8 tensor cores multiply two e4m3 numbers. They
keep some 14 bits of a sum, so each `BLOCK` is a sum of its own, as in `fp8_tiles`. A row's scale multiplies it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.few_rows import four_bits
from jaxspec.pallas.dense.few_rows.registers import flat_scales, products, quantise
from jaxspec.pallas.dense.few_rows.ring import over_chunks
from jaxspec.pallas.dense.few_rows.share import TILE, Share, column_of, split_of, turn_of
from jaxspec.pallas.dense.fp8_rows import weight_supported

_i32, _f32 = jnp.int32, jnp.float32


class Fp8Weight(NamedTuple):
    """The weight of a matmul in FP8, or the references to one in a kernel: see `jaxspec.models.fp8`.

    Scales are for `BLOCK` inputs, or one for each output, [n, 1]; of these a kernel has references to [n].
    """

    values: Float[Array, "n k"]
    scales: Float[Array, "a b"]


class Fp8WeightAndRows(Fp8Weight):
    """A weight whose rows are quantised, too: `fp8.quantise_rows` for `BLOCK` inputs each."""


def format_of(weight: Any) -> dict[str, Any]:
    """Say of a weight what `share_out` asks."""
    four = four_bits.four_bits_of(weight) if isinstance(weight, Weight) else None
    return {"fp8": isinstance(weight, Fp8Weight), "rounds": isinstance(weight, Fp8WeightAndRows), "four": four}


def fp8_supported(block: int | None, outputs: int, inputs: int, unit: int) -> str | None:
    """Why kernels of few rows can't read such a weight, or None if they can.

    `block` inputs, None being all, and `unit` outputs share a scale.
    """
    if block is None and unit > 1:
        return f"scales for {unit} outputs and all inputs; supported: one for each output"
    return weight_supported(*((block, outputs, inputs, unit) if block else (BLOCK, outputs, inputs, TILE)))


def operands(weight: Any) -> list[Any]:
    """The arrays that a kernel takes for a weight: itself, or a quantised one's bytes and scales."""
    if isinstance(weight, Weight):
        return four_bits.operands(weight)
    if not isinstance(weight, Fp8Weight):
        return [weight]
    by_output = len(weight.scales) == len(weight.values)
    scales = weight.scales.reshape(-1) if by_output else weight.scales
    rounds = isinstance(weight, Fp8WeightAndRows)
    return [weight.values if rounds else lax.bitcast_convert_type(weight.values, jnp.int8), scales]


def taken(share: Share, refs: list[Any]) -> Any:
    """Pop the references to a weight from the front of `refs`."""
    if share.four:
        return four_bits.taken(share, refs)
    return Fp8Weight(refs.pop(0), refs.pop(0)) if share.fp8 else refs.pop(0)


def outputs(weight: Any) -> int:
    """The number of outputs of a weight, or of the references to one."""
    by_output = isinstance(weight, Fp8Weight | Weight | four_bits.FourBitWeight)
    return weight.values.shape[0] if by_output else weight.shape[1]


def fp8_sums(share, begun, *, weight_s, rows_s, ready, scales_s, values_s=None, row_scales_s=None, staged_s=None):
    """f32[TILE, rows] of each group, over this warpgroup's chunks. Each `BLOCK`'s products are summed by themselves,
    then multiplied by its scale, if it has one, and by its rows', if these are quantised.
    """
    fetch, scales = begun
    groups, blocks, turn = share.groups, share.chunk // BLOCK, turn_of(share)
    scales.put(scales_s)

    def early(i):
        return [[scales.at(g, i * blocks + b) for b in range(blocks)] for g in range(groups)]

    def add(i, slot, by, totals):
        rows, of_rows = rows_s.at[i if share.normed else slot], [None] * blocks
        if share.rounds:
            values = values_s.at[turn]
            of_rows = quantise(share, rows, values, row_scales_s.at[turn], staged_s is not None)
            made = _of_quantised(share, weight_s.at[slot], values)
        else:
            made = products(share, weight_s.at[slot], rows, None if staged_s is None else staged_s.at[turn])
        for b in range(blocks):
            more = [_by_row(_by_output(each[b], by[g][b]), of_rows[b]) for g, each in enumerate(made)]
            totals = [total + sums for total, sums in zip(totals, more, strict=True)]
        return totals

    totals = over_chunks(share, fetch, ready, early, add)
    return [_by_output(total, scales.of_all(g)) for g, total in enumerate(totals)]


def _of_quantised(share, weight_s, values_s):
    """Multiply as `products`, on FP8 tensor cores."""
    places = [(g, b) for g in range(share.groups) for b in range(share.chunk // BLOCK)]

    def run(*sums):
        for (g, b), each in zip(places, sums, strict=True):
            part = weight_s.at[pl.ds(g * TILE, TILE), pl.ds(b * BLOCK, BLOCK)]
            plgpu.wgmma(each, part, values_s.at[b].transpose((1, 0)))
        return [each[...] for each in sums]

    made = pl.run_scoped(run, *[plgpu.ACC((TILE, share.rows), _f32)] * len(places))
    return [made[i : i + len(made) // share.groups] for i in range(0, len(made), len(made) // share.groups)]


def _by_output(sums, scale):
    if scale is None:
        return sums
    return sums * (scale if scale.ndim == 0 else lax.broadcast_in_dim(scale, sums.shape, [0]))


def _by_row(sums, scale):
    return sums if scale is None else sums * lax.broadcast_in_dim(scale, sums.shape, [1])


def scales_of(share: Share, weight: Fp8Weight | four_bits.FourBitWeight, interpret: bool) -> Any:
    """The scales of a block's outputs, loaded here, before the weights: so no load waits behind all weights in
    flight. Of weights in four bits, their factors."""
    if share.four:
        return OutputScales(share, weight) if share.four.floats else None
    return OutputScales(share, weight) if len(weight.scales.shape) == 1 else Scales(share, weight, interpret)


def _first_group(share: Share) -> Any:
    """The first of a block's groups of columns."""
    return lax.div(column_of(share, share.columns, lax.axis_index("tile"), 0), _i32(TILE))


class OutputScales:
    """Scales of outputs for all inputs: they multiply each warpgroup's sums once, in the end."""

    def __init__(self, share: Share, weight: Fp8Weight | four_bits.FourBitWeight):
        first, layout = _first_group(share), plgpu.Layout.WGMMA.reduce(1)
        by_output = weight.factors if share.four else weight.scales
        parts = [by_output.at[pl.ds((first + g) * TILE, TILE)] for g in range(share.groups)]
        self._loaded = [plgpu.load(part, layout=layout, optimized=False) for part in parts]

    def put(self, scales_s: Any) -> None:
        pass

    def at(self, group: int, block: Any) -> None:
        return None

    def of_all(self, group: int) -> Any:
        return self._loaded[group]


class Scales:
    """Scales of blocks: of each group one number, or one for each part of it, at a block of inputs."""

    def __init__(self, share: Share, weight: Fp8Weight, interpret: bool):
        unit = weight.values.shape[0] // weight.scales.shape[0]
        first = _first_group(share)
        self._parts, self._blocks, self._turn = TILE // min(unit, TILE), share.part // BLOCK, turn_of(share)
        inputs = pl.ds(split_of(share) * self._blocks, self._blocks)
        rows = [pl.ds(lax.div((first + g) * TILE, _i32(unit)), self._parts) for g in range(share.groups)]
        own = [weight.scales.at[outputs, inputs] for outputs in rows]
        self._loaded = own if interpret else [flat_scales(ref, weight.scales.shape[1], share.scales) for ref in own]
        self._interpret = interpret

    def put(self, scales_s: Any) -> None:
        """Write this warpgroup's scales to shared memory."""
        self._scales_s = scales_s.at[self._turn]
        for g, each in enumerate(self._loaded):
            if self._interpret:
                for part in range(self._parts):
                    self._scales_s[g, pl.ds(part * self._blocks, self._blocks)] = each[part]
            else:
                self._scales_s[g] = each
        plgpu.commit_smem()

    def of_all(self, group: int) -> None:
        return None

    def at(self, group: int, block: Any) -> Any:
        """The scale of a group's sums at a block of inputs: a number, or f32[TILE], one for each output."""
        whole = self._scales_s[group, block]
        if self._parts == 1:
            return whole
        layout = plgpu.Layout.WGMMA.reduce(1)
        part = lax.div(plgpu.broadcasted_iota(_i32, (TILE,), 0, layout=layout), _i32(TILE // self._parts))
        for i in range(1, self._parts):
            whole = jnp.where(part >= i, self._scales_s[group, i * self._blocks + block], whole)
        return whole
