"""Vision towers as pure functions: from patches of pictures to the rows that stand in a prompt.

Patches of several pictures stand one behind the other, those of one token side by side, and padding at the end. Axis
letters: p patches, d width, n heads, h their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.vision import PER_LAYER, Tower
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
    def of(cls, tower: Tower, grids: Sequence[tuple[int, int, int]], size: int) -> Patches:
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


def embed_pictures(
    tower: Tower, params: dict[str, Any], pixels: Float[Array, "p v"], patches: Patches
) -> Float[Array, "t d"]:
    """The tower's rows: one for each `merge` x `merge` patches, those of padding for nobody."""
    dtype = params["pos_embed.weight"].dtype
    x = _linear(params, "patch_embed.proj", pixels.astype(dtype))
    learnt = params["pos_embed.weight"][patches.corners].astype(jnp.float32) * patches.weights[..., None]
    x = x + learnt.sum(0).astype(dtype)
    table = _rope_table(tower, patches)
    layers = {name.removeprefix(PER_LAYER): each for name, each in params.items() if name.startswith(PER_LAYER)}

    def layer(x, weights):
        x = x + _attend(tower, weights, _norm(weights, "norm1", x), patches, table)
        hidden = jax.nn.gelu(_linear(weights, "mlp.linear_fc1", _norm(weights, "norm2", x)), approximate=True)
        return x + _linear(weights, "mlp.linear_fc2", hidden), None

    x, _ = jax.lax.scan(layer, x, layers)
    x = _norm(params, "merger.norm", x).reshape(-1, tower.width * tower.merge**2)
    return _linear(params, "merger.linear_fc2", jax.nn.gelu(_linear(params, "merger.linear_fc1", x), approximate=False))


def _linear(params: dict[str, Any], name: str, x: Float[Array, "p i"]) -> Float[Array, "p o"]:
    return jnp.einsum("pi,oi->po", x, params[f"{name}.weight"]) + params[f"{name}.bias"]


def _norm(params: dict[str, Any], name: str, x: Float[Array, "p d"]) -> Float[Array, "p d"]:
    """Layer norm, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + EPS)
    return (x32 * params[f"{name}.weight"] + params[f"{name}.bias"]).astype(x.dtype)


def _rope_table(tower: Tower, patches: Patches) -> tuple[Float[Array, "p 1 h"], Float[Array, "p 1 h"]]:
    """Cosines and sines: a quarter of a head's columns turns by the row, a quarter by the column, then both again."""
    quarter = tower.width // tower.heads // 4
    frequency = THETA ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
    by_row, by_column = (place[:, None] * frequency for place in (patches.row, patches.column))
    angle = jnp.concatenate([by_row, by_column, by_row, by_column], axis=-1)[:, None]
    return jnp.cos(angle), jnp.sin(angle)


def _attend(tower: Tower, weights: dict[str, Any], x: Array, patches: Patches, table: Any) -> Array:
    """Attention of each patch to all of its picture."""
    p, n, (cos, sin) = len(x), tower.heads, table
    q, k, v = jnp.moveaxis(_linear(weights, "attn.qkv", x).reshape(p, 3, n, -1), 1, 0)

    def rotated(x):
        x32 = x.astype(jnp.float32)
        first, second = jnp.split(x32, 2, axis=-1)
        return (x32 * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)

    mixed = picture_attention(rotated(q), rotated(k), v, patches.begin, patches.end)
    return _linear(weights, "attn.proj", mixed.reshape(p, -1))
