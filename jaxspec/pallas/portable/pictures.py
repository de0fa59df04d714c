"""Attention of vision towers on any NVIDIA GPU, Hopper included: each patch to all of its picture.

A program has a tile of patches and a head. It walks over the patches of the pictures that its own belong to, with a
running maximum and sum. Triton's arrays have powers of two, and heads often 72 columns: these are 64 and 16 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxspec.pallas import hopper, portable
from jaxspec.pallas.portable.attention import LOG2E

LEAST = 16  # columns of a product, and patches
MOST = 128  # columns of a head: sums of a tile are float32 in registers
ROWS, STEP = 128, 64  # patches of a tile, and those that one step attends to
WARPS, STAGES = 4, 3
LOWEST = -1e30  # a maximum before the first score, from which -inf may be subtracted


@dataclass(frozen=True)
class Plan:
    """Static sizes of a call: patches, columns of a head, and those of a head with its padding."""

    patches: int
    h: int
    width: int

    @property
    def rows(self) -> int:
        return min(ROWS, self.patches)

    @property
    def step(self) -> int:
        return min(STEP, self.patches)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """First columns and widths, powers of two, of the pieces that make up a head."""
        pieces, first = [], 0
        while rest := self.width - first:
            pieces.append((first, 1 << (rest.bit_length() - 1)))
            first += pieces[-1][1]
        return pieces


def supported(q_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why the kernel can't serve queries [p, n, h] of `dtype`, None if it can."""
    p, _, h = q_shape
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries in {jnp.dtype(dtype).name}; bfloat16, float16 and float32 are supported"
    if h > MOST:
        return f"heads of width {h}; up to {MOST} are supported"
    if p < LEAST or p & (p - 1):
        return f"{p} patches; powers of two from {LEAST} on are supported"
    return portable.missing()


def picture_attention(
    q: Float[Array, "p n h"],
    k: Float[Array, "p n h"],
    v: Float[Array, "p n h"],
    begin: Int[Array, " p"],
    end: Int[Array, " p"],
    *,
    interpret: bool = False,
) -> Float[Array, "p n h"]:
    """Run `picture_attention.picture_attention`."""
    hopper.count("portable_pictures")
    p, n, h = q.shape
    plan = Plan(p, h, -(-h // LEAST) * LEAST)
    heads = (jnp.pad(x, ((0, 0), (0, 0), (0, plan.width - h))).reshape(p, -1) for x in (q, k, v))
    return _launch(plan, begin, end, *heads, interpret=interpret).reshape(p, n, -1)[..., :h]


@partial(jax.jit, static_argnames=("plan", "interpret"))
def _launch(plan: Plan, begin: Array, end: Array, *heads: Array, interpret: bool) -> Float[Array, "p w"]:
    return pl.pallas_call(
        partial(_tile, plan),
        out_shape=jax.ShapeDtypeStruct(heads[0].shape, heads[0].dtype),
        grid=(plan.patches // plan.rows, heads[0].shape[1] // plan.width),
        compiler_params=portable.triton().CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="portable_pictures",
    )(begin, end, *heads)


def _tile(plan: Plan, begin_ref: Any, end_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any) -> None:
    rows, head = pl.ds(pl.program_id(0) * plan.rows, plan.rows), pl.program_id(1) * plan.width
    begin, end = begin_ref[rows], end_ref[rows]
    first = lax.div(jnp.min(begin), jnp.int32(plan.step))
    last = lax.div(jnp.max(end) + (plan.step - 1), jnp.int32(plan.step))
    load = lambda ref, at: [ref[at, pl.ds(head + column, width)] for column, width in plan.columns]  # noqa: E731
    q, scale = load(q_ref, rows), plan.h**-0.5 * LOG2E

    def step(i: Array, carry: tuple[Sequence[Array], Array, Array]) -> tuple[Sequence[Array], Array, Array]:
        sums, top, total = carry
        patch = i * plan.step + jnp.arange(plan.step, dtype=jnp.int32)[None]
        at, across = pl.ds(i * plan.step, plan.step), (((1,), (1,)), ((), ()))
        both = zip(q, load(k_ref, at), strict=True)
        parts = (lax.dot_general(*of, across, preferred_element_type=jnp.float32) for of in both)
        seen = (begin[:, None] <= patch) & (patch < end[:, None])
        scores = jnp.where(seen, sum(parts) * scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        mix = (jnp.dot(weights.astype(x.dtype), x, preferred_element_type=jnp.float32) for x in load(v_ref, at))
        sums = tuple(old * shrink[:, None] + new for old, new in zip(sums, mix, strict=True))
        return sums, new_top, total * shrink + jnp.sum(weights, axis=1)

    nothing = tuple(jnp.zeros((plan.rows, width), jnp.float32) for _, width in plan.columns)
    carry = nothing, jnp.full((plan.rows,), LOWEST, jnp.float32), jnp.zeros((plan.rows,), jnp.float32)
    sums, _, total = lax.fori_loop(first, last, step, carry)
    for (column, width), each in zip(plan.columns, sums, strict=True):
        mean = each / jnp.maximum(total, 1e-30)[:, None]
        out_ref[rows, pl.ds(head + column, width)] = mean.astype(out_ref.dtype)
