"""e4m3 numbers times their blocks' scales as bfloat16, in registers, in the layout of the tensor cores' left operand.

A weight is rounded to bfloat16 once, as `Weight.dequantised` does. For that its scale is a sum of two bfloat16 numbers.
So the tensor cores accumulate from the first block of inputs to the last one without being rescaled.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Tiling, optimization_barrier
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import upcast
from jaxspec.pallas.hopper import LANES, THREADS, WGMMA_ROWS
from jaxspec.pallas.hopper.thread_ints import const, div, mul, rem

UNIT = WGMMA_ROWS  # outputs of a group
HALF_TILES = (HALF, 8), (8, 8), (2,)
LEFT = 2.0**20  # a factor that comes last, so that 2^120 times a scale is no overflow
SPLIT = """{
.reg .b32 both, word;
.reg .f32 whole, part;
mov.b32 whole, $2;
cvt.rn.bf16x2.f32 both, whole, whole;
and.b32 word, both, 0xFFFF0000;
mov.b32 part, word;
sub.f32 part, whole, part;
cvt.rn.bf16x2.f32 $1, part, part;
mov.b32 $0, both;
}"""  # a scale as a sum of two bfloat16 numbers, each in both halves of a word
CONVERT = """{
.reg .b32 word, low;
prmt.b32 word, $1, 0, 0x9180;
shl.b32 word, word, 4;
and.b32 word, word, 0x87F087F0;
mul.bf16x2 low, word, $3;
fma.rn.bf16x2 $0, word, $2, low;
}"""  # two bytes, each with its sign spread over the upper half of 16 bits, times such a sum
_i32, _f32 = jnp.int32, jnp.float32


class Scales:
    """The scales of a group of 64 outputs at each block of inputs: one number, or one for each part of the outputs."""

    def __init__(self, scales: Any, outputs: int, group: Any):
        unit = outputs // scales.shape[0]
        self._scales, self._count = scales, UNIT // min(unit, UNIT)
        self._first = lax.div(group * UNIT, _i32(unit))

    def at(self, k: Any) -> list[Any]:
        return [self._scales[self._first + u, k] for u in range(self._count)]


def load(bytes_s: Any, scales: list[Any], staged_s: Any = None, paired: bool = False) -> Any:
    """Load e4m3 bytes [UNIT, k] from shared memory, times their outputs' scales over `LEFT`, as bfloat16.

    A lane loads two neighbours at a time, as it needs them. Their bits are moved to bfloat16's positions, which gives
    the number times 2^-120, and multiplied by a scale in two parts, so that the product is rounded once.
    `paired`: the outputs are `HALF` of gate and `HALF` of up. Eights of both alternate in the result, so that a lane
    has the products of both, which `unpaired` returns.
    `staged_s`: shared memory for the left operand, which interpret mode takes from there alone.
    """
    by = _spread(scales, paired)
    if staged_s is not None:
        exact = plgpu.load(upcast.load(bytes_s, staged_s), layout=plgpu.Layout.WGMMA).astype(_f32)
        exact = _alternating(exact) if paired else exact
        staged_s[...] = (exact * lax.broadcast_in_dim(by / LEFT, exact.shape, [0])).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return staged_s
    layout, parts = (_half(), 2) if paired else (plgpu.Layout.WGMMA, 1)
    count = UNIT // parts
    loaded = [plgpu.load(bytes_s.at[pl.ds(i * count, count)], layout=layout) for i in range(parts)]
    result = plgpu.ShapeDtypeStruct(bytes_s.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    convert = plgpu.inline_mgpu(arg_types=(by_output(), *[layout] * parts), return_type=result)(_converted)
    return convert(by * (2.0**120 / LEFT), *loaded)


def unpaired(sums: Any, interpret: bool) -> tuple[Any, Any]:
    """f32[HALF, r] of gate and of up, from [UNIT, r] whose left operand was `paired`."""
    shape = HALF, sums.shape[1]
    if interpret:
        return tuple(sums.reshape(HALF // 8, 2, 8, -1)[:, part].reshape(shape) for part in range(2))
    results = [plgpu.ShapeDtypeStruct(shape, _f32, layout=_half())] * 2
    return tuple(plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=results)(_unpaired)(sums))


def store_transposed(sums: Any, target: Any, interpret: bool) -> None:
    """Write f32[UNIT, r] to a reference [r, UNIT] in memory, of which eight lanes have 32 neighbouring bytes."""
    if interpret:
        target.transpose((1, 0))[...] = sums
    else:
        types = plgpu.Layout.WGMMA, plgpu.RefType()
        plgpu.inline_mgpu(arg_types=types, return_type=None)(_store_transposed)(sums, target)


def by_output() -> Any:
    """The register layout of one number for each output."""
    return plgpu.Layout.WGMMA.reduce(1)


def _half() -> Any:
    """`WGMMA` with eight outputs a warp in place of sixteen."""
    return plgpu.Layout.TILED(plgpu.Tiling(HALF_TILES), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _alternating(x: Any) -> Any:
    return x.reshape(2, HALF // 8, 8, -1).transpose(1, 0, 2, 3).reshape(x.shape)


def _spread(scales: list[Any], paired: bool) -> Any:
    """f32[UNIT]: each output's scale."""
    whole = plgpu.layout_cast(lax.broadcast_in_dim(scales[0] if scales else _f32(1), (UNIT,), []), by_output())
    if len(scales) > 1:
        output = plgpu.broadcasted_iota(_i32, (UNIT,), 0, layout=by_output())
        part = lax.rem(lax.div(output, _i32(8)), _i32(2)) if paired else lax.div(output, _i32(UNIT // len(scales)))
        for u, scale in enumerate(scales[1:], 1):
            whole = jnp.where(part >= u, scale, whole)
    return whole


def _converted(_, scales, *loaded):
    """Convert and scale; a lane's registers have two outputs, of one array or of both."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    pair, (_, width) = ir.VectorType.get((2,), ir.BF16Type.get()), loaded[0].shape
    words = [mgpu.utils.bitcast(scale, i32) for scale in scales.registers.flat]
    parts = [mgpu.utils.inline_ptx(SPLIT, word, result_types=(i32, i32)) for word in words]
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((UNIT, width)), dtype=object)
    for at in np.ndindex(registers.shape):
        vector = loaded[0].registers[at] if len(loaded) == 1 else loaded[at[4]].registers.flat[at[1]]
        both = arith.extui(i32, mgpu.utils.bitcast(vector, i16))
        made = mgpu.utils.inline_ptx(CONVERT, both, *parts[at[4]], result_types=i32)
        registers[at] = mgpu.utils.bitcast(made, pair)
    made = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    return optimization_barrier(made)  # converted here and not later


def _store_transposed(_, sums, target):
    f32 = ir.F32Type.get()
    (across, down), _ = ir.MemRefType(target.type).get_strides_and_offset()
    thread = rem(mgpu.utils.thread_idx(), THREADS)
    warp, lane = div(thread, LANES), rem(thread, LANES)
    output = arith.addi(mul(warp, 16), div(lane, 4))
    row = mul(rem(lane, 4), 2)
    first = arith.addi(mul(row, across), mul(output, down))
    start = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [first], f32)
    for at, pair in np.ndenumerate(sums.registers):
        for i in range(2):
            place = (8 * at[1] + i) * across + 8 * at[4] * down
            value = llvm.extractelement(pair, const(i))
            llvm.store(value, mgpu.utils.getelementptr(start, [place], f32))


def _unpaired(_, sums):
    layout = mgpu.TiledLayout(Tiling(HALF_TILES), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    shape = layout.registers_shape((HALF, sums.shape[1]))
    return [
        mgpu.FragmentedArray(
            _registers=sums.registers[:, :, :, :, part].reshape(shape), _layout=layout, _is_signed=None
        )
        for part in range(2)
    ]
