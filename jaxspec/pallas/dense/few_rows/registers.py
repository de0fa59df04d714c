"""Products of few rows with FP8 weights, which become bfloat16 in registers on their way to the tensor cores.

The weights' outputs are the left operand of `mma`, of which a warp has 16 and a group `TILE`; rows are the narrow side.
Both operands come from shared memory in words of 16 bytes, so a lane has 16 neighbouring inputs of an output, and the
same ones of a row. A register may hold any of a product's inputs as long as both operands agree, so no lane needs
another's words. A word of four e4m3 numbers makes two registers; the rows' neighbours are in two registers already.

In rows of 128 bytes, in `SwizzleTransform`'s order, the four lanes of an output read the 16 bytes given by `PIECES`,
then their neighbours: so neither operand's loads share a bank.

Rows that are quantised go from shared memory to shared memory as e4m3 numbers: eight rows are a warpgroup's at once, a
row's 128 inputs those of 16 lanes, which find the largest among themselves. FP8 tensor cores then take both operands as
they are (`fp8`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from jaxspec.models import fp8
from jaxspec.models.fp8 import BLOCK
from jaxspec.pallas.dense.few_rows.share import GROUP, TILE
from jaxspec.pallas.hopper import THREADS
from jaxspec.pallas.hopper.thread_ints import byte_at, const, div, i32, load_words, mul, rem

PIECES = (0, 3, 5, 6)  # by lane: the first of two of a row's eight parts of 16 bytes; the other is its neighbour
BIASED = 0x7B807B80  # 2^120 twice: corrects for the exponent's other bias
BYTES, ATOM = 16, 1024  # of a load; of eight rows of 128 bytes, which are swizzled together
# A word's four bytes as two pairs of bfloat16: each with its sign spread over the upper half of 16 bits, moved to
# bfloat16's positions and multiplied by 2^120.
CONVERT = """{
.reg .b32 pair;
prmt.b32 pair, $2, 0, 0x9180;
shl.b32 pair, pair, 4;
and.b32 pair, pair, 0x87F087F0;
mul.bf16x2 $0, pair, $3;
prmt.b32 pair, $2, 0, 0xB3A2;
shl.b32 pair, pair, 4;
and.b32 pair, pair, 0x87F087F0;
mul.bf16x2 $1, pair, $3;
}"""
# Four words of two bfloat16 numbers to two words of the e4m3 numbers that they are quantised to, and the scale: that of
# 16 lanes' largest, 2^-100 at least, and not a number where one of them isn't.
QUANTISE = "\n".join([
    "{.reg .b32 largest, other; .reg .b16 pair0, pair1, pair2, pair3; .reg .f32 scale, inverse, x, y;",
    "and.b32 largest, $3, 0x7FFF7FFF;",
    *(f"and.b32 other, ${i}, 0x7FFF7FFF; max.NaN.bf16x2 largest, largest, other;" for i in (4, 5, 6)),
    "shr.b32 other, largest, 16; and.b32 largest, largest, 0xFFFF; max.u32 largest, largest, other;",
    *(f"shfl.sync.bfly.b32 other, largest, {i}, 31, -1; max.u32 largest, largest, other;" for i in (1, 2, 4, 8)),
    "shl.b32 largest, largest, 16; mov.b32 scale, largest;",
    "mul.f32 scale, scale, 0f3B124925; max.NaN.f32 scale, scale, 0f0D800000;",  # 1 / 448, 2^-100
    "rcp.approx.ftz.f32 inverse, scale; mov.f32 $2, scale;",
    *(
        f"shl.b32 other, ${3 + i}, 16; mov.b32 x, other; mul.f32 x, x, inverse;"
        f"and.b32 other, ${3 + i}, 0xFFFF0000; mov.b32 y, other; mul.f32 y, y, inverse;"
        f"cvt.rn.satfinite.e4m3x2.f32 pair{i}, y, x;"
        for i in range(4)
    ),
    "mov.b32 $0, {pair0, pair1}; mov.b32 $1, {pair2, pair3};}",
])  # fmt: skip
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
CONSTRAINTS = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
_i32, _f32 = jnp.int32, jnp.float32


def weight_transforms() -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128)


def rows_transforms() -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, BLOCK // 2)), plgpu.SwizzleTransform(128)


def products(share: Any, weight_s: Any, rows_s: Any, staged_s: Any = None, apart: int = 0) -> list[list[Any]]:
    """Multiply weight bytes [groups * TILE, chunk] by rows [n, chunk]: f32[TILE, r] for each group and each `BLOCK` of
    the chunk.

    `share`: how many `rows` are multiplied, r, and its `groups` and `chunk`. `apart`: distance from the first row that
    a warp multiplies to the next warp's; then r is `GROUP`, and past the last row that row is repeated. `staged_s`:
    shared memory for the left operand, which interpret mode takes from there alone; `apart` is 0 then.
    """
    groups, blocks = share.groups, share.chunk // BLOCK
    if staged_s is not None:
        return [[_interpreted(weight_s, rows_s, g, b, staged_s) for b in range(blocks)] for g in range(groups)]
    one = plgpu.ShapeDtypeStruct((TILE, share.rows), _f32, layout=plgpu.Layout.WGMMA)
    types = plgpu.RefType(weight_transforms()), plgpu.RefType(rows_transforms())
    multiply = plgpu.inline_mgpu(arg_types=types, return_type=[one] * (groups * blocks))
    made = multiply(partial(_products, share, apart, rows_s.shape[0] - 1))(weight_s, rows_s)
    return [made[g * blocks : (g + 1) * blocks] for g in range(groups)]


def quantise(share: Any, rows_s: Any, values_s: Any, scales_s: Any, interpret: bool) -> list[Any]:
    """Quantise rows [r, chunk] as `fp8.quantise_rows`, into `values_s`, e4m3[blocks, r, BLOCK]. Returns their scales,
    f32[r] for each `BLOCK`, by way of `scales_s`."""
    blocks = range(share.chunk // BLOCK)
    if interpret:
        return [_interpreted_rows(rows_s, values_s, b) for b in blocks]
    types = plgpu.RefType(rows_transforms()), plgpu.RefType(weight_transforms()), plgpu.RefType()
    plgpu.inline_mgpu(arg_types=types, return_type=None)(partial(_quantise, share))(rows_s, values_s, scales_s)
    plgpu.commit_smem()
    load = partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return [load(scales_s.at[b]) for b in blocks]


def _interpreted_rows(rows_s, values_s, block):
    values, scales = fp8.quantise_rows(rows_s[:, pl.ds(block * BLOCK, BLOCK)])
    values_s[block] = values
    return scales[:, 0]


def _quantise(share, _, rows_s, values_s, scales_s):
    blocks, groups = share.chunk // BLOCK, share.rows // GROUP
    thread = rem(mgpu.utils.thread_idx(), THREADS)
    row, lane = div(thread, 16), rem(thread, 16)
    # Lane i reads the i-th 16 bytes of a row's two atoms as they lie there: swizzled, they are another part's numbers.
    half, place = div(lane, 8), rem(lane, 8)
    line, part = mul(row, 128), arith.xori(place, row)
    own = arith.addi(mul(half, ATOM), arith.addi(line, mul(place, BYTES)))
    # As e4m3 two such parts share 16 bytes of one atom.
    both = arith.xori(arith.addi(mul(half, 4), div(part, 2)), row)
    into = arith.addi(line, arith.addi(mul(both, BYTES), mul(rem(part, 2), BYTES // 2)))
    rows, values = (byte_at(mgpu.utils.memref_ptr(ref), at) for ref, at in ((rows_s, own), (values_s, into)))
    scales = byte_at(mgpu.utils.memref_ptr(scales_s), mul(row, 4))
    types = [i32()] * 2 + [ir.F32Type.get()]
    quantised = partial(mgpu.utils.inline_ptx, QUANTISE, result_types=types, convergent=True)
    places = [(n, block) for n in range(groups) for block in range(blocks)]
    # All loads, then all else, then one branch: so these chains of operations are hidden behind one another.
    loaded = [load_words(rows, (n * 2 * blocks + 2 * block) * ATOM) for n, block in places]
    made = [quantised(*words) for words in loaded]
    for (n, block), (*words, _) in zip(places, made, strict=True):
        _store(values, (block * groups + n) * ATOM, words)
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const(0))):
        for (n, block), (*_, scale) in zip(places, made, strict=True):
            llvm.store(scale, byte_at(scales, 4 * (block * share.rows + GROUP * n)), alignment=4)


def flat_scales(ref: Any, stride: int, size: int) -> Any:
    """Load scales [parts, blocks] of an array with `stride` columns as f32[size], padded with the last of them."""
    layout = plgpu.Layout.WG_STRIDED((size,), 1)
    result, shape = plgpu.ShapeDtypeStruct((size,), _f32, layout=layout), ref.shape
    load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    return load(partial(_flat, shape, stride, size))(ref)


def _flat(shape, stride, size, _, ref):
    parts, blocks = shape
    f32, base, registers = ir.F32Type.get(), mgpu.utils.memref_ptr(ref), []
    for first in range(0, size, THREADS):
        at = arith.minui(arith.addi(rem(mgpu.utils.thread_idx(), THREADS), const(first)), const(parts * blocks - 1))
        place = arith.addi(mul(div(at, blocks), 4 * stride), mul(rem(at, blocks), 4))
        value = llvm.load(f32, byte_at(base, place), alignment=4)
        registers.append(llvm.insertelement(llvm.mlir_undef(ir.VectorType.get((1,), f32)), value, position=const(0)))
    layout = mgpu.WGStridedFragLayout((size,), 1)
    return mgpu.FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=None)


def _interpreted(weight_s, rows_s, group, block, staged_s):
    inputs = pl.ds(block * BLOCK, BLOCK)
    values = lax.bitcast_convert_type(weight_s[pl.ds(group * TILE, TILE), inputs], jnp.float8_e4m3fn)
    staged_s[...] = values.astype(_f32).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def run(total):
        plgpu.wgmma(total, staged_s, rows_s.at[:, inputs].transpose((1, 0)))
        return total[...]

    return pl.run_scoped(run, plgpu.ACC((TILE, rows_s.shape[0]), _f32))


def _products(share, apart, last, _, weight_s, rows_s):
    groups, blocks, row_groups = share.groups, share.chunk // BLOCK, share.rows // 8
    eights, halves = TILE // 8 * blocks * ATOM, 2 * blocks  # bytes of a group; atoms of eight rows
    weight, rows = (mgpu.utils.memref_ptr(ref) for ref in (weight_s, rows_s))
    lane = rem(mgpu.utils.thread_idx(), 32)
    warp, row, column = rem(div(mgpu.utils.thread_idx(), 32), 4), div(lane, 4), rem(lane, 4)
    piece = const(PIECES[0])
    for i, each in enumerate(PIECES[1:], 1):
        piece = arith.select(arith.cmpi(arith.CmpIPredicate.eq, column, const(i)), const(each), piece)
    # The weight: an output's address among the warp's 16; eights of them are `blocks` atoms apart.
    own = arith.addi(mul(warp, 2 * blocks * ATOM), arith.addi(mul(row, 128), mul(arith.xori(piece, row), BYTES)))
    weights = [byte_at(weight, arith.xori(own, const(BYTES * i))) for i in range(2)]
    # The rows: the same inputs are twice as many bytes, in one of two atoms.
    first = const(0)
    if apart:
        row = arith.minui(arith.addi(mul(warp, apart), row), const(last))
        row, first = rem(row, 8), mul(div(row, 8), halves * ATOM)
    inside = arith.xori(rem(mul(piece, 2), 8), row)
    own = arith.addi(mul(div(piece, 4), ATOM), arith.addi(mul(row, 128), mul(inside, BYTES)))
    own = arith.addi(first, own)
    inputs = [byte_at(rows, arith.xori(own, const(BYTES * i))) for i in range(4)]

    zero = mgpu.c(0.0, ir.F32Type.get())
    chains = 2 if row_groups == 1 else 1  # each product waits for one before it, of the same sums
    sums = {}
    for block in range(blocks):
        right = [[load_words(inputs[i], (n * halves + 2 * block) * ATOM) for i in range(4)] for n in range(row_groups)]
        for g in range(groups):
            apart = [[[zero] * 4 for _ in range(row_groups)] for _ in range(chains)]
            for i in range(2):
                at, totals = g * eights + block * ATOM, apart[i % chains]
                upper, lower = (load_words(weights[i], at + half * blocks * ATOM) for half in range(2))
                for q in range(4):
                    (a0, a2), (a1, a3) = (_converted(half[q]) for half in (upper, lower))
                    for n in range(row_groups):
                        words = right[n][2 * i + q // 2]
                        totals[n] = mma(totals[n], (a0, a1, a2, a3), words[q % 2 * 2 :][:2])
            sums[g, block] = [chained(each) for each in zip(*apart, strict=True)]
    return [as_sums(sums[g, block]) for g in range(groups) for block in range(blocks)]


def chained(chains):
    """The sums of one chain, or of two."""
    return chains[0] if len(chains) == 1 else [arith.addf(*pair) for pair in zip(*chains, strict=True)]


def as_sums(totals):
    """Make f32[TILE, rows] from a thread's four sums of each eight rows."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, GROUP * len(totals))), dtype=object)
    for n, four in enumerate(totals):
        for half in range(2):
            whole = llvm.mlir_undef(pair)
            for i in range(2):
                whole = llvm.insertelement(whole, four[2 * half + i], position=const(i))
            registers[0, n, 0, 0, half, 0, 0, 0, 0] = whole
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def four_sums(total, n):
    """A thread's four numbers of the n-th eight rows, as `as_sums` takes them."""
    pairs = [total.registers[0, n, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
    return [llvm.extractelement(pair, const(i)) for pair in pairs for i in range(2)]


def mma(totals, left, right):
    f32 = ir.F32Type.get()
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    made = llvm.inline_asm(struct, [*left, *right, *totals], MMA, CONSTRAINTS, has_side_effects=False)
    return [llvm.extractvalue(f32, made, [i]) for i in range(4)]


def _converted(word):
    """Convert a word's four numbers to bfloat16: the first two, then the others."""
    return mgpu.utils.inline_ptx(CONVERT, word, mgpu.c(BIASED, i32()), result_types=[i32()] * 2)


def _store(pointer, offset: int, words):
    """Store words of 32 bits."""
    whole = llvm.mlir_undef(ir.VectorType.get((len(words),), i32()))
    for i, word in enumerate(words):
        whole = llvm.insertelement(whole, word, position=const(i))
    llvm.store(whole, byte_at(pointer, offset), alignment=4 * len(words))
