"""The kernel that writes prompts' keys and values: interpreted against the scatter, and where it serves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.cache.paged import Rows
from jaxspec.pallas import hopper
from jaxspec.pallas.attention.kv_write import FEWEST, kv_write, stored, supported
from jaxspec.pallas.hopper import KERNELS
from tests.support import drawn
from tests.support.kernels import kernels

LAYERS = 3


def check(blocks: int, t: int, heads: int, width: int, **options):
    """Blocks of t rows, each in a place of its own, the last with one row on the dummy page."""
    keys, page_size = jax.random.split(jax.random.key(t), 3), 2 * t
    normal = lambda key, *shape: drawn.normal(key, shape, jnp.bfloat16)  # noqa: E731
    kv = normal(keys[0], LAYERS, blocks + 1, 2, heads, page_size, width)
    page = jnp.broadcast_to(jnp.arange(blocks, 0, -1, dtype=jnp.int32)[:, None], (blocks, t)).at[-1, -1].set(0)
    slot = (jnp.arange(blocks, dtype=jnp.int32)[:, None] % t) + jnp.arange(t, dtype=jnp.int32)
    k, v = (normal(key, blocks, t, heads, width) for key in keys[1:])
    expected = kv.at[1, page, :, :, slot].set(jnp.stack([k, v], axis=2))
    np.testing.assert_array_equal(kv_write(kv, jnp.int32(1), page, slot, k, v, **options), expected)


@pytest.mark.parametrize("blocks,t,heads,width", [(2, 3, 2, 128), (1, 2, 1, 256)])
def test_matches_the_scatter(blocks, t, heads, width):
    check(blocks, t, heads, width, interpret=plgpu.InterpretGPUParams())


def test_numbers_are_stored_as_their_definition_says():
    x = jnp.array([0.3, -1e5, jnp.inf, jnp.nan, 2.0**-12, 900.0], jnp.bfloat16)
    exact = np.clip(np.nan_to_num(np.float32(x), posinf=np.inf) * np.float32(0.5), -448, 448)
    assert (stored(x, jnp.float8_e4m3fn, 0.5) == exact.astype(ml_dtypes.float8_e4m3fn)).all()
    assert (stored(x, jnp.float8_e4m3fn)[:3].astype(jnp.float32) == jnp.array([0.3125, -448, 448])).all()
    assert (stored(x, jnp.bfloat16)[:3] == x[:3]).all()


def test_long_prompts_take_it_where_there_is_one(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    shape, bfloat16 = jax.ShapeDtypeStruct, jnp.bfloat16
    for blocks, layer, dtype, own in (
        (16, shape((), jnp.int32), bfloat16, 1),
        (8, shape((), jnp.int32), bfloat16, 0),
        (16, shape((2, 1, 1), jnp.int32), bfloat16, 0),
        (16, shape((), jnp.int32), jnp.float8_e4m3fn, 0),
    ):
        before = KERNELS["kv_write"]
        layers = layer.shape[:1]
        new = shape((*layers, blocks, 64, 8, 128), bfloat16)
        rows = shape((blocks,), jnp.int32), shape((blocks,), jnp.int32), shape((blocks, 4), jnp.int32)
        kv = shape((36, 9, 2, 8, 64, 128), dtype)
        write = lambda kv, layer, k, v, *rows: Rows(*rows).write(kv, layer, k, v)  # noqa: E731
        assert kernels(write, kv, layer, new, new, *rows) == own
        assert KERNELS["kv_write"] == before + own


def test_what_it_leaves_to_others_is_named():
    assert supported(FEWEST, 16, 256, jnp.bfloat16) is None
    assert supported(8, 8, 128, jnp.bfloat16) == "8 rows"
    assert "float8" in supported(FEWEST, 8, 128, jnp.float8_e4m3fn, jnp.bfloat16)
    assert "17 heads" in supported(FEWEST, 17, 128, jnp.bfloat16)
    assert "width 64" in supported(FEWEST, 8, 64, jnp.bfloat16)
