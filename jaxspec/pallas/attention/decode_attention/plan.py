"""Static sizes of a call of the decode kernel: its shapes, its tiling, and how its tokens are divided."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.models.positions import Window
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import THREADS

ROWS = 64  # of a tile, at most: the M of a Hopper warpgroup's matmul, whose N may be as small as `FEW_ROWS`
FEW_ROWS = 8
NARROW_ROWS = 32  # up to which rows are the narrow side: more wouldn't leave a thread registers enough
MAX_ROWS = 32  # new rows a request
MAX_MASKED_SLOTS = 32  # KV slots that a mask covers: bits of a word
MAX_GROUP = 16
PACK = 4  # rows that parts are combined in at a time, one a warp
HEAD_WIDTHS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_SPLITS = 16  # blocks that share a request's tokens: each combines the results of all
FP8 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class Plan:
    """Everything about one call that is static."""

    b: int
    t: int
    n: int
    m: int
    h: int
    page: int
    entries: int
    fp8: bool
    masked_slots: int  # KV slots that a mask covers; 0: there is none, rows are causal
    window: Window | None  # positions that a row sees, its own included, or chunks; None: all so far
    depths: bool  # whether rows' positions are given, and aren't their KV slots
    sinks: bool  # whether heads have one
    splits: int  # blocks that share a request's tokens; all of a call's run at once, since they wait for one another
    warpgroups: int  # of a block, that share those of the block
    tallest: int  # rows of a tile, at most
    segment: int  # steps that are summed by themselves, in any part; 0: all of a part's are
    interpret: bool  # then sums can't start from a value, and blocks can't count: a second call combines parts

    @property
    def parts(self) -> int:
        """How many warpgroups share a request's tokens."""
        return self.splits * self.warpgroups

    @property
    def kept(self) -> int:
        """How many results of a tile are kept and then combined: one a part, or one a segment that there may be."""
        return -(-self.entries * self.page // (self.segment * self.step)) if self.segment else self.parts

    @property
    def combined(self) -> bool:
        return self.parts > 1 or self.segment > 0

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.n // self.m

    @property
    def tile_tokens(self) -> int:
        """New tokens whose rows make up one tile."""
        return min(self.t, self.tallest // self.group)

    @property
    def tiles(self) -> int:
        return -(-self.t // self.tile_tokens)

    @property
    def step(self) -> int:
        """Cached tokens that one step takes."""
        return step_tokens(self.h)

    @property
    def copies(self) -> int:
        """Bulk copies that load the keys of one step."""
        return max(1, self.step // self.page)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of both operands of the products. Float16 holds every e4m3 number, by one instruction."""
        return jnp.dtype(jnp.float16 if self.fp8 else jnp.bfloat16)

    @property
    def stages(self) -> int:
        """Pipeline stages: steps whose keys and values a warpgroup's ring holds.

        They are 64 KiB, so that two blocks share a multiprocessor. More was measured to be slower: blocks with much
        shared memory start later. Half as much holds as many tokens in e4m3, and more blocks share a multiprocessor.
        """
        return 4 if self.fp8 and not self.narrow else 2

    @property
    def stage_bytes(self) -> int:
        return 2 * self.step * self.h * (1 if self.fp8 else 2)

    @property
    def rows(self) -> int:
        """Rows of a tile as they are multiplied, some of which may be padding."""
        few = max(FEW_ROWS, 1 << (self.tile_tokens * self.group - 1).bit_length())
        return few if few <= NARROW_ROWS else ROWS

    @property
    def narrow(self) -> bool:
        """Whether scores are [step, rows] and sums of values [h, rows], and not the other way around."""
        return self.rows <= NARROW_ROWS

    @property
    def in_registers(self) -> bool:
        """Whether an fp8 cache's keys and values become `dtype` in registers (`e4m3`), not through shared memory."""
        return self.fp8 and self.narrow and not self.interpret

    @property
    def exchanged(self) -> int:
        """Numbers that the warps of a warpgroup exchange at a time: every lane's, for as many as 16 rows."""
        return THREADS * min(self.rows, 16) // 4

    @property
    def packs(self) -> int:
        """How many packs of rows a part's result has."""
        return -(-self.tile_tokens * self.group // PACK)


def step_tokens(h: int) -> int:
    return 128 if h == 64 else 64


def supported(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype, masked_slots: int = 0) -> str | None:
    """Why the kernel can't serve queries [b, t, n, h] over a cache [l, p, 2, m, s, h] of this dtype, with a mask over
    `masked_slots` KV slots; None if it can. Windows of any size are served."""
    _, t, n, h = q_shape
    m, s = kv_shape[3], kv_shape[4]
    if jnp.dtype(dtype) not in (jnp.bfloat16, FP8):
        return f"a cache in {jnp.dtype(dtype).name}; bfloat16 and float8_e4m3fn are"
    if h not in HEAD_WIDTHS or kv_shape[5] != h:
        return f"heads of width {h} over keys of width {kv_shape[5]}; equal widths of {_listed(HEAD_WIDTHS)} are"
    if s not in PAGE_SIZES:
        return f"pages of {s} tokens; {_listed(PAGE_SIZES)} are"
    if n % m or n // m > MAX_GROUP:
        return f"{n} query heads over {m} KV heads; whole groups of up to {MAX_GROUP} are"
    if t > MAX_ROWS:
        return f"{t} rows a request; up to {MAX_ROWS} are"
    if masked_slots > MAX_MASKED_SLOTS:
        return f"a mask over {masked_slots} KV slots; up to {MAX_MASKED_SLOTS} are"
    return None


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"


def division(tiles: int, h: int, span: int | None = None) -> tuple[int, int]:
    """The number of blocks, and of warpgroups of a block, that divide the tokens that each of `tiles` attends to.

    No more blocks than multiprocessors, so that all run at once. If these leave half of them idle, two warpgroups of a
    block divide its tokens once more. `span`: the most tokens that rows within a window see. No more parts are made
    than these have steps, since each is combined with all others.
    """
    processors = hopper.processors()
    most = 2 * MAX_SPLITS if span is None else -(-span // step_tokens(h)) + 1
    splits = 1
    while splits < min(MAX_SPLITS, most) and 2 * splits * tiles <= processors:
        splits *= 2
    paired = 2 * splits * tiles <= processors and h < 256 and splits < most
    return splits, 2 if paired else 1
