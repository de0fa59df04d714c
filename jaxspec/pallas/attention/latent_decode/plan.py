"""Static sizes of a call of the latent decode kernel: its shapes, its tiling, and how its tokens are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import THREADS, WGMMA_ROWS

LATENT, REST = 512, 64  # columns of a token: those of keys and values, and those of keys alone behind them
HALF = LATENT // 2  # a warpgroup's share of the values' columns: as many sums as its registers hold
PIECES = ((0, HALF), (HALF, HALF), (LATENT, REST))  # of a token's columns, apart in shared memory: first, width
STEP = 64  # tokens; a warpgroup weighs every other step
PAIR = 2 * STEP
PAGE_SIZES = (16, 32, 64, 128)
MAX_MASKED_SLOTS = 32  # KV slots that a mask covers: bits of a word
NARROW_ROWS = 32  # up to which rows are the narrow side of products: more wouldn't leave a thread registers enough
FEW_ROWS = 8  # the least that they have there
FP8 = jnp.float8_e4m3fn
TOGETHER = 16  # parts that are read before the first is added
COMBINED = 64  # rows of parts that are read together where there are few parts: more wouldn't fit into registers
PART_COST = 0.02  # what a part adds to a request's time: it is written, waited for and combined
LEAST_ROWS = 8  # rows are copied in multiples of these


@dataclass(frozen=True)
class Plan:
    """Everything about one call that is static."""

    b: int
    t: int
    n: int
    page: int
    entries: int
    scale: float
    masked_slots: int  # KV slots that a mask covers; 0: there is none, rows are causal
    splits: int  # blocks that share a request's tokens, and wait for one another: a GPU starts them one after the other
    fp8: bool  # e4m3 latents
    interpret: bool  # then sums can't start from a value, and blocks can't count: a second call combines parts

    @property
    def tallest(self) -> int:
        """Rows of a tile, at most. FP8 latents become wider in registers, as the left operand of narrow products."""
        return NARROW_ROWS if self.fp8 else WGMMA_ROWS

    @property
    def narrow(self) -> bool:
        """Whether scores are [tokens, rows] and sums of values [columns, rows], and not the other way around. Rows are
        the left side otherwise, and padded to 64."""
        return self.rows <= NARROW_ROWS

    @property
    def height(self) -> int:
        """Rows of a tile as they are multiplied, some of which may be padding."""
        return max(FEW_ROWS, 1 << (self.rows - 1).bit_length()) if self.narrow else WGMMA_ROWS

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of both operands of the products. Float16 holds every e4m3 number, by one instruction."""
        return jnp.dtype(jnp.float16 if self.fp8 else jnp.bfloat16)

    @property
    def in_registers(self) -> bool:
        """Whether e4m3 latents become `dtype` in registers, whose rows and columns have orders of their own."""
        return self.fp8 and not self.interpret

    @property
    def own_in_registers(self) -> bool:
        """Whether a warpgroup multiplies its own step's weights from registers, and not from shared memory."""
        return not (self.narrow or self.interpret)

    @property
    def exchanged(self) -> int:
        """Numbers that the warps of a warpgroup exchange at a time: every lane's, for as many as 16 rows."""
        return THREADS * min(self.height, 16) // 4

    @property
    def all_rows(self) -> int:
        """A request's rows: its tokens' heads, and padding up to a multiple of `LEAST_ROWS`."""
        return -(-self.t * self.n // LEAST_ROWS) * LEAST_ROWS

    @property
    def rows(self) -> int:
        """Rows of a tile that aren't padding of the products."""
        return min(self.all_rows, self.tallest)

    @property
    def tiles(self) -> int:
        return -(-self.all_rows // self.tallest)

    @property
    def neighbours(self) -> int:
        """Tiles whose blocks are a cluster: each token is copied once for them. Over FP8 latents, conversion binds."""
        return 1 if self.tiles % 2 or self.fp8 else 2

    @property
    def copies(self) -> int:
        """Bulk copies that load one piece of a step."""
        return max(1, STEP // self.page)

    @property
    def together(self) -> int:
        """Parts that are read before the first is added."""
        return min(self.splits, TOGETHER)

    @property
    def pack(self) -> int:
        """Rows that parts are combined in at a time: the fewer parts, the more, as long as each part has some."""
        pack = LEAST_ROWS
        while 2 * pack * self.together <= COMBINED and self.rows % (2 * pack) == 0 and self._packs(2 * pack, HALF):
            pack *= 2
        return pack

    @property
    def combined(self) -> int:
        """Columns of a half that parts are combined in at a time: all of them for more than `LEAST_ROWS` rows, since
        fewer wouldn't be contiguous in shared memory."""
        return next((columns for columns in (HALF, HALF // 2) if self._packs(self.pack, columns)), REST)

    def _packs(self, rows: int, columns: int) -> bool:
        """Whether so many rows and columns leave each part a pack of a half to combine."""
        return self.rows // rows * (HALF // columns) >= self.splits


def supported(q_shape: tuple[int, ...], kv: Any, dtype: Any, latent: int, masked_slots: int = 0) -> str | None:
    """Why the kernel can't serve queries [b, t, n, w] of `dtype` over `kv` [l, p, 1, 1, s, w], None if it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"queries in {jnp.dtype(dtype).name}; bfloat16 is supported"
    if jnp.dtype(kv.dtype) not in (jnp.bfloat16, FP8):
        return f"latents in {jnp.dtype(kv.dtype).name}; bfloat16 and float8_e4m3fn are supported"
    if (latent, q_shape[3] - latent) != (LATENT, REST):
        return f"latents of {latent} + {q_shape[3] - latent} columns; {LATENT} + {REST} are supported"
    if kv.shape[4] not in PAGE_SIZES:
        return f"pages of {kv.shape[4]} tokens; {', '.join(map(str, PAGE_SIZES))} are supported"
    if masked_slots > MAX_MASKED_SLOTS:
        return f"a mask over {masked_slots} KV slots; up to {MAX_MASKED_SLOTS} are supported"
    return None


def division(tiles: int, entries: int, page: int) -> int:
    """The number of blocks that divide the tokens that each of `tiles` attends to: those that leave processors least
    idle, a part's own cost counted. No more than the page table has pairs of steps, or than run at once."""
    processors = hopper.processors()

    def gain(splits: int) -> float:
        blocks = tiles * splits
        return blocks / (-(-blocks // processors) * processors) / (1 + PART_COST * splits)

    return max(range(1, min(processors, -(-entries * page // PAIR)) + 1), key=gain)
