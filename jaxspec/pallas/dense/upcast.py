"""e4m3 numbers as bfloat16, in registers, in the layout of the tensor cores' left operand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxspec.pallas.hopper.thread_ints import const, i32, rem

# Two of the four bytes of (own word, neighbour's word), each in the upper half of 16 bits: of a lane with an even
# number and of one with an odd number, first the pair that goes to a lane's first register, then that of its second.
PICKED = ((0x1000, 0x7060), (0x5040, 0x3020))
BIASED = 0x7B807B80  # 2^120 twice: corrects for the exponent's other bias
CONVERT = """{
.reg .b32 pair, rest;
prmt.b32 pair, $1, $2, $3;
shr.u32 rest, pair, 4;
and.b32 rest, rest, 0x07F007F0;
lop3.b32 pair, rest, pair, 0x80008000, 0xF8;
mul.bf16x2 $0, pair, $4;
}"""


def load(ref: Any, staged_s: Any = None) -> Any:
    """Load a tile of e4m3 bytes [64, k] from shared memory, as bfloat16 in the layout `WGMMA`.

    `staged_s`: shared memory for the left operand, which interpret mode takes from there alone.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    if staged_s is not None:
        values = lax.bitcast_convert_type(plgpu.load(ref, layout=layout), jnp.float8_e4m3fn)
        staged_s[...] = values.astype(jnp.float32).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return staged_s
    result = plgpu.ShapeDtypeStruct(ref.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_convert)(plgpu.load(ref, layout=layout))


def _convert(_, x):
    """Convert words of four neighbours of a row; tensor cores need the second pair, or the first, in the next lane.

    e4m3 has bfloat16's order of bits, with four exponent bits in place of eight and three of the mantissa in place of
    seven. So a number's bits, moved to bfloat16's positions, are the number times 2^-120.
    """
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    even = arith.cmpi(arith.CmpIPredicate.eq, rem(mgpu.utils.thread_idx(), 2), const(0))
    picked = [arith.select(even, *map(const, both)) for both in PICKED]
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(x.shape), dtype=object)
    for at, vector in np.ndenumerate(x.registers):
        word = mgpu.utils.bitcast(vector, i32())
        other = mgpu.utils.shfl_bfly(word, 1)
        for i, which in enumerate(picked):
            out = mgpu.utils.inline_ptx(CONVERT, word, other, which, const(BIASED), result_types=i32())
            registers[(at[0], at[1] * 2 + i, *at[2:-1])] = mgpu.utils.bitcast(out, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
