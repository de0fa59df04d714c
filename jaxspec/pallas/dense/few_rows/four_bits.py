"""Products of few rows with weights of four bits, integers or NVFP4: loaders of `registers`' kind.

A lane loads 16 bytes, which are its numbers of 128 inputs of an output: `int4` arranges them so, as `mma` takes them in
eight steps. A shift and a mask make two bfloat16 of a word's bits. Rows come from shared memory by `ldmatrix`, in the
order of their inputs.

Integers become bfloat16 of 128 more than they are, less 128 and their zero point, which is exact. Each group's products
are summed by themselves and multiplied by its scale, in float32. A zero point that isn't whole is rounded, and what it
lacks is added to the group's sum, times the sum of the rows' inputs. E2M1 numbers are multiplied by their scale, which
is exact as well, and go to the sum of all inputs; this is multiplied by the outputs' factors in the end.

Scales come with their chunk of weights, into the same slot of the ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import optimization_barrier
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm, nvvm

from jaxspec.models import int4, mxfp4, nvfp4
from jaxspec.models.fp8 import BLOCK
from jaxspec.models.int4 import UNIT
from jaxspec.models.weights import Int4, Weight
from jaxspec.pallas.dense.few_rows import registers
from jaxspec.pallas.dense.few_rows.registers import ATOM, BYTES, chained, four_sums, mma
from jaxspec.pallas.dense.few_rows.ring import over_chunks
from jaxspec.pallas.dense.few_rows.share import TILE, FourBits, Share, column_of, turn_of
from jaxspec.pallas.dense.scaled import SPLIT
from jaxspec.pallas.hopper import BULK_COPY
from jaxspec.pallas.hopper.thread_ints import byte_at, const, div, i32, load_words, mul, rem

DTYPES = ("bfloat16", "float16", "float32")  # of integers' scales
STEPS = BLOCK // 16  # of `mma` in the inputs of a load
# Pair i of a word: its integers, in the low bits of two bfloat16 that are 128, less `$2`.
INTEGERS = [
    f"{{ .reg .b32 a; {f'shr.b32 a, $1, {4 * i};' if i else 'mov.b32 a, $1;'} "
    "lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 $0, a, $2; }"
    for i in range(4)
]
LESS = 0x43004300 + int4.MIDDLE * 0x00010001  # 128 and the zero point of symmetric weights, twice
# 128 and a zero point, twice, and what a zero point that isn't whole is less than that.
ZERO = """{ .reg .f32 a, b; .reg .b32 c; add.f32 a, $2, 0f43000000; cvt.rn.bf16x2.f32 $0, a, a;
shl.b32 c, $0, 16; mov.b32 b, c; sub.f32 $1, b, a; }"""
PAIR = "cvt.rn.bf16x2.f32 $0, $1, $1;"
ONES = 0x3F803F80  # two bfloat16
SCALED = "{ .reg .b32 low; mul.bf16x2 low, $1, $3; fma.rn.bf16x2 $0, $1, $2, low; }"  # times the sum of two numbers
SHIFTED = "{ .reg .b32 low; fma.rn.bf16x2 low, $1, $3, $4; fma.rn.bf16x2 $0, $1, $2, low; }"  # and a third one added
# Pair i of a word of E2M1 numbers (see `mxfp4`), times a scale.
FLOATS = [
    f"{{ .reg .b32 a, b; {pair} mul.bf16x2 $0, a, $2; }}"
    for pair in (
        f"and.b32 a, $1, {mxfp4.MASK};",
        f"shf.l.wrap.b32 a, $1, $1, 10; and.b32 a, a, {mxfp4.MASK};",
        f"shr.u32 a, $1, 4; shl.b32 b, $1, 4; lop3.b32 a, a, b, {mxfp4.MASK}, 0x28;",  # (a ^ b) & MASK
        f"shl.b32 a, $1, 6; and.b32 a, a, {mxfp4.MASK};",
    )
]
# Byte i of a word of scales as a bfloat16, twice: 2^118 times the scale, so that the product has 2^-8 of what it means.
SCALES = [f"{{ .reg .b32 a; prmt.b32 a, $1, 0, 0x4{i}4{i}; mad.lo.u32 $0, a, 16, 0x70007000; }}" for i in range(4)]
LEFT = 2.0**8
_i32, _f32 = jnp.int32, jnp.float32


class FourBitWeight(NamedTuple):
    """The references to a weight in a kernel. `factors`: NVFP4's."""

    values: Any
    scales: Any
    factors: Any = None


def four_bits_of(weight: Weight) -> FourBits:
    """How a weight is stored."""
    if not isinstance(weight.format, Int4):
        return FourBits()
    return FourBits(weight.format.group or weight.inputs, weight.format.zeros, weight.scales.dtype.name)


def four_bits_supported(weight: Weight) -> str | None:
    """Why kernels of few rows can't read such a weight, or None if they can. Its order of inputs is the caller's."""
    four = four_bits_of(weight)
    if weight.outputs % TILE or weight.inputs % UNIT:
        return f"a weight of {weight.inputs} x {weight.outputs}; supported: multiples of {UNIT} x {TILE}"
    if not four.floats and four.dtype not in DTYPES:
        return f"scales in {four.dtype}; supported: {', '.join(DTYPES)}"
    if four.group not in (nvfp4.GROUP, 32, 64, BLOCK, weight.inputs):
        return f"scales for {four.group} inputs; supported: 32, 64, {BLOCK} and all"
    return None


def operands(weight: Weight) -> list[Any]:
    """The arrays that a kernel takes for a weight."""
    values = lax.bitcast_convert_type(weight.values, jnp.int8)
    if weight.factors is None:
        return [values, weight.scales]
    return [values, weight.scales.reshape(len(weight.scales), -1, BULK_COPY), weight.factors]


def taken(share: Share, refs: list[Any]) -> FourBitWeight:
    """Pop the references to a weight from the front of `refs`."""
    return FourBitWeight(*(refs.pop(0) for _ in range(2 + share.four.floats)))


def scale_copies(share: Share, weight: FourBitWeight, chunk: Any, tile: Any):
    """Yield what is copied of a chunk's scales, and to which place of a slot."""
    for place in range(share.groups // share.together):
        first = column_of(share, share.columns, tile, place * share.together)
        yield scales_at(share.four, weight, share.chunk, share.together * TILE, chunk, first), place


def scales_at(four: FourBits, weight: FourBitWeight, size: int, outputs: int, chunk: Any, first: Any) -> Any:
    """The scales of a chunk of `size` inputs, of so many outputs from `first` on."""
    count, *wide = four.scales(size, outputs)
    top = chunk * count if four.group <= size else 0
    if four.floats:
        first = lax.div(first, _i32(outputs // wide[0]))
    return weight.scales.at[pl.ds(top, count), pl.ds(first, wide[0])]


def four_bit_sums(share, begun, *, weight_s, rows_s, ready, scales_s, staged_s=None):
    """f32[TILE, rows] of each group, over this warpgroup's chunks."""
    fetch, factors = begun

    def add(i, slot, _, totals):
        refs = weight_s.at[slot], rows_s.at[i if share.normed else slot], scales_s.at[slot]
        if staged_s is not None:
            return _interpreted(share, totals, *refs, staged_s.at[turn_of(share)])
        types = *[plgpu.Layout.WGMMA] * share.groups, *map(plgpu.RefType, registers_transforms())
        one = plgpu.ShapeDtypeStruct((TILE, share.rows), _f32, layout=plgpu.Layout.WGMMA)
        more = plgpu.inline_mgpu(arg_types=types, return_type=[one] * share.groups)
        return list(more(lambda _, *given: _added(share, *given))(*totals, *refs))

    totals = over_chunks(share, fetch, ready, lambda i: None, add)
    if factors is None:
        return totals
    by = [factors.of_all(g) * LEFT for g in range(share.groups)]
    return [total * lax.broadcast_in_dim(each, total.shape, [0]) for total, each in zip(totals, by, strict=True)]


def registers_transforms():
    """Transforms of a chunk's weights, rows and scales in shared memory."""
    return registers.weight_transforms(), registers.rows_transforms(), ()


def _added(share, *refs):
    """The totals with the products of a chunk."""
    *totals, weight_s, rows_s, scales_s = refs
    warp, row, _ = lanes()
    scales = scales_in(share.four, share.chunk, share.together * TILE, scales_s, arith.addi(mul(warp, 16), row))
    return add_products(share, totals, weight_s, rows_s, scales)


def lanes():
    """A thread's warp, and which of eight rows and of four parts of a row its lane has."""
    lane = rem(mgpu.utils.thread_idx(), 32)
    return rem(div(mgpu.utils.thread_idx(), 32), 4), div(lane, 4), rem(lane, 4)


def add_products(sizes, totals, weight_s, rows_s, scales, apart=0, last=0):
    """Add a chunk's products to the totals of its groups.

    `sizes`: how many `rows` are multiplied, and the `groups` and inputs of a `chunk`. `scales`: from `scales_in`.
    `apart`: as in `registers.products`; `last`: the number of the last row.
    """
    groups, units, row_groups = sizes.groups, sizes.chunk // UNIT, sizes.rows // 8
    eights, halves = TILE // 8 * units * ATOM, UNIT // 64 * units  # bytes of a group; atoms of eight rows
    weight, rows = (mgpu.utils.memref_ptr(ref) for ref in (weight_s, rows_s))
    warp, row, column = lanes()
    # Of each output's 128 bytes a lane has two neighbouring parts of 16: one for the first 128 inputs, one for others.
    own = arith.addi(mul(row, 128), mul(arith.xori(mul(column, 2), row), BYTES))
    own = arith.addi(mul(warp, 2 * units * ATOM), own)
    weights = [byte_at(weight, arith.xori(own, const(BYTES * i))) for i in range(2)]
    # `ldmatrix` takes 32 inputs of eight rows, as four parts of 16 bytes whose addresses eight lanes each give.
    lane = rem(mgpu.utils.thread_idx(), 32)
    row_of, part, first = rem(lane, 8), div(lane, 8), None
    if apart:
        row_of = arith.minui(arith.addi(mul(warp, apart), row_of), const(last))
        row_of, first = rem(row_of, 8), mul(div(row_of, 8), halves * ATOM)
    own = arith.addi(mul(row_of, 128), mul(arith.xori(part, row_of), BYTES))
    rows = byte_at(rows, first) if apart else rows
    inputs = [byte_at(rows, arith.xori(own, const(4 * BYTES * odd))) for odd in range(2)]

    sums = [[four_sums(total, n) for n in range(row_groups)] for total in totals]
    for unit in range(units):
        for i in range(2):
            atom = [[n * halves + 4 * unit + 2 * i + q // 2 for q in range(4)] for n in range(row_groups)]
            right = [[_matrices(inputs[q % 2], each[q] * ATOM) for q in range(4)] for each in atom]
            for g in range(groups):
                place = g * eights + unit * ATOM
                words = [load_words(weights[i], place + half * units * ATOM) for half in range(2)]
                sums[g] = scales.add(sums[g], g, unit, i, words, right)
    return [registers.as_sums(each) for each in sums]


def _steps(sums, pairs, right, steps, chains):
    """Add the products of some of a load's steps. `pairs(q)`: of a word's numbers, four for each half of outputs."""
    zero = mgpu.c(0.0, ir.F32Type.get())
    apart = [sums, *([[[zero] * 4 for _ in sums] for _ in range(chains - 1)])]
    for q in range(steps.start // 2, steps.stop // 2):
        upper, lower = pairs(q)
        for s in range(2):
            totals, left = apart[s % chains], (upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1])
            for n, words in enumerate(right):
                totals[n] = mma(totals[n], left, words[q][2 * s : 2 * s + 2])
    return [chained(each) for each in zip(*apart, strict=True)]


def scales_in(four, chunk, width, scales_s, own):
    """The loader of a chunk whose scales lie in shared memory, those of `width` outputs together.

    `own`: a lane's first output of a group's.
    """
    return (Floats if four.floats else Integers)(four, chunk, width, scales_s, own)


class Integers:
    """Integers, and their groups' scales: see `scales_in`."""

    def __init__(self, four, chunk, width, scales_s, own):
        self._four, self._dtype = four, four.dtype
        self._together, (self._count, self._width) = max(width // TILE, 1), four.scales(chunk, width)
        self._item, self._summed = jnp.dtype(self._dtype).itemsize, (None, None)
        self._start = byte_at(mgpu.utils.memref_ptr(scales_s), mul(own, self._item))

    def _number(self, g, line, half):
        """A scale, or a zero point, of a lane's output in float32."""
        place, group = divmod(g, self._together)
        offset = ((place * self._count + line) * self._width + group * TILE + 8 * half) * self._item
        f32, bits = ir.F32Type.get(), ir.IntegerType.get_signless(8 * self._item)
        source = byte_at(self._start, offset)
        if self._dtype == "float16":
            return arith.extf(f32, llvm.load(ir.F16Type.get(), source, alignment=2))
        word = llvm.load(bits, source, alignment=self._item)
        if self._dtype == "bfloat16":
            word = arith.shli(arith.extui(i32(), word), const(16))
        return arith.bitcast(f32, word)

    def _less(self, g, line):
        """128 and the zero point of both halves of the outputs, as pairs, and what is to be added to their numbers."""
        if not self._four.zeros:
            return [const(LESS)] * 2, None
        types = [i32(), ir.F32Type.get()]
        made = [mgpu.utils.inline_ptx(ZERO, self._number(g, line + 1, half), result_types=types) for half in range(2)]
        return [pair for pair, _ in made], [rest for _, rest in made]

    def _line(self, inputs):
        """Which line of its scales some inputs of a chunk have."""
        group = self._four.group
        return inputs // group * (1 + self._four.zeros) if group <= BLOCK else 0

    def scaled(self, g, step, words):
        """Make pairs of a step of 64 inputs of a group, times their scales, of each half's two words.

        A product is rounded once, as a scale comes as the sum of two bfloat16 numbers.
        """
        made, pair = [[], []], i32()
        for j in range(2):
            line = self._line(64 * step + 32 * j)
            less, rest = self._less(g, line)
            for half in range(2):
                by = self._number(g, line, half)
                scales = mgpu.utils.inline_ptx(SPLIT, by, result_types=[pair] * 2)
                if rest is not None:
                    scales = *scales, mgpu.utils.inline_ptx(PAIR, arith.mulf(by, rest[half]), result_types=pair)
                exact = [_made(program, words[half][j], less[half]) for program in INTEGERS]
                program = SCALED if rest is None else SHIFTED
                made[half] += [mgpu.utils.inline_ptx(program, x, *scales, result_types=pair) for x in exact]
        return made

    def add(self, sums, g, unit, i, words, right):
        part = min(self._four.group, BLOCK)
        for p in range(BLOCK // part):
            line = self._line(unit * UNIT + i * BLOCK + p * part)
            less, rest = self._less(g, line)

            def pairs(q, less=less):
                return [[_made(INTEGERS[k], words[h][q], less[h]) for k in range(4)] for h in range(2)]

            chains = 2 if len(right) == 1 else 1  # each product waits for one before it, of the same sums
            made = _steps(_none(right), pairs, right, _part(p, part), chains)
            by = [self._number(g, line, half) for half in range(2)]
            sums = _fmas(made, by, sums)
            if rest is not None:
                rest = [arith.mulf(*pair) for pair in zip(rest, by, strict=True)]
                sums = _fmas(self._inputs(right, part)[p], rest, sums)
        return sums

    def _inputs(self, right, part):
        """Sums of the rows' inputs over each part of a load, as products have them. All groups share them."""
        if self._summed[0] is not right:
            ones = lambda q: [[const(ONES)] * 4] * 2  # noqa: E731
            parts = [_part(p, part) for p in range(BLOCK // part)]
            self._summed = right, [_steps(_none(right), ones, right, steps, 1) for steps in parts]
        return self._summed[1]


def _part(p, part):
    """The steps of a load that a part of so many inputs has."""
    return range(p * part // 16, (p + 1) * part // 16)


def _none(right):
    return [[mgpu.c(0.0, ir.F32Type.get())] * 4 for _ in right]


def _fmas(made, by, sums):
    """Add products times a number of each half of the outputs."""
    return [[_fma(four[c], by[c // 2], total[c]) for c in range(4)] for four, total in zip(made, sums, strict=True)]


class Floats:
    """E2M1 numbers, and the scales of each 16 inputs: see `scales_in`."""

    def __init__(self, _, chunk, width, scales_s, own):
        self._together, self._width, self._units = max(width // TILE, 1), width, chunk // UNIT
        # A unit's scales of an output are 16 bytes.
        self._start = byte_at(mgpu.utils.memref_ptr(scales_s), mul(own, BYTES))

    def add(self, sums, g, unit, i, words, right):
        place, group = divmod(g, self._together)
        first = (place * self._units + unit) * self._width + group * TILE
        scales = [load_words(self._start, (first + 8 * half) * BYTES + 8 * i, 2) for half in range(2)]

        def pairs(q):
            return [_floats(words[half][q], scales[half][q // 2], q % 2) for half in range(2)]

        return _steps(sums, pairs, right, range(STEPS), 2 if len(right) == 1 else 1)

    def scaled(self, g, step, words):
        """Make pairs of a step of 64 inputs of a group, times their scales over `LEFT`, of each half's two words."""
        scales = [load_words(self._start, (g * TILE + 8 * half) * BYTES + 4 * step, 1)[0] for half in range(2)]
        return [[x for j in range(2) for x in _floats(words[half][j], scales[half], j)] for half in range(2)]


def _floats(word, scales, which):
    """Make a word's pairs; of a word of scales the first two bytes are theirs, or the other ones."""
    by = [_made1(SCALES[2 * which + k], scales) for k in range(2)]
    return [_made(FLOATS[k], word, by[k // 2]) for k in range(4)]


def left_operand(four, s, g, together, _, weight_s, scales_s):
    """A group's numbers of step `s` of a unit times their scales, [TILE, 64] in bfloat16, in registers.

    The unit's scales are those of so many groups together. Of each output's 32 bytes a lane takes 8.
    """
    warp, row, column = lanes()
    piece = arith.xori(arith.addi(mul(column, 2), const(s // 2)), row)
    own = arith.addi(mul(row, 128), mul(piece, BYTES))
    own = arith.addi(mul(warp, 2 * ATOM), own)
    start = byte_at(mgpu.utils.memref_ptr(weight_s), own)
    words = [load_words(start, half * ATOM + s % 2 * 8, 2) for half in range(2)]
    scales = scales_in(four, UNIT, together * TILE, scales_s, arith.addi(mul(warp, 16), row))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, 64)), dtype=object)
    for half, made in enumerate(scales.scaled(g, s, words)):
        for i, word in enumerate(made):
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = mgpu.utils.bitcast(word, pair)
    made = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    return optimization_barrier(made)  # converted here and not later


def _made(program, word, other):
    return mgpu.utils.inline_ptx(program, word, other, result_types=word.type)


def _made1(program, word):
    return mgpu.utils.inline_ptx(program, word, result_types=i32())


def _fma(x, y, z):
    return mgpu.utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", x, y, z, result_types=ir.F32Type.get())


def _matrices(pointer, offset):
    """Load 32 inputs of eight rows, as `mma` takes them in two steps: two words for each."""
    shape = ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>")
    made = nvvm.ldmatrix(
        byte_at(pointer, offset), layout=nvvm.MMALayout.row, num=4, shape=shape, elt_type=nvvm.LdStMatrixEltType.B16
    )
    return [llvm.extractvalue(i32(), made, [i]) for i in range(4)]


def _interpreted(share, totals, weight_s, rows_s, scales_s, staged_s):
    """Add a chunk's products, with each 128 inputs of the left operand in shared memory."""
    four, made = share.four, []
    for g, total in enumerate(totals):
        place, group = divmod(g, share.together)
        weight = dequantised(four, weight_s[pl.ds(g * TILE, TILE)], scales_s[place], group)
        for first in range(0, share.chunk, BLOCK):
            part = weight[:, first : first + BLOCK]
            total = total + _staged(part, rows_s.at[:, pl.ds(first, BLOCK)], staged_s)
        made.append(total)
    return made


def dequantised(four, values, scales, group=0):
    """A chunk's weight in float32, of its bytes [n, chunk / 2] and of several groups' scales; floats over `LEFT`."""
    values, n = lax.bitcast_convert_type(values, jnp.uint8), len(values)
    if not four.floats:
        return int4.dequantise(values, scales[:, group * n : (group + 1) * n], four.zeros)
    scales = scales.reshape(len(scales), -1)[:, group * n * 16 : (group + 1) * n * 16]
    by = nvfp4.scales_of(scales, n) / LEFT
    return (mxfp4.numbers(int4.by_block(values)).reshape(*by.shape, -1) * by[..., None]).reshape(n, -1)


def _staged(weight, rows_s, staged_s):
    """Multiply in two parts of bfloat16, which together are the float32 weight's to 16 bits."""
    high = weight.astype(jnp.bfloat16)
    sums = 0
    for part in (high, (weight - high.astype(_f32)).astype(jnp.bfloat16)):
        staged_s[...] = part
        plgpu.commit_smem()

        def run(total):
            plgpu.wgmma(total, staged_s, rows_s.transpose((1, 0)))
            return total[...]

        sums = sums + pl.run_scoped(run, plgpu.ACC((TILE, rows_s.shape[0]), _f32))
    return sums
