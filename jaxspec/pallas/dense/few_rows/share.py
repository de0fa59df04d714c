"""How the products of few rows are divided among blocks, and which sizes fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxspec.models.fp8 import BLOCK
from jaxspec.models.int4 import UNIT
from jaxspec.pallas.attention.kv_write import PAGES
from jaxspec.pallas.hopper import BULK_COPY, MULTIPROCESSORS, SHARED_BYTES, THREADS, WGMMA_ROWS

TILE = WGMMA_ROWS  # columns of a group
COLUMNS = 32  # a weight's columns in `normed` are a multiple of this, if rows are `Scaled`
GROUP = 8  # rows that are normed together; the number of rows is a multiple of this
SQUARES = 16  # tiles of columns; sums of squares are padded to a multiple: a warp reads so many of a row at once
MAX_ROWS = 64  # more would need another tile of rows, and registers for it
BLOCKS = MULTIPROCESSORS  # as many as run at once
NARROW = 1024  # inputs of a product whose rows each block norms for itself, however many rows there are
WIDE_ROWS = 8  # rows of wider products: with more, `weight_stream` repeats less work in every block
FP8_ROWS = 32  # rows of products with FP8 weights: for more there are no registers
WARPGROUPS = {4: 56, 3: 112}  # of a block with FP8 weights, and how many sums and inputs a thread may keep then
RING_BYTES = 128 * 1024  # of FP8 weights in flight, with more than one warpgroup
FP8_SLOT_BYTES = 16 * 1024  # of FP8 weights that are waited for together
FOUR_SLOT_BYTES = 16 * 1024  # of weights in four bits, as well
COPY_GROUPS = BULK_COPY // TILE  # of columns of an FP8 weight that one copy can load
MAX_CHUNK = BULK_COPY  # inputs of one copy of weights: the most that a bulk copy can load
MAX_CLUSTER = 4  # blocks that share a tile's inputs
SPREAD = 64  # blocks in clusters of more than two: with 120 and 128, some waited until others had ended
MAX_GROUPS = 8  # groups of columns of a block
HEAD_STAGES = 2  # pipeline stages: tiles of a head in a block's shared memory
SLOT_BYTES = 32 * 1024  # of weights that are waited for together
MIN_SLOTS = 3  # of a ring
ROOM = SHARED_BYTES - 1024  # for weights, rows and sums; the rest is for barriers


@dataclass(frozen=True)
class FourBits:
    """How weights of four bits are stored: integers of which `group` inputs share a scale of this `dtype`, with `zeros`
    a zero point too; or `floats`, E2M1 numbers with a byte for each 16 inputs."""

    group: int = 16
    zeros: bool = False
    dtype: str = "uint8"

    @property
    def floats(self) -> bool:
        return self.dtype == "uint8"

    def scales(self, chunk: int, outputs: int) -> tuple[int, ...]:
        """The shape of the scales of a chunk of inputs of so many outputs, in memory."""
        if self.floats:
            return (chunk // UNIT, outputs * (UNIT // self.group) // BULK_COPY, BULK_COPY)
        return (max(chunk // self.group, 1) * (1 + self.zeros), outputs)

    def bytes(self, chunk: int, outputs: int) -> int:
        """Bytes of these."""
        return math.prod(self.scales(chunk, outputs)) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Share:
    """How a product is shared out: `groups` groups of columns a block, inputs in `splits` parts, a part in `chunks`.

    `normed`: a block norms its inputs of all rows itself; otherwise they come in chunks with the weights. `fp8`: the
    weights are, with scales for `BLOCK` inputs each. `rounds`: so are rows, which are quantised once they have arrived.
    `four`: weights have four bits, and their scales come with them. `adapters`: chunks of `TILE` inputs follow, which
    adapters add.
    """

    rows: int
    widths: tuple[int, ...]  # of the arrays that stand side by side as inputs
    columns: int
    groups: int
    splits: int
    normed: bool
    fp8: bool = False
    rounds: bool = False
    four: FourBits | None = None
    adapters: bool = False

    @property
    def quantised(self) -> bool:
        """Whether weights are, and stand by output."""
        return self.fp8 or self.four is not None

    @property
    def item(self) -> float:
        """Bytes of a weight's number."""
        return 0.5 if self.four else 1 if self.fp8 else 2

    @property
    def step(self) -> int:
        """The unit of a chunk: its inputs are a multiple of this."""
        return step_of(self.fp8, self.four)

    @property
    def tiles(self) -> int:
        """Tiles of columns; the last may have fewer columns (`column_of`)."""
        return -(-self.columns // TILE // self.groups)

    @property
    def chunk(self) -> int:
        """Inputs that come together: as many as one copy can load and a slot can hold, the same for all chunks."""
        if self.adapters and self.rows > GROUP:
            return TILE  # no copy writes fewer columns of several groups of rows
        slot = FP8_SLOT_BYTES if self.fp8 else SLOT_BYTES
        if self.four:
            slot = FOUR_SLOT_BYTES // (1 if self.rows <= GROUP else 2)  # rows take room, too
        most = min(
            2 * MAX_CHUNK if self.four else MAX_CHUNK, max(slot // int(self.item * TILE * self.groups), self.step)
        )
        return largest(math.gcd(self.part, *self.widths), most, self.step)

    @property
    def part(self) -> int:
        """Inputs of one block."""
        return sum(self.widths) // self.splits

    @property
    def chunks(self) -> int:
        return self.part // self.chunk

    @property
    def finishers(self) -> int:
        """Blocks of a cluster that finish products, each for the same number of rows, a multiple of `GROUP`."""
        return next(n for n in range(self.splits, 0, -1) if self.rows // GROUP % n == 0)

    @property
    def finished(self) -> int:
        """Rows that a finishing block finishes."""
        return self.rows // self.finishers

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block. With FP8 weights they alternate between chunks, each with slots of the ring to itself.

        As many as have registers enough and leave a ring of `RING_BYTES`, since its slots are a multiple of them.
        """
        counts = range(min(self._most_warpgroups, self.chunks) if self.quantised else 1, 1, -1)
        most = lambda n: min(self.chunks, self._room(n) // n * n)  # noqa: E731
        return next((n for n in counts if most(n) * self._slot >= min(RING_BYTES, self.chunks * self._slot)), 1)

    @property
    def _most_warpgroups(self) -> int:
        """The most warpgroups that have registers: a thread keeps sums of all groups and rows, and inputs of rows.

        With weights of four bits two took least time at eight rows: fewer sums are added up in the end.
        """
        if self.four and self.rows <= GROUP:
            return 2
        return next((n for n, most in WARPGROUPS.items() if self.rows * (self.groups + 5) // 2 <= most), 2)

    @property
    def together(self) -> int:
        """Groups whose scales one copy loads, of weights in four bits."""
        return next(n for n in range(COPY_GROUPS, 0, -1) if self.groups % n == 0)

    @property
    def copies(self) -> int:
        """Bulk copies that load a chunk of weights."""
        scales = self.groups // self.together if self.four else 0
        return -(-self.groups // COPY_GROUPS) + scales if self.quantised else self.groups

    @property
    def slots(self) -> int:
        """Slots of the ring of weights, as many as shared memory holds."""
        return min(self.chunks, self._room(self.warpgroups) // self.warpgroups * self.warpgroups)

    @property
    def _slot(self) -> int:
        """Bytes of a chunk of weights, of their scales in four bits, and of rows if they come with it."""
        scales = self.four.bytes(self.chunk, self.groups * TILE) if self.four else 0
        return int(self.chunk * (self.item * TILE * self.groups + (0 if self.normed else 2 * self.rows))) + scales

    def _room(self, warpgroups: int) -> int:
        """Chunks that shared memory has room for. Warpgroups' sums overwrite the ring in the end."""
        out = 2 * self.finished * TILE * (self.groups + (min(self.groups, 2) if self.quantised else self.groups))
        parts = 4 * self.finished * TILE * self.groups * self.splits if self.splits > 1 else 0
        parts += 4 * self.scales * self.groups * warpgroups if self.fp8 else 0
        parts += warpgroups * self.rows * self.chunk // BLOCK * (BLOCK + 4) if self.rounds else 0
        rows = 2 * self.rows * (self.part if self.normed else 0)
        return (ROOM - 1024 - out - parts - rows) // self._slot

    @property
    def scales(self) -> int:
        """Numbers that a warpgroup keeps in shared memory for each of its groups: the scales of two parts of it."""
        return -(-2 * (self.part // BLOCK) // THREADS) * THREADS

    @property
    def fits(self) -> bool:
        return self._room(self.warpgroups) >= min(self.chunks, MIN_SLOTS)


def share_out(
    rows: int,
    widths: Sequence[int],
    columns: int,
    groups: int | None = None,
    *,
    normed: bool = True,
    divided: bool = True,
    fp8: bool = False,
    rounds: bool = False,
    four: FourBits | None = None,
    adapters: bool = False,
) -> Share:
    """Divide a product so that all blocks run at once and most multiprocessors have one.

    `groups`: of a block's columns; None: any number. `divided`: several blocks of a cluster may divide the inputs; not
    in interpret mode, where blocks send each other nothing. **Raises:** `ValueError` for rows that a block norms and
    quantises: they are quantised before the norm's factor.
    """
    if normed and rounds:
        raise ValueError("rows that a block norms can't be quantised; give them as `Scaled`")
    whole = columns // TILE
    if groups is None:
        # Unquantised layers whose last tile would overlap are as fast without these kernels.
        fits = (n for n in range(1, MAX_GROUPS + 1) if -(-whole // n) <= BLOCKS and (fp8 or four or whole % n == 0))
        groups = next(fits, 1)
    tiles = -(-columns // TILE // groups)
    most = 1 if not divided or (normed and max(widths) <= NARROW) else MAX_CLUSTER
    step = step_of(fp8, four)
    room = lambda n: tiles * n <= (BLOCKS if n == 2 else SPREAD)  # noqa: E731
    splits = next((n for n in range(most, 1, -1) if sum(widths) // step % n == 0 and room(n)), 1)
    return Share(rows, tuple(widths), columns, groups, splits, normed, fp8, rounds, four, adapters)


def step_of(fp8: bool, four: FourBits | None) -> int:
    """The number that divides inputs of all weights."""
    return UNIT if four else BLOCK if fp8 else TILE


def split_of(share: Share) -> Any:
    """This block's part of a tile's inputs."""
    return lax.axis_index("split") if share.splits > 1 else jnp.int32(0)


def first_row(share: Share) -> Any:
    """The first of the rows that this block finishes, if it finishes any."""
    if share.finishers == 1:
        return 0
    return lax.rem(split_of(share), jnp.int32(share.finishers)) * share.finished


def turn_of(share: Share) -> Any:
    """The number of this warpgroup in its block."""
    return lax.axis_index("warpgroup") if share.warpgroups > 1 else jnp.int32(0)


def largest(whole: int, most: int = MAX_CHUNK, step: int = TILE) -> int:
    """The largest multiple of `step` up to `most` that divides `whole`."""
    return next(size for size in range(most // step * step, 0, -step) if whole % size == 0)


def column_of(share: Share, columns: int, tile: Any, group: Any) -> Any:
    """The first column of a group of a tile of a weight with so many columns.

    A last tile that would go past the last column begins earlier, and computes some of the columns of others again.
    """
    first, whole = tile * (share.groups * TILE), share.groups * TILE
    if columns % whole:
        first = jnp.minimum(first, max(columns - whole, 0))
    return first + group * TILE if columns >= whole else jnp.minimum(first + group * TILE, columns - TILE)


def tiles_of(weight: Any, groups: int) -> int:
    """How many tiles of so many groups of columns a weight has; the last may have fewer."""
    return -(-weight.shape[1] // TILE // groups)


def tiles_of_squares(width: int) -> int:
    """The number of tiles of columns that have sums of squares; those past the width are padding, and zero."""
    return -(-width // TILE // SQUARES) * SQUARES


def supported(
    rows: int,
    head: int,
    inputs: tuple[int, ...],
    weights: Any,
    pages: Any = jnp.bfloat16,
    *,
    rotated: int | None = None,
    beside: int = 0,
    wide_rows: int = WIDE_ROWS,
    fp8: bool = False,
    four: FourBits | None = None,
) -> str | None:
    """Why so many rows can't go through layers with heads of width `head`, or None if they can.

    `inputs` are those of the layer's products: the model's width, that of all query heads, and of a dense layer the
    MLP's; `weights` and `pages` are dtypes. `rotated`: how many of a head's columns rotate; None: all. `beside`: the
    width of a second input of q, k and v, beside the rows of the model's width. `wide_rows`: the most of rows wider
    than `NARROW`; more than `WIDE_ROWS` come `Scaled`. `fp8`: the weights are, and `weights` is their dtype once
    dequantised; or they have `four` bits. Wide rows of either come `Scaled`, too.
    """
    width, queries, *mlp = inputs
    if jnp.dtype(weights) != jnp.bfloat16:
        return f"weights in {jnp.dtype(weights).name}; supported: bfloat16"
    if jnp.dtype(pages) not in PAGES:
        return f"pages in {jnp.dtype(pages).name}; supported: bfloat16 and float8_e4m3fn"
    if head not in (TILE, 2 * TILE):
        return f"heads of width {head}; supported: {TILE} and {2 * TILE}"
    if rotated not in (None, head, TILE):
        return f"{rotated} of {head} columns rotated; supported: {TILE} and {2 * TILE}"
    if beside and max(width, beside) > NARROW:
        return f"two inputs {max(width, beside)} wide; supported: up to {NARROW}"
    most, step, quantised = MAX_ROWS if width <= NARROW else wide_rows, step_of(fp8, four), fp8 or four
    if quantised:
        most = FP8_ROWS
    if rows > most:
        return f"{rows} rows of {width}; supported: up to {most}"
    if odd := [each for each in (*inputs, beside) if each % step]:
        return f"width {odd[0]}; supported: multiples of {step}"
    rows, share = -(-rows // GROUP) * GROUP, partial(share_out, fp8=fp8, four=four)
    side_by_side = [each for each in (width, beside) if each]
    scaled = (quantised or wide_rows > WIDE_ROWS) and width > NARROW
    shares = [share(rows, side_by_side, queries, head // TILE, normed=not scaled, divided=False)]
    shares += [share(rows, [each], width, 1, normed=False) for each in (queries, *mlp)]
    # For unquantised weights as if rows were normed here, though `Scaled` ones need less.
    shares += [share(rows, [width], 2 * each, normed=not scaled) for each in mlp]
    return None if all(share.fits for share in shares) else f"{rows} rows of {inputs} for shared memory"


def product_supported(
    rows: int,
    widths: Sequence[int],
    shape: tuple[int, int],
    dtype: Any,
    fp8: bool = False,
    four: FourBits | None = None,
) -> str | None:
    """Why `product` can't serve so many rows of these widths and a weight like this, or None if it can.

    `fp8`: the weight is, and `dtype` is its dtype once dequantised; or it has `four` bits.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"weights in {jnp.dtype(dtype).name}; supported: bfloat16"
    most = FP8_ROWS if fp8 or four else MAX_ROWS if shape[1] <= NARROW else WIDE_ROWS
    if rows > most:
        return f"{rows} rows for {shape[1]} columns; supported: up to {most}"
    step = step_of(fp8, four)
    if len(set(widths)) > 1 or widths[0] % step or shape[1] % TILE:
        return f"widths {widths} and {shape[1]}; supported: equal multiples of {step}, and one of {TILE}"
    fits = share_out(-(-rows // GROUP) * GROUP, widths, shape[1], 1, normed=False, fp8=fp8, four=four).fits
    return None if fits else f"{rows} rows of {widths} for shared memory"


def normed_supported(
    rows: int,
    width: int,
    columns: Sequence[int],
    *dtypes: Any,
    fp8: bool = False,
    scaled: bool = False,
    four: FourBits | None = None,
) -> str | None:
    """Why `normed` can't serve so many rows of this width and weights of so many columns, or None if it can.

    `scaled`: rows come as `Scaled`. `fp8`: the weight is, and rows wider than `NARROW` come so, as for `four` bits.
    """
    quantised = bool(fp8 or four)
    scaled = scaled or (quantised and width > NARROW)
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"weights in {wrong[0]}; supported: bfloat16"
    most = FP8_ROWS if scaled or quantised else WIDE_ROWS
    if rows % GROUP or rows > most:
        return f"{rows} rows; supported: multiples of {GROUP} up to {most}"
    step = step_of(fp8, four)
    if width % step:
        return f"width {width}; supported: multiples of {step}"
    unit = TILE if quantised or not scaled else COLUMNS  # jax finds no layouts where blocks that norm rows overlap
    if odd := [each for each in columns if each < TILE or each % unit]:
        return f"{odd[0]} columns; supported: multiples of {unit} from {TILE} on"
    whole = sum(-(-each // TILE) * TILE for each in columns)
    if whole > (most := (BLOCKS - len(columns)) * MAX_GROUPS * TILE):
        return f"{sum(columns)} columns; supported: up to {most}"
    fits = share_out(rows, [width], whole, normed=not scaled, fp8=fp8, four=four).fits
    return None if fits else f"rows of {width} for shared memory"


def top_supported(rows: int, shape: tuple[int, int], dtype: Any) -> str | None:
    """Why `top_tokens` can't serve so many rows and a head like this, or None if it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"a head in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; supported: up to {MAX_ROWS}"
    if shape[0] % TILE or shape[1] % TILE:
        return f"a head of {shape[0]} by {shape[1]}; supported: multiples of {TILE}"
    needed = 2 * shape[1] * (HEAD_STAGES * TILE + rows)
    return f"{needed} bytes of shared memory; supported: up to {ROOM}" if needed > ROOM else None
