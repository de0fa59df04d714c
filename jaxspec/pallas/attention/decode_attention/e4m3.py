"""e4m3 keys and values as float16 in registers, where tensor cores take them as the left operand of a product.

Float16 holds every e4m3 number, and one instruction converts two. Converted by way of shared memory, a step would move
six times its bytes there, more than the bandwidth; in registers it moves twice its bytes.

A register of a left operand has two neighbours of a row. But shared memory gives words of four bytes:

- four neighbours of a key. So columns have an order of their own, and `permuted` gives queries the same;
- two neighbours of a value, of two tokens, as `ldmatrix` transposes pairs of bytes. So the rows of a product with
  values are in an order of their own, which `restored` undoes.

Both orders are within 16 columns of a head. Interpret mode has neither: there all goes through shared memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm, nvvm

from jaxspec.pallas.hopper.thread_ints import const, div, i32, rem

LARGEST = 65504.0  # of float16
SWIZZLE = 128  # bytes, the widest; narrower rows have their own width
MATRIX = 8  # rows of 16 bytes: `ldmatrix` takes four such matrices at a time
CONVERT = """{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}"""
SPLIT = "prmt.b32 $0, $1, 0, 0x3120;"  # the even bytes, then the odd ones


def transforms(width: int) -> tuple[Any, ...]:
    """The transforms of an array in shared memory whose tokens have so many bytes."""
    swizzle = min(width, SWIZZLE)
    return plgpu.TilingTransform((MATRIX, swizzle)), plgpu.SwizzleTransform(swizzle)


def keys(ref: Any) -> Any:
    """A tile of keys [64 n, h] as a left operand, their columns permuted."""
    layout = plgpu.Layout.WGMMA_8BIT
    result = plgpu.ShapeDtypeStruct(ref.shape, jnp.float16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_neighbours)(plgpu.load(ref, layout=layout))


def values(ref: Any, swizzle: int = SWIZZLE) -> Any:
    """A tile of values [tokens, h], transposed, as a left operand [h, tokens], its rows permuted. `swizzle`: bytes of
    shared memory's, at most."""
    tokens, h = ref.shape
    result = plgpu.ShapeDtypeStruct((h, tokens), jnp.float16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms(min(h, swizzle))),), return_type=result)(_transposed)(
        ref
    )


def permuted(rows: Any, layout: Any) -> Any:
    """Rows [r, h] of float16 with the columns of each 16 in the order 0 1 4 5 8 9 12 13, 2 3 6 7 10 11 14 15.

    `layout`: that of `rows`. A lane has two or four neighbours, the lanes of a warp those of one row in order.
    """
    result = plgpu.ShapeDtypeStruct(rows.shape, jnp.float16, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_permuted)(rows)


def restored(sums: Any) -> Any:
    """Put the rows of sums [h, r], float32, in order: in each 16 they are the even and then the odd ones."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(_restored)(sums)


def _neighbours(_, x):
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(x.shape), dtype=object)
    for at, vector in np.ndenumerate(x.registers):
        for i, pair in enumerate(_converted(mgpu.utils.bitcast(vector, i32()))):
            registers[(at[0], 2 * at[1] + i, *at[2:])] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _transposed(_, ref):
    *_, eights, _, _, swizzle = ir.MemRefType(ref.type).shape
    h = ir.MemRefType(ref.type).shape[-3] * swizzle
    tokens, at_once = eights * MATRIX, 4 * MATRIX
    i8, lane = ir.IntegerType.get_signless(8), rem(mgpu.utils.thread_idx(), 32)
    warp, row = rem(div(mgpu.utils.thread_idx(), 32), 4), rem(lane, MATRIX)
    # Each lane addresses 16 bytes of a token: the 16 columns that its warp has of 64.
    within = arith.addi(arith.muli(row, const(swizzle)), arith.muli(warp, const(16)))
    mixed = arith.muli(rem(div(within, 128), swizzle // 16), const(16))
    first = arith.addi(arith.muli(div(lane, MATRIX), const(MATRIX * h)), arith.xori(within, mixed))
    base = mgpu.utils.memref_ptr(ref)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((h, tokens)), dtype=object)
    for block in range(h // 64):
        tile, beside = divmod(block * 64, swizzle)
        ours = mgpu.utils.getelementptr(base, [arith.xori(first, const(beside))], i8)
        for i in range(tokens // at_once):
            pointer = mgpu.utils.getelementptr(ours, [i * at_once * h + tile * MATRIX * swizzle], i8)
            shape = ir.Attribute.parse(f"#nvvm.ld_st_matrix_shape<m={MATRIX}, n={MATRIX}>")
            words = nvvm.ldmatrix(
                pointer, layout=nvvm.MMALayout.col, num=4, shape=shape, elt_type=nvvm.LdStMatrixEltType.B16
            )
            for j in range(4):
                word = mgpu.utils.inline_ptx(SPLIT, _field(words, j), result_types=i32())
                for half, pair in enumerate(_converted(word)):
                    registers[block, 4 * i + j, 0, 0, half, 0, 0, 0, 0] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _permuted(_, x):
    lane, registers = rem(mgpu.utils.thread_idx(), 32), np.empty_like(x.registers)
    for at, vector in np.ndenumerate(x.registers):
        words = _words(vector)
        if len(words) == 1:  # eight lanes have 16 columns
            inside = rem(lane, 8)
            source = arith.addi(arith.muli(rem(inside, 4), const(2)), div(inside, 4))
            moved = [_from(words[0], arith.addi(arith.subi(lane, inside), source))]
        else:  # four have
            inside = rem(lane, 4)
            source = arith.addi(arith.subi(lane, inside), arith.muli(rem(inside, 2), const(2)))
            early = arith.cmpi(arith.CmpIPredicate.ult, inside, const(2))
            pairs = [[_from(word, arith.addi(source, const(i))) for word in words] for i in range(2)]
            moved = [arith.select(early, *pair) for pair in pairs]
        registers[at] = mgpu.utils.bitcast(mgpu.utils.vector_concat([_single(word) for word in moved]), vector.type)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _restored(_, x):
    lane, registers = rem(mgpu.utils.thread_idx(), 32), np.empty_like(x.registers)
    group, column = div(lane, 4), rem(lane, 4)
    even = arith.cmpi(arith.CmpIPredicate.eq, rem(group, 2), const(0))
    source = arith.addi(arith.muli(div(group, 2), const(4)), column)
    for at, _ in np.ndenumerate(x.registers[:, :, :, :, :1]):
        halves = [_words(x.registers[(*at[:4], half, *at[5:])]) for half in range(2)]
        for half in range(2):
            lane_of = arith.addi(source, const(16 * half))
            moved = [arith.select(even, *(_from(word, lane_of) for word in pair)) for pair in zip(*halves, strict=True)]
            whole = mgpu.utils.vector_concat([_single(word) for word in moved])
            index = (*at[:4], half, *at[5:])
            registers[index] = mgpu.utils.bitcast(whole, x.registers[index].type)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _converted(word):
    """Convert four bytes of e4m3 to two pairs of float16."""
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    return [mgpu.utils.bitcast(half, pair) for half in mgpu.utils.inline_ptx(CONVERT, word, result_types=[i32()] * 2)]


def _words(vector):
    """A register's words of 32 bits."""
    count = mgpu.utils.bitwidth(vector.type) // 32
    if count == 1:
        return [mgpu.utils.bitcast(vector, i32())]
    words = mgpu.utils.bitcast(vector, ir.VectorType.get((count,), i32()))
    return [mgpu.utils.bitcast(mgpu.utils.vector_slice(words, slice(i, i + 1)), i32()) for i in range(count)]


def _single(word):
    return mgpu.utils.bitcast(word, ir.VectorType.get((1,), i32()))


def _from(word, lane):
    """Read another lane's word."""
    return nvvm.shfl_sync(mgpu.c(0xFFFFFFFF, i32()), word, lane, const(31), nvvm.ShflKind.idx)


def _field(struct, i):
    return llvm.extractvalue(i32(), struct, [i])
