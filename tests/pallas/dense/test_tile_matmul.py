"""The matmul of many rows: in interpret mode against plain jnp, by lowering it for CUDA, and where it is chosen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.matmul import gate, project, reference, valid_count
from jaxspec.models.weights import HALF, Layout, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import tile_matmul, tiles
from jaxspec.pallas.dense.tile_matmul import matmul, supported, tiling_of
from jaxspec.pallas.dense.tiles import BLOCKS, Tiling
from jaxspec.pallas.hopper import counting
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import one_in, rare, some


def inputs(rows: int, width: int, outputs: int, seed: int = 0):
    x, weight = (
        drawn.normal(key, shape)
        for key, shape in zip(jax.random.split(jax.random.key(seed)), ((rows, width), (width, outputs)), strict=True)
    )
    return x.astype(jnp.bfloat16), (weight * width**-0.5).astype(jnp.bfloat16)


def check(rows: int, real: int, width: int, outputs: int, gated: bool, added: bool = False, **options) -> None:
    """Real rows against plain jnp, summed in float32, by norm; of padding each tile is zeros or its own product.

    `added`: to a residual stream, which padding keeps.
    """
    x, weight = inputs(rows, width, outputs)
    residual = inputs(rows, outputs, 1, seed=1)[0] if added else None
    out = np.asarray(matmul(x, weight, jnp.array([real], jnp.int32), residual, gated=gated, **options), np.float32)
    wide = np.asarray(jnp.matmul(x, weight, preferred_element_type=jnp.float32))
    expected = np.asarray(gate(wide, HALF)) if gated else wide
    assert out.shape == expected.shape
    if added:
        out = out - np.asarray(residual, np.float32)
    expected = np.concatenate([expected[:real], np.where(out[real:] != 0, expected[real:], 0)])
    difference = np.linalg.norm(out - expected, axis=1)
    assert (difference <= 8e-3 * np.linalg.norm(expected, axis=1)).all()


SIZES = [(256, 256), (300, 140), (296, 290), (297, 297), (256, 0)]  # rows, and how many of them are real
OFTEN = {(SIZES[1], True, 128), (SIZES[2], False, 192), (SIZES[3], True, 64)}


@pytest.mark.parametrize("size,gated,columns", some(OFTEN, SIZES, [False, True], [64, 128, 192]))
def test_matches_plain_jnp(monkeypatch, size, columns, gated):
    """With fewer blocks than tiles, so that each takes several; interpreting a block takes a while, idle or not."""
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    check(*size, 128, 384, gated, tiling=Tiling(128, columns), interpret=plgpu.InterpretGPUParams())


TALL = [(512, 512), (512, 390), (512, 130), (400, 300), (384, 384), (256, 0)]


@pytest.mark.parametrize("size,gated", some({(TALL[1], False), (TALL[3], True)}, TALL, [False, True]))
def test_tall_tiles_match_plain_jnp(monkeypatch, size, gated):
    """With rows for both warpgroups, for one of them, and with those that the tile before has: of one or of neither."""
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    check(*size, 128, 384, gated, tiling=Tiling(256, 192), interpret=plgpu.InterpretGPUParams())


def test_the_ring_comes_round(monkeypatch):
    """More steps than slots, and tiles that begin at any of them."""
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    check(256, 256, 64 * 5, 512, False, tiling=Tiling(128, 256), interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("rows,real,gated,added,splits", [(300, 140, False, True, 3), (20, 17, True, False, 1)])
def test_sums_of_parts_and_few_rows_match_plain_jnp(monkeypatch, rows, real, gated, added, splits):
    """Multiply as deterministic layers do: parts of unequal length, more steps than slots, and rows below a tile's."""
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    options = dict(splits=splits, rounded=gated, interpret=plgpu.InterpretGPUParams())
    check(rows, real, 64 * 10, 128, gated, added, **options)


@pytest.mark.parametrize("columns,real", [rare(64, 140), rare(192, 140), (192, 290)])
def test_adds_to_a_residual_stream(monkeypatch, columns, real):
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    options = dict(tiling=Tiling(128, columns), interpret=plgpu.InterpretGPUParams())
    check(300, real, 128, 384, False, added=True, **options)


@pytest.mark.parametrize(
    "rows,outputs,kind", one_in(20, [132, 136, 165, 512, 2048], [4096, 6144, 24576, 128], ["plain", "gated", "added"])
)
def test_lowers_for_cuda(rows, outputs, kind):
    shapes = jax.eval_shape(lambda: inputs(rows, 512, outputs))
    residual = jax.ShapeDtypeStruct((rows, outputs), jnp.bfloat16) if kind == "added" else None
    given = *shapes, jax.ShapeDtypeStruct((1,), jnp.int32), residual
    assert kernels(partial(matmul, gated=kind == "gated"), *given) == 1


@pytest.mark.parametrize("rows,outputs", [(512, 4096), (512, 6144), (512, 24576), (1024, 4096), (1024, 24576)])
def test_tiles_keep_multiprocessors_busy(rows, outputs):
    tiling = tiling_of(rows, outputs)
    tiles = rows // tiling.rows * (outputs // tiling.columns)
    assert tiles / (-(-tiles // BLOCKS) * BLOCKS) > 0.95


def test_prompts_have_the_tallest_tiles_unless_registers_hold_a_residual():
    assert tiling_of(2048, 24576) == tiling_of(2048, 6144) == Tiling(256, 192)
    assert tiling_of(2048, 24576, added=True).rows == 128


def test_what_is_not_for_it_is_named():
    assert supported(129, jnp.bfloat16, 4096, 6144) is None
    assert "128 rows" in supported(128, jnp.bfloat16, 4096, 6144)
    assert "576" in supported(512, jnp.bfloat16, 4096, 576)
    assert "float32" in supported(512, jnp.float32, 4096, 4096)


def test_valid_rows_end_with_the_last_valid_one():
    assert valid_count(jnp.array([[0, -1, 2], [-1, 7, -1], [-1, -1, -1]])).tolist() == [5]
    assert valid_count(jnp.full((2, 2), -1)).tolist() == [0]


@pytest.mark.parametrize("kind", [rare("plain"), "gated", rare("added")])
def test_projections_choose_it_and_have_gradients(monkeypatch, kind):
    """Gradients are those of plain jnp, which training needs where the kernel serves the forward."""
    gated = kind == "gated"
    x, weight = inputs(256, 128, 256)
    given = x, Weight(weight, layout=Layout((128, 128), interleave=HALF) if gated else Layout((256,)))
    if kind == "added":
        given += (inputs(256, 256, 1)[0],)
    real = jnp.array([256], jnp.int32)
    total = lambda f: jax.grad(lambda given: f(*given).astype(jnp.float32).sum())(given)  # noqa: E731
    expected = total(partial(reference, gated=gated))
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(tile_matmul, "matmul", partial(matmul, interpret=plgpu.InterpretGPUParams()))
    with counting() as chosen:
        got = total(lambda x, w, *residual: project(x, w, real, *residual, gated=gated))
    assert chosen == {"tile_matmul": 1}
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize("count,rows", [(300, 512), rare(600, 1024), rare(1800, 2048), (1300, 2048)])
def test_each_tile_is_one_blocks_and_the_last_rows_are_everyones(count, rows):
    tiling, outputs = Tiling(256, 192), 24576
    of = lambda index: tiles.Block.of(tiling, rows, outputs, 64, jnp.int32(count), index)  # noqa: E731
    high, across = -(-count // tiling.rows), outputs // tiling.columns
    turns = -(-high * across // BLOCKS)
    index, j = (x.reshape(-1) for x in np.meshgrid(np.arange(BLOCKS), np.arange(turns), indexing="ij"))
    top, _, c = map(np.asarray, jax.vmap(lambda index, j: of(index).place(j))(*map(jnp.asarray, (index, j))))
    mine = index + j * BLOCKS < high * across
    assert len(set(zip(top[mine], c[mine], strict=True))) == high * across
    last = np.bincount(index[mine & (top == (high - 1) * tiling.rows)], minlength=BLOCKS)
    assert BLOCKS % high or last.max() == 1  # there are fewer of these than blocks
