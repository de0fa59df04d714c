"""The few rows' kernels with weights of four bits: interpreted against numpy, lowered, and chosen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import logits, project, reference
from jaxspec.models import int4, nvfp4
from jaxspec.models.weights import Int4, Nvfp4, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import few_rows as op
from jaxspec.pallas.dense.few_rows.share import share_out
from jaxspec.pallas.hopper import counting
from tests.pallas.dense import test_few_rows_fp8 as fp8_kernels
from tests.pallas.dense.test_few_rows import INTERPRET
from tests.pallas.dense.test_few_rows import operands as unquantised
from tests.support.kernels import kernels
from tests.support.sample import rare

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FORMATS = [Int4(128), Int4(32, zeros=True), Int4(None, zeros=True), Nvfp4()]


def drawn(
    kind: Int4 | Nvfp4, inputs: int, outputs: int, dtype=np.float16, seed: int = 0, size: float = 1.0
) -> tuple[Weight, np.ndarray]:
    """A weight of all numbers, and the float64 matrix [inputs, outputs] that it stands for, by the definition."""
    rng = np.random.default_rng(inputs + outputs + seed)
    numbers = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    packed = jnp.asarray(numbers[:, ::2] | numbers[:, 1::2] << 4)
    group = kind.group or inputs if isinstance(kind, Int4) else nvfp4.GROUP
    spread = lambda each: np.repeat(each.astype(np.float64), group, axis=1)  # noqa: E731
    if isinstance(kind, Nvfp4):
        scales = rng.uniform(2**-9, 448, (outputs, inputs // group))
        scales[:, 0] = 0
        scales, factors = (
            jnp.asarray(scales, jnp.float8_e4m3fn),
            (size * rng.uniform(1e-4, 1e-3, outputs)).astype(np.float32),
        )
        whole = E2M1[numbers] * spread(np.asarray(scales, np.float32)) * factors[:, None]
        stored = np.stack(np.broadcast_arrays(np.asarray(scales, np.float32), factors[:, None]), axis=-1)
    else:
        scales = (size * rng.uniform(0.5, 2, (outputs, inputs // group))).astype(dtype)
        points = rng.integers(0, 17, scales.shape) if kind.zeros else np.full(scales.shape, int4.MIDDLE)
        whole = (numbers - spread(points)) * spread(scales)
        stored = np.stack([scales, points.astype(dtype)][: 1 + kind.zeros], axis=-1)
    values, scales, *factors = _placed(kind, packed, jnp.asarray(stored))
    return Weight(values, kind, scales=scales, factors=factors[0] if factors else None), whole.T


_placed = jax.jit(lambda kind, *stored: kind.placed(*stored), static_argnums=0)


def rows_of(count: int, inputs: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(count).standard_normal((count, inputs), np.float32), jnp.bfloat16)


@pytest.mark.parametrize("kind,rows", [(Int4(32, zeros=True), 8), (Nvfp4(), 16), rare(Int4(128), 32),
                                       rare(Int4(None, zeros=True), 24)])  # fmt: skip
def test_products_are_those_of_the_dequantised_weight(kind, rows):
    """The ring has fewer slots than there are chunks."""
    inputs = 1280
    weight, whole = drawn(kind, inputs, 128)
    np.testing.assert_allclose(weight.dequantised(jnp.float32), whole, rtol=1e-6)
    got, x = op.product([rows_of(rows, inputs)], weight, **INTERPRET), np.asarray(rows_of(rows, inputs), np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), x @ whole, atol=2**-8 * np.abs(x @ whole).max())


@pytest.mark.parametrize("kernel,kind", [("gated", Nvfp4()), rare("add", Nvfp4()), rare("normed", Int4(128)),
                                         ("heads", Int4(128))])  # fmt: skip
def test_layers(kernel, kind):
    """Norms, gates, rotations and sums are those of FP8's kernels."""
    given = unquantised(8, d=1280, heads=2, kv_heads=1, f=256, width=128)
    name = {"gated": "gate_up", "add": "down"}.get(kernel, "qkv")
    values, scales, *factors = jax.jit(kind.quantise)(given[name].T.astype(jnp.float32))
    weight = Weight(values, kind, scales=scales, factors=factors[0] if factors else None)
    given[name] = weight, weight.dequantised(jnp.float32)
    fp8_kernels.CHECKS[kernel](given, **INTERPRET)


@pytest.mark.parametrize("kind,rows", [*zip(FORMATS, (8, 32, 16, 32), strict=True)])
def test_lowers_for_cuda(kind, rows):
    x, weight = jax.eval_shape(lambda: (jnp.ones((rows, 4096), jnp.bfloat16), drawn_shape(kind, 4096, 24576)))
    assert kernels(lambda *given: op.gated(*op.scale_rows(given[0], given[0][0]), given[1], eps=1e-6), x, weight) == 1


def drawn_shape(kind, inputs, outputs):
    groups = inputs // (kind.group or inputs if isinstance(kind, Int4) else nvfp4.GROUP)
    stored = jnp.ones((outputs, groups, 1 + (isinstance(kind, Nvfp4) or kind.zeros)), jnp.bfloat16)
    values, scales, *factors = kind.placed(jnp.zeros((outputs, inputs // 2), jnp.uint8), stored)
    return Weight(values, kind, scales=scales, factors=factors[0] if factors else None)


@pytest.mark.parametrize("ordered", [rare(False), True])
def test_projections_choose_it(monkeypatch, ordered):
    """The result is the plain form's but for rounding; with `order`, rows are taken in the weight's."""
    weight, _ = drawn(Int4(64, True), 256, 64)
    order = jnp.asarray(np.random.default_rng(0).permutation(256), jnp.int32) if ordered else None
    weight = weight.replace(order=order, format=Int4(64, True, ordered))
    x, residual = rows_of(5, 256), jnp.ones((5, 64), jnp.bfloat16)
    expected = reference(x, weight, residual).astype("float32")
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(op, "product", partial(op.product, **INTERPRET))
    with counting() as chosen:
        got = project(x, weight, jnp.array([5]), residual).astype("float32")
    assert chosen["few_rows_product"] == 1
    np.testing.assert_allclose(got, expected, atol=2**-6 * float(jnp.abs(expected).max()))


def test_a_heads_logits_are_float32(monkeypatch):
    """Rows come in parts, the last of which is padded."""
    weight, whole = drawn(Nvfp4(), 256, 64)
    x = rows_of(37, 256)
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(op, "product", partial(op.product, **INTERPRET))
    with counting() as chosen:
        got = logits(x, weight)
    assert chosen == {"few_rows_product": 2} and got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ whole, atol=2**-14 * np.abs(whole).max() * 256)


def test_a_heads_kernel_lowers_for_cuda():
    x, weight = jax.eval_shape(lambda: (jnp.ones((8, 2048), jnp.bfloat16), drawn_shape(Int4(128), 2048, 64 * 300)))
    assert kernels(lambda *given: op.product([given[0]], given[1], dtype=jnp.float32), x, weight) == 1


def test_weights_that_do_not_fit_are_named():
    assert op.four_bits_supported(drawn(Int4(128), 512, 64)[0]) is None
    assert "a weight of 128 x 64; supported: multiples of 256" in op.four_bits_supported(drawn(Int4(64), 128, 64)[0])
    assert "scales for 96 inputs; supported: 32, 64" in op.four_bits_supported(drawn(Int4(96), 768, 64)[0])
    assert "scales in int8" in op.four_bits_supported(drawn(Int4(128), 256, 64, np.int8)[0])
    four = op.four_bits_of(drawn(Int4(128), 512, 64)[0])
    assert "multiples of 256" in op.product_supported(8, [384], (384, 64), jnp.bfloat16, four=four)
    share = share_out(32, [4096], 4096, 1, normed=False, four=four)
    assert (share.chunk, share.splits) == (256, 2) and share.slots >= 6
