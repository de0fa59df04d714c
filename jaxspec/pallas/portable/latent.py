"""Attention over latents in pages on any NVIDIA GPU, Hopper included: decode, verify, trees and prompts in one kernel.

A program has a tile of a request's rows, new tokens by query heads, and walks over the pages as `attention` does. A
step's latents are loaded once: they are keys, with the columns behind them, and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas import hopper, portable
from jaxspec.pallas.portable import attention, fp8
from jaxspec.pallas.portable.attention import FP8, LEAST_PAGE, LEAST_ROWS, LOG2E, NARROW_INDEX, Plan

MOST_LATENT = 512
MOST_ROWS = 64  # of a tile, whose sums are float32 in registers


@dataclass(frozen=True)
class LatentPlan(Plan):
    """Static sizes of a call: `h` columns of a latent, and `rest` behind them."""

    rest: int = 0
    scale: float = 1.0
    most_rows: int = MOST_ROWS

    @property
    def width(self) -> int:
        return self.h + self.rest

    @property
    def rows(self) -> int:
        return max(LEAST_ROWS, min(1 << (self.t * self.n - 1).bit_length(), self.most_rows))

    @property
    def tiles(self) -> int:
        """Rows of a tile are any that follow one another: a token's heads may be divided among tiles."""
        return -(-self.t * self.n // self.rows)

    @property
    def step(self) -> int:
        return min(self.page, 64 // self.itemsize)

    @property
    def launch(self) -> tuple[int, int]:
        return 8 if self.rows > LEAST_ROWS else 4, 2


def supported(q_shape: tuple[int, ...], kv: Any, dtype: Any, latent: int) -> str | None:
    """Why the kernel can't serve queries [b, t, n, w] of `dtype` over `kv` [l, p, 1, 1, s, w], None if it can."""
    rest, s = q_shape[3] - latent, kv.shape[4]
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries in {jnp.dtype(dtype).name}; bfloat16, float16 and float32 are supported"
    if kv.dtype not in (dtype, FP8):
        return f"latents in {kv.dtype.name}; the queries' {jnp.dtype(dtype).name} and float8_e4m3fn are supported"
    if kv.dtype == FP8 and kv.size in NARROW_INDEX:
        return "latents in float8_e4m3fn of 2 to 4 GiB; give --max-total-tokens for more or less"
    if any(x < 16 or x & (x - 1) for x in (latent, rest)) or latent > MOST_LATENT:
        return f"latents of {latent} + {rest} columns; powers of two from 16 on, up to {MOST_LATENT}, are supported"
    if s < LEAST_PAGE or s & (s - 1):
        return f"pages of {s} tokens; powers of two from {LEAST_PAGE} on are supported"
    return portable.missing()


def latent_attention(
    q: Float[Array, "b t n w"],
    kv: Float[Array, "l p 1 1 s w"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    latent: int,
    scale: float,
    mask: Bool[Array, "b t w2"] | None = None,
    *,
    parts: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b t n l"]:
    """Run `latent_attention.latent_attention`. `parts`: see `Plan`; None: by `attention.division`."""
    hopper.count("portable_latent")
    (b, t, n, width), (p, _, _, s) = q.shape, kv.shape[1:5]
    sizes = b, t, n, 1, latent, p, s, table.shape[1], 0 if mask is None else mask.shape[2], None, q.dtype.itemsize
    most = MOST_ROWS if portable.operands_stay() else MOST_ROWS // 2
    plan = LatentPlan(*sizes, rest=width - latent, scale=scale, most_rows=most)
    plan = replace(plan, parts=parts or attention.division(plan))
    if kv.dtype == FP8:
        kv = lax.bitcast_convert_type(kv, jnp.int8)  # which every card converts: see `fp8.numbers`
    given = dict(q=q.reshape(-1), table=table, start=start, layer=layer.reshape(1), kv=kv.reshape(-1, width))
    if mask is not None:
        given["mask"] = mask.astype(jnp.int8).reshape(-1)
    return attention.attend(plan, given, _tile, interpret=interpret).reshape(b, t, n, latent)


def _tile(plan: LatentPlan, names: tuple[str, ...], *refs: Any) -> None:
    """Attend a tile's rows to one part of the steps that they see."""
    ref = dict(zip(names, refs, strict=False))
    tile, b, part = pl.program_id(0), plan.b - 1 - pl.program_id(1), pl.program_id(2)
    rows, n, start = plan.t * plan.n, jnp.int32(plan.n), ref["start"][b]
    row = tile * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)
    token, valid = lax.div(row, n), row < rows
    last = start + lax.div(jnp.minimum((tile + 1) * plan.rows, rows) - 1, n)
    last = start + plan.masked_slots - 1 if plan.masked_slots else last
    end = jnp.clip(attention.steps(last, plan.step) + 1, 0, plan.last_step)
    of = attention.Rows(b * rows + row, valid, b * plan.t + token, start + token, None, (jnp.int32(0), end))
    load = lambda first, width: attention.load(  # noqa: E731
        ref["q"].at[of.index[:, None] * plan.width + first + jnp.arange(width, dtype=jnp.int32)[None]],
        valid[:, None],
        0.0,
    )
    q, rest = load(0, plan.h), load(plan.h, plan.rest)

    def step(masked, i, carry):
        per_page = jnp.int32(plan.page // plan.step)
        page = ref["layer"][0] * plan.pages + ref["table"][b, lax.div(i, per_page)]
        tokens = pl.ds(page * plan.page + lax.rem(i, per_page) * plan.step, plan.step)
        latents, keys = (ref["kv"].at[tokens, pl.ds(*each)][...] for each in ((0, plan.h), (plan.h, plan.rest)))
        latents, keys = (x if x.dtype == q.dtype else fp8.numbers(x, q.dtype) for x in (latents, keys))
        across = (((1,), (1,)), ((), ()))
        scores = lax.dot_general(q, latents, across, preferred_element_type=jnp.float32)
        scores = scores + lax.dot_general(rest, keys, across, preferred_element_type=jnp.float32)
        seen = attention.seen(plan, ref, of, b, i) if masked else None
        return attention.add_step(carry, scores * (plan.scale * LOG2E), seen, lambda: latents, q.dtype)

    first = start if plan.masked_slots else start + lax.div(tile * plan.rows, n) + 1
    attention.walk(plan, ref, refs[len(names) :], of, part, first, step)
