"""Sizes of a launch, the limits of its shapes, and each block's work.

Every part of an expert's hidden columns is one block's, and no block has two parts more than another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.few_rows import Fp8Weight
from jaxspec.pallas.dense.few_rows.four_bits import four_bits_of, four_bits_supported
from jaxspec.pallas.dense.few_rows.share import FourBits
from jaxspec.pallas.dense.weight_stream import ROOM
from jaxspec.pallas.hopper import BULK_COPY, WGMMA_ROWS

# An expert's gate and up, [e, 2f, d], gate's rows first, and down, [e, d, f]; both in bfloat16, FP8 or four bits.
Stack = tuple[jax.Array, jax.Array] | tuple[Fp8Weight, Fp8Weight] | tuple[Weight, Weight]

ROWS = 8  # of tokens in a product, padding included
MOST = 16  # experts of a token
PAIRS = ROWS * MOST  # threads of a warpgroup: each has one pair in `find`
TILE = WGMMA_ROWS  # rows of weights in a product
HALF = TILE // 2  # of gate, then of up
COLUMNS = 16  # outputs of a block
TOGETHER = TILE // COLUMNS  # experts in a tile of `down`
BLOCKS = (128,)  # grids that an H200 has run: most multiprocessors have a block, and all blocks are resident
# Sizes as they were run on an H200. There others (STEP 128, PART 32) gave wrong results for some shapes, presumably as
# Mosaic swizzles parts of arrays otherwise than the whole.
STEP = BULK_COPY  # inputs that one copy loads
PART = 16  # rows of gate, and of up, that one copy loads where a tile isn't one expert's
PARTS = HALF // PART  # of a tile of `up`
ARRIVALS = max(2 * PARTS, TOGETHER)  # of copies into a slot: as many as any tile has
ALIGNED = 1024  # bytes: each array in shared memory begins at a multiple
AHEAD, FP8_AHEAD = 768, 1024  # inputs of `down` whose hidden rows are prefetched, at most
HIDDEN_BYTES = 32 * 1024  # of FP8 experts' hidden rows, if those of a group of experts need no more
FLIGHT = 64 * 1024  # bytes of weights in flight at once
SCALES, SCALE_BYTES = (2, 8), 32 * 1024  # tiles whose scales of four bits are prefetched: least, most; and their room
COPY_LINES = 256  # of scales, that one copy loads
LANES = 32  # of a warp: each has the scale of a block of inputs
ODD = 2  # rows before the results, so that slices begin at no multiple of four: Mosaic swizzles such slices wrongly
_i32 = jnp.int32


@dataclass(frozen=True)
class Plan:
    """Sizes of one launch: t tokens, model width d, k experts of width f each, and how many each stack has.

    `fp8`: weights are. `four`: gate and up are stored so, and down, in four bits. With either, two warpgroups multiply
    and alternate between steps.
    """

    t: int
    k: int
    d: int
    f: int
    stacks: tuple[int, ...]
    fp8: bool = False
    four: tuple[FourBits, FourBits] | None = None

    @property
    def quantised(self) -> bool:
        return self.fp8 or self.four is not None

    @property
    def experts(self) -> int:
        return sum(self.stacks)

    @property
    def groups(self) -> int:
        """Groups of `TOGETHER` experts, if all chosen experts differ."""
        return -(-self.t * self.k // TOGETHER)

    @property
    def blocks(self) -> int:
        return self.d // COLUMNS

    @property
    def pitch(self) -> int:
        """Rows between an expert's hidden rows and the next's: bulk copies begin at a multiple of eight."""
        return max(2, self.t + self.t % 2)

    @property
    def beside(self) -> int:
        """Hidden rows that are multiplied at once."""
        return TOGETHER * self.pitch

    @property
    def parts(self) -> int:
        """Parts of an expert's hidden columns."""
        return self.f // PART

    @property
    def wave(self) -> int:
        """Parts that all blocks make at once, a tile each."""
        return self.blocks * PARTS

    @property
    def ahead(self) -> int:
        """Waves of the first token's experts only: their weights are prefetched before the others are known."""
        return self.k * self.parts // self.wave

    @property
    def hidden_slots(self) -> int:
        return self.hidden_ahead // STEP

    @property
    def hidden_ahead(self) -> int:
        """Inputs of `down` whose hidden rows the ring holds."""
        if not self.quantised:
            return AHEAD
        inputs, turns = max(HIDDEN_BYTES // (2 * self.beside), self.f), self.multipliers * STEP
        return min(FP8_AHEAD, -(-inputs // turns) * turns)

    @property
    def pairs(self) -> bool:
        """Whether tokens' rows become pairs of e4m3 rows. One token's aren't worth the time that takes."""
        return self.fp8 and self.t > 1

    @property
    def multipliers(self) -> int:
        """Warpgroups that multiply."""
        return 2 if self.quantised else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that fetches, and of one that multiplies."""
        return (72, 184) if self.quantised else (96, 200)

    @property
    def slot_bytes(self) -> int:
        return TILE * STEP // 2 if self.four else (1 if self.fp8 else 2) * TILE * STEP

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape in shared memory of what a warp's outputs of four bits have for scales: the larger stage's."""
        (up, *wide), (down, *_) = (of.scales(n, COLUMNS) for of, n in zip(self.four, (self.d, self.f), strict=True))
        return -(-max(up, down) // 4) * 4, *wide[-1:]  # each warp's begin at a multiple of 128 bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a tile's scales of four bits."""
        return TILE // COLUMNS * math.prod(self.scales) * jnp.dtype(self.four[0].dtype).itemsize

    @property
    def scale_slots(self) -> int:
        """Tiles whose scales of four bits are in shared memory."""
        least, most = SCALES
        return min(most, max(least, SCALE_BYTES // self.scale_bytes)) if self.four else 0

    @property
    def flight(self) -> int:
        """Slots of weights in flight at once."""
        return FLIGHT // self.slot_bytes

    @property
    def made(self) -> int:
        """Rows of the products of a group of experts: quantised ones multiply their own hidden rows alone."""
        return ROWS if self.quantised else self.beside

    @property
    def apart(self) -> int:
        """Distance from an expert's rows of the products to the next one's."""
        return 0 if self.quantised else self.pitch

    @property
    def slots(self) -> int:
        """Slots of the weight ring. Each slot of either ring has one warpgroup, which waits for every arrival."""
        rows, hidden = 2 * ROWS * self.d, 2 * self.hidden_ahead * self.beside
        results = 4 * ROWS * TILE, 2 * ROWS * HALF, 2 * (ODD + self.made + ROWS) * TILE, 2 * ROWS * COLUMNS
        parts = [4 * ROWS * TILE] * self.quantised  # sums
        parts += [4 * ROWS * self.d // BLOCK] * self.pairs  # factors of rows
        parts += [self.scale_slots * self.scale_bytes] if self.four else []
        taken = sum(-(-each // ALIGNED) * ALIGNED for each in (rows, hidden, *results, *parts, *[8 * PAIRS] * 2))
        return (ROOM - taken) // self.slot_bytes // self.multipliers * self.multipliers


def supported(tokens: int, each: int, dtype: Any, stacks: list[Stack]) -> str | None:
    """Why the kernel can't serve so many tokens, or rows of the residual stream, of `each` experts; None if it can."""
    if tokens > ROWS or each > MOST:
        return f"{tokens} tokens of {each} experts; supported: up to {ROWS} of {MOST}"
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    (d, f), *others = [shape_of(down)[1:] for _, down in stacks]
    if others and others != [(d, f)] * len(others):
        return f"experts of widths {f} and {others[0][1]} in one mixture"
    if d % 256 or d // COLUMNS not in BLOCKS:
        return f"a model {d} wide, which makes {d // COLUMNS} blocks"
    if f % 256:
        return f"experts {f} wide, not a multiple of 256"
    first = stacks[0][0]
    if isinstance(first, Fp8Weight | Weight) and d % (2 * STEP):
        return f"a model {d} wide, not a multiple of {2 * STEP}"
    if isinstance(first, Fp8Weight):
        return _fp8_refused(stacks)
    return _four_refused(stacks) if isinstance(first, Weight) else None


def _fp8_refused(stacks: list[tuple[Fp8Weight, Fp8Weight]]) -> str | None:
    if (most := max(stacks[0][1].values.shape[1:])) > LANES * BLOCK:
        return f"FP8 experts of {most} inputs; supported: up to {LANES * BLOCK}"
    for weight in (weight for stack in stacks for weight in stack):
        (_, outputs, inputs), (_, units, blocks) = weight.values.shape, weight.scales.shape
        if (units, blocks) != (outputs, 1) and (outputs // units % COLUMNS or inputs // blocks != BLOCK):
            return f"scales for {outputs // units} outputs and {inputs // blocks} inputs"
    return None


def _four_refused(stacks: list[tuple[Weight, Weight]]) -> str | None:
    for part in zip(*stacks, strict=True):
        if len({four_bits_of(weight) for weight in part}) > 1:
            return "experts in several formats of four bits in one mixture"
    up, down = stacks[0]
    if four_bits_of(up).dtype != four_bits_of(down).dtype:
        return f"scales in {four_bits_of(up).dtype} and {four_bits_of(down).dtype}"
    if reason := four_bits_supported(up) or four_bits_supported(down):
        return reason
    if (most := max(len(weight.scales[0]) for weight in (up, down))) > COPY_LINES:
        return f"{most} scales and zero points of an output; supported: up to {COPY_LINES}"
    return None


def shape_of(weight: jax.Array | Fp8Weight | Weight) -> tuple[int, int, int]:
    """Experts, outputs and inputs."""
    if isinstance(weight, Weight):
        return len(weight.values), weight.outputs, weight.inputs
    return (weight.values if isinstance(weight, Fp8Weight) else weight).shape


class Work:
    """A block's work: whole `waves`, then the parts from `low` to `high`, if any, and all groups of experts."""

    def __init__(self, plan: Plan, block, count):
        self.plan, self.block, self.count = plan, block, count
        self.groups = lax.div(count + (TOGETHER - 1), _i32(TOGETHER))
        self.waves = lax.div(count * plan.parts, _i32(plan.wave))
        before = self.waves * plan.wave
        left = count * plan.parts - before
        self.low, self.high = (before + lax.div((block + end) * left, _i32(plan.blocks)) for end in (0, 1))
        self.tiles = self.waves + (self.low < self.high).astype(_i32)

    def parts(self, tile):
        """A tile's first part, and the one after its last."""
        first, whole = tile * self.plan.wave + self.block * PARTS, tile < self.waves
        return jnp.where(whole, first, self.low), jnp.where(whole, first + PARTS, self.high)


def expert_of(part, high, parts):
    """The index among the chosen experts of the one that has a part, of `parts` each; past the last part, the last."""
    return lax.div(jnp.minimum(part, high - 1), _i32(parts))
