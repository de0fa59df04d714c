"""Attention of long prompt blocks over the paged cache, on Hopper's tensor cores (Pallas, Mosaic GPU).

A persistent grid takes tiles from a queue, the longest first (`plan`). A tile is one block of tokens and two units that
share a KV head; a unit is 64 query rows: 64 tokens of one head or, in shorter blocks, fewer tokens of several heads. In
each CTA a producer warpgroup copies queries and pages into rings of shared memory, and one consumer warpgroup for each
unit computes (`kernel`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.positions import Window
from jaxspec.pallas.attention.prompt_attention.kernel import kernel
from jaxspec.pallas.attention.prompt_attention.plan import HEAD_DIMS, PAGE_SIZES, UNIT, Plan
from jaxspec.pallas.hopper import MULTIPROCESSORS
from jaxspec.pallas.hopper.export import lower_once

__all__ = ["UNIT", "prompt_attention", "supported"]


def supported(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why `prompt_attention` can't take queries and a cache of these shapes and this cache dtype, or None if it can."""
    (_, t, n, h), (_, _, _, m, page_size, kv_h) = q_shape, kv_shape
    if h not in HEAD_DIMS or kv_h != h:
        return f"heads of queries and cache are {h} and {kv_h} wide; they must be equal, and one of {HEAD_DIMS}"
    if n % m:
        return f"{n} query heads are not a multiple of {m} kv heads"
    if t % UNIT and t not in (8, 16, 32):
        return f"blocks are {t} tokens; they must be 8, 16, 32 or a multiple of {UNIT}"
    if page_size not in PAGE_SIZES:
        return f"pages are {page_size} tokens; they must be one of {PAGE_SIZES}"
    if dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return f"the cache is {jnp.dtype(dtype).name}; it must be bfloat16 or float8_e4m3fn"
    return None


@lower_once("prompt_attention", "window", "sms")
def prompt_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    *,
    scales: Float[Array, "l 2 m"] | None = None,
    window: Window | None = None,
    sinks: Float[Array, " n"] | None = None,
    interpret: Any = False,
    sms: int = MULTIPROCESSORS,
) -> Float[Array, "b t n h"]:
    """Causal attention of blocks of t prompt tokens, whose own keys and values are already in `kv`.

    Block i is at positions `start[i] + 0..t-1` (a negative start counts as 0) of the request whose pages `table[i]`
    lists; several blocks may belong to one request. `q` is bfloat16 and unscaled: scores are scaled by h**-0.5. Keys
    and values are multiplied by `scales[layer, 0]` and `scales[layer, 1]`, positive, for each kv head (None: 1).
    A row sees `window` positions up to its own, or its chunk's (None: all); pages before those aren't read.
    `sinks`: one more logit of each head's softmax, which no value belongs to.
    Returns the mix of values in bfloat16. Rows past the last page are padding; their results are finite.

    `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU; `sms` is the number of CTAs that share the work.

    **Raises:** `ValueError` with the reason of `supported`, or if `q` isn't bfloat16.
    """
    if reason := supported(q.shape, kv.shape, kv.dtype):
        raise ValueError(f"prompt_attention: {reason}")
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"prompt_attention: queries are {q.dtype.name}; they must be bfloat16")
    fp8, sunk = kv.dtype == jnp.float8_e4m3fn, sinks is not None
    plan = Plan(q.shape, kv.shape, table.shape[1], fp8, window, sunk, sms, bool(interpret))
    if scales is None:
        scales = jnp.ones((kv.shape[0], 2, plan.m), jnp.float32)
    start = jnp.maximum(start, 0)
    longest_first = jnp.argsort(start, descending=True)  # XLA merges the sorts of all layers into one
    queue = jnp.stack([longest_first.astype(jnp.int32), start[longest_first]])
    call = plgpu.kernel(
        partial(kernel, plan),
        kernel_name="prompt_attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[plan.scratch()],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(q, kv, layer.reshape(1), table, queue, scales, *([plan.by_unit(sinks)] if sunk else []))
