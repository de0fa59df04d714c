"""Padding rows: kernels of few rows take eight together, so each request is given a few more than it has.

With several requests, padding rows sit between theirs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.pallas.dense import few_rows

TIMED_ROWS = few_rows.WIDE_ROWS  # over several devices, where no GPU has timed more; the kernels take up to FP8_ROWS


def padded(b: int, t: int) -> int:
    """How many rows to give each of `b` requests that have `t`: so many that the kernels take them together.

    Attention then takes what the kernels before it give and gives what those after it take, with nothing between them.
    """
    return next(rows for rows in range(t, t + few_rows.GROUP) if b * rows % few_rows.GROUP == 0)


def untimed(rows: int, devices: int, timed: bool = False) -> str | None:
    """Why so many rows over several devices stay plain layers', or None if they need not: no GPU has timed more.

    `timed`: one has timed all that the kernels take.
    """
    most = few_rows.FP8_ROWS if timed else TIMED_ROWS
    if devices == 1 or rows <= most:
        return None
    return f"{rows} rows over {devices} devices; supported: up to {most}"


def pad(x: Array, value: int = 0) -> Array:
    """Rows [b, t, d] with each request's padding: [b, padded(b, t), d]."""
    b, t, _ = x.shape
    return jnp.pad(x, ((0, 0), (0, padded(b, t) - t), (0, 0)), constant_values=value)


def flat(x: Array, value: int = 0) -> Array:
    """Rows [b, t, d] one under the other, each request's padded."""
    return pad(x, value).reshape(-1, x.shape[2])


def valid_rows(positions: Int[Array, "b t"]) -> tuple[Int[Array, "1 r"], int]:
    """Positions of flat rows, -1 of padding, and how many rows there are up to the last valid one."""
    b, t = positions.shape
    out = flat(positions[..., None], -1).T
    return out, t if b == 1 else out.size
