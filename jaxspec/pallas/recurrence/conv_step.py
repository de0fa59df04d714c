"""A round's rows before the gated delta rule, on Hopper: convolved, in heads, keys and queries of length one.

A Mosaic GPU kernel in place of seven of XLA's. A warpgroup takes a head of one request, a channel a thread. It loads
the channels' window and the new rows, convolves them, and leaves both as the next round's window.

Invariant: no other block reads or writes those channels of that slot, so none waits for another.
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

from jaxspec.pallas.hopper.export import lower_once

WIDTH = 128  # channels of a head: a warpgroup's threads
MAX_ROWS = 16


def supported(rows: int, key_dim: int, value_dim: int, *dtypes: Any) -> str | None:
    """Why the kernel can't convolve so many rows of heads so wide, or None if it can. `dtypes`: all operands'."""
    if reason := heads_supported(key_dim, value_dim, *dtypes):
        return reason
    return f"{rows} rows a request; supported: up to {MAX_ROWS}" if rows > MAX_ROWS else None


def heads_supported(key_dim: int, value_dim: int, *dtypes: Any) -> str | None:
    """Why a kernel can't convolve heads so wide, with operands of these dtypes; None if it can."""
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"inputs, windows or weights in {wrong[0]}; supported: bfloat16"
    if (key_dim, value_dim) != (WIDTH, WIDTH):
        return f"keys of width {key_dim} and values of width {value_dim}; supported: {WIDTH} and {WIDTH}"
    return None


@lower_once("conv_step", "key_heads", "eps")
def conv_step(
    windows: Float[Array, "l r s c"],
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    x: Float[Array, "b t d"],
    weight: Float[Array, "w c"],
    *,
    key_heads: int,
    eps: float,
    interpret: Any = False,
) -> tuple[tuple[Float[Array, "b t m k"], Float[Array, "b t m k"], Float[Array, "b t n v"]], Float[Array, "l r s c"]]:
    """Convolve the first c columns of x as `causal_conv.step` does.

    Returns queries, keys and values, and the updated windows. `key_heads`: heads of queries, and as many of keys.
    """
    (b, t, _), heads = x.shape, windows.shape[3] // WIDTH
    shape = lambda heads: jax.ShapeDtypeStruct((b, t, heads, WIDTH), x.dtype)  # noqa: E731
    ref = jax.new_ref(windows)
    out = plgpu.kernel(
        partial(_head, key_heads, eps),
        kernel_name="conv_step",
        out_type=[shape(key_heads), shape(key_heads), shape(heads - 2 * key_heads)],
        grid=(b, heads),
        grid_names=("b", "head"),
        interpret=interpret,
    )(layer.reshape(1), slots, replay, x, weight, ref)
    return tuple(out), jax.freeze(ref)


def _head(key_heads, eps, layer_g, slots_g, replay_g, x_g, weight_g, windows_g, q_g, k_g, v_g):
    b, head = lax.axis_index("b"), lax.axis_index("head")
    layer, slot, replay = layer_g[0], slots_g[b], replay_g[b]
    back, rows, cut = weight_g.shape[0] - 1, x_g.shape[1], pl.ds(head * WIDTH, WIDTH)
    load = partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((WIDTH,), 1), optimized=False)
    inputs = [load(windows_g.at[layer, slot, replay + j, cut]) for j in range(back)]
    inputs += [load(x_g.at[b, j, cut]) for j in range(rows)]
    taps = [load(weight_g.at[j, cut]).astype(jnp.float32) for j in range(back + 1)]
    for j, row in enumerate(inputs):
        windows_g[layer, slot, j, cut] = row

    wide = [row.astype(jnp.float32) for row in inputs]
    for i in range(rows):
        total = sum(wide[i + j] * tap for j, tap in enumerate(taps))
        row = (total / (1 + jnp.exp(-total))).astype(jnp.bfloat16)
        unit = row.astype(jnp.float32)
        unit = unit * lax.rsqrt(jnp.sum(unit * unit) + eps)

        def put(out_g, first, value, i=i):
            out_g[b, i, head - first] = value.astype(jnp.bfloat16)

        pl.when(head < key_heads)(partial(put, q_g, 0, unit * WIDTH**-0.5))
        pl.when((head >= key_heads) & (head < 2 * key_heads))(partial(put, k_g, key_heads, unit))
        pl.when(head >= 2 * key_heads)(partial(put, v_g, 2 * key_heads, row))
