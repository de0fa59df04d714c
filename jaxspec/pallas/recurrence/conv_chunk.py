"""Blocks of prompts before the gated delta rule, on Hopper: convolved, in heads, keys and queries of length one.

A Mosaic GPU kernel in place of XLA's, which reached a fifth of the memory's speed. A warpgroup takes two heads of one
block, each 64 rows of 128 channels and the rows before them. It prefetches both: the second arrives while it computes
the first. Sixteen threads share a row, so the row's length is a sum over a few lanes. The kernel also writes the
windows that the next block or round reads.

Invariant: the rows before each block have been read from the windows when the kernel starts.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.recurrence.conv_step import WIDTH, heads_supported

BLOCK = 64  # rows
GROUP = 2  # heads of a warpgroup, if there is an even number of them
STEP = 16  # rows that a warpgroup convolves at once
HALO = 8  # rows of shared memory before a block's own; the last ones hold the inputs before the block
FEWEST = 513  # rows of a call; fewer gain less than one more kernel for each size costs at start
# Rows of a step: of each eighth of them, sixteen threads have eight channels each.
TILING = plgpu.Tiling(((STEP, WIDTH), (STEP // 4, WIDTH), (STEP // 8, 8)))
LAYOUT = plgpu.Layout.TILED(TILING, warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1)


def supported(b: int, t: int, taps: int, key_dim: int, value_dim: int, *dtypes: Any) -> str | None:
    """Why the kernel can't convolve b blocks of t rows of heads so wide, or None if it can. `dtypes`: all operands'."""
    if b * t < FEWEST:
        return f"{b * t} rows"
    if t != BLOCK:
        return f"blocks of {t} tokens; supported: {BLOCK}"
    if reason := heads_supported(key_dim, value_dim, *dtypes):
        return reason
    return f"{taps} taps, more than {HALO}" if taps > HALO else None


@lower_once("conv_chunk", "key_heads", "eps")
def conv_chunk(
    windows: Float[Array, "l r s c"],
    layer: Int[Array, ""],
    targets: Int[Array, "b 2"],
    count: Int[Array, " b"],
    before: Float[Array, "b w-1 c"],
    x: Float[Array, "b t d"],
    weight: Float[Array, "w c"],
    *,
    key_heads: int,
    eps: float,
    interpret: Any = False,
) -> tuple[tuple[Float[Array, "b t m k"], Float[Array, "b t m k"], Float[Array, "b t n v"]], Float[Array, "l r s c"]]:
    """Convolve the first c columns of x, which follow `before`, as `causal_conv.chunk` does.

    Returns queries, keys and values, and the updated windows. The last w - 1 inputs up to the end of block i's
    `count[i]` valid rows go to the slots `targets[i]`; negative ones are none. No two blocks name the same slot.
    `key_heads`: heads of queries, and as many of keys.
    """
    (b, t, _), taps, heads = x.shape, weight.shape[0], windows.shape[3] // WIDTH
    group = math.gcd(heads, GROUP)
    shape = lambda heads: jax.ShapeDtypeStruct((b, t, heads, WIDTH), x.dtype)  # noqa: E731
    ref = jax.new_ref(windows)
    out = plgpu.kernel(
        partial(_heads, key_heads, eps),
        kernel_name="conv_chunk",
        out_type=[shape(key_heads), shape(key_heads), shape(heads - 2 * key_heads)],
        grid=(b, heads // group),
        grid_names=("b", "group"),
        scratch_types=dict(
            x_s=plgpu.SMEM((group, HALO + BLOCK, WIDTH), x.dtype),
            weight_s=plgpu.SMEM((group, taps, WIDTH), x.dtype),
            ready=plgpu.Barrier(num_arrivals=3, num_barriers=group),
        ),
        # Safe here: only bulk copies write to shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(layer.reshape(1), targets, count, before, x, weight, ref)
    return tuple(out), jax.freeze(ref)


def _heads(key_heads, eps, layer_g, targets_g, count_g, before_g, x_g, weight_g, windows_g, q_g, k_g, v_g, *, x_s,
           weight_s, ready):  # fmt: skip
    b, first = lax.axis_index("b"), lax.axis_index("group") * x_s.shape[0]
    back = weight_g.shape[0] - 1

    def channels(i):
        return pl.ds((first + i) * WIDTH, WIDTH)

    for i in range(x_s.shape[0]):
        prefetch = partial(plgpu.copy_gmem_to_smem, barrier=ready.at[i])
        prefetch(weight_g.at[:, channels(i)], weight_s.at[i])
        prefetch(before_g.at[b, :, channels(i)], x_s.at[i, pl.ds(HALO - back, back)])
        prefetch(x_g.at[b, :, channels(i)], x_s.at[i, pl.ds(HALO, BLOCK)])

    def one(i, carry):
        head = first + i
        plgpu.barrier_wait(ready.at[i])
        across = partial(plgpu.load, layout=LAYOUT.reduce(0), optimized=False)
        taps = [across(weight_s.at[i, j]).astype(jnp.float32) for j in range(back + 1)]

        def step(at, carry):
            at = at * STEP
            total = None
            for j, tap in enumerate(taps):
                seen = plgpu.load(x_s.at[i, pl.ds(at + HALO - back + j, STEP)], layout=LAYOUT, optimized=False)
                part = seen.astype(jnp.float32) * lax.broadcast_in_dim(tap, seen.shape, [1])
                total = part if total is None else total + part
            root = lax.rsqrt(1 + jnp.exp(-total))  # its square is faster than a quotient
            rows = (total * root * root).astype(jnp.bfloat16)

            def put(out_g, before, rows):
                out_g[b, pl.ds(at, STEP), head - before] = rows

            @pl.when(head < 2 * key_heads)
            def _():
                wide = rows.astype(jnp.float32)
                length = lax.rsqrt(jnp.sum(wide * wide, axis=1) + eps)
                length = length * jnp.where(head < key_heads, WIDTH**-0.5, 1.0)
                unit = (wide * lax.broadcast_in_dim(length, wide.shape, [0])).astype(jnp.bfloat16)
                pl.when(head < key_heads)(lambda: put(q_g, 0, unit))
                pl.when(head >= key_heads)(lambda: put(k_g, key_heads, unit))

            pl.when(head >= 2 * key_heads)(lambda: put(v_g, 2 * key_heads, rows))
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(BLOCK // STEP), step, None)

        for target in (targets_g[b, 0], targets_g[b, 1]):

            @pl.when(target >= 0)
            def _(target=target):
                for j in range(back):
                    row = x_s.at[i, HALO - back + count_g[b] + j]
                    row = plgpu.load(row, layout=plgpu.Layout.WG_STRIDED((WIDTH,), 1), optimized=False)
                    windows_g[layer_g[0], target, j, channels(i)] = row

        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(x_s.shape[0]), one, None)
