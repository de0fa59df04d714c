"""Gemma 4's tower: pictures of any grid, with learnt and rotary positions by column and by row.

Patches of one token stand side by side. Each token is the mean of a square of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import rms_norm
from jaxspec.decoder.towers.layers import by_layer
from jaxspec.models.vision import Gemma4Tower
from jaxspec.pallas.attention.picture_attention import picture_attention


@flax.struct.dataclass
class Patches:
    """Places of patches, made on the host.

    - `begin`, `end`: the patches of its picture, to which it attends. Padding has none: it begins behind all.
    - `at`: its column and row there.
    """

    begin: Int[np.ndarray, " p"]
    end: Int[np.ndarray, " p"]
    at: Int[np.ndarray, "2 p"]

    @classmethod
    def of(cls, tower: Gemma4Tower, grids: Sequence[tuple[int, int, int]], size: int) -> Patches:
        """Place patches of pictures with these grids, filled up to `size`."""
        begin, end, at = np.full(size, size, np.int32), np.zeros(size, np.int32), np.zeros((2, size), np.int32)
        last, k = 0, tower.pooled
        for _, rows, columns in grids:
            own = slice(last, last := last + rows * columns)
            blocks = np.indices((rows, columns)).reshape(2, rows // k, k, columns // k, k).transpose(0, 1, 3, 2, 4)
            begin[own], end[own] = own.start, own.stop
            at[:, own] = blocks.reshape(2, -1)[::-1]
        return cls(begin, end, at)


def embed(
    tower: Gemma4Tower, params: dict[str, Any], pixels: Float[Array, "p v"], patches: Patches
) -> Float[Array, "t d"]:
    """The tower's rows, one for each `pooled` x `pooled` patches, those of padding for nobody."""
    table, eps, n = params["patch_embedder.position_embedding_table"], tower.eps, tower.heads
    x = (2 * (pixels - 0.5)).astype(table.dtype) @ params["patch_embedder.input_proj.weight"].T
    x = x + table[0][patches.at[0]] + table[1][patches.at[1]]
    ropes = [_rope_table(tower, place) for place in patches.at]

    def linear(weights, name, x):
        bound = lambda x, side: jnp.clip(x, weights[f"{name}.{side}_min"], weights[f"{name}.{side}_max"])  # noqa: E731
        x = bound(x, "input") if tower.clipped else x
        x = x @ weights[f"{name}.linear.weight"].T
        return bound(x, "output") if tower.clipped else x

    def rotated(x):
        """Turn one half of a head by the column, and the other by the row."""
        halves = zip(jnp.split(x.astype(jnp.float32), 2, axis=-1), ropes, strict=True)
        return jnp.concatenate([half * cos + _turned(half) * sin for half, (cos, sin) in halves], axis=-1)

    def layer(x, weights):
        y = rms_norm(x, weights["input_layernorm.weight"], eps)
        q, k, v = (linear(weights, f"self_attn.{name}_proj", y).reshape(len(x), n, -1) for name in "qkv")
        q, k = (
            rotated(rms_norm(each, weights[f"self_attn.{name}_norm.weight"], eps))
            for name, each in zip("qk", (q, k), strict=True)
        )
        q = q * q.shape[-1] ** 0.5  # scores aren't scaled
        v = rms_norm(v, jnp.ones(v.shape[-1], v.dtype), eps)
        mixed = picture_attention(q.astype(x.dtype), k.astype(x.dtype), v, patches.begin, patches.end)
        y = linear(weights, "self_attn.o_proj", mixed.reshape(len(x), -1))
        x = x + rms_norm(y, weights["post_attention_layernorm.weight"], eps)
        y = rms_norm(x, weights["pre_feedforward_layernorm.weight"], eps)
        gate, up = (linear(weights, f"mlp.{name}_proj", y) for name in ("gate", "up"))
        y = linear(weights, "mlp.down_proj", jax.nn.gelu(gate, approximate=True) * up)
        return x + rms_norm(y, weights["post_feedforward_layernorm.weight"], eps), None

    x, _ = jax.lax.scan(layer, x, by_layer(tower, params))
    tokens = len(x) // tower.per_token
    x = (
        x[: tokens * tower.per_token].reshape(tokens, tower.per_token, -1).astype(jnp.float32).mean(1)
        * tower.width**0.5
    )
    if tower.standardised:
        x = (x - params["std_bias"].astype(jnp.float32)) * params["std_scale"].astype(jnp.float32)
    x = rms_norm(x.astype(table.dtype), jnp.ones(tower.width, table.dtype), eps)
    return x @ params["embedding_projection.weight"].T


def _rope_table(tower: Gemma4Tower, place: Int[Array, " p"]) -> tuple[Float[Array, "p 1 h"], Float[Array, "p 1 h"]]:
    quarter = tower.width // tower.heads // 4
    angle = place[:, None] * tower.theta ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
    angle = jnp.concatenate([angle, angle], axis=-1)[:, None]
    return jnp.cos(angle), jnp.sin(angle)


def _turned(x: Float[Array, "p n h"]) -> Float[Array, "p n h"]:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)
