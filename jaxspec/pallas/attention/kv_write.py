"""Writes of a prompt's keys and values into their pages, on Hopper; and their conversion to pages' dtype (`stored`).

A Mosaic GPU kernel, in place of XLA's scatter, which reaches a tenth of the memory's speed. A warpgroup takes one row.
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

from jaxspec.pallas.hopper import THREADS
from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing

FEWEST = 513  # rows; fewer are written by XLA's scatter, which is fused with the rotation of keys
MOST_HEADS = 16  # a warpgroup holds all their keys and values in registers at once
WIDE = 1e6  # a dtype whose largest number is beyond this isn't expected to overflow
PAGES = (jnp.bfloat16, jnp.float8_e4m3fn)  # dtypes that kernels of rounds and `write_heads` write


def stored(x: Any, dtype: Any, inverse_scale: Any = None) -> Any:
    """Convert x to pages of `dtype`: multiplied in float32 by `inverse_scale`, if given, and saturated.

    An overflow would make results infinite or NaN, at weight zero too, for all later owners of the page. So would a
    NaN, which becomes zero if the dtype's numbers could overflow at all.
    """
    largest = min(float(jnp.finfo(each).max) for each in (dtype, x.dtype))
    if inverse_scale is None and largest > WIDE:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    x = x if inverse_scale is None else x * inverse_scale
    return jnp.clip(jnp.where(x == x, x, 0.0), -largest, largest).astype(dtype)


def write(
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, "*l"],
    page: Int[Array, "b t"],
    slot: Int[Array, "b t"],
    k: Float[Array, "*l b t m h"],
    v: Float[Array, "*l b t m h"],
    inverse: Float[Array, "l 2 m"] | None = None,
) -> Float[Array, "l p 2 m s h"]:
    """`kv` with the keys and values of rows in `slot` of `page`, as they are `stored`. Of rows in one place, any may
    stay.

    They are of one `layer` i32[], or of several at once, i32[l, 1, 1]. `inverse`: of the scales of each layer's keys
    (0) and values (1) by head, float32; None: they have none.
    """
    call = kv, layer, page, slot, k, v, inverse
    return choose("the write of keys and values", KV_WRITE, *call).run(*call)


def reference(kv, layer, page, slot, k, v, inverse) -> Array:
    """`write` in plain jnp, without the rows of the dummy page: attention in plain jnp reads that at weight zero."""
    inverse = None if inverse is None else inverse[layer, ..., None]  # [*l 1 1, 2, m, 1]
    page = jnp.where(page > 0, page, kv.shape[1])  # beyond the last, where it is dropped
    return kv.at[layer, page, :, :, slot].set(stored(jnp.stack([k, v], axis=-3), kv.dtype, inverse), mode="drop")


def write_rows(
    kv: Float[Array, "l p 1 1 s w"],
    layer: Int[Array, "*l"],
    page: Int[Array, "b t"],
    slot: Int[Array, "b t"],
    rows: Float[Array, "*l b t w"],
) -> Float[Array, "l p 1 1 s w"]:
    """Write one row a token, as `write` does keys and values. In XLA's scatter: it has a half to a tenth of the bytes
    of keys and values."""
    page = jnp.where(page > 0, page, kv.shape[1])
    return kv.at[layer, page, 0, 0, slot].set(stored(rows, kv.dtype), mode="drop")


def _refuses(kv, layer, page, slot, k, v, inverse) -> str | None:
    if layer.ndim:
        return "several layers at once"
    if inverse is not None:
        return "pages with scales"
    return supported(page.size, *kv.shape[3::2], kv.dtype, k.dtype, v.dtype)


KV_WRITE = (
    Implementation("kv_write", HOPPER, _refuses, lambda *call: kv_write(*call[:-1])),
    Implementation("reference", ANY, nothing, reference),
)


def supported(rows: int, heads: int, width: int, *dtypes: Any) -> str | None:
    """Why the kernel shouldn't write so many rows of so many heads, or None if it should. `dtypes`: all operands'."""
    if rows < FEWEST:
        return f"{rows} rows"
    if wrong := [jnp.dtype(dtype).name for dtype in dtypes if jnp.dtype(dtype) != jnp.bfloat16]:
        return f"keys, values or pages in {wrong[0]}; supported: bfloat16"
    if heads > MOST_HEADS:
        return f"{heads} heads, more than {MOST_HEADS}"
    return f"heads of width {width}; supported: multiples of {THREADS}" if width % THREADS else None


@lower_once("kv_write")
def kv_write(
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    page: Int[Array, "b t"],
    slot: Int[Array, "b t"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    *,
    interpret: Any = False,
) -> Float[Array, "l p 2 m s h"]:
    """Write row i's keys and values to `slot[i]` of `page[i]`; returns the pages. Of rows with one slot, any stays."""
    heads, width = k.shape[2:]
    ref = jax.new_ref(kv)
    plgpu.kernel(
        partial(_row, heads, width),
        kernel_name="kv_write",
        out_type=[],
        grid=(page.size,),
        grid_names=("row",),
        interpret=interpret,
    )(layer.reshape(1), page.reshape(-1), slot.reshape(-1), k.reshape(page.size, -1), v.reshape(page.size, -1), ref)
    return jax.freeze(ref)


def _row(heads, width, layer_g, page_g, slot_g, k_g, v_g, kv_g):
    row, layer = lax.axis_index("row"), layer_g[0]
    page, slot = page_g[row], slot_g[row]
    layout = plgpu.Layout.WG_STRIDED((width,), width // THREADS)
    new = [
        [plgpu.load(x_g.at[row, pl.ds(head * width, width)], layout=layout, optimized=False) for head in range(heads)]
        for x_g in (k_g, v_g)
    ]
    for kind, values in enumerate(new):
        for head, value in enumerate(values):
            kv_g[layer, page, kind, head, slot] = value
