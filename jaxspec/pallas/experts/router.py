"""A mixture's router at few rows, from the residual stream to the chosen experts, as one kernel on Hopper.

The blocks of one cluster divide the router's inputs. Each multiplies its own and sends the sums to the first block's
shared memory. That one norms the logits, and chooses as `top_experts` does. All blocks write their inputs of the normed
rows, which the experts read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.dense.few_rows.block import begin, grid_of, multiply, params, prepare, scratch_of
from jaxspec.pallas.dense.few_rows.layer import Scaled
from jaxspec.pallas.dense.few_rows.share import GROUP, TILE, Share
from jaxspec.pallas.experts.top_experts import LANES, LAYOUT, NOBODY, across, choose, most_chosen
from jaxspec.pallas.hopper.export import lower_once

CLUSTER = 8  # blocks, the most that every Hopper card runs together
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, width: int, experts: int, k: int, dtype: Any) -> str | None:
    """Why the kernel can't choose k of so many experts for rows of this width, or None if it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"a router in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows != GROUP:
        return f"{rows} rows; supported: {GROUP}"
    if width % TILE or experts % TILE:
        return f"a router of {width} by {experts}; supported: multiples of {TILE}"
    if k > most_chosen(False):
        return f"{k} experts a token; supported: up to {most_chosen(False)}"
    share = _share(rows, width, experts)
    return None if share.slots >= share.chunks else f"a router of {width} by {experts} for shared memory"


def _share(rows: int, width: int, columns: int, cluster: int = CLUSTER) -> Share:
    splits = next(n for n in range(cluster, 0, -1) if width // TILE % n == 0)
    return Share(rows, (width,), columns, columns // TILE, splits, normed=False)


@lower_once("router", "k", "renormalised", "eps", "num_experts")
def router(
    x: Scaled,
    weight: Float[Array, "d e"],
    positions: Int[Array, " r"],
    bias: Float[Array, " e"] | None = None,
    *,
    k: int,
    renormalised: bool,
    eps: float,
    num_experts: int | None = None,
    interpret: Any = False,
) -> tuple[Int[Array, "r w"], Float[Array, "r w"], Float[Array, "r d"]]:
    """Choose experts by the normed rows' logits as `top_experts` does, in w = `LANES` columns; also returns the normed
    rows in bfloat16.

    The norm, of this `eps`, is rounded in the result alone: logits are sums of the scaled rows, multiplied by the
    norm's factor in float32. `bias` is added to logits. `num_experts`: columns from there on are padding; None: all are
    experts. In interpret mode, where blocks send each other nothing, one has all inputs.
    """
    (rows, width), columns = x.rows.shape, weight.shape[1]
    share = _share(rows, width, columns, 1 if interpret else CLUSTER)
    biases = [] if bias is None else [bias]
    choices = partial(jax.ShapeDtypeStruct, (rows, LANES))
    scratch = {"logits_s": plgpu.SMEM((rows, -(-columns // LANES) * LANES), _f32)}
    made = plgpu.kernel(
        partial(_block, share, eps, num_experts or columns, k, renormalised),
        kernel_name="router",
        out_type=[choices(_i32), choices(_f32), jax.ShapeDtypeStruct((rows, width), x.rows.dtype)],
        **grid_of(share),
        scratch_types=scratch_of(share) | scratch,
        compiler_params=params(),
        interpret=interpret,
    )(x.rows, x.squares, weight, positions, *biases)
    return tuple(made)


def _block(share, eps, experts, k, renormalised, x_g, squares_g, weight_g, positions_g, *refs, logits_s, **scratch):
    *biases_g, ids_g, weights_g, rows_g = refs
    load = partial(plgpu.load, optimized=False)
    fetch = begin(share, [weight_g], [x_g], **scratch)
    # These loads are issued before any wait, or each would add its latency later.
    position = load(positions_g, layout=LAYOUT.reduce(1))
    groups = [bias_g.at[pl.ds(g * TILE, TILE)] for bias_g in biases_g for g in range(share.groups)]
    biases = [load(group, layout=plgpu.Layout.WGMMA.reduce(1)).astype(_f32) for group in groups]
    factor = prepare(share, [x_g], [squares_g], eps, scratch["rows_s"], False, rows_g)

    def finish(totals):
        for g, total in enumerate(totals):
            if biases:
                total = total + lax.broadcast_in_dim(biases[g], total.shape, [0])
            part = logits_s.at[:, pl.ds(g * TILE, TILE)].transpose((1, 0))
            part[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        ids, weights = choose(load(logits_s, layout=LAYOUT), experts, k, renormalised)
        ids_g[...] = jnp.where(across(position, ids.shape) >= 0, ids, NOBODY)
        weights_g[...] = weights

    multiply(share, fetch, (), finish, factor, **scratch)
