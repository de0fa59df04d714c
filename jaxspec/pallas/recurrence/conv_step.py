"""A round's rows before a recurrence, on Hopper: convolved, in heads; before the gated delta rule, keys and queries of
length one.

A Mosaic GPU kernel in place of seven of XLA's. A warpgroup takes 128 channels of one request, a channel a thread: a
head of the delta rule's. It loads the channels' window and the new rows, convolves them, and leaves both as the next
round's window.

Invariant: no other block reads or writes those channels of that slot, so none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import and_
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


def channels_supported(rows: int, first: int, widths: Sequence[int], *dtypes: Any) -> str | None:
    """Why the kernel can't convolve so many rows of channels from column `first` on, in parts so wide, or None if it
    can."""
    if odd := [width for width in (first, *widths) if width % WIDTH]:
        return f"{odd[0]} columns of channels, or before them; supported: multiples of {WIDTH}"
    return supported(rows, WIDTH, WIDTH, *dtypes)


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
    heads = windows.shape[3] // WIDTH
    counts = key_heads, key_heads, heads - 2 * key_heads
    return _launch(windows, (layer, slots, replay, x, weight), counts, partial(_units, eps), 0, x.shape[1], interpret)


@lower_once("conv_step", "first", "widths", "rows")
def conv_channels(
    windows: Float[Array, "l r s c"],
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    x: Float[Array, "b t d"],
    weight: Float[Array, "w c"],
    bias: Float[Array, " c"] | None,
    *,
    first: int,
    widths: tuple[int, ...],
    rows: int,
    interpret: Any = False,
) -> tuple[tuple[Float[Array, "b t _"], ...], Float[Array, "l r s c"]]:
    """Convolve c columns of each request's first `rows` rows, from the column `first` on, add the `bias` before SiLU,
    and split them in parts of these widths."""
    operands = layer, slots, replay, x, weight, *([] if bias is None else [bias])
    counts = tuple(width // WIDTH for width in widths)
    same = lambda row: [lambda: row] * len(widths)  # noqa: E731
    out, windows = _launch(windows, operands, counts, same, first, rows, interpret)
    return tuple(part.reshape(*part.shape[:2], -1) for part in out), windows


def _launch(windows, operands, counts: tuple[int, ...], parts: Callable, first: int, rows: int, interpret: Any):
    """Convolve columns of x's first rows from `first` on, and give each part so many heads. `parts(row)`: a head as
    each part has it, computed where it is called."""
    layer, *others = operands
    b, dtype = len(others[2]), others[2].dtype
    ref = jax.new_ref(windows)
    out = plgpu.kernel(
        partial(_head, counts, parts, first),
        kernel_name="conv_step",
        out_type=[jax.ShapeDtypeStruct((b, rows, count, WIDTH), dtype) for count in counts],
        grid=(b, sum(counts)),
        grid_names=("b", "head"),
        interpret=interpret,
    )(layer.reshape(1), *others, ref)
    return tuple(out), jax.freeze(ref)


def _head(counts, parts, first, layer_g, slots_g, replay_g, x_g, weight_g, *refs):
    *bias_g, windows_g = refs[: -len(counts)]
    b, head = lax.axis_index("b"), lax.axis_index("head")
    layer, slot, replay = layer_g[0], slots_g[b], replay_g[b]
    back, rows, cut = weight_g.shape[0] - 1, refs[-1].shape[1], pl.ds(head * WIDTH, WIDTH)
    own = pl.ds(first + head * WIDTH, WIDTH) if first else cut
    load = partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((WIDTH,), 1), optimized=False)
    inputs = [load(windows_g.at[layer, slot, replay + j, cut]) for j in range(back)]
    inputs += [load(x_g.at[b, j, own]) for j in range(rows)]
    taps = [load(weight_g.at[j, cut]).astype(jnp.float32) for j in range(back + 1)]
    start = [load(bias.at[cut]).astype(jnp.float32) for bias in bias_g]
    for j, row in enumerate(inputs):
        windows_g[layer, slot, j, cut] = row

    wide = [row.astype(jnp.float32) for row in inputs]
    for i in range(rows):
        total = sum((wide[i + j] * tap for j, tap in enumerate(taps)), *start)
        row = (total / (1 + jnp.exp(-total))).astype(jnp.bfloat16)

        def put(out_g, before, value, i=i):
            out_g[b, i, head - before] = value.astype(jnp.bfloat16)

        before = 0
        for count, part, out_g in zip(counts, parts(row), refs[-len(counts) :], strict=True):
            here = [head >= before] * (before > 0) + [head < before + count] * (out_g is not refs[-1])
            pl.when(reduce(and_, here))(partial(put, out_g, before, part()))
            before += count


def _units(eps: float, row: Any) -> tuple[Callable[[], Any], ...]:
    """A head as queries, keys and values have it, each computed where it is called."""
    unit = row.astype(jnp.float32)
    unit = unit * lax.rsqrt(jnp.sum(unit * unit) + eps)
    return lambda: unit * WIDTH**-0.5, lambda: unit, lambda: row
