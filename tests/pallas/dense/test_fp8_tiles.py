"""The FP8 kernel of many rows: in interpret mode against plain jnp, by lowering for CUDA, and what is chosen where."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.functions import normed, weighted
from jaxspec.decoder.matmul import Quantised, Weighted, gate, normed_for, product, project, reference
from jaxspec.models import fp8
from jaxspec.models.description import Norm
from jaxspec.models.weights import HALF, Fp8, Layout, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import fp8_quantise, fp8_rows, fp8_tiles, fp8_wide, tile_matmul, tiles
from jaxspec.pallas.dense.tiles import Tiling
from jaxspec.pallas.hopper import counting
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import one_in, rare

INTERPRET = plgpu.InterpretGPUParams()


def operands(rows: int, inputs: int, outputs: int, block: int | None, unit: int, seed: int = 0):
    """Rows, and a weight's values and scales, which lie far apart."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = drawn.normal(keys[0], (rows, inputs)) * jnp.exp(drawn.normal(keys[2], (rows, 1)))
    parts = drawn.normal(keys[1], (outputs // unit, unit, inputs // (block or inputs), block or inputs))
    largest = jnp.max(jnp.abs(parts), axis=(1, 3), keepdims=True)
    spread = jnp.exp(drawn.normal(keys[0], largest.shape)) * inputs**-0.5
    values = (parts / largest * 448).astype(fp8.E4M3).reshape(outputs, inputs)
    return x.astype(jnp.bfloat16), values, (largest / 448 * spread)[:, 0, :, 0]


def run(x, values, scales, real, residual=None, *, block, **options):
    """The kernel's result in float32."""
    valid = jnp.array([real], jnp.int32)
    out = fp8_tiles.matmul(*fp8.quantise_rows(x), values, scales, valid, residual, block=block, **options)
    assert out.dtype == jnp.bfloat16
    return np.asarray(out, np.float32)


def check(
    rows, real, inputs, outputs, block, unit, kind="plain", within=6e-3, run=run, exact=fp8.product, **options
) -> None:
    """Valid rows by norm; of padding each tile is its own product or nothing, on top of the residual stream."""
    x, values, scales = operands(rows, inputs, outputs, block, unit)
    residual = drawn.normal(jax.random.key(7), (rows, outputs), jnp.bfloat16) if kind == "added" else None
    given = x, values, scales, real, residual
    out = run(*given, block=block, gated=kind == "gated", **options)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(exact(x.astype(jnp.float32), values, scales, block))
    if kind == "gated":
        expected, within = np.asarray(gate(expected, HALF)), 1.5 * within  # gate, up and silu(gate) may be rounded
    assert out.shape == expected.shape
    before = np.zeros_like(expected) if residual is None else np.asarray(residual, np.float32)
    size = np.linalg.norm(expected, axis=1) + np.linalg.norm(before, axis=1)
    untouched = (np.arange(rows) >= real)[:, None] & (out == before)
    expected = np.where(untouched, before, before + expected)
    assert (np.linalg.norm(out - expected, axis=1) <= within * size).all()


@pytest.mark.parametrize("rows,real,kind,tiling,scales", [
    (300, 140, "gated", (128, 128), (128, 32)),  # the last tile begins among the rows of another; one is of padding
    (297, 297, "added", (128, 64), (128, 64)),
    rare(512, 390, "plain", (128, 128), (None, 1)),  # of a tile, a warpgroup's rows are padding
    (128, 0, "plain", (128, 128), (128, 128)),
    rare(260, 250, "gated", (192, 128), (128, 32)),  # three warpgroups
])  # fmt: skip
def test_matches_plain_jnp(monkeypatch, rows, real, kind, tiling, scales):
    """With fewer blocks than tiles, so that each takes several; interpreting a block takes a while, idle or not."""
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    check(rows, real, 256, 128, *scales, kind, tiling=Tiling(*tiling), interpret=INTERPRET)


@pytest.mark.parametrize("kind,unit,splits", [("added", 64, 3), rare("plain", None, 2)])
def test_inputs_are_summed_in_parts(monkeypatch, kind, unit, splits):
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    of = 40, 40, 128 * 6, 128, 128 if unit else None, unit or 1, kind
    check(*of, tiling=Tiling(128, 64), splits=splits, interpret=INTERPRET)


def test_few_rows_are_divided_by_their_inputs_too():
    """So that most multiprocessors have a part; gates need whole sums."""
    division = fp8_tiles.division_of
    assert division(128, 4096, 12288) == (Tiling(128, 128), 4)
    assert [n for _, n in (division(128, 24576, 4096, gated=True), division(512, 4096, 12288))] == [1, 1]
    assert all(t.columns * n >= 128 for t, n in (division(64, 4096, 4096), division(64, 5120, 6144)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows,real", [(130, 130), (256, 256), (264, 150), (700, 650)])
@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize("unit", [32, 128, None])
def test_matches_plain_jnp_with_its_own_tiles(monkeypatch, rows, real, kind, unit):
    monkeypatch.setattr(tiles, "BLOCKS", 3)
    check(rows, real, 384, 384, 128 if unit else None, unit or 1, kind, interpret=INTERPRET)


def test_the_widest_tiles(monkeypatch):
    """The second one begins in the middle of outputs that share a scale."""
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    check(128, 128, 128, 384, 128, 128, tiling=Tiling(128, 192), interpret=INTERPRET)


def test_the_rings_come_round(monkeypatch):
    """More steps than slots, and tiles that begin at any of them."""
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    check(128, 128, 128 * 7, 192, 128, 64, tiling=Tiling(128, 64), interpret=INTERPRET)


def test_rows_are_quantised_as_in_plain_jnp():
    """A row of zeros, and groups of other sizes beside each other. The last block begins among the rows of another."""
    x = drawn.normal(jax.random.key(0), (72, 384), jnp.bfloat16).at[3].set(0).at[:, 200:210].multiply(300)
    got, expected = fp8_quantise.quantise_rows(x, interpret=INTERPRET), fp8.quantise_rows(x)
    assert got[0].dtype == fp8.E4M3
    assert len(got[0]) == len(got[1]) == fp8_tiles.padded_rows(72) == 128  # as `fp8_tiles` copies
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours[:72], np.float32), np.asarray(theirs, np.float32))


def check_normed(rows: int, inputs: int, norm: Norm, splits: int | None = None, quantise=True, **options) -> None:
    """The rows times the weight, quantised, and the norm's factor among the scales; of a sum, if there are parts."""
    keys = jax.random.split(jax.random.key(0))
    x = operands(rows, inputs, 128, 128, 128)[0].at[rows // 2].set(0)
    weight, parts = 1 + drawn.normal(keys[1], (inputs,), jnp.bfloat16) / 4, None
    if splits:
        parts = drawn.normal(keys[0], (fp8_tiles.padded_rows(rows), splits, inputs)).at[rows // 2].set(0)
    named = {"eps": norm.eps, "centred": norm.centred, "keep": bool(splits), "quantise": quantise}
    got = jax.jit(partial(fp8_quantise.norm, **named, **options))(x, weight, parts)
    expected = x
    if splits:
        total = parts[:rows, 0]
        for i in range(1, splits):
            total = total + parts[:rows, i]
        expected = x + total.astype(x.dtype)
        exactly = np.asarray(normed(expected, weight, norm), np.float32)
        np.testing.assert_allclose(np.asarray(got.rows, np.float32), exactly, rtol=2**-6, atol=1e-6)  # rounded twice
    assert (got.rows is None) == (not splits) and (got.quantised is None) == (not quantise)
    np.testing.assert_array_equal(np.asarray(got.x, np.float32), np.asarray(expected, np.float32))
    if quantise:
        of, factor = weighted(expected, weight, norm)
        (ours, by), (values, scales) = (x[:rows] for x in got.quantised), fp8.quantise_rows(of)
        assert ours.dtype == fp8.E4M3 and len(got.quantised[0]) == fp8_tiles.padded_rows(rows)
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(values, np.float32))
        np.testing.assert_allclose(by, scales * factor[:, None], rtol=1e-6)


@pytest.mark.parametrize("norm,splits,quantise", [
    (Norm(1e-6), None, True), (Norm(1e-5, centred=True), 1, True), (Norm(1e-6), 3, False),
])  # fmt: skip
def test_rows_are_normed_and_quantised_as_in_plain_jnp(norm, splits, quantise):
    check_normed(5, 1024, norm, splits, quantise, interpret=INTERPRET)


@pytest.mark.parametrize("rows,operands", [(2048, 1), (40, 1), (2048, 2), (40, 3)])
def test_quantising_lowers_for_cuda(rows, operands):
    shapes = ((rows, 1024), jnp.bfloat16), ((1024,), jnp.bfloat16), ((128, 4, 1024), jnp.float32)
    of = fp8_quantise.quantise_rows if operands == 1 else partial(fp8_quantise.norm, eps=1e-6, keep=operands == 3)
    assert kernels(of, *(jax.ShapeDtypeStruct(*each) for each in shapes[:operands])) == 1


def test_few_quantised_rows_are_padded(monkeypatch):
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    check(3, 3, 256, 128, 128, 64, interpret=INTERPRET)


def shapes(rows: int, outputs: int, block: int | None, unit: int, kind: str, inputs: int = 512):
    """Shapes of rows, values, scales, the count of valid rows, and the residual stream, if there is one."""
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    residual = shape(jnp.bfloat16, rows, outputs) if kind == "added" else None
    scales = shape(jnp.float32, outputs // unit, inputs // (block or inputs))
    return shape(jnp.bfloat16, rows, inputs), shape(fp8.E4M3, outputs, inputs), scales, shape(jnp.int32, 1), residual


@pytest.mark.parametrize(
    "rows,outputs,block,unit,kind",
    one_in(6, [132, 2048], [4096, 24576], [(128, 32), (None, 1)], ["plain", "gated", "added"]),
)
def test_lowers_for_cuda(rows, outputs, block, unit, kind):
    x, *given = shapes(rows, outputs, block, unit, kind)
    x = jax.eval_shape(fp8.quantise_rows, x)
    assert kernels(partial(fp8_tiles.matmul, block=block, gated=kind == "gated"), *x, *given) == 1


def test_prompts_have_the_quickest_tiles():
    tiling_of = fp8_tiles.tiling_of
    assert tiling_of(2048, 6144) == tiling_of(1024, 24576, gated=True) == Tiling(128, 192)
    assert tiling_of(2048, 24576, gated=True) == tiling_of(8192, 24576, gated=True) == Tiling(192, 128)
    assert tiling_of(2048, 4096) == tiling_of(512, 4096) == Tiling(128, 128)


def kernels_in_interpret_mode(monkeypatch) -> None:
    monkeypatch.setattr(tiles, "BLOCKS", 1)
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    for module in (fp8_tiles, fp8_wide, tile_matmul):
        monkeypatch.setattr(module, "matmul", partial(module.matmul, interpret=INTERPRET))
    monkeypatch.setattr(fp8_rows, "product", partial(fp8_rows.product, interpret=INTERPRET))
    for name in ("quantise_rows", "norm"):
        monkeypatch.setattr(fp8_quantise, name, partial(getattr(fp8_quantise, name), interpret=INTERPRET))


@pytest.mark.parametrize("rows,block,activations,kernel", [
    (136, 128, False, "fp8_wide"),
    rare(2056, 128, False, "tile_matmul"),
    rare(72, 128, True, "fp8_tiles"),
    rare(16, 128, True, "fp8_rows"),
    rare(40, 128, True, "fp8_tiles"),
    rare(16, None, True, "fp8_rows"),
    (16, None, False, "fp8_rows"),
])  # fmt: skip
def test_projections_choose_one_and_have_gradients(monkeypatch, rows, block, activations, kernel):
    """Results are the plain form's but for rounding, of rows beside each other too; gradients are the plain form's."""
    x, values, scales = operands(rows, 256, 128, block, 128 if block else 1)
    weight = Weight(values, Fp8(block, activations), Layout((128,)), scales)
    given = x, weight, jnp.array([rows], jnp.int32), drawn.normal(jax.random.key(5), (rows, 128), jnp.bfloat16)
    of = lambda f: jax.value_and_grad(lambda x: f(x).astype(jnp.float32).sum())(x)  # noqa: E731
    expected = of(lambda x: reference(x, weight, given[3]))
    kernels_in_interpret_mode(monkeypatch)
    with counting() as chosen:
        got = of(lambda x: project(x, *given[1:]))
    chosen.pop("fp8_quantise", None)
    assert chosen == {kernel: 1}
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-2, atol=1.0)
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), np.asarray(expected[1], np.float32))
    with counting() as chosen:
        out = product([x[None, :, :128], x[None, :, 128:]], weight)[0]
    chosen.pop("fp8_quantise", None)
    assert chosen == {kernel: 1}
    plain = np.asarray(reference(x, weight), np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), plain, atol=1e-2 * np.abs(plain).max())


@pytest.mark.parametrize("block,activations,rows", [(128, True, 72), rare(128, False, 136), rare(None, True, 72)])
def test_rows_are_quantised_before_their_norms_factor(monkeypatch, block, activations, rows):
    """For one weight that quantises rows, however it is scaled itself. A norm that two read stays as it is."""
    x, values, scales = operands(rows, 1024, 128, block, 128 if block else 1)
    weight, scale = Weight(values, Fp8(block, activations), Layout((128,)), scales), jnp.ones(1024, jnp.bfloat16)
    valid, norm = jnp.array([rows], jnp.int32), Norm(1e-6)
    expected = np.asarray(project(normed_for([weight], x, scale, norm), weight, valid), np.float32)
    kernels_in_interpret_mode(monkeypatch)
    with counting() as chosen:
        made = normed_for([weight], x[None], scale, norm)
        out = np.asarray(project(made, weight, valid), np.float32)
    assert isinstance(made, Quantised) == (chosen["fp8_norm_quantise"] == 1) == activations
    np.testing.assert_allclose(out[0], expected, atol=2e-2 * np.abs(expected).max())
    assert not isinstance(normed_for([weight, weight], x, scale, norm), Quantised)


def test_a_norm_with_fields_that_they_do_not_know_is_taken_by_itself():
    """The plain path takes any norm, so those that are in one with the rounding must refuse by themselves."""

    @dataclasses.dataclass(frozen=True)
    class Later(Norm):
        squared: bool = False

    x, values, scales = operands(2, 256, 128, 128, 128)
    weight, scale = Weight(values, Fp8(128, True), Layout((128,)), scales), jnp.ones(256, jnp.bfloat16)
    made = [type(normed_for([weight], x, scale, norm)) for norm in (Norm(1e-6, centred=True), Later(1e-6))]
    assert made[0] is Weighted and made[1] is type(x)


def test_what_is_not_for_them_is_named():
    assert fp8_quantise.norm_supported(64, 4096, jnp.bfloat16) is None
    assert "rows of 4224" in fp8_quantise.norm_supported(64, 4224, jnp.bfloat16)
    assert "32 rows" in fp8_quantise.norm_supported(32, 4096, jnp.bfloat16)
    assert fp8_quantise.supported(33, jnp.bfloat16) is None
    assert "32 rows" in fp8_quantise.supported(32, jnp.bfloat16)
    assert "float32" in fp8_quantise.supported(64, jnp.float32)
    sizes = jnp.bfloat16, 128, 4096, 4096, 128
    assert fp8_tiles.supported(*sizes) is None
    assert fp8_tiles.supported(jnp.bfloat16, None, 4096, 4096, 1) is None
    assert "float32" in fp8_tiles.supported(jnp.float32, *sizes[1:])
    assert "64 inputs each" in fp8_tiles.supported(jnp.bfloat16, 64, *sizes[2:])
    assert "4096 x 96" in fp8_tiles.supported(jnp.bfloat16, 128, 96, 4096, 32)
    assert "16 outputs" in fp8_tiles.supported(jnp.bfloat16, 128, 4096, 4096, 16)
