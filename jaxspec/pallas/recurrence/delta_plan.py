"""How a round of the gated delta rule, or of a state space, is shared out: `delta_step`'s blocks, their parts of the
state, their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.hopper import WGMMA_ROWS

TILE = WGMMA_ROWS  # rows of a state that a warpgroup has at a time
WIDTH = 128  # of keys, and of the delta rule's values
MAX_ROWS = 16
MAX_TILES = 8  # of a key head: as many as a cluster has blocks
MAX_GROUP = MAX_TILES * TILE // WIDTH  # value heads of a key head
GATES = 2 * MAX_ROWS  # decays and betas of a head's rows: 128 bytes, what a bulk copy's target is aligned to
PIECES = 2  # errors of 2^-18 of an element, so some 1e-6 of a product
ENOUGH = 250  # blocks: about two for each multiprocessor
ROOM = 112 * 1024  # bytes of shared memory for a block; a multiprocessor runs two or three


@dataclass(frozen=True)
class Division:
    """How a round is shared out between blocks, and how many parts of the state a block has in flight."""

    splits: int  # blocks that share a request's key head; one has one tile or whole heads
    stages: int  # parts of the state that a block's shared memory holds
    columns: int = 64  # of a part, which has the rows of a tile: 64, or all 128


@dataclass(frozen=True)
class Plan:
    """Everything about one call that is static."""

    b: int
    t: int
    rows: int  # of the records
    m: int
    group: int
    dtype: Any  # of the state
    division: Division
    interpreted: bool
    eps: float | None = None  # of the norm after it, if that is part of the kernel
    fixed: bool = False  # tokens enter the state one after the other, whichever round they belong to
    value_width: int = WIDTH
    limits: tuple[float, float] | None = None  # of a state space's steps
    pieces: int = 1  # that a key head's value heads are cut into: each is as a key head, but for its records of keys
    channels: bool = False  # each key channel has a decay of its own

    @property
    def halves(self) -> int:
        """Tiles of a value head."""
        return self.value_width // TILE

    @property
    def gates(self) -> int:
        """Numbers of a head in shared memory: decays and betas; of a state space its skip as well, which follows."""
        return GATES if self.limits is None else 2 * GATES

    @property
    def by_token(self) -> bool:
        """Whether new rows enter the state one after the other, in registers."""
        return self.fixed or self.channels

    @property
    def decays(self) -> tuple[int, ...]:
        """The shape of a head's records of decays in shared memory."""
        return (-(-self.rows // 4) * 4, WIDTH) if self.channels else (GATES,)

    @property
    def share(self) -> int:
        """Tiles of one block and key head."""
        return self.group * self.halves // self.division.splits

    @property
    def heads(self) -> int:
        """Value heads that these tiles belong to."""
        return max(self.share // self.halves, 1)

    @property
    def width(self) -> int:
        """Rows of each of these heads' states, or values, that a block has."""
        return min(self.share, self.halves) * TILE

    @property
    def parts(self) -> int:
        """Parts of a tile, each with all its rows and `division.columns` of its columns."""
        return WIDTH // self.division.columns

    @property
    def both(self) -> int:
        """Rows of keys and queries together, in eights as the tensor cores take them."""
        return -(-2 * self.t // 8) * 8


def operands_supported(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], state_dtype, *dtypes, value_width: int = WIDTH
) -> str | None:
    """Why no kernel takes queries [b, t, m, k] and values [b, t, n, v] over states of `state_dtype`; None if one may.
    `dtypes` are those of queries, keys and values."""
    (m, k), (n, v) = q_shape[2:], v_shape[2:]
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"queries, keys or values in {wrong[0]}; supported: bfloat16"
    if jnp.dtype(state_dtype) not in (jnp.float32, jnp.bfloat16):
        return f"states in {jnp.dtype(state_dtype).name}; supported: float32 and bfloat16"
    if (k, v) != (WIDTH, value_width):
        return f"keys of width {k} and values of width {v}; supported: {WIDTH} and {value_width}"
    return f"{n} value heads over {m} key heads; supported: whole groups" if n % m else None


def division_of(
    key_heads: int,
    group: int,
    t: int,
    rows: int,
    dtype,
    whole: bool = False,
    value_width: int = WIDTH,
    channels: bool = False,
) -> Division:
    """Choose the division for so many key heads of all requests: few blocks with many tiles each, if those are enough,
    and as many parts in flight as let two or three blocks share a multiprocessor.

    With one block a key head, the work that its tiles share is done once, and no block waits for others of a cluster.
    `whole`: no block has half a value head.
    """
    tiles = group * value_width // TILE
    splits = next((splits for splits in (1, group) if key_heads * splits >= ENOUGH), group if whole else tiles)
    one = Plan(1, t, rows, 1, group, dtype, Division(splits, 1), False, value_width=value_width, channels=channels)
    taken = sum(
        -(-math.prod(shape) * jnp.dtype(dtype).itemsize // 1024) * 1024 for shape, dtype in _beside(one).values()
    )
    parts = (ROOM - taken) // (TILE * one.division.columns * jnp.dtype(dtype).itemsize)
    parts = min(parts, 4 if t <= 4 else 3)  # so measured: two blocks with more are slower
    return Division(splits, stages=max(1, min(parts, one.share * one.parts)))


def _beside(plan: Plan) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the arrays in shared memory beside the state."""
    mine = plan.heads, plan.width
    return dict(
        rows_s=((plan.both, WIDTH), jnp.bfloat16),  # new keys, then queries
        kq_s=((plan.both, WIDTH), jnp.bfloat16),  # a copy of them in the tensor cores' layout
        keys_s=((plan.rows, WIDTH), jnp.bfloat16),
        among_s=((plan.t, plan.both), jnp.float32),
        updates_s=((plan.rows, *mine), jnp.float32),  # then the new rows' updates
        decays_s=((plan.heads, *plan.decays), jnp.float32),
        **(dict(fresh_s=((plan.heads, *plan.decays), jnp.float32)) if plan.channels else {}),  # new rows' decays
        gates_s=((plan.heads, plan.gates), jnp.float32),
        values_s=((plan.t, *mine), jnp.bfloat16),  # then the rows' results
    )


def scratch_of(plan: Plan) -> dict:
    """Shared memory and barriers."""
    division = plan.division
    scratch = {name: plgpu.SMEM(*array) for name, array in _beside(plan).items()}
    scratch |= dict(
        state_s=plgpu.SMEM((division.stages, TILE, division.columns), plan.dtype),
        brought=plgpu.Barrier(num_arrivals=2 + (plan.heads if plan.channels and plan.eps is None else 0)),
        shared=plgpu.Barrier(num_arrivals=3 + plan.heads),
        ready=plgpu.Barrier(num_barriers=division.stages),
    )
    if division.splits > 1:
        scratch["read"] = plgpu.ClusterBarrier(collective_axes=("split",))
    return scratch
