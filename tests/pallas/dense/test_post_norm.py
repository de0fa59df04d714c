"""Norms behind a sub-layer, and products of rows that are normed already: plain jnp's numbers, interpreted, and lowered
for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import gate
from jaxspec.models.description import Norm
from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.dense import post_norm as op
from tests.pallas.dense.test_few_rows import EPS, INTERPRET, normal
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare

# Of a layer: the width, whether norms are zero-centred, parts of the sum, norms that follow, and whether it is scaled.
GEMMA3 = dict(width=1152, centred=True, parts=1, following=1)
GEMMA4 = dict(width=5376, centred=False, parts=1, following=1, scaled=True)
GEMMA4_MIXTURE = dict(width=2816, centred=False, parts=2, following=3, scaled=True)
OLMO = dict(width=4096, centred=False, parts=1, following=0)
GLM4 = dict(width=6144, centred=False, parts=1, following=1)
LAYERS = GEMMA3, GEMMA4, GEMMA4_MIXTURE, OLMO, GLM4


def operands(rows: int, width: int, parts: int, following: int, scaled: bool = False, valid: int | None = None, **_):
    """Rows, parts of the sum, their own norms, the norm of the sum, those that follow, and the layer's number. The last
    part may have `valid` rows alone."""
    keys = iter(jax.random.split(jax.random.key(rows + width), 12))
    scales = lambda count: [1 + 0.1 * normal(next(keys), width) for _ in range(count)]  # noqa: E731
    made = [normal(next(keys), rows, width) for _ in range(parts)]
    made[-1] = made[-1][:valid]
    own, (scale,), next_scales = (scales(count) for count in (parts if parts > 1 else 0, 1, following))
    return (
        normal(next(keys), rows, width),
        made,
        own,
        scale,
        next_scales,
        0.7 * jnp.ones(1, "bfloat16") if scaled else None,
    )


def reference(x, parts, own, scale, following, output_scale, norm: Norm, factors):
    parts = [jnp.pad(part, ((0, len(x) - len(part)), (0, 0)), mode="edge") for part in parts]
    parts = [normed(part, each, norm) for part, each in zip(parts, own, strict=True)] if own else parts
    x = x + normed(sum(parts[1:], parts[0]), scale, norm)
    x = x if output_scale is None else x * output_scale
    return x, [normed(x, each, norm) * jnp.asarray(by, x.dtype) for each, by in zip(following, factors, strict=True)]


def check(rows: int, layer: dict, valid: int | None = None, exact: bool = False, **options):
    """Plain jnp's numbers; `exact`: every bit, which sums in another order don't have."""
    given, norm = operands(rows, **layer, valid=valid), Norm(EPS, layer["centred"])
    factors = (1.0, layer["width"] ** -0.5, 1.0)[: layer["following"]]
    run = jax.jit(lambda *of: op.post_norm(*of, eps=EPS, centred=norm.centred, factors=factors, **options))
    found, expected = (jax.tree.leaves(each) for each in (run(*given), reference(*given, norm, factors)))
    assert len(found) == 1 + layer["following"]
    for got, want in zip(found, expected, strict=True):
        if exact:
            np.testing.assert_array_equal(got, want)
        assert_close(got, want)


@pytest.mark.parametrize("layer", [rare(GEMMA3), rare(GEMMA4), GEMMA4_MIXTURE, OLMO | {"width": 128}, rare(GLM4)])
def test_has_plain_layers_bits(layer):
    check(8, layer, exact=True, **INTERPRET)


def test_parts_may_have_valid_rows_alone():
    check(8, GEMMA4_MIXTURE | {"width": 256, "centred": True}, valid=3, exact=True, **INTERPRET)


def product_operands(rows: int, width: int, columns: int) -> tuple:
    keys = jax.random.split(jax.random.key(rows + width), 2)
    return normal(keys[0], rows, width), normal(keys[1], width, columns) * width**-0.5


def check_products(rows: int, width: int, columns: int, dtype: str = "bfloat16", **options):
    """Products of rows that have their norm already."""
    x, weight = product_operands(rows, width, columns)
    (got,) = few_rows.normed(x, None, [weight], eps=EPS, dtypes=(dtype,), **options)
    assert_close(got, jnp.matmul(x, weight, preferred_element_type=dtype))


def check_gated(rows: int, width: int, columns: int, activation: str = "gelu_tanh", **options):
    x, weight = product_operands(rows, width, columns)
    got = few_rows.gated(x, None, weight, eps=EPS, activation=activation, **options)
    assert_close(got, gate(x @ weight, HALF, activation))


@pytest.mark.parametrize("rows,dtype", [(8, "float32"), rare(24, "bfloat16")])
def test_products_of_normed_rows(rows, dtype):
    check_products(rows, 192, 128, dtype, **INTERPRET)


@pytest.mark.parametrize("activation", ["gelu_tanh", rare("silu")])
def test_gates_of_normed_rows(activation):
    check_gated(8, 192, 256, activation, **INTERPRET)


# Inputs and outputs of the first products of layers: Gemma 4's 31B and 26B, with their router, EXAONE 4's 32B.
SIZES = (5376, 18432), (5376, 43008), (2816, 9216), (2816, 4224), (2816, 128), (5120, 2 * 27392)


@pytest.mark.parametrize("layer", LAYERS)
def test_lowers_for_cuda(layer):
    run = lambda *of: op.post_norm(*of, eps=EPS, centred=layer["centred"])  # noqa: E731
    assert kernels(run, *jax.eval_shape(lambda: operands(8, **layer, valid=1))) == 1


@pytest.mark.parametrize("width,columns", [SIZES[3], *(rare(*size) for size in SIZES if size != SIZES[3])])
def test_products_of_normed_rows_lower_for_cuda(width, columns):
    given = jax.eval_shape(lambda: product_operands(8, width, columns))
    assert few_rows.normed_supported(8, width, [columns], "bfloat16", scaled=True) is None
    run = lambda x, weight: few_rows.normed(x, None, [weight], eps=EPS, dtypes=("float32",))  # noqa: E731
    assert kernels(run, *given) == 1
    assert kernels(lambda x, weight: few_rows.gated(x, None, weight, eps=EPS, activation="gelu_tanh"), *given) == 1


def test_what_cannot_run_is_named():
    assert op.supported(2816, "bfloat16") is None
    assert "rows of 2880; supported: multiples of 128 up to 8192" in op.supported(2880, "bfloat16")
    assert "rows of 8320" in op.supported(8320, "bfloat16")
    assert "rows or norms in float32" in op.supported(2816, "bfloat16", "float32")
