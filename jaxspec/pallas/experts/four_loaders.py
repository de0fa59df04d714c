"""Formats of four bits as `expert_four` reads them: what is copied, and how it becomes the tensor cores' left operand.

MXFP4's rows of 144 or 48 bytes, for 288 or 96 inputs, lie in shared memory so that no two of a warp's words share a
bank. Two numbers take a shift, a mask and a product with the block's scale (`mxfp4` has the order of bits). Sums are
scaled by 2^-64, which keeps scales within bfloat16's exponents.

Integers and NVFP4 come in units of 256 inputs, rows of 128 bytes in the tensor cores' swizzle. `few_rows.four_bits`
converts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxtyping import Array

from jaxspec.models import int4, mxfp4
from jaxspec.models.weights import Mxfp4, Weight
from jaxspec.pallas.dense.few_rows import four_bits
from jaxspec.pallas.dense.few_rows.registers import weight_transforms
from jaxspec.pallas.dense.few_rows.share import FourBits
from jaxspec.pallas.dense.tiles import STEP
from jaxspec.pallas.experts.expert_tile import TILE
from jaxspec.pallas.hopper import BULK_COPY
from jaxspec.pallas.hopper.thread_ints import const, i32, mul

LESS = 64  # sums are divided by 2 to the power of this
# Twice: a scale s times the first, plus the second, is 2^(s - 127 - LESS) times 2^126, which E2M1's bits lack.
SCALE, BIAS = 0x00800080, 0x1F001F00


@dataclass(frozen=True)
class Loader:
    """How kernels read a stage's weights.

    - `step`: inputs that are multiplied at once.
    - `turn`: inputs; even turns go to one sum, odd ones to the other.
    - `one_launch`: up to so many items both products are one launch.
    - `less`: sums are divided by this.
    - `dtype`: of scales.
    """

    step: ClassVar[int]
    turn: ClassVar[int]
    one_launch: ClassVar[float]
    less: ClassVar[float]

    @property
    def dtype(self) -> Any:
        raise NotImplementedError

    def refuses(self, weight: Weight) -> str | None:
        """Why a stack's weight can't be read, or None if it can."""
        raise NotImplementedError

    def piece(self, few: bool) -> int:
        """Inputs that are copied together. Copies are few and large: all threads of a warpgroup announce each."""
        return self.turn

    def scales(self, piece: int, groups: int) -> tuple[int, ...]:
        """Shape in shared memory of the scales of a piece of so many groups of outputs."""
        raise NotImplementedError

    def by_lead(self, scales: Array, lead: int) -> Array:
        """Scales [experts, rows, outputs] with outputs in `lead` parts, so that one copy loads those of all groups."""
        return scales.reshape(*scales.shape[:2], lead, -1)

    def copied(self, ref: Any, expert: Any, piece: int, i: Any, lead: Any, tile: Any, scales_s: Any) -> tuple[Any, Any]:
        """Scales of an expert's i-th piece in memory, and their place: those of parts `lead` of its outputs,
        of each part's `TILE` outputs of number `tile`."""
        raise NotImplementedError

    def left(self, scratch: dict[str, Any], turn: Any, slot: Any, g: int, step: int) -> Any:
        """A step of a group's piece as a left operand in bfloat16, [TILE, self.step], over `less`."""
        weight_s, scales_s = scratch["weight_s"].at[slot, g], scratch["scales_s"].at[slot]
        if "staged_s" not in scratch:
            return self.converted(weight_s, scales_s, g, step)
        staged_s = scratch["staged_s"].at[turn]  # interpret mode takes a left operand from shared memory alone
        staged_s[...] = self.interpreted(weight_s, scales_s, g, step).astype(staged_s.dtype)
        plgpu.commit_smem()
        return staged_s

    def converted(self, weight_s: Any, scales_s: Any, g: int, step: int) -> Any:
        """Compute `left` in registers."""
        raise NotImplementedError

    def interpreted(self, weight_s: Any, scales_s: Any, g: int, step: int) -> Array:
        """Compute `left` in plain jnp."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mxfp4Loader(Loader):
    """MXFP4. Larger pieces are for few rows."""

    step = 3 * mxfp4.BLOCK
    turn = 3 * step
    one_launch = 32  # for so many, one launch took no longer on an H200 with gpt-oss-120b, for more it did
    less = 2.0**LESS
    dtype = jnp.int8

    def refuses(self, weight):
        multiple = 2 * self.turn
        if bad := [width for width in (weight.inputs, weight.outputs) if width % multiple]:
            return f"MXFP4 experts of width {bad[0]}; supported: multiples of {multiple}"
        return None

    def piece(self, few):
        return self.turn if few else self.step

    def scales(self, piece, groups):
        blocks = piece // mxfp4.BLOCK
        return blocks + blocks % 2, groups, TILE  # each piece's begin at a multiple of 128 bytes

    def by_lead(self, scales, lead):
        return super().by_lead(lax.bitcast_convert_type(scales, jnp.int8), lead)

    def copied(self, ref, expert, piece, i, lead, tile, scales_s):
        blocks, outputs = pl.ds(i * (piece // mxfp4.BLOCK), piece // mxfp4.BLOCK), pl.ds(tile * TILE, TILE)
        return ref.at[expert, blocks, lead, outputs], scales_s.at[pl.ds(0, blocks.size)]

    def _step(self, weight_s, scales_s, g, step):
        size, blocks = self.step // 2, self.step // mxfp4.BLOCK
        return weight_s.at[:, pl.ds(step * size, size)], scales_s.at[pl.ds(step * blocks, blocks), g]

    def converted(self, weight_s, scales_s, g, step):
        weight_s, scales_s = self._step(weight_s, scales_s, g, step)
        layout, of_row = plgpu.Layout.WGMMA_8BIT, plgpu.Layout.WGMMA.reduce(1)
        words = plgpu.load(weight_s, layout=layout, optimized=False)
        scales = [plgpu.load(scales_s.at[b], layout=of_row, optimized=False) for b in range(self.step // mxfp4.BLOCK)]
        result = plgpu.ShapeDtypeStruct((TILE, self.step), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        convert = plgpu.inline_mgpu(arg_types=(layout, *[of_row] * len(scales)), return_type=result)(_convert)
        return convert(words, *scales)

    def interpreted(self, weight_s, scales_s, g, step):
        values, scales = (ref[...] for ref in self._step(weight_s, scales_s, g, step))
        values, scales = (lax.bitcast_convert_type(each, jnp.uint8) for each in (values, scales))
        return mxfp4.dequantise(values, scales) / self.less


def _convert(_, words, *scales):
    """Convert E2M1 to bfloat16 times its scale: a thread makes four pairs of each word that it has."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    i8 = ir.IntegerType.get_signless(8)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, Mxfp4Loader.step)), dtype=object)
    for at, vector in np.ndenumerate(words.registers):
        word = mgpu.utils.bitcast(vector, i32())
        scale = scales[at[1]].registers[0, 0, at[4], 0, 0]
        scale = arith.extui(i32(), scale if scale.type == i8 else mgpu.utils.bitcast(scale, i8))
        factor = arith.addi(mul(scale, SCALE), const(BIAS))
        for i, program in enumerate(four_bits.FLOATS):
            out = mgpu.utils.inline_ptx(program, word, factor, result_types=i32())
            registers[(at[0], at[1] * 4 + i, *at[2:])] = mgpu.utils.bitcast(out, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


@dataclass(frozen=True)
class UnitLoader(Loader):
    """Integers and NVFP4, stored as `four` says."""

    four: FourBits
    step = STEP
    turn = int4.UNIT
    one_launch = math.inf

    @property
    def less(self) -> float:
        return four_bits.LEFT if self.four.floats else 1.0

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.four.dtype)

    def refuses(self, weight):
        return four_bits.four_bits_supported(weight)

    def scales(self, piece, groups):
        count, *wide = self.four.scales(piece, TILE)
        return count, groups, *wide

    def by_lead(self, scales, lead):
        scales = super().by_lead(scales, lead)
        return scales.reshape(*scales.shape[:3], -1, BULK_COPY) if self.four.floats else scales

    def copied(self, ref, expert, piece, i, lead, tile, scales_s):
        count, wide, *_ = self.four.scales(piece, TILE)
        rows = pl.ds(i * count if self.four.group <= piece else 0, count)
        return ref.at[expert, rows, lead, pl.ds(tile * wide, wide)], scales_s

    def converted(self, weight_s, scales_s, g, step):
        types = plgpu.RefType(weight_transforms()), plgpu.RefType()
        result = plgpu.ShapeDtypeStruct((TILE, self.step), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        convert = partial(four_bits.left_operand, self.four, step, g, scales_s.shape[1])
        return plgpu.inline_mgpu(arg_types=types, return_type=result)(convert)(weight_s, scales_s)

    def interpreted(self, weight_s, scales_s, g, step):
        scales = scales_s[...].reshape(scales_s.shape[0], -1)
        whole = four_bits.dequantised(self.four, weight_s[...], scales, g)
        return whole[:, step * self.step : (step + 1) * self.step]


def loader_of(weight: Weight) -> Loader:
    """The loader of a stack's weight in four bits."""
    return Mxfp4Loader() if isinstance(weight.format, Mxfp4) else UnitLoader(four_bits.four_bits_of(weight))
