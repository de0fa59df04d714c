"""e4m3 numbers times their blocks' scales as bfloat16, in registers, where tensor cores take a left operand.

A number is rounded to bfloat16 once, as `Weight.dequantised` does. The scale is a sum of two bfloat16 numbers for it.
So a product's sums stay in the tensor cores' hands from the first block of inputs to the last one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import optimization_barrier
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxspec.pallas import upcast
from jaxspec.pallas.hopper import WGMMA_ROWS

UNIT = WGMMA_ROWS  # outputs of a group
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


def load(bytes_s: Any, scales: list[Any], staged_s: Any = None) -> Any:
    """e4m3 bytes [UNIT, k] in shared memory times their outputs' scales over `LEFT`, as bfloat16.

    A lane loads two neighbours at a time, as it needs them. Their bits are moved to bfloat16's places, which is the
    number times 2^-120, and multiplied by a scale in two parts, so that the product is rounded once.
    `staged_s`: interpret mode takes a left operand from shared memory alone, and this is where it is put.
    """
    by = _spread(scales)
    if staged_s is not None:
        exact = plgpu.load(upcast.load(bytes_s, staged_s), layout=plgpu.Layout.WGMMA).astype(_f32)
        staged_s[...] = (exact * lax.broadcast_in_dim(by / LEFT, exact.shape, [0])).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return staged_s
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(bytes_s.shape, jnp.bfloat16, layout=layout)
    convert = plgpu.inline_mgpu(arg_types=(by_output(), layout), return_type=result)(_converted)
    return convert(by * (2.0**120 / LEFT), plgpu.load(bytes_s, layout=layout))


def by_output() -> Any:
    """The layout of one number for each output."""
    return plgpu.Layout.WGMMA.reduce(1)


def _spread(scales: list[Any]) -> Any:
    """f32[UNIT]: each output's scale."""
    whole = plgpu.layout_cast(lax.broadcast_in_dim(scales[0] if scales else _f32(1), (UNIT,), []), by_output())
    if len(scales) > 1:
        part = lax.div(plgpu.broadcasted_iota(_i32, (UNIT,), 0, layout=by_output()), _i32(UNIT // len(scales)))
        for u, scale in enumerate(scales[1:], 1):
            whole = jnp.where(part >= u, scale, whole)
    return whole


def _converted(_, scales, x):
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    pair, registers = ir.VectorType.get((2,), ir.BF16Type.get()), np.empty_like(x.registers)
    words = [mgpu.utils.bitcast(scale, i32) for scale in scales.registers.flat]  # a lane has two outputs
    parts = [mgpu.utils.inline_ptx(SPLIT, word, result_types=(i32, i32)) for word in words]
    for at, vector in np.ndenumerate(x.registers):
        both = arith.extui(i32, mgpu.utils.bitcast(vector, i16))
        made = mgpu.utils.inline_ptx(CONVERT, both, *parts[at[4]], result_types=i32)
        registers[at] = mgpu.utils.bitcast(made, pair)
    made = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    return optimization_barrier(made)  # converted here and not later
