"""Attention of new rows over latents in pages, on Hopper's tensor cores: decode, verify, trees and prompts.

A Mosaic GPU kernel. A block has a tile of up to 64 of a request's rows (32 over FP8 latents), new tokens by query
heads, and a part of the request's tokens, each of 512 + 64 columns: all of them are its key, and the first 512 its
value. So each token is copied once into shared memory. A tile's sums, [64, 512] in float32, fill the registers of two
warpgroups, each of which has 256 columns (`kernel`). A third copies pages.

With few requests, several blocks divide a request's tokens, count in memory how many are done, and combine their
results, in bfloat16, which they have divided by their sums of weights. A request's parts take its pairs of steps in
turn, so work follows the tokens that rows see.

The cache must hold finite numbers everywhere, since masked values enter a sum with weight zero.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.attention.decode_attention import e4m3
from jaxspec.pallas.attention.latent_decode.kernel import combine, warpgroup
from jaxspec.pallas.attention.latent_decode.plan import (
    FP8,
    HALF,
    LATENT,
    NARROW_ROWS,
    PIECES,
    STEP,
    Plan,
    division,
    supported,
)
from jaxspec.pallas.hopper.export import lower_once

__all__ = ["division", "latent_decode", "supported"]


@lower_once("latent_decode", "scale", "splits")
def latent_decode(
    q: Float[Array, "b t n w"],
    kv: Float[Array, "l p 1 1 s w"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    mask: Bool[Array, "b t w2"] | None = None,
    *,
    scale: float,
    splits: int | None = None,
    interpret=False,
) -> Float[Array, "b t n l"]:
    """Run `latent_attention.latent_attention` with queries in bfloat16, over latents in bfloat16 or
    float8_e4m3fn. `splits`: blocks that divide a request's tokens; None: by `division`.

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    masked_slots = 0 if mask is None else mask.shape[2]
    if reason := supported(q.shape, kv, q.dtype, LATENT, masked_slots):
        raise ValueError(f"latent_decode doesn't support {reason}")
    (b, t, n, width), page, entries = q.shape, kv.shape[4], table.shape[1]
    plan = Plan(b, t, n, page, entries, scale, masked_slots, 1, kv.dtype == FP8, bool(interpret))
    splits = splits or division(b * plan.tiles, entries, page)
    plan = replace(plan, splits=splits)
    q = q.reshape(b, t * n, width)
    if plan.fp8:
        # The interpreter multiplies what is in memory alone, so it has float16 there.
        q, kv = _float16(plan, q), kv if plan.in_registers else kv.astype(plan.dtype)
    if more := plan.all_rows - t * n:
        q = jnp.pad(q, ((0, 0), (0, more), (0, 0)))
    operands = [q, kv, table, start, layer.reshape(1)]
    if mask is not None:
        operands.append(_row_bits(plan, mask))
    out = jax.ShapeDtypeStruct((b, plan.all_rows, LATENT), jnp.bfloat16)
    each = b, plan.tiles, splits
    parts = [
        jax.ShapeDtypeStruct((*each, plan.rows, LATENT), jnp.bfloat16),
        jax.ShapeDtypeStruct((*each, 2, plan.height), jnp.float32),
    ]
    launch = partial(
        plgpu.kernel,
        kernel_name="latent_decode",
        grid=(b, plan.tiles // plan.neighbours, splits),
        grid_names=("b", "tiles", "split"),
        cluster=(plan.neighbours,),
        cluster_names=("neighbour",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(plan),
        # Safe here: warps exchange data through a barrier or `commit_smem`, written out in `kernel`.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    attend = partial(warpgroup, plan)
    if splits == 1:
        result = launch(attend, out_type=[out])(*operands)
    elif plan.interpret:
        result = launch(partial(combine, plan), out_type=[out])(start, *launch(attend, out_type=parts)(*operands))
    else:
        result = launch(attend, out_type=[*parts, out])(*operands)
    return result[-1][:, : t * n].reshape(b, t, n, LATENT)


def _row_bits(plan: Plan, mask):
    """The mask of each row, a bit for each KV slot: i32[b, rows], which rows of a tile's padding have, too."""
    bits = (mask.astype(jnp.uint32) << jnp.arange(plan.masked_slots, dtype=jnp.uint32)).sum(2, dtype=jnp.uint32)
    bits = jnp.repeat(lax.bitcast_convert_type(bits, jnp.int32), plan.n, axis=1)
    return jnp.pad(bits, ((0, 0), (0, max(plan.all_rows, plan.height) - bits.shape[1])))


def _float16(plan: Plan, q):
    """Queries for FP8 latents, in the order of columns that `e4m3.keys` gives keys in."""
    q = jnp.clip(q.astype(jnp.float32), -e4m3.LARGEST, e4m3.LARGEST).astype(plan.dtype)
    if not plan.in_registers:
        return q
    # Of each 16 columns, the pairs with an even number come first.
    return q.reshape(*q.shape[:2], -1, 4, 2, 2).swapaxes(-3, -2).reshape(q.shape)


def _scratch(plan: Plan) -> dict:
    """Shared memory and barriers. Queries and the two steps under way are in pieces."""
    numbers = plgpu.SMEM((2, plan.height), jnp.float32)
    narrow = dict(exchange_s=plgpu.SMEM((2, plan.exchanged), jnp.float32)) if plan.narrow else {}
    if plan.fp8:  # what would overwrite latents is wider than they are
        narrow |= dict(
            weights_s=plgpu.SMEM((2, plan.height, STEP), plan.dtype),
            rows_s=plgpu.SMEM((2, NARROW_ROWS, HALF), jnp.bfloat16),
        )
    shared = partial(plgpu.ClusterBarrier, collective_axes=("neighbour",))
    released = plgpu.Barrier if plan.neighbours == 1 else shared  # a copy is for all neighbours
    return narrow | dict(
        q_s=[plgpu.SMEM((1, plan.height, width), plan.dtype) for _, width in PIECES],
        ring=[plgpu.SMEM((2, STEP, width), FP8 if plan.in_registers else plan.dtype) for _, width in PIECES],
        tops_s=numbers,
        totals_s=numbers,
        sums_s=numbers,
        q_ready=plgpu.Barrier(num_arrivals=len(PIECES)),
        filled=plgpu.Barrier(num_arrivals=plan.copies, num_barriers=(2, len(PIECES))),
        # Each warpgroup has a piece of values, and both have the weights, which overwrite the third.
        released=[released(num_arrivals=n, num_barriers=2) for n in (1, 1, 2)],
        weighed=plgpu.Barrier(num_arrivals=1, num_barriers=2),
        summed=plgpu.Barrier(num_arrivals=2),
    )
