"""Static sizes of a call of the latent decode kernel: its shapes, its tiling, and how its tokens are divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import WGMMA_ROWS

LATENT, REST = 512, 64  # columns of a token: those of keys and values, and those of keys alone behind them
HALF = LATENT // 2  # a warpgroup's share of the values' columns: as many sums as its registers hold
PIECES = ((0, HALF), (HALF, HALF), (LATENT, REST))  # of a token's columns, apart in shared memory: first, width
STEP = 64  # tokens; a warpgroup weighs every other step
PAIR = 2 * STEP
PAGE_SIZES = (16, 32, 64, 128)
MAX_MASKED_SLOTS = 32  # KV slots that a mask covers: bits of a word
PACK = 4  # rows that parts are combined in at a time, one a warp
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
    interpret: bool  # then sums can't start from a value, and blocks can't count: a second call combines parts

    @property
    def all_rows(self) -> int:
        """A request's rows: its tokens' heads, and padding up to a multiple of `LEAST_ROWS`."""
        return -(-self.t * self.n // LEAST_ROWS) * LEAST_ROWS

    @property
    def rows(self) -> int:
        """Rows of a tile that aren't padding of the products."""
        return min(self.all_rows, WGMMA_ROWS)

    @property
    def tiles(self) -> int:
        return -(-self.all_rows // WGMMA_ROWS)

    @property
    def copies(self) -> int:
        """Bulk copies that load one piece of a step."""
        return max(1, STEP // self.page)

    @property
    def packs(self) -> int:
        return self.rows // PACK


def supported(q_shape: tuple[int, ...], kv: Any, dtype: Any, latent: int, masked_slots: int = 0) -> str | None:
    """Why the kernel can't serve queries [b, t, n, w] of `dtype` over `kv` [l, p, 1, 1, s, w], None if it can."""
    for what, given in (("queries", dtype), ("latents", kv.dtype)):
        if jnp.dtype(given) != jnp.bfloat16:
            return f"{what} in {jnp.dtype(given).name}; bfloat16 is supported"
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
