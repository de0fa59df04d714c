"""Attention over latents in pages, with DeepSeek-V3's heads: all of them, and those of one of eight GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import PAGE, Case
from jaxspec.pallas.attention.latent_attention import latent_attention, reference

LATENT, REST, SCALE = 512, 64, 0.1


def decode(b: int, context: int, t: int, heads: int, layers: int, dtype: str, kv: str | None = None) -> Case:
    """`t` rows of `heads` heads for each of `b` requests with `context` tokens. `kv`: the pages' dtype, an FP8 one;
    None: `dtype`."""
    width, pages = LATENT + REST, -(-context // PAGE)
    rows, seen = b * t * heads, context - (t - 1) / 2

    def build(key):
        kv_key, q_key = jax.random.split(key)
        made = lambda k: jax.random.normal(k, (1 + b * pages, 1, 1, PAGE, width), dtype).astype(kv or dtype)  # noqa: E731
        latents = jax.lax.map(made, jax.random.split(kv_key, layers))
        table = 1 + np.random.default_rng(0).permutation(b * pages).reshape(b, pages).astype(np.int32)
        q = jax.random.normal(q_key, (b, t, heads, width), dtype)
        return (q, jnp.asarray(table), jnp.full((b,), context - t, jnp.int32)), latents

    def attend(layer, shared, kv, plain=False):
        q, table, start = shared
        call = q, kv, jnp.int32(layer), table, start, LATENT, SCALE, None
        return (reference if plain else latent_attention)(*call)

    return Case(
        name=f"latent attention {b} x {context}, {t} row{'s' * (t > 1)}, {heads} heads" + (", FP8 KV" if kv else ""),
        group="latent attention",
        layers=layers,
        build=build,
        op=attend,
        plain=partial(attend, plain=True),
        size=jnp.dtype(kv or dtype).itemsize * b * context * width
        + jnp.dtype(dtype).itemsize * rows * (width + LATENT),
        flops=2 * rows * seen * (width + LATENT),
    )
