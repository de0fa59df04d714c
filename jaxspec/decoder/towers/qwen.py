"""Qwen3-VL's tower, as Qwen3.5 has it: pictures of any grid, with learnt and rotary positions.

Patches of one token stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.decoder.towers.layers import by_layer, layer_norm, linear
from jaxspec.models.vision import QwenTower, deepstack_merger
from jaxspec.pallas.attention.picture_attention import picture_attention

EPS = 1e-6  # of layer norms
THETA = 10_000.0  # of rotary positions


@flax.struct.dataclass
class Patches:
    """Places of patches, made on the host.

    - `begin`, `end`: the patches of its picture, to which it attends. Padding has none: it begins behind all.
    - `row`, `column`: where it stands there.
    - `corners`, `weights`: the four learnt positions around it, and how much each counts.
    """

    begin: Int[np.ndarray, " p"]
    end: Int[np.ndarray, " p"]
    row: Int[np.ndarray, " p"]
    column: Int[np.ndarray, " p"]
    corners: Int[np.ndarray, "4 p"]
    weights: Float[np.ndarray, "4 p"]

    @classmethod
    def of(cls, tower: QwenTower, grids: Sequence[tuple[int, int, int]], size: int) -> Patches:
        """The patches of pictures with these grids, filled up to `size`."""
        (last, row, column), begin = np.zeros((3, size), np.int32), np.full(size, size, np.int32)
        corners, weights, end = np.zeros((4, size), np.int32), np.zeros((4, size), np.float32), 0
        for _, rows, columns in grids:
            own, m = slice(end, end := end + rows * columns), tower.merge
            blocks = np.indices((rows, columns)).reshape(2, rows // m, m, columns // m, m).transpose(0, 1, 3, 2, 4)
            begin[own], last[own] = own.start, own.stop
            row[own], column[own] = blocks.reshape(2, -1)
            (top, bottom, down), (left, right, along) = (
                _around(tower.side, *each) for each in ((row[own], rows), (column[own], columns))
            )
            corners[:, own] = [y * tower.side + x for y in (top, bottom) for x in (left, right)]
            weights[:, own] = [y * x for y in (1 - down, down) for x in (1 - along, along)]
        return cls(begin, last, row, column, corners, weights)


def _around(side: int, place: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The learnt positions before and after places among `count`, whose ends are theirs, and how far between."""
    at = (place * np.float32((side - 1) / max(count - 1, 1))).astype(np.float32)
    before = np.minimum(at.astype(np.int32), side - 1)
    return before, np.minimum(before + 1, side - 1), at - before


def embed(
    tower: QwenTower, params: dict[str, Any], pixels: Float[Array, "p v"], patches: Patches
) -> Float[Array, "t d"]:
    """The tower's rows, as wide as `tower.columns`: one for each `merge` x `merge` patches, those of padding for
    nobody."""
    dtype = params["pos_embed.weight"].dtype
    x = linear(params, "patch_embed.proj", pixels.astype(dtype))
    learnt = params["pos_embed.weight"][patches.corners].astype(jnp.float32) * patches.weights[..., None]
    x = x + learnt.sum(0).astype(dtype)
    table = _rope_table(tower, patches)
    norm, stages = partial(layer_norm, eps=EPS), len(tower.deepstack)

    def layer(carry, weights):
        (x, kept), (weights, into) = carry, weights
        x = x + _attend(tower, weights, norm(weights, "norm1", x), patches, table)
        hidden = jax.nn.gelu(linear(weights, "mlp.linear_fc1", norm(weights, "norm2", x)), approximate=True)
        x = x + linear(weights, "mlp.linear_fc2", hidden)
        return (x, kept.at[into].set(x, mode="drop") if stages else None), None

    # Where each layer's result is kept for a merger; out of range for those that have none.
    into = np.array([tower.deepstack.index(i) if i in tower.deepstack else stages for i in range(tower.layers)])
    kept = jnp.zeros((stages, *x.shape), x.dtype) if stages else None
    (x, kept), _ = jax.lax.scan(layer, (x, kept), (by_layer(tower, params), into))

    def merged(name, x, shape):
        x = norm(params, f"{name}.norm", x.reshape(shape)).reshape(-1, tower.width * tower.merge**2)
        hidden = jax.nn.gelu(linear(params, f"{name}.linear_fc1", x), approximate=False)
        return linear(params, f"{name}.linear_fc2", hidden)

    each = [merged(deepstack_merger(i), kept[i], (-1, tower.width * tower.merge**2)) for i in range(stages)]
    return jnp.concatenate([merged("merger", x, x.shape), *each], axis=1)


def _rope_table(tower: QwenTower, patches: Patches) -> tuple[Float[Array, "p 1 h"], Float[Array, "p 1 h"]]:
    """Cosines and sines: a quarter of a head's columns turns by the row, a quarter by the column, then both again."""
    quarter = tower.width // tower.heads // 4
    frequency = THETA ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
    by_row, by_column = (place[:, None] * frequency for place in (patches.row, patches.column))
    angle = jnp.concatenate([by_row, by_column, by_row, by_column], axis=-1)[:, None]
    return jnp.cos(angle), jnp.sin(angle)


def _attend(tower: QwenTower, weights: dict[str, Any], x: Array, patches: Patches, table: Any) -> Array:
    """Attention of each patch to all of its picture."""
    p, n, (cos, sin) = len(x), tower.heads, table
    q, k, v = jnp.moveaxis(linear(weights, "attn.qkv", x).reshape(p, 3, n, -1), 1, 0)

    def rotated(x):
        x32 = x.astype(jnp.float32)
        first, second = jnp.split(x32, 2, axis=-1)
        return (x32 * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)

    mixed = picture_attention(rotated(q), rotated(k), v, patches.begin, patches.end)
    return linear(weights, "attn.proj", mixed.reshape(p, -1))
